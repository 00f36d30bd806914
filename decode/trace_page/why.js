'use strict';
// Explains one decision: a sentence, the line from 0 to 1, and a table of its numbers.

function isBlock(method, decision) {
  return decision.kind === 'keep' && decision.kept !== undefined && !isOfContext(decision) && method.rule.includes('h = S');
}

/** Text that says what may still be kept after a decision to keep nothing. */
function whatIsLeft(round, method, decision) {
  if (isBlock(method, decision)) return '; a deeper token may still keep it';
  if (!isOfContext(decision)) return '';
  const {decisions} = round.judgements[DATA.methods.indexOf(method)];
  return decision === decisions[decisions.length - 1] ? '; no branch is left' : '; the branches after it are still tried';
}

/** The paths of guesses that a method judges, as lists of nodes from the root's child down to a leaf. */
function pathsOf(round, method) {
  const judged = method.nodes.filter((node) => node && tokenOf(round, node) >= 0);
  return judged.filter((node) => !judged.some((other) => TREE.parents[other] === node)).map(pathTo);
}

const PATHS_SHOWN = 8;

/** The card before the decisions: every path of guesses, and its probability under the draft and the target. */
function guessCard(round, method, hasTarget) {
  const product = (values) => (values.includes(null) ? null : values.reduce((total, value) => total * value, 1));
  const rows = pathsOf(round, method).map((path) => {
    const p = product(path.map((node) => round.draft[node - 1]));
    const q = product(path.map((node) => round.target[node - 1]));
    return {text: path.map((node) => tokenText(tokenOf(round, node))).join(' '), p, q, ratio: p > 0 ? q / p : null};
  });
  if (!rows.length) return make('p', {class: 'note'}, 'There is nothing to judge in this round.');
  const table = make('table', {class: 'numbers', 'aria-label': 'Paths of guesses'},
    make('thead', {}, make('tr', {}, ...['', 'path', 'p', ...(hasTarget ? ['q', 'q/p'] : [])].map((head) => make('th', {scope: 'col'}, head)))),
    make('tbody', {}, ...rows.slice(0, PATHS_SHOWN).map(({text, p, q, ratio}, i) => make('tr', {},
      make('td', {}, String(i + 1)), make('th', {scope: 'row', title: text}, text), make('td', {}, number(p, 2)),
      ...(hasTarget ? [make('td', {}, number(q, 2)), make('td', {}, number(ratio, 2))] : [])))));
  table.classList.add('paths');
  const sentence = hasTarget
    ? 'The target may find a path more or less likely than the draft does. Decisions follow.'
    : 'The probability p of a path is the product of those of its tokens. The target has not seen them yet.';
  return make('div', {class: 'why-card'},
    make('h4', {}, hasTarget ? 'Scored guesses ' : 'Guesses ', make('span', {class: 'note'}, plural(rows.length, 'path'))),
    make('p', {class: 'sentence'}, sentence), make('div', {class: 'table-scroll'}, table),
    rows.length > PATHS_SHOWN ? make('p', {class: 'note'}, `and ${rows.length - PATHS_SHOWN} more`) : null);
}

/** A sentence that describes one decision. */
function decisionSentence(round, method, decision) {
  const {kind, chosen, nodes, uniform} = decision;
  const name = chosen >= 0 ? quoted(tokenOf(round, chosen)) : '';
  const u = number(uniform);
  if (kind === 'accept') {
    if (chosen >= 0) return `u = ${u} falls into the share of ${name}: accepted.`;
    const sum = decision.shares.reduce((total, share) => total + share, 0);
    return `u = ${u} lies behind all shares, which end at ${number(sum)}: ` +
      (nodes.length > 1 ? `none of ${nodes.length} candidates is accepted.` : 'the candidate is rejected.');
  }
  if (kind === 'pick') {
    return nodes.length > 1
      ? `A race among ${nodes.length} candidates: u = ${u} falls into the share of ${name}, which is picked.`
      : `The path goes on with ${name}, the only candidate.`;
  }
  if (kind === 'race') {
    const winner = quoted(decision.winner);
    return chosen >= 0 ? `The target’s winner ${winner} is among the candidates: accepted.`
      : `The target’s winner ${winner} is not among the candidates.`;
  }
  const threshold = decision.kept === undefined || isBlock(method, decision) || isOfContext(decision) ? 'h' : 'P';
  const share = number(decision.shares[0]);
  const where = `down to ${quoted(tokenOf(round, decision.node))}, position ${TREE.depths[decision.node]}`;
  return chosen >= 0 ? `u = ${u} < ${threshold} = ${share}: the path is kept ${where}.`
    : `u = ${u} ≥ ${threshold} = ${share}: not kept ${where}${whatIsLeft(round, method, decision)}.`;
}

