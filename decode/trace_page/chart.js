'use strict';
// The chart of the run: a square per token, a column per round, and the running mean.

/**
 * Draws the chart of tokens per round.
 * `round` is the current one, `until` the number of those that are over, `other` the compared method or -1, and
 * `onChoose` is called with the round that is clicked.
 */
function drawChart(box, {round, until, other, onChoose}) {
  const {rounds} = DATA;
  const width = Math.max(box.clientWidth, 120);
  const [height, left, most] = [118, 18, TREE.maxDepth + 1];
  const column = (width - left) / rounds.length;
  const unit = height / most;
  const chart = makeSvg('svg', {width, height: height + 18, role: 'img'});
  for (let level = 0; level <= most; level += Math.ceil(most / 4)) {
    const y = height - level * unit;
    chart.append(makeSvg('line', {x1: left, x2: width, y1: y, y2: y, class: 'grid'}));
    chart.append(makeSvg('text', {x: left - 5, y: Math.max(y + 4, 9), class: 'tick', 'text-anchor': 'end'}, String(level)));
  }
  let total = 0;
  const points = [];
  rounds.forEach((each, i) => {
    const x = left + i * column;
    const group = makeSvg('g', {class: i < until ? '' : 'later'});
    each.origins.forEach((origin, k) => {
      group.append(makeSvg('rect', {x: x + column * 0.12, y: height - (k + 1) * unit + 1, width: column * 0.76,
        height: Math.max(unit - 1.5, 1), rx: 1.5, class: ORIGINS[origin]}));
    });
    if (other >= 0) {
      const y = Math.max(1.5, height - (each.judgements[other].path.length + 1) * unit);
      group.append(makeSvg('line', {x1: x + 1, x2: x + column - 1, y1: y, y2: y, class: 'other'}));
    }
    if (i === round) group.append(makeSvg('rect', {x: x + 0.5, y: 0.5, width: column - 1, height: height - 0.5, class: 'now', rx: 3}));
    const hit = makeSvg('rect', {x, y: 0, width: column, height: height + 16, class: 'hit'});
    hit.addEventListener('click', () => onChoose(i));
    hit.append(makeSvg('title', {}, `Round ${i + 1}`));
    total += each.pieces.length;
    if (i < until) points.push(`${x + column / 2},${height - (total / (i + 1)) * unit}`);
    chart.append(group, hit);
    if (i === 0 || i === rounds.length - 1 || (i + 1) % Math.max(5, Math.ceil(36 / column)) === 0) {
      if (i === rounds.length - 1 || rounds.length - 1 - i > 24 / column) {
        chart.append(makeSvg('text', {x: x + column / 2, y: height + 14, class: 'tick', 'text-anchor': 'middle'}, String(i + 1)));
      }
    }
  });
  if (points.length > 1) chart.append(makeSvg('polyline', {points: points.join(' '), class: 'mean'}));
  chart.setAttribute('aria-label', `Tokens of each round: ${rounds.map((each) => each.pieces.length).join(', ')}`);
  box.replaceChildren(chart);
}
