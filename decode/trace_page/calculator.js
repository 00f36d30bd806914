'use strict';
// The speed-up calculator: sliders for the closed form, its curve over the length, and the run's methods at its costs.

(() => {
  const MOST = 24;  // the longest draft
  const KNOBS = {
    a: ['a', 'acceptance of a guess', 0, 0.99, 0.01],
    numDrafts: ['K', 'drafts', 1, 8, 1],
    length: ['L', 'tokens of a draft', 1, MOST, 1],
    draftCost: ['c', 'cost of a step of the draft', 0, 0.6, 0.005],
    guessCost: ['e', 'extra cost of a guess in the call', 0, 1, 0.002],
  };
  const COSTS = {
    'one text, call bound by weights': [{draftCost: 0.05, guessCost: 0.004}, 'Assumed: a draft of a twentieth of the target, and guesses that cost nearly nothing.'],
    'a small pair on a CPU': [{draftCost: 0.24, guessCost: 0.08}, 'Fitted to the run that is measured below: with a = .76 and L = 8 they give its speed-up of speculative, 1.1.'],
    'a large batch': [{draftCost: 0.05, guessCost: 1}, 'Bound by arithmetic: a guess costs what a token costs.'],
    'your own': [{}, ''],
  };
  const {methods, rounds} = DATA;
  const setting = {a: 0.76, numDrafts: 1, length: 8, draftCost: 0.05, guessCost: 0.004};
  const inputs = {};
  const outputs = {};

  const times = (value) => `${value.toFixed(2)}×`;
  const short = (value) => String(Number(value.toFixed(3))).replace(/^0\./, '.');

  /** The tokens per call of a method of the run, its guesses and its depth. */
  function measured(index) {
    const kept = rounds.reduce((sum, round) => sum + round.judgements[index].path.length + 1, 0);
    const nodes = methods[index].nodes;
    return {tokens: kept / rounds.length, numGuesses: nodes.length - 1, length: Math.max(...nodes.map((node) => TREE.depths[node]))};
  }

  function renderSteps() {
    const {a, numDrafts, length, draftCost, guessCost} = setting;
    const any = SPEED.anyOf(a, numDrafts);
    const tokens = SPEED.chainTokens(any, length);
    const cost = SPEED.roundCost(length, numDrafts * length, draftCost, guessCost);
    const speedUp = SPEED.speedUp(setting);
    byId('speed-up').textContent = times(speedUp);
    byId('speed-verdict').textContent = speedUp > 1.005 ? 'It pays.' : speedUp > 0.995 ? 'It makes no difference.' : 'It does not pay.';
    const base = numDrafts === 1 ? `a = ${short(a)}` : `1 − (1 − ${short(a)})^${numDrafts} = ${short(any)} for a, approximately`;
    byId('speed-steps').replaceChildren(
      `With ${base}: `, make('b', {}, `${tokens.toFixed(2)} tokens per call`),
      `. A round costs 1 + ${length} · ${short(draftCost)} + ${numDrafts * length} · ${short(guessCost)} = ${cost.toFixed(2)} calls. `,
      `${tokens.toFixed(2)} / ${cost.toFixed(2)} = ${times(speedUp)}`);
    byId('drafts-note').classList.toggle('stressed', numDrafts > 1);
  }

  /** The speed-up over the length of the drafts, with the line at 1. */
  function renderCurve() {
    const box = byId('speed-chart');
    const width = Math.max(box.clientWidth, 160);
    const [height, left] = [120, 26];
    const values = Array.from({length: MOST}, (_, i) => SPEED.speedUp({...setting, length: i + 1}));
    const most = Math.max(1.5, ...values) * 1.05;
    const x = (length) => left + ((length - 1) / (MOST - 1)) * (width - left - 8);
    const y = (value) => height - (value / most) * (height - 6);
    const chart = makeSvg('svg', {width, height: height + 18, role: 'img',
      'aria-label': `Speed-up by length: ${values.map((value, i) => `${i + 1}: ${value.toFixed(2)}`).join(', ')}`});
    const line = (level, kind) => chart.append(makeSvg('line', {x1: left, x2: width, y1: y(level), y2: y(level), class: kind}));
    for (let level = 0; level <= most; level += Math.ceil(most / 4)) {
      line(level, 'grid');
      chart.append(makeSvg('text', {x: left - 6, y: Math.max(y(level) + 4, 9), class: 'tick', 'text-anchor': 'end'}, String(level)));
    }
    line(1, 'even');
    chart.append(makeSvg('polyline', {points: values.map((value, i) => `${x(i + 1)},${y(value)}`).join(' '), class: 'curve'}),
      makeSvg('circle', {cx: x(setting.length), cy: y(values[setting.length - 1]), r: 5, class: 'now'}));
    for (const length of [1, 8, 16, MOST]) {
      chart.append(makeSvg('text', {x: x(length), y: height + 14, class: 'tick', 'text-anchor': 'middle'}, String(length)));
    }
    box.replaceChildren(chart);
    const best = SPEED.bestLength(setting, MOST);
    const highest = SPEED.speedUp({...setting, length: best});
    byId('speed-best').textContent = 'Speed-up over the length L; dashed: without a draft. ' +
      (highest > 1 ? `The best length here is ${best}, with ${times(highest)}.` : 'No length pays here: decode without a draft.');
  }

  function renderRun() {
    const found = methods.map((method, index) => {
      const {tokens, numGuesses, length} = measured(index);
      const cost = SPEED.roundCost(length, numGuesses, setting.draftCost, setting.guessCost);
      return {name: method.name, tokens, speedUp: tokens / cost, cost};
    });
    const most = Math.max(1, ...found.map((each) => each.speedUp));
    const list = make('ul', {class: 'bars wide-label'});
    for (const {name, tokens, speedUp, cost} of found) {
      const fill = make('i', {class: 'fill q'});
      fill.style.width = `${(100 * speedUp) / most}%`;
      list.append(make('li', {'data-method': name, 'data-value': speedUp}, make('span', {class: 'bar-label'}, name),
        make('span', {class: 'bar-group'}, make('span', {class: 'bar-row'}, make('span', {class: 'track'}, fill),
          make('em', {}, times(speedUp)), make('span', {class: 'note'}, `${tokens.toFixed(2)} / ${cost.toFixed(2)}`)))));
    }
    byId('speed-run').replaceChildren(list);
  }

  function renderTable() {
    const lengths = [1, 2, 4, 8, 16];
    const head = make('tr', {}, make('th', {scope: 'col'}, 'a'), ...lengths.map((length) => make('th', {scope: 'col'}, `L = ${length}`)));
    const rows = [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95].map((a) => make('tr', {}, make('th', {scope: 'row'}, short(a)),
      ...lengths.map((length) => make('td', {}, SPEED.chainTokens(a, length).toFixed(2)))));
    byId('speed-table').replaceChildren(make('table', {class: 'numbers even', 'aria-label': 'Tokens per call'},
      make('thead', {}, head), make('tbody', {}, ...rows)));
  }

  function render() {
    for (const name of Object.keys(KNOBS)) {
      inputs[name].value = setting[name];
      outputs[name].textContent = short(setting[name]);
    }
    byId('costs-note').textContent = COSTS[byId('costs').value][1];
    renderSteps();
    renderCurve();
    renderRun();
  }

  function chooseCosts() {
    Object.assign(setting, COSTS[byId('costs').value][0]);
    render();
  }

  function start() {
    for (const [name, [symbol, words, min, max, step]] of Object.entries(KNOBS)) {
      inputs[name] = make('input', {type: 'range', min, max, step, id: `knob-${name}`});
      outputs[name] = make('output', {for: `knob-${name}`});
      inputs[name].addEventListener('input', () => {
        setting[name] = Number(inputs[name].value);
        if (name.endsWith('Cost')) byId('costs').value = 'your own';
        render();
      });
      byId('speed-sliders').append(make('label', {for: `knob-${name}`}, make('b', {}, symbol), ` ${words}`), inputs[name], outputs[name]);
    }
    byId('costs').append(...Object.keys(COSTS).map((name) => make('option', {value: name}, name)));
    byId('costs').addEventListener('change', chooseCosts);
    const own = measured(0);
    const button = make('button', {type: 'button', id: 'speed-own'}, 'Acceptance of this run');
    button.addEventListener('click', () => {
      Object.assign(setting, {a: Math.min(0.99, Number(SPEED.acceptanceOf(own.tokens, own.length).toFixed(2))), numDrafts: 1, length: Math.min(own.length, MOST)});
      render();
    });
    byId('speed-sliders').after(make('p', {}, button, make('span', {class: 'note'},
      ` the constant a at which one draft of ${own.length} yields the ${own.tokens.toFixed(2)} tokens per call of ${methods[0].name} here`)));
    renderTable();
    render();
    let width = window.innerWidth;
    window.addEventListener('resize', () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      renderCurve();
    });
  }

  start();
})();
