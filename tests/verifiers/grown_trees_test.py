"""Trees that are data: rows with parents of their own are verified as with the tree that these make."""

import jax
import numpy as np
import pytest
from guesses import ALL, DISTINCT, DUPLICATES, EXACT, RAN_OUT, RAN_OUT_BELOW, UNEQUAL, make_guesses, stack

from spectr_jax import METHODS, TokenTree
from spectr_jax.proposal import Proposal
from tests.slow import slow, slow_but


def _placed(tree, bounds, places, proposal, targets):
  """The guesses of a tree in slots `places` `[n + 1]` of wider bounds: parents, proposal, target probabilities."""
  vocab_size = targets.shape[1]
  parents, tokens = np.full((2, bounds.num_nodes), -1, np.int32)
  parents[places[1:] - 1] = places[tree.parent_of[1:]]
  tokens[places[1:] - 1] = proposal.tokens
  # Draft laws of nodes without children are never read.
  probs = np.full((bounds.num_nodes + 1, vocab_size), np.nan)
  probs[places[tree.parent_nodes]] = proposal.probs
  laws = np.full((bounds.num_nodes + 1, vocab_size), 1 / vocab_size)
  laws[places] = targets
  return parents, Proposal(tokens, probs[bounds.parent_nodes]), laws


def _grown_rows(tree, bounds, places, tokens, num_rows=6):
  """Several rows of guesses on a tree, and the same in slots of the bounds; `tokens` holds rows, or None to draw."""
  own, more = ([{'tokens': row} for row in tokens], 0) if tokens else ([], num_rows)
  rows = [
    make_guesses(seed, tree, 5, zero_share=0.0 if tokens else 0.2, equal_share=0.15, **options)
    for seed, options in enumerate(own + [{}] * more)
  ]
  return rows, [_placed(tree, bounds, np.array(places), *row) for row in rows]


_GROWN = [name for name, method in METHODS.items() if method.takes_grown and method.max_drafts is None]
_GROWN += ['traversal_without_replacement']
_GROWN_KINDS = ('ersd',)
_grown_methods = pytest.mark.parametrize('name', slow_but(_GROWN_KINDS, _GROWN))


def _tokens_for(name, *choices):
  """Those that the method's proposal rule can draw: siblings that differ, or that may be equal."""
  return [tokens for tokens, is_distinct in choices if is_distinct or not ALL[name].proposal_rule.may_run_out]


@pytest.mark.slow
@_grown_methods
@pytest.mark.parametrize('is_bound', [False, slow(True)])
def test_a_row_with_the_parents_of_a_tree_is_verified_like_it(name, is_bound):
  """With the tree itself as its bounds, and with bounds in which every node may have children."""
  verifier = ALL[name].verifier
  bounds = UNEQUAL if is_bound else TokenTree.slots([2, 3, 1])
  tokens = _tokens_for(name, (DUPLICATES, False), (DISTINCT, True), ([2, 4, 0, 1, 3, 3], True))
  if ALL[name].proposal_rule.may_run_out:
    tokens += [RAN_OUT, RAN_OUT_BELOW]
  rows, placed = _grown_rows(UNEQUAL, bounds, range(7), 2 * tokens)
  keys = jax.random.split(jax.random.key(2), (len(rows), 20, UNEQUAL.max_depth + 1))

  def judge(keys, *row):
    verdict, explained = (
      jax.vmap(lambda key, decide=decide: decide(key, *row, ()))(keys) for decide in (verifier.verify, verifier.explain)
    )
    return verdict, explained, verifier.law(*row, ()) if name != 'ersd' else ()

  with jax.enable_x64(True):
    fixed = jax.jit(jax.vmap(lambda keys, *row: judge(keys, UNEQUAL, *row)))(keys, *stack(rows))
    grown = jax.jit(jax.vmap(lambda keys, parents, *row: judge(keys, bounds.of_row(parents), *row)))(
      keys, *stack(placed)
    )
  for verdict, (explained, _), _ in (fixed, grown):
    jax.tree.map(np.testing.assert_array_equal, verdict, explained)
  jax.tree.map(np.testing.assert_array_equal, grown[0], fixed[0])
  assert len(np.unique(fixed[0].num_accepted)) > 1
  # Races are fitted in two programs, and rounding grows in their rounds.
  np.testing.assert_allclose(grown[2], fixed[2], rtol=0, atol=1e-9 if 'race' in name else EXACT)
  found, expected = grown[1][1], fixed[1][1]
  np.testing.assert_array_equal(found.node, expected.node)
  np.testing.assert_allclose(found.weights, expected.weights, atol=1e-9)
  num_made = 0
  for kind, made in expected.decisions.items():
    mine = found.decisions[kind]
    np.testing.assert_array_equal(mine.is_made, made.is_made)
    num_made += np.sum(made.is_made)
    for field in ('node', 'chosen', 'uniform'):
      if getattr(made, field) is not None:
        np.testing.assert_array_equal(*(np.asarray(getattr(each, field))[made.is_made] for each in (mine, made)))
    is_shown = np.asarray(made.is_made)[..., None] & np.asarray(made.is_valid)
    np.testing.assert_array_equal(np.asarray(mine.is_made)[..., None] & np.asarray(mine.is_valid), is_shown)
    pairs = [(mine.nodes, made.nodes)] + ([(mine.shares, made.shares)] if made.shares is not None else [])
    for mine_, made_ in pairs + [(mine.numbers[key], made.numbers[key]) for key in made.numbers]:
      at = is_shown if np.ndim(made_) == np.ndim(is_shown) else np.asarray(made.is_made)
      np.testing.assert_allclose(np.asarray(mine_)[at], np.asarray(made_)[at], rtol=1e-7, atol=1e-9)
  assert num_made > 20


