'use strict';
// The tree of a round as boxes from the root down, one column per leaf, with the state of every node.

const [BOX, LINE, GAP] = [50, 13, 11];  // a box without a line of credit, a line of it, and what is between two depths
const ROOT_ROW = 42;

/** The columns of nodes: a leaf takes the next column, a parent is centered over its children. */
const COLUMNS = (() => {
  const columns = [];
  let next = 0;
  const place = (node) => {
    const below = TREE.children[node];
    if (!below.length) columns[node] = next++;
    below.forEach(place);
    if (below.length) columns[node] = (columns[below[0]] + columns[below[below.length - 1]]) / 2;
  };
  place(0);
  return {columns, count: next};
})();

/**
 * The state of each node after `count` decisions of a judgement.
 * kept: accepted, or on the path kept so far; picked: on a block's path; rejected: ruled out; outside: not judged.
 */
function nodeStates(round, method, judgement, count, isOver) {
  const states = new Array(TREE.size + 1).fill('');
  const judged = new Set(method.nodes);
  for (let node = 1; node <= TREE.size; node++) if (!judged.has(node)) states[node] = 'outside';
  states[0] = 'kept';
  const decisions = (judgement.decisions ?? []).slice(0, count);
  for (const decision of decisions) {
    const {kind, chosen} = decision;
    if (kind === 'keep' && isOfContext(decision)) {
      const path = chosen >= 0 ? pathTo(chosen) : [decision.node];
      const spelled = new Set(path.map((node) => round.places[node]));
      for (let node = 1; node <= TREE.size; node++) {
        if (spelled.has(round.places[node])) states[node] = chosen >= 0 ? 'same' : 'rejected';
      }
      if (chosen >= 0) for (const node of path) states[node] = 'kept';
    } else if (kind === 'keep') {
      if (chosen >= 0) for (const node of pathTo(chosen)) states[node] = 'kept';
      else if (states[decision.node] !== 'picked') states[decision.node] = 'rejected';
    } else {
      const token = chosen >= 0 ? tokenOf(round, chosen) : null;
      for (const node of decision.nodes) {
        if (node === chosen) states[node] = kind === 'pick' ? 'picked' : 'kept';
        else states[node] = tokenOf(round, node) === token ? 'same' : 'rejected';
      }
    }
  }
  if (isOver) {
    const kept = new Set([0, ...judgement.path]);
    for (let node = 0; node <= TREE.size; node++) {
      if (kept.has(node)) states[node] = 'kept';
      else if (states[node] !== 'outside') states[node] = 'rejected';
    }
  }
  return states;
}

const STATE_WORDS = {kept: 'kept', picked: 'picked', rejected: 'rejected', same: 'spells the same', outside: 'not judged'};
const STATE_MARKS = {kept: '✓', picked: '◆', rejected: '✕', same: '=', outside: '', '': ''};

/** A tree that is drawn once per round and marked at every step. */
class TreeView {
  constructor(label, onSelect) {
    this.onSelect = onSelect;
    this.canvas = make('div', {class: 'tree'});
    this.element = make('div', {class: 'tree-scroll', tabindex: '0', role: 'region', 'aria-label': label}, this.canvas);
    this.round = null;
  }

