'use strict';
// The sandbox: two editable distributions, K, and the acceptance of each rule.

const SANDBOX = (() => {
  const PRESETS = {
    'six tokens': [[30, 25, 20, 15, 7, 3], [40, 10, 22, 5, 15, 8], 'abcdef'.split('')],
    'close together': [[42, 28, 15, 9, 4, 2], [46, 25, 13, 9, 5, 2], 'abcdef'.split('')],
    'draft too sure': [[90, 4, 2, 2, 1, 1], [40, 20, 15, 10, 10, 5], 'abcdef'.split('')],
    'Ber(¼) to Ber(½)': [[75, 25], [50, 50], ['0', '1']],
    'uniform, six to two': [[10, 10, 10, 10, 10, 10], [10, 10, 0, 0, 0, 0], 'abcdef'.split('')],
    'nothing in common': [[50, 50, 0, 0], [0, 0, 50, 50], 'abcd'.split('')],
  };
  const FROM_TRACE = 'distributions of the trace';
  const BARS = [
    ['speculative', 'SD, one candidate'], ['specinfer', 'SpecInfer'], ['kseq', 'K-SEQ'], ['race', 'Race'], ['optimum', 'Optimum'],
  ];
  let weights = null;  // draft's and target's
  let labels = null;
  let traced = null;

  const toLaw = (values) => {
    const total = values.reduce((sum, value) => sum + value, 0);
    return total > 0 ? values.map((value) => value / total) : null;
  };

  function update() {
    const n = Number(byId('candidates').value);
    byId('candidates-out').textContent = String(n);
    const laws = weights.map(toLaw);
    document.querySelectorAll('#sliders output').forEach((output) => {
      const law = laws[output.dataset.law];
      output.textContent = law ? number(law[output.dataset.token]) : '–';
    });
    const box = byId('acceptance');
    if (!laws[0] || !laws[1]) {
      box.replaceChildren(make('p', {class: 'note'}, 'A distribution needs some mass: move a slider.'));
      byId('sandbox-note').textContent = '';
      return;
    }
    const list = make('ul', {class: 'bars wide-label'});
    for (const [rule, name] of BARS) {
      const value = RULES[rule](...laws, n);
      const fill = make('i', {class: `fill rule-${rule}`});
      fill.style.width = `${100 * value}%`;
      list.append(make('li', {'data-rule': rule, 'data-value': value},
        make('span', {class: 'bar-label'}, name),
        make('span', {class: 'bar-group'}, make('span', {class: 'bar-row'}, make('span', {class: 'track'}, fill), make('em', {}, value.toFixed(4))))));
    }
    box.replaceChildren(list);
    byId('sandbox-note').textContent = `γ* = ${RULES.gamma(...laws, n).toFixed(3)}. The optimum is the most that any lossless rule can ` +
      'accept; K-SEQ is never below 1 − 1/e of it.';
  }

  function build() {
    const box = byId('sliders');
    box.replaceChildren(make('span'), make('b', {class: 'p'}, 'p, draft'), make('b', {class: 'q'}, 'q, target'));
    labels.forEach((label, x) => {
      box.append(make('span', {class: 'token', title: label}, label));
      ['p', 'q'].forEach((name, i) => {
        const input = make('input', {type: 'range', min: 0, max: 100, step: 0.1, class: name,
          'aria-label': `${name === 'p' ? 'draft' : 'target'} weight of ${label}`});
        input.value = weights[i][x];
        input.addEventListener('input', () => {
          weights[i][x] = Number(input.value);
          update();
        });
        box.append(make('span', {class: 'slider'}, input, make('output', {'data-law': i, 'data-token': x})));
      });
    });
    update();
  }

  function choose(name) {
    const [draft, target, names] = name === FROM_TRACE ? traced : PRESETS[name];
    weights = [[...draft], [...target]];
    labels = names;
    build();
  }

  function options(chosen) {
    const names = [...Object.keys(PRESETS), ...(traced ? [FROM_TRACE] : [])];
    byId('preset').replaceChildren(...names.map((name) => make('option', {value: name}, name)));
    byId('preset').value = chosen;
    choose(chosen);
  }

  /** Loads distributions of the run, as rows of (label, p, q). The rest of the mass becomes one token. */
  function load(rows) {
    const rest = [1, 2].map((i) => Math.max(0, 1 - rows.reduce((sum, row) => sum + row[i], 0)));
    const all = [...rows, ['all others', ...rest]];
    traced = [all.map((row) => 100 * row[1]), all.map((row) => 100 * row[2]), all.map((row) => row[0])];
    options(FROM_TRACE);
  }

  byId('preset').addEventListener('change', (event) => choose(event.target.value));
  byId('candidates').addEventListener('input', update);
  options('six tokens');
  return {load};
})();
