"""A traced run as JSON values, for the trace page."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np

from spectr_jax import TokenTree
from spectr_jax.engine import ORIGIN_BONUS, ORIGIN_CORRECTION, Judge, Judgement, Trace, TracedRound
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.verifiers import Decisions, Record

NUM_SHOWN = 6  # likeliest tokens of a distribution


def _number(value: float) -> float | None:
  """The number with six digits, more than a page shows; None for values that JSON cannot represent."""
  return float(f'{value:.6g}') if math.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | None]:
  return [_number(value) for value in values.tolist()]


def _likeliest(probs: np.ndarray) -> list[list]:
  """The likeliest tokens and their probabilities. The distribution need not be normalized."""
  probs = probs / probs.sum()
  order = np.argsort(-probs, kind='stable')[:NUM_SHOWN]
  return [[int(token), _number(float(probs[token]))] for token in order if probs[token] > 0]


def _decision(kind: str, made: Decisions, place: int, nodes: np.ndarray) -> dict[str, Any]:
  """One decision as JSON values. Nodes are numbered as in the whole tree."""
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
  """All decisions of a judge, in order. At each depth of a block, the decision to keep precedes the pick below it."""
  order: list[tuple[int, str]] = [
    (int(place), kind) for kind, made in record.decisions.items() for place in np.flatnonzero(made.is_made)
  ]
  return [_decision(kind, record.decisions[kind], place, judge.nodes) for place, kind in sorted(order)]


def _judgement(judgement: Judgement, judge: Judge, num_nodes: int) -> dict[str, Any]:
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
  credits = None
  if record.credits is not None:
    credits = dict(zip(judge.nodes.tolist(), _numbers(record.credits)))
  return entry | {
    'decisions': _decisions(record, judge),
    'credits': None if credits is None else [credits.get(node) for node in range(num_nodes + 1)],
    'law': _likeliest(record.weights),
    'next_prob': _number(float(record.weights[verdict.next_token] / record.weights.sum())),
  }


def _same_text(tree: TokenTree, tokens: np.ndarray) -> list[int]:
  """For each node the first node with the same text, which has the same distributions."""
  seen: dict[tuple, int] = {}
  texts = [tuple(tokens[path[path > 0] - 1].tolist()) for path in tree.paths]
  return [seen.setdefault(text, node) for node, text in enumerate(texts)]


def _distributions(tree: TokenTree, played: TracedRound) -> tuple[list[int], dict[str, list]]:
  """The node that stores each node's distributions, and their likeliest tokens, the target's likeliest first.

  Each entry is a token, its probability under the draft (None where there is no such distribution: at leaves, and where
  no model drafts) and under the target.
  """
  places = _same_text(tree, played.tokens)
  by_node = {}
  for node in sorted(set(places)):
    target = played.target_probs[node]
    with_draft = [other for other in tree.parent_nodes.tolist() if places[other] == node]
    draft = played.draft_probs[tree.parent_index[with_draft[0]]] if with_draft else None
    draft = None if draft is None or not draft.any() else draft
    shown = {token for probs in (draft, target) if probs is not None for token, _ in _likeliest(probs)}
    rows = [
      [token, None if draft is None else _number(float(draft[token])), _number(float(target[token]))] for token in shown
    ]
    by_node[str(node)] = sorted(rows, key=lambda row: (-row[2], row[0]))
  return places, by_node


def _round(tree: TokenTree, judges: tuple[Judge, ...], played: TracedRound) -> dict[str, Any]:
  parents, tokens = tree.parent_of[1:], played.tokens
  places, by_node = _distributions(tree, played)
  exists = tokens >= 0
  draft = np.where(exists, played.draft_probs[tree.parent_index[parents], tokens], 0)
  target = np.where(exists, played.target_probs[parents, tokens], 0)
  return {
    'root': played.root,
    'tokens': tokens.tolist(),
    'given': (np.flatnonzero(played.is_given & exists) + 1).tolist(),
    'draft': [None if is_given else value for is_given, value in zip(played.is_given, _numbers(draft))],
    'target': _numbers(target),
    'places': places,
    'laws': by_node,
    'judgements': [_judgement(*pair, tree.num_nodes) for pair in zip(played.judgements, judges)],
    'origins': played.origins.tolist(),
  }


def pieces_of_tokens(tokens: np.ndarray, tokenizer: TokenizerBase) -> list[str]:
  """The text that each of the tokens `[T]` adds; the one that completes a character adds all of its bytes."""
  whole, pieces, begin = tokenizer.decode(tokens), [], 0
  for end in range(1, len(tokens) + 1):
    known = len(os.path.commonprefix([whole, tokenizer.decode(tokens[:end])])) if end < len(tokens) else len(whole)
    pieces.append(whole[begin:known])
    begin = max(begin, known)
  return pieces


def _names(rounds: list[dict[str, Any]], tokenizer: TokenizerBase) -> dict[str, str]:
  """The texts of all displayed tokens, by id."""
  tokens = set()
  for played in rounds:
    tokens |= {played['root'], *played['tokens']}
    tokens |= {row[0] for rows in played['laws'].values() for row in rows}
    for judgement in played['judgements']:
      tokens |= {judgement['next'], *(token for token, _ in judgement.get('law', ()))}
      tokens |= {decision['winner'] for decision in judgement.get('decisions', ()) if 'winner' in decision}
  return {str(token): tokenizer.token_text(token) for token in sorted(tokens - {-1})}


def describe_trace(trace: Trace, tokenizer: TokenizerBase) -> dict[str, Any]:
  """A run as JSON values.

  `methods`, the run's own first; `parents` of the tree's nodes 1..N; `names`, the texts of tokens by id; `rounds`,
  each with the guesses, the nodes that were given, the guesses' probabilities (None under the draft for given ones),
  the likeliest tokens of every distribution, every method's decisions and their reasons, and the `pieces` of text
  that the round added.
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
      **dataclasses.asdict(judge.method.verifier.explanation),  # rule, residual and plain words
    }
    for judge in trace.judges
  ]
  return {'methods': methods, 'parents': list(trace.tree.parents), 'names': _names(rounds, tokenizer), 'rounds': rounds}
