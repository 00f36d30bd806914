'use strict';
// The player: it holds the current step and draws everything that depends on it.

const PLAYER = (() => {
  const {rounds, methods, run} = DATA;
  let other = -1;       // the compared method, or -1
  let round = 0;
  let stage = 0;        // 0 drafts, 1 target, then the decisions, and last the kept tokens
  let selected = null;  // the clicked node, or null
  let timer = null;
  let panels = [];
  let drawn = null;     // key of the step that the panels show

  const decisionsOf = (index) => rounds[index].judgements.map((judgement) => judgement.decisions ?? []);
  const shownMethods = () => (other < 0 ? [0] : [0, other]);
  const countDecisions = (index) => Math.max(...shownMethods().map((method) => decisionsOf(index)[method].length));
  const lastStage = (index) => countDecisions(index) + 2;
  const isOver = () => stage === lastStage(round);
  const stepsBefore = (index) => {
    let steps = 0;
    for (let i = 0; i < index; i++) steps += lastStage(i) + 1;
    return steps;
  };

  function goTo(newRound, newStage) {
    round = Math.max(0, Math.min(rounds.length - 1, newRound));
    stage = Math.max(0, Math.min(lastStage(round), newStage));
    selected = null;
    render();
  }

  function step(by) {
    const target = stage + by;
    if (target < 0) {
      if (round > 0) goTo(round - 1, lastStage(round - 1));
    } else if (target > lastStage(round)) {
      if (round < rounds.length - 1) goTo(round + 1, 0);
      else pause();
    } else {
      goTo(round, target);
    }
  }

  function goToStep(place) {
    let index = 0;
    while (index < rounds.length - 1 && place > lastStage(index)) place -= lastStage(index++) + 1;
    goTo(index, place);
  }

  const isLast = () => round === rounds.length - 1 && isOver();

  function play() {
    if (isLast()) goTo(0, 0);
    byId('caption').setAttribute('aria-live', 'off');  // a screen reader could not keep up
    const advance = () => {
      step(1);
      if (isLast()) pause();
      else timer = setTimeout(advance, Number(byId('speed').value));
    };
    timer = setTimeout(advance, Number(byId('speed').value));
    showPlaying();
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    byId('caption').setAttribute('aria-live', 'polite');
    showPlaying();
  }

  function showPlaying() {
    const button = byId('play');
    button.setAttribute('aria-label', timer === null ? 'Play' : 'Pause');
    button.querySelector('path').setAttribute('d', timer === null ? 'M7 4v16l13-8z' : 'M6 5h4v14H6zM14 5h4v14h-4z');
  }

  // Drawing.

  function caption() {
    const current = rounds[round];
    if (stage === 0) {
      if (run.has_lookup) {
        const drawn = current.tokens.filter((token) => token >= 0).length - current.given.length;
        const found = current.given.length ? `gives ${plural(current.given.length, 'guess', 'guesses')}` : 'finds nothing';
        return `Lookup ${found} after ${quoted(current.root)}${drawn ? `; the draft model draws ${plural(drawn, 'token')}` : ''}.`;
      }
      const drafts = run.num_drafts ? `${plural(run.num_drafts, 'draft')} of ${plural(run.draft_length, 'token')}` : plural(TREE.size, 'token');
      return `The draft model guesses ${drafts} after ${quoted(current.root)}.`;
    }
    if (stage === 1) return `One call of the target model gives its distribution after each of the ${plural(TREE.size, 'guess', 'guesses')}.`;
    if (!isOver()) {
      const parts = shownMethods().map((method) => {
        const decision = decisionsOf(round)[method][stage - 2];
        return decision ? `${methods[method].name}: ${decisionSentence(current, methods[method], decision)}` : null;
      });
      return parts.filter(Boolean).join(' ');
    }
    const [own] = current.judgements;
    const count = current.pieces.length;
    const cut = count < own.path.length + 1 ? ', cut off by the end of the text or the limit' : '';
    return `${methods[0].name} adds ${plural(count, 'token')} to the text${cut}: ` +
      `${plural(own.path.length, 'accepted guess', 'accepted guesses')} and a ${ORIGINS[own.origin]}${own.origin === 2 ? ' token' : ''}.`;
  }

  function renderText() {
    const box = byId('text');
    box.replaceChildren(make('span', {class: 'origin prompt'}, run.prompt));
    const until = round + (isOver() ? 1 : 0);
    for (let i = 0; i < until; i++) {
      rounds[i].pieces.forEach((piece, place) => {
        const kind = ORIGINS[rounds[i].origins[place]];
        if (piece) box.append(make('span', {class: `origin ${kind} ${i === round ? 'new' : ''}`, title: `round ${i + 1}: ${kind}`}, piece));
      });
    }
    box.append(make('span', {class: 'caret', 'aria-hidden': 'true'}));
    box.scrollTop = box.scrollHeight;
    const tokens = rounds.slice(0, until).reduce((sum, each) => sum + each.pieces.length, 0);
    byId('rate').textContent = until ? (tokens / until).toFixed(2) : '–';
    byId('rate-note').textContent = until ? `${plural(tokens, 'token')} from ${plural(until, 'call')}` : 'no call yet';
    drawChart(byId('chart'), {round, until, other, onChoose: (chosen) => goTo(chosen, 0)});
    byId('chart-note').textContent = 'Dashed: the mean so far.' +
      (other >= 0 ? ` Strokes: ${methods[other].name} on the same drafts.` : '');
  }

  function buildPanels() {
    panels = shownMethods().map((index) => {
      const method = methods[index];
      const tree = new TreeView(`Tree of drafts as judged by ${method.name}`, (node) => {
        selected = selected === node ? null : node;
        renderPanels();
        renderLaws();
      });
      const why = make('div', {class: 'why'});
      const tally = make('p', {class: 'tally note'});
      const isPart = method.nodes.length < TREE.size + 1;
      const element = make('article', {class: `card panel ${index ? 'second' : 'first'}`, 'aria-label': method.name},
        make('div', {class: 'bar'}, make('h3', {}, method.name),
          make('span', {class: `badge ${method.is_lossless ? '' : 'biased'}`, title: method.bias}, method.is_lossless ? 'lossless' : 'not lossless')),
        make('p', {class: 'plain'}, method.plain + (isPart ? ' It judges the first draft alone.' : '')),
        tally, tree.element, why, ruleOf(method));
      return {index, method, tree, why, tally, element};
    });
    byId('panels').replaceChildren(...panels.map((panel) => panel.element));
    byId('panels').classList.toggle('two', panels.length > 1);
    byId('credit-legend').hidden = !shownMethods().some((index) => rounds[0].judgements[index].credits);
  }

  function renderPanels() {
    const current = rounds[round];
    const key = `${round} ${other} ${byId('panels').clientWidth}`;
    const over = isOver();
    const until = round + (over ? 1 : 0);
    for (const panel of panels) {
      const judgement = current.judgements[panel.index];
      if (drawn !== key) panel.tree.draw(current, judgement.credits ?? null, panel.tree.element.clientWidth);
      const decisions = decisionsOf(round)[panel.index];
      const count = Math.max(0, Math.min(stage - 1, decisions.length));
      const decision = over || stage < 2 ? null : decisions[stage - 2] ?? null;
      const isDone = over || (stage >= 2 && stage - 2 >= decisions.length);
      panel.tree.mark(nodeStates(current, panel.method, judgement, count, isDone), decision, {hasTarget: stage > 0, selected});
      const kept = rounds.slice(0, until).reduce((sum, each) => sum + each.judgements[panel.index].path.length + 1, 0);
      panel.tally.textContent = (panel.index ? 'On the same drafts so far: ' : 'So far: ') +
        (until ? `${(kept / until).toFixed(2)} tokens a round` : 'no round is over');
      if (decision) panel.why.replaceChildren(decisionCard(current, panel.method, decision, stage - 1, decisions.length));
      else if (isDone) panel.why.replaceChildren(verdictCard(current, panel.method, judgement));
      else panel.why.replaceChildren(guessCard(current, panel.method, stage > 0));
    }
    drawn = key;
  }

  /** The rule of a method as a formula, a line per sentence. */
  function ruleOf(method) {
    const lines = (method.rule || `Source: ${method.source}.`).split(/(?<=\.) (?=[A-Z])/);
    return make('div', {class: 'rule'}, make('b', {}, 'In symbols'), make('ul', {'aria-label': 'The rule in symbols'}, ...lines.map((line) => make('li', {}, line))),
      method.bias ? make('p', {}, `Not lossless: ${method.bias}.`) : null);
  }

  /** The node whose distributions are shown: the clicked node, else the node of the first method's decision. */
  function lawNode() {
    if (selected !== null) return selected;
    const decision = stage >= 2 && !isOver() ? decisionsOf(round)[0][stage - 2] : null;
    if (decision) return decision.kind === 'keep' ? TREE.parents[decision.node] : decision.node;
    return 0;
  }

  function lawRows(node) {
    const current = rounds[round];
    return current.laws[current.places[node]];
  }

  function renderLaws() {
    const current = rounds[round];
    const node = lawNode();
    const rows = lawRows(node);
    const children = TREE.children.flatMap((each, parent) => (current.places[parent] === current.places[node] ? each : []));
    const tokensOf = (isGiven) => children.filter((child) => current.given.includes(child) === isGiven).map((child) => tokenOf(current, child));
    const [drafted, given] = [tokensOf(false), tokensOf(true)];
    const hasDraft = rows[0][1] !== null;
    const hasTarget = stage > 0;
    byId('laws-where').textContent = `After ${quoted(tokenOf(current, node))}${node ? `, position ${TREE.depths[node]} of the tree` : ', the last token of the text'}. ` +
      (hasDraft ? 'Likeliest tokens of both distributions; ×n: drafted n times here. ' : 'Nothing was drawn here. ') + 'Choose a box of the tree for its distributions.';
    byId('laws').replaceChildren(lawBars(rows.map(([token, p, q]) => {
      const times = drafted.filter((each) => each === token).length;
      const marks = (times ? ` ×${times}` : '') + (given.includes(token) ? ' (given)' : '');
      return {label: tokenText(token) + marks, values: [p, hasTarget ? q : null]};
    }), ['p', 'q']));
    if (!hasDraft && !hasTarget) byId('laws').replaceChildren(make('p', {class: 'note'}, 'The target has not been called yet.'));
    byId('to-sandbox').disabled = !hasDraft || !hasTarget;
  }

  function render() {
    if (!byId('panels').childElementCount) buildPanels();
    byId('round-title').textContent = `Round ${round + 1} of ${rounds.length}`;
    byId('caption').textContent = caption();
    const slider = byId('place');
    slider.max = stepsBefore(rounds.length) - 1;
    slider.value = stepsBefore(round) + stage;
    const where = `round ${round + 1}, step ${stage + 1} of ${lastStage(round) + 1}`;
    slider.setAttribute('aria-valuetext', where);
    byId('place-out').textContent = `round ${round + 1} · ${stage + 1}/${lastStage(round) + 1}`;
    byId('back').disabled = round === 0 && stage === 0;
    byId('previous-round').disabled = byId('back').disabled;
    byId('link').href = `#${fragment()}`;
    byId('forward').disabled = isLast();
    byId('next-round').disabled = isLast();
    renderText();
    renderPanels();
    renderLaws();
  }

  /** The part of the address that opens this step. */
  function fragment() {
    return new URLSearchParams({round: round + 1, step: stage + 1, with: other < 0 ? 'nothing' : methods[other].name});
  }

  /** Goes to the step of the address, if it names one. */
  function openFragment() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const [newRound, newStep] = [wanted.get('round'), wanted.get('step') ?? '1'].map(Number);
    if (!wanted.has('round') || !Number.isInteger(newRound) || !Number.isInteger(newStep)) return;
    if (timer !== null) pause();
    const index = methods.findIndex((method, place) => place > 0 && method.name === wanted.get('with'));
    if (index > 0 || wanted.get('with') === 'nothing') {
      byId('other').value = index;
      chooseOther(index);
    }
    goTo(newRound - 1, newStep - 1);
    byId('stage').scrollIntoView();
  }

  function chooseOther(index) {
    other = index;
    drawn = null;
    stage = Math.min(stage, lastStage(round));
    buildPanels();
    render();
  }

  const previousRound = () => goTo(stage ? round : round - 1, 0);
  const nextRound = () => (round === rounds.length - 1 ? goTo(round, Infinity) : goTo(round + 1, 0));
  const toggle = () => (timer === null ? play() : pause());
  const byHand = (action) => () => {
    if (timer !== null) pause();
    action();
  };

  const KEYS = {
    ArrowRight: byHand(() => step(1)), ArrowLeft: byHand(() => step(-1)),
    PageDown: byHand(nextRound), PageUp: byHand(previousRound),
    Home: byHand(() => goTo(0, 0)), End: byHand(() => goTo(rounds.length - 1, Infinity)),
    ' ': toggle,
  };

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const target = event.target;
    // Input fields use keys themselves, and Space presses the focused button.
    if (target.closest('select, input')) return;
    if (event.key === ' ' && target.closest('button, a')) return;
    const action = KEYS[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  function about() {
    const models = Object.entries(run.models).map(([role, name]) => `${role} ${name}`).join(', ') + (run.has_lookup ? ', guesses by lookup' : '');
    const filters = [`temperature ${run.temperature}`, run.top_k ? `top-k ${run.top_k}` : '', run.top_p < 1 ? `top-p ${run.top_p}` : '', run.min_p ? `min-p ${run.min_p}` : ''];
    const shape = run.num_drafts ? `K = ${run.num_drafts}, L = ${run.draft_length}` : `tree ${run.tree}`;
    byId('about').append(make('strong', {}, methods[0].name), `, ${shape}, ${filters.filter(Boolean).join(', ')}, seed ${run.seed}; ${models}`);
    document.title = `${methods[0].name}, step by step`;
    byId('given-note').hidden = !run.has_lookup;
  }

  function start() {
    about();
    const select = byId('other');
    select.append(make('option', {value: -1}, 'nothing'));
    methods.forEach((method, index) => {
      if (index) select.append(make('option', {value: index}, method.name));
    });
    select.addEventListener('change', () => chooseOther(Number(select.value)));
    if (methods.length > 1) {
      const wanted = ['spectr', 'speculative'].map((name) => methods.findIndex((method) => method.name === name)).find((index) => index > 0);
      other = wanted ?? 1;
      select.value = other;
    } else {
      select.disabled = true;
      select.firstChild.textContent = 'no other method can judge these drafts';
    }
    byId('back').addEventListener('click', byHand(() => step(-1)));
    byId('forward').addEventListener('click', byHand(() => step(1)));
    byId('previous-round').addEventListener('click', byHand(previousRound));
    byId('next-round').addEventListener('click', byHand(nextRound));
    byId('play').addEventListener('click', toggle);
    byId('place').addEventListener('input', byHand(() => goToStep(Number(byId('place').value))));
    byId('to-sandbox').addEventListener('click', () => {
      SANDBOX.load(lawRows(lawNode()).map(([token, p, q]) => [tokenText(token), p, q]));
      byId('sandbox').scrollIntoView();
      byId('preset').focus({preventScroll: true});
    });
    document.addEventListener('keydown', onKey);
    let width = window.innerWidth;
    window.addEventListener('resize', () => {
      if (window.innerWidth === width) return;  // a phone's bars change only the height
      width = window.innerWidth;
      render();
    });
    render();
    openFragment();
    window.addEventListener('hashchange', openFragment);
  }

  start();
  return {goTo, lastStage};
})();