# Shapes in bounds of 3, 4 and 3 slots, with some left out before, between and behind those in use. In the last one the
# nodes of depth 2 stand in another order than their parents; siblings keep theirs, and no two nodes spell the same.
_WIDE = TokenTree.slots([3, 4, 3])
_SHAPES = [
  (UNEQUAL, (0, 2, 3, 4, 6, 7, 9), None),
  (TokenTree.chains(2, 2), (0, 1, 3, 5, 7), None),
  (TokenTree.prefix((3, 1, 1)), (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), None),
  (TokenTree.chains(1, 3), (0, 3, 5, 10), None),
  (TokenTree.chains(3, 1), (0, 1, 2, 3), None),
  (UNEQUAL, (0, 1, 3, 6, 7, 4, 8), [[2, 4, 0, 1, 3, 3], [0, 1, 4, 2, 4, 0]]),
]


@_grown_methods
def test_slots_that_a_row_does_not_use_change_nothing(name):
  """Rows of many shapes in one program, each with the law of its own tree; a shared race, token for token."""
  verifier = ALL[name].verifier
  shapes = _SHAPES if ALL[name].proposal_rule.name == 'independent' else [
    (tree, places, tokens or [[2, 4, 0, 1, 3, 3], [0, 1, 4, 2, 4, 0]])
    for tree, places, tokens in _SHAPES
    if tree is UNEQUAL
  ]  # fmt: skip
  keys = jax.random.split(jax.random.key(4), (50, _WIDE.max_depth + 1))

  def judge(tree, proposal, targets):
    if name != 'ersd':
      return verifier.law(tree, proposal, targets, ())
    verdict = jax.vmap(lambda key: verifier.verify(key, tree, proposal, targets, ()))(keys)
    return verdict.next_token, verdict.path, verdict.num_accepted

  with jax.enable_x64(True):
    in_slots = jax.jit(jax.vmap(lambda parents, *row: judge(_WIDE.of_row(parents), *row)))
    alone = jax.jit(judge, static_argnums=0)
    cases = [(tree, np.array(places), *_grown_rows(tree, _WIDE, places, tokens)) for tree, places, tokens in shapes]
    placed = stack([row for *_, rows in cases for row in rows])
    leaves, structure = jax.tree.flatten(jax.device_get(in_slots(*placed)))
    found = (jax.tree.unflatten(structure, row) for row in zip(*leaves))
    for tree, places, rows, _ in cases:
      for row in rows:
        mine, expected = next(found), jax.device_get(alone(tree, *row))
        if name == 'ersd':
          (token, path, number), (own_token, own_path, own_number) = mine, expected
          np.testing.assert_array_equal(token, own_token)
          np.testing.assert_array_equal(number, own_number)
          is_kept = np.arange(tree.max_depth) < number[:, None]
          np.testing.assert_array_equal(path[:, : tree.max_depth][is_kept], places[own_path][is_kept])
          continue
        np.testing.assert_allclose(mine[places], expected, rtol=0, atol=1e-9 if 'race' in name else EXACT)
        assert mine.sum() == pytest.approx(1, abs=EXACT)