/** The line from 0 to 1, split into shares, with u. */
function unitLine(round, decision) {
  const line = make('div', {class: 'unit', role: 'img'});
  const isKeep = decision.kind === 'keep';
  const words = [];
  let sum = 0;
  decision.shares.forEach((share, i) => {
    const node = decision.nodes[i];
    const slice = make('span', {class: `slice s${i % 2} ${node === decision.chosen ? 'chosen' : ''}`});
    slice.style.width = `${100 * share}%`;
    if (share > (isKeep ? 0.12 : 0.07)) slice.append(isKeep ? 'kept' : String(i + 1));
    words.push(`${tokenText(tokenOf(round, node))} from ${number(sum)} to ${number(sum + share)}`);
    sum += share;
    if (share > 0) line.append(slice);
  });
  const rest = make('span', {class: `slice rest ${decision.chosen < 0 ? 'chosen' : ''}`});
  if (1 - sum > 0.2) rest.append(isKeep ? 'not kept' : 'none');
  line.append(rest);
  const marker = make('span', {class: 'marker'}, make('b', {}, `u ${number(decision.uniform)}`));
  marker.style.left = `${100 * decision.uniform}%`;
  marker.classList.toggle('late', decision.uniform > 0.8);
  line.append(marker);
  line.setAttribute('aria-label', `Shares: ${words.join('; ')}; u is ${number(decision.uniform)}`);
  return line;
}

const COLUMN_NAMES = {
  draft_prob: 'p', target_prob: 'q', ratio: 'q/p', pick_prob: 'picked', picked_prob: 'p̃',
  draft_time: 'E/p', target_time: 'E/q',
};

/** A table of a decision's candidates, with the numbers that determine their shares. */
function decisionTable(round, decision) {
  const keys = Object.keys(COLUMN_NAMES).filter((key) => Array.isArray(decision[key]));
  const heads = ['', 'token', ...keys.map((key) => COLUMN_NAMES[key])];
  const isPick = decision.kind === 'pick';
  const withTurn = decision.kind === 'accept';
  if (withTurn) heads.push(decision.pick_prob ? 'min(1, q/p̃)' : 'on its turn');
  if (decision.shares) heads.push('share');
  const body = make('tbody');
  let before = 0;
  decision.nodes.forEach((node, i) => {
    const row = make('tr', {class: node === decision.chosen ? 'chosen' : ''});
    row.append(make('td', {}, String(i + 1)),
      make('th', {scope: 'row'}, tokenText(tokenOf(round, node)), node === decision.chosen ? ' ✓' : ''));
    for (const key of keys) row.append(make('td', {}, number(decision[key][i], 2)));
    if (withTurn) {
      const left = decision.pick_prob ? decision.pick_prob[i] : 1 - before;
      row.append(make('td', {}, left > 1e-6 ? number(Math.min(1, decision.shares[i] / left)) : '–'));
    }
    if (decision.shares) {
      row.append(make('td', {}, number(decision.shares[i])));
      before += decision.shares[i];
    }
    body.append(row);
  });
  const table = make('table', {class: 'numbers'},
    make('thead', {}, make('tr', {}, ...heads.map((head) => make('th', {scope: 'col'}, head)))), body);
  table.setAttribute('aria-label', isPick ? 'Candidates and the chance to be picked' : 'Candidates and their shares');
  return make('div', {class: 'table-scroll'}, table);
}

/** The numbers of a decision that belong to no single candidate. */
function decisionFacts(method, decision) {
  const facts = [];
  if (decision.gamma !== undefined) facts.push(`γ = ${number(decision.gamma)}`);
  if (decision.epsilon !== undefined) facts.push(`ε = ${number(decision.epsilon)}`);
  if (decision.winner_time !== undefined) facts.push(`First arrival of the target’s race: ${number(decision.winner_time)}`);
  if (decision.kind === 'keep' && decision.kept !== undefined) facts.push(`P = ${number(decision.kept)}`);
  if (isBlock(method, decision)) facts.push(`h = ${number(decision.shares[0])}`);
  return facts.length ? make('p', {class: 'facts'}, facts.join(', ')) : null;
}

/** The chance of a node whose branch goes on, from its credit P and what the target has left for it, S. */
function leftLine(method, {kept, shares: [chance]}) {
  if (Math.abs(chance - kept) < 1e-9 || chance === 1 || !method.rule.includes('h = S')) return `h = ${number(chance)}`;
  const left = chance * (1 - kept) / (1 - chance);
  return `h = S / (S + 1 − P) = ${number(left)} / (${number(left)} + ${number(1 - kept)}) = ${number(chance)}, where S is what the target has left here after all below was rejected`;
}

/** The lines from the credit above a node to its own chance, with the numbers put in. */
function creditLines(round, method, decision) {
  const {node, above, mass, before, kept} = decision;
  const [isOfRace, parent] = [decision.picked_share !== undefined, quoted(tokenOf(round, TREE.parents[node]))];
  const taken = isOfRace
    ? `m = s · min(1, P · q/p̃) = ${number(decision.picked_share)} · min(1, ${number(above)} · ${number(decision.ratio)}) = ${number(mass)}`
    : `m = ${number(mass)}`;
  return [
    `Credit above, of ${parent}: P = ${number(above)}`,
    taken,
    `P = m / (1 − Σ m of the siblings before) = ${number(mass)} / (1 − ${number(before)}) = ${number(kept)}`,
    leftLine(method, decision),
  ];
}