  /** Builds the boxes; `width` is the available width in pixels, `credits` are P by node or null. */
  draw(round, credits, width) {
    this.round = round;
    this.credits = credits;
    const gap = 8;
    const boxHeight = BOX + (credits ? LINE : 0);
    const row = boxHeight + GAP;
    const column = Math.max(76, Math.min(150, Math.floor(width / COLUMNS.count)));
    const total = Math.max(column * COLUMNS.count, Math.min(width, 180));
    const height = ROOT_ROW + TREE.maxDepth * row - 8;
    const centre = (node) => (COLUMNS.columns[node] + 0.5) * column + (total - column * COLUMNS.count) / 2;
    const top = (node) => (node ? ROOT_ROW + (TREE.depths[node] - 1) * row + 4 : 0);
    this.canvas.style.width = `${total}px`;
    this.canvas.style.height = `${height}px`;
    this.edges = [];
    this.boxes = [];
    const lines = makeSvg('svg', {width: total, height, 'aria-hidden': 'true'});
    for (let node = 1; node <= TREE.size; node++) {
      const parent = TREE.parents[node];
      const from = parent ? top(parent) + boxHeight : 28;
      const [x, y, u, v] = [centre(parent), from, centre(node), top(node)];
      const middle = (y + v) / 2;
      this.edges[node] = makeSvg('path', {d: `M${x} ${y}C${x} ${middle} ${u} ${middle} ${u} ${v}`});
      lines.append(this.edges[node]);
    }
    const focused = document.activeElement?.closest?.('.node');
    const focusedNode = focused && this.canvas.contains(focused) ? focused.dataset.node : null;
    this.canvas.replaceChildren(lines);
    for (let node = 0; node <= TREE.size; node++) {
      const box = this.makeBox(round, node);
      const boxWidth = node ? column - gap : Math.min(total - 4, 150);
      box.style.left = `${Math.max(2, Math.min(centre(node) - boxWidth / 2, total - boxWidth - 2))}px`;
      box.style.top = `${top(node)}px`;
      box.style.width = `${boxWidth}px`;
      if (node) box.style.height = `${boxHeight}px`;
      this.boxes[node] = box;
      this.canvas.append(box);
    }
    if (focusedNode !== null) this.boxes[focusedNode]?.focus();
  }

  makeBox(round, node) {
    const token = tokenOf(round, node);
    const box = make('button', {type: 'button', class: 'node', 'data-node': node});
    box.append(make('span', {class: 'token'}, token < 0 ? '–' : tokenText(token)), make('b', {class: 'mark'}));
    if (node) {
      const bar = (name, value) => {
        const fill = make('i', {class: `fill ${name}`});
        fill.style.width = `${100 * (value ?? 0)}%`;
        return make('span', {class: `prob ${name}`}, make('span', {class: 'track'}, fill), make('em', {}, number(value)));
      };
      const isGiven = round.given.includes(node);
      box.append(isGiven ? make('span', {class: 'prob given'}, 'given') : bar('p', round.draft[node - 1]), bar('q', round.target[node - 1]));
      if (this.credits) box.append(bar('credit', token < 0 ? null : this.credits[node]));
    } else {
      box.classList.add('root');
      box.title = 'the last token of the text';
    }
    box.addEventListener('click', () => this.onSelect(node));
    return box;
  }

  /** Shows the nodes' states, the current decision, and whether the target has been called. */
  mark(states, decision, {hasTarget, selected}) {
    const round = this.round;
    const asked = new Set(decision ? decision.nodes : []);
    this.canvas.classList.toggle('unscored', !hasTarget);
    for (let node = 0; node <= TREE.size; node++) {
      const box = this.boxes[node];
      const state = states[node];
      const isMissing = node > 0 && tokenOf(round, node) < 0;
      box.className = ['node', node ? '' : 'root', state && `is-${state}`, asked.has(node) && 'is-asked',
        decision?.node === node && 'is-here', isMissing && 'is-missing', selected === node && 'is-selected']
        .filter(Boolean).join(' ');
      box.querySelector('.mark').textContent = node ? STATE_MARKS[state] : '';
      const words = node
        ? [`${tokenText(tokenOf(round, node))}, position ${TREE.depths[node]}`, round.given.includes(node) ? 'given' : `p ${number(round.draft[node - 1])}`,
          hasTarget ? `q ${number(round.target[node - 1])}` : '', hasTarget && this.credits ? `P ${number(this.credits[node])}` : '', STATE_WORDS[state] ?? '']
        : [`${tokenText(round.root)}, the last token of the text`];
      box.setAttribute('aria-label', words.filter(Boolean).join(', '));
      box.setAttribute('aria-pressed', String(selected === node));
      if (node) {
        const isOn = ['kept', 'picked'].includes(state) && ['kept', 'picked'].includes(states[TREE.parents[node]]);
        this.edges[node].setAttribute('class', isOn ? `on ${state}` : state);
      }
    }
    const chosen = decision?.chosen >= 0 ? decision.chosen : decision?.node;
    this.reveal(chosen ?? states.findLastIndex((state) => state === 'kept'));
  }

  /** Scrolls a wide tree so that a node is in the middle. */
  reveal(node) {
    const box = this.boxes[node];
    this.element.scrollLeft = box.offsetLeft + (box.offsetWidth - this.element.clientWidth) / 2;
  }
}
