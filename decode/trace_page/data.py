"""A traced run as JSON values: what the trace page shows."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from spectr_jax import ORIGIN_BONUS, ORIGIN_CORRECTION, Method, Tokenizer, TokenTree
from spectr_jax.couplings import KSeq, Maximal, Only, OverAccept, Race, Recursive, Selected
from spectr_jax.engine.trace import Judge, Judgement, Trace, TracedRound
from spectr_jax.verify import Block, Decisions, GreedyBlock, RaceTraversal, Record, SeedExact, Traversal, Walk

NUM_SHOWN = 6  # likeliest tokens of a law
_SPECIAL = {Tokenizer.pad_id: '⟨pad⟩', Tokenizer.bos_id: '⟨begin⟩', Tokenizer.eos_id: '⟨end⟩'}

# How candidates of one position are judged, and where the next token comes from if none is accepted.
_COUPLINGS = {
  Maximal: ('The candidate is accepted with probability min(1, q/p).', '[q − p]₊'),
  KSeq: (
    'K-SEQ tries the candidates in turn against one threshold γ: each is accepted with min(1, q/(γp)).',
    '[q − min(p, q/γ) · (1 − (1 − β)ⁿ)/β]₊',
  ),
  Recursive: (
    'The candidates are tried in turn with min(1, r/p), where r is what the rejected ones before have left of q.',
    'r, which is what the rejected candidates have left of q',
  ),
  Selected: (
    'A weighted race picks one candidate; it is accepted with min(1, q/p̃), where p̃ is the law of what the race picks.',
    '[q − p̃]₊',
  ),
  OverAccept: (
    'The candidate is accepted with min(1, (q + ε)/p): more than is right, on purpose.',
    'the rejection law',
  ),
}
_SELECTIONS = {
  Only: ('The path is the draft.', 'p'),
  Race: ('At each position a weighted race picks one candidate; p̃ is the law of what it picks.', 'p̃'),
}


def _rules(method: Method) -> dict[str, str]:
  """What the page says of a verifier: how it decides, `rule`, and where a correction comes from, `residual`."""
  verifier = method.verifier
  if isinstance(verifier, Walk) and type(verifier.coupling) in _COUPLINGS:
    rule, residual = _COUPLINGS[type(verifier.coupling)]
    if verifier.coupling == Recursive(with_replacement=False):
      rule += ' Candidates differ: p loses each rejected token.'
    elif not verifier.is_pooled:
      rule += ' After the first position only the accepted draft goes on.'
  elif isinstance(verifier, Block) and type(verifier.selection) in _SELECTIONS:
    picks, law = _SELECTIONS[type(verifier.selection)]
    rule = (
      f'{picks} With P = min(1, P · q/{law}) along the path and S = Σ [Pq − {law}]₊ at its next position, the path is'
      ' kept down to the deepest token with u < h = S/(S + 1 − P); at its end h = P.'
    )
    residual = f'[Pq − {law}]₊'
  elif isinstance(verifier, Traversal):
    rule = (
      'Leaves first: the whole path to a leaf is kept if u < P, with P = min(1, P · q/p) along it. A rejected leaf is'
      ' deleted, and takes [Pq − p]₊ as the new q at its parent, whose P becomes S/(S + 1 − P).'
    )
    residual = 'what the rejected children have left of q'
  elif isinstance(verifier, RaceTraversal):
    rule = (
      'Nodes that spell the same are one. A weighted race would pick each candidate with probability s; p̃ is the law'
      ' of what it picks. Every branch is tried, leaves first, candidates in ascending order of s. With'
      ' m = s · min(1, P · q/p̃) a candidate has P = m/(1 − Σ m of those before it). The first with u < h is kept:'
      ' h = S/(S + 1 − P) with S = Σ [Pq − p̃]₊ at the next position; at a leaf h = P.'
    )
    residual = '[Pq − p̃]₊'
  elif isinstance(verifier, SeedExact):
    rule = (
      "Every token x has one exponential E. Candidates are the first to arrive at E/p; the target's own winner is the"
      ' first at E/q. If it is a candidate, the walk goes on there.'
    )
    residual = "q: it is the winner of the target's race"
  elif isinstance(verifier, GreedyBlock):
    rule = 'Every beginning of every draft is accepted with probability h; the longest accepted one is kept.'
    residual = 'q (1 − min(1, p/(vq)))ᴷ'
  else:
    rule = residual = ''
  return {'rule': rule, 'residual': residual}


def _number(value: float) -> float | None:
  """Six digits, more than a page shows; None for what JSON has no number for."""
  return float(f'{value:.6g}') if math.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
  return [_number(value) for value in values.tolist()]


def _likeliest(law: np.ndarray) -> list[list]:
  """The likeliest tokens and their probabilities, of a law that need not be normalised."""
  law = law / law.sum()
  order = np.argsort(-law, kind='stable')[:NUM_SHOWN]
  return [[int(token), _number(float(law[token]))] for token in order if law[token] > 0]


def _decision(kind: str, made: Decisions, place: int, nodes: np.ndarray) -> dict[str, Any]:
  """One decision; nodes are numbered as in the whole tree."""
  is_valid, chosen = made.is_valid[place], int(made.chosen[place])
  entry = {
    'kind': kind,
    'node': int(nodes[made.node[place]]),
    'nodes': nodes[made.nodes[place][is_valid]].tolist(),
    'chosen': int(nodes[chosen]) if chosen >= 0 else -1,
  }
  if made.shares is not None:
    entry |= {'shares': _numbers(made.shares[place][is_valid]), 'uniform': _number(float(made.uniform[place]))}
  for name, values in made.numbers.items():
    value = np.asarray(values[place])
    if name.startswith('log_'):
      name, value = name.removeprefix('log_'), np.exp(value)
    if name == 'winner':
      entry[name] = int(value)
    else:
      entry[name] = _numbers(value[is_valid]) if value.ndim else _number(float(value))
  return entry


def _decisions(record: Record, judge: Judge) -> list[dict[str, Any]]:
  """All that were made, in order: at each depth of a block, whether it is kept before what is picked below."""
  order: list[tuple[int, str]] = [
    (int(place), kind) for kind, made in record.decisions.items() for place in np.flatnonzero(made.is_made)
  ]
  return [_decision(kind, record.decisions[kind], place, judge.nodes) for place, kind in sorted(order)]


def _judgement(judgement: Judgement, judge: Judge) -> dict[str, Any]:
  verdict, record = judgement.verdict, judgement.record
  path = verdict.path[: verdict.num_accepted]
  is_end = judge.tree.num_children[path[-1] if len(path) else 0] == 0
  entry = {
    'path': judge.nodes[path].tolist(),
    'next': int(verdict.next_token),
    'origin': ORIGIN_BONUS if is_end else ORIGIN_CORRECTION,
  }
  if record is None:
    return entry
  return entry | {
    'decisions': _decisions(record, judge),
    'law': _likeliest(record.weights),
    'next_prob': _number(float(record.weights[verdict.next_token] / record.weights.sum())),
  }


def _same_text(tree: TokenTree, tokens: np.ndarray) -> list[int]:
  """For each node the first that spells the same; they have the same laws."""
  seen: dict[tuple, int] = {}
  texts = [tuple(tokens[path[path > 0] - 1].tolist()) for path in tree.paths]
  return [seen.setdefault(text, node) for node, text in enumerate(texts)]


def _laws(tree: TokenTree, played: TracedRound) -> tuple[list[int], dict[str, list]]:
  """For each node where its laws stand, and the likeliest tokens of both laws there, the target's likeliest first.

  Each is a token, its probability by the draft (None behind leaves, where nothing was drafted) and by the target.
  """
  places = _same_text(tree, played.tokens)
  laws = {}
  for node in sorted(set(places)):
    target = played.target_probs[node]
    with_law = [other for other in tree.parent_nodes.tolist() if places[other] == node]
    draft = played.draft_probs[tree.law_index[with_law[0]]] if with_law else None
    shown = {token for law in (draft, target) if law is not None for token, _ in _likeliest(law)}
    rows = [
      [token, None if draft is None else _number(float(draft[token])), _number(float(target[token]))] for token in shown
    ]
    laws[str(node)] = sorted(rows, key=lambda row: (-row[2], row[0]))
  return places, laws


def _round(tree: TokenTree, judges: tuple[Judge, ...], played: TracedRound) -> dict[str, Any]:
  parents, tokens = tree.parent_of[1:], played.tokens
  places, laws = _laws(tree, played)
  exists = tokens >= 0
  draft = np.where(exists, played.draft_probs[tree.law_index[parents], tokens], 0)
  target = np.where(exists, played.target_probs[parents, tokens], 0)
  return {
    'root': played.root,
    'tokens': tokens.tolist(),
    'draft': _numbers(draft),
    'target': _numbers(target),
    'places': places,
    'laws': laws,
    'judgements': [_judgement(*pair) for pair in zip(played.judgements, judges)],
    'origins': played.origins.tolist(),
  }


def pieces_of_tokens(tokens: np.ndarray, tokenizer: Tokenizer) -> list[str]:
  """The text that each token adds, `[T]`; put together they are the text of all.

  Bytes of one character are added by the token that completes it.
  """
  whole, pieces, begin = tokenizer.decode(tokens), [], 0
  for end in range(1, len(tokens) + 1):
    known = len(os.path.commonprefix([whole, tokenizer.decode(tokens[:end])])) if end < len(tokens) else len(whole)
    pieces.append(whole[begin:known])
    begin = max(begin, known)
  return pieces


def _names(rounds: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, str]:
  """Texts of all tokens that are shown."""
  tokens = set()
  for played in rounds:
    tokens |= {played['root'], *played['tokens']}
    tokens |= {row[0] for law in played['laws'].values() for row in law}
    for judgement in played['judgements']:
      tokens |= {judgement['next'], *(token for token, _ in judgement.get('law', ()))}
      tokens |= {decision['winner'] for decision in judgement.get('decisions', ()) if 'winner' in decision}
  return {str(token): _SPECIAL.get(token) or tokenizer.decode([token]) for token in sorted(tokens - {-1})}


def describe_trace(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
  """A run as JSON values.

  Args:
    trace: The run.
    tokenizer: Its models' tokenizer.

  Returns:
    `methods`, the run's own first; `parents` of the tree's nodes 1..N; `names`, the texts of tokens by id; `rounds`,
    each with the guesses, their probabilities, the likeliest tokens of every law, what every method decided and why,
    and the `pieces` of text that the round added.
  """
  rounds = [_round(trace.tree, trace.judges, played) for played in trace.rounds]
  emitted = np.concatenate([played.emitted for played in trace.rounds])
  pieces = iter(pieces_of_tokens(emitted, tokenizer))
  for played in rounds:
    played['pieces'] = [next(pieces) for _ in played['origins']]
  methods = [
    {
      'name': judge.method.name,
      'is_lossless': judge.method.is_lossless_on(judge.tree),
      'bias': '' if judge.method.is_lossless_on(judge.tree) else judge.method.bias,
      'source': judge.method.source,
      'nodes': judge.nodes.tolist(),
      'children': judge.method.proposal_rule.name,
      **_rules(judge.method),
    }
    for judge in trace.judges
  ]
  return {
    'methods': methods,
    'parents': list(trace.tree.parents),
    'names': _names(rounds, tokenizer),
    'rounds': rounds,
  }