/** What the numbers of a decision to keep a path mean, or null. */
function factsMeaning(round, method, decision) {
  if (isOfContext(decision)) {
    const {credits} = round.judgements[DATA.methods.indexOf(method)];
    const end = pathTo(decision.node).find((node) => credits[node] === 0);
    const nothing = decision.above === 0 ? `The credit of this branch ends at ${quoted(tokenOf(round, end))}, position ${TREE.depths[end]}, so nothing below it can be kept, whatever p and q are. `
      : decision.picked_share === 0 ? 'With s = 0 the race always picks a sibling, which has the credit instead. ' : '';
    const share = decision.picked_share === undefined ? '' : 's: its share of the race among its siblings. ';
    return make('p', {class: 'note'}, nothing + 'P: the chance that a node or one below it is kept, once it is tried. ' + share +
      'm: its part of the credit above. h: its chance now that nothing below it was kept.');
  }
  if (isBlock(method, decision)) {
    return make('p', {class: 'note'}, 'P: the chance that the path is kept at least down to here. h: the chance with which this place passes.');
  }
  return null;
}

/** The card of a decision. */
function decisionCard(round, method, decision, place, count) {
  const title = {accept: 'Candidates', pick: 'Pick', keep: 'Keep the path?', race: 'Race'}[decision.kind];
  const after = decision.kind === 'keep' ? `down to ${quoted(tokenOf(round, decision.node))}`
    : `at position ${TREE.depths[decision.node] + 1}, after ${quoted(tokenOf(round, decision.node))}`;
  const card = make('div', {class: 'why-card'},
    make('h4', {}, `${title} `, make('span', {class: 'note'}, `${after} · ${place} of ${count}`)),
    make('p', {class: 'sentence'}, decisionSentence(round, method, decision)));
  if (decision.shares) card.append(unitLine(round, decision));
  if (isOfContext(decision)) {
    card.append(make('ul', {class: 'facts steps', 'aria-label': 'From the credit above to h'}, ...creditLines(round, method, decision).map((line) => make('li', {}, line))));
  } else {
    const facts = decisionFacts(method, decision);
    if (facts) card.append(facts);
  }
  const meaning = factsMeaning(round, method, decision);
  if (meaning) card.append(meaning);
  if (decision.kind !== 'keep') card.append(decisionTable(round, decision));
  return card;
}

/** The card of a method's verdict: the round's tokens, and the origin of the last one. */
function verdictCard(round, method, judgement) {
  const kind = ORIGINS[judgement.origin];
  const chips = judgement.path.map((node) => make('span', {class: 'origin draft'}, tokenText(tokenOf(round, node))));
  chips.push(make('span', {class: `origin ${kind}`}, tokenText(judgement.next)));
  const count = judgement.path.length;
  const words = kind === 'bonus'
    ? `The path is accepted to its end, so the target’s own next token comes with it, from q.`
    : `The next token corrects what was rejected${method.residual ? `: drawn from ${method.residual}` : ''}.`;
  const card = make('div', {class: 'why-card'},
    make('h4', {}, `${plural(count + 1, 'token')} `,
      make('span', {class: 'note'}, `${plural(count, 'guess', 'guesses')} and a ${kind}${kind === 'bonus' ? ' token' : ''}`)),
    make('p', {class: 'chips'}, ...chips), make('p', {class: 'sentence'}, words));
  if (judgement.law) {
    const rows = judgement.law.some(([token]) => token === judgement.next)
      ? judgement.law : [...judgement.law, [judgement.next, judgement.next_prob]];
    card.append(lawBars(rows.map(([token, prob]) => ({label: tokenText(token), values: [prob], isMarked: token === judgement.next})),
      [kind === 'bonus' ? 'q' : 'r']));
  } else {
    card.append(make('p', {class: 'note'}, 'This verifier keeps no record: path and distributions are shown without the numbers.'));
  }
  return card;
}

/** Bars of one or two distributions over tokens. */
function lawBars(rows, names) {
  const list = make('ul', {class: 'bars'});
  for (const {label, values, isMarked} of rows) {
    const bars = make('span', {class: 'bar-group'});
    values.forEach((value, i) => {
      if (value === null) return;  // no distribution, or none yet
      const fill = make('i', {class: `fill ${names[i]}`});
      fill.style.width = `${100 * (value ?? 0)}%`;
      bars.append(make('span', {class: 'bar-row'}, make('span', {class: 'track'}, fill), make('em', {}, number(value))));
    });
    list.append(make('li', {class: isMarked ? 'marked' : ''}, make('span', {class: 'bar-label'}, label, isMarked ? ' ✓' : ''), bars));
  }
  return list;
}
