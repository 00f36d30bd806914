"""Draws of verifiers follow the distributions that they declare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from guesses import (
  ALL,
  CHAIN,
  CHAINS,
  DISTINCT,
  DUPLICATES,
  RAN_OUT,
  RAN_OUT_BELOW,
  SMALL,
  UNEQUAL,
  as_float32,
  law_jit,
  make_guesses,
)

from spectr_jax import TokenTree
from spectr_jax.proposal import Proposal
from spectr_jax.testing import chi_square
from spectr_jax.verifiers.greedy_block import Modifications
from tests.slow import slow

_ONE = np.eye(5)
_DRAWS = [
  ('autoregressive', TokenTree(), [], {}),
  ('speculative', CHAIN, [2, 0, 1], {}),
  ('spectr', UNEQUAL, DUPLICATES, {}),
  ('specinfer', UNEQUAL, DUPLICATES, {}),
  ('batch', UNEQUAL, DUPLICATES, {}),
  ('gsd', UNEQUAL, DISTINCT, {}),
  ('gsd', UNEQUAL, RAN_OUT, {(): _ONE[2]}),
  ('gsd', UNEQUAL, RAN_OUT_BELOW, {(2,): _ONE[0]}),
  ('block', CHAIN, [2, 0, 1], {}),
  ('greedy_block', CHAIN, [2, 0, 1], {}),
  ('spectr_gbv', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('race', SMALL, [2, 2, 0], {}),
  ('race', SMALL, [4, 2, 0], {}),
  ('race_block', SMALL, [2, 2, 0], {}),
  ('race_block', SMALL, [4, 2, 0], {}),
  ('race_traversal', UNEQUAL, DUPLICATES, {}),
  ('race_traversal', UNEQUAL, DISTINCT, {}),
  ('race_traversal', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('race_layers', UNEQUAL, DUPLICATES, {}),
  ('race_layers', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('ratio_block', CHAINS, [2, 2, 0, 1, 1, 3], {}),
  ('traversal', UNEQUAL, DUPLICATES, {}),
  ('traversal_without_replacement', UNEQUAL, DISTINCT, {}),
  ('traversal_without_replacement', UNEQUAL, RAN_OUT, {(): _ONE[2]}),
  ('traversal_without_replacement', UNEQUAL, RAN_OUT_BELOW, {(2,): _ONE[0]}),
  ('univer', UNEQUAL, DISTINCT, {}),
  ('univer', UNEQUAL, RAN_OUT, {(): _ONE[2]}),
  ('univer', UNEQUAL, RAN_OUT_BELOW, {(2,): _ONE[0]}),
  ('decoding_opt', CHAIN, [2, 0, 1], {}),
  ('decoding_uno', CHAIN, [2, 0, 1], {}),
]
# By default one of each kind, the others among the slow tests.
_KINDS = 'speculative', 'gsd', 'race_traversal'
_FIRST = [next(case for case in _DRAWS if case[0] == name) for name in _KINDS]
_DRAWS = [pytest.param(*case, marks=() if case in _FIRST else pytest.mark.slow) for case in _DRAWS]
# Two rounds ago a draft of three was cut after its first token, and now one after its root.
_HELD_BACK = Modifications(np.array([1.5, 0.8], np.float32), np.array([1, 2], np.int32))


@functools.partial(jax.jit, static_argnames=('verifier', 'tree', 'num_draws'))
def _draw(key, proposal, target_probs, state, *, verifier, tree, num_draws):
  keys = jax.random.split(key, (num_draws, tree.max_depth + 1))
  verdict = jax.vmap(lambda keys: verifier.verify(keys, tree, proposal, target_probs, state))(keys)
  node = jnp.take_along_axis(jnp.pad(verdict.path, ((0, 0), (1, 0))), verdict.num_accepted[:, None], axis=1)[:, 0]
  return verdict, node


@law_jit
def _law(proposal, target_probs, state, *, verifier, tree):
  return verifier.law(tree, proposal, target_probs, state)


def test_draws_of_every_method_are_tested():
  # What a race with shared noise emits is tested token for token instead.
  assert {case.values[0] for case in _DRAWS} | {'ersd'} == set(ALL)


@pytest.mark.parametrize(('name', 'tree', 'tokens', 'laws'), _DRAWS)
def test_draws_follow_the_law(name, tree, tokens, laws):
  """Given the guesses: how often `verify` stops at each node with each token, and what `law` says of it."""
  verifier = ALL[name].verifier
  proposal, target_probs = as_float32(make_guesses(13, tree, 5, tokens, agreement=0.5, laws=laws))
  states = [verifier.init_state(tree)] + [_HELD_BACK] * (name in ('greedy_block', 'spectr_gbv'))
  # A race solves its fit for every row anew.
  num_draws = 40_000 if name in ('race', 'race_block', 'race_layers') else 200_000
  for state in map(as_float32, states):
    law = np.asarray(_law(proposal, target_probs, state, verifier=verifier, tree=tree), np.float64)
    assert law.shape == (tree.num_nodes + 1, 5)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert (law >= 0).all()
    verdict, node = _draw(
      jax.random.key(8), proposal, target_probs, state, verifier=verifier, tree=tree, num_draws=num_draws
    )
    assert verdict.next_token.dtype == verdict.num_accepted.dtype == verdict.path.dtype == jnp.int32
    node, token, path = (np.asarray(x) for x in (node, verdict.next_token, verdict.path))
    np.testing.assert_array_equal(verdict.num_accepted, tree.depths[node])
    is_accepted = np.arange(tree.max_depth) < tree.depths[node][:, None]
    np.testing.assert_array_equal(np.where(is_accepted, path, -1), tree.paths[node])
    assert ((path >= 0) & (path <= tree.num_nodes)).all()
    if -1 in tokens:  # nothing below a missing node is reached
      missing = 1 + tokens.index(-1)
      assert not tree.ancestors[node][:, missing].any()
    result = chi_square(np.bincount(node * 5 + token, minlength=law.size), law)
    assert result.num_samples == num_draws
    assert result.num_cells > 4
    assert result.p_value > 1e-3, result


@pytest.mark.parametrize(
  'name',
  [
    'block', 'race_traversal',
    *(slow(name) for name in ('greedy_block', 'race_block', 'traversal')),
  ],
)  # fmt: skip
def test_a_path_may_be_less_likely_than_any_float32(name):
  """Fourteen tokens that the target likes a thousand times less than the draft, then as many that it likes more."""
  tree = TokenTree.chains(1, 28)
  unlikely, likely = [0.9, 0.1 - 9e-4, 9e-4], [9e-4, 0.1 - 9e-4, 0.9]
  first = np.arange(28)[:, None] < 14
  proposal = Proposal(np.zeros(28, np.int32), np.where(first, unlikely, likely))
  target_probs = np.concatenate([np.where(first, likely, unlikely), [[0.2, 0.3, 0.5]]])
  verifier = ALL[name].verifier
  law = np.asarray(_law(*as_float32((proposal, target_probs)), verifier.init_state(tree), verifier=verifier, tree=tree))
  with jax.enable_x64(True):
    exact = np.asarray(_law(proposal, target_probs, verifier.init_state(tree), verifier=verifier, tree=tree))
  assert exact[-1].sum() > 0.9  # what was lost on the way down is made up for: all is kept
  np.testing.assert_allclose(law, exact, rtol=1e-3, atol=1e-6)


def test_draws_that_do_not_follow_the_law_are_noticed():
  """The test can tell: verifiers that all keep the target's law differ in what they accept, given the guesses."""
  proposal, target_probs = as_float32(make_guesses(13, UNEQUAL, 5, DUPLICATES, agreement=0.5))
  verdict, node = _draw(
    jax.random.key(8), proposal, target_probs, (), verifier=ALL['spectr'].verifier, tree=UNEQUAL, num_draws=200_000
  )
  counts = np.bincount(np.asarray(node) * 5 + np.asarray(verdict.next_token), minlength=35)
  for name in ('specinfer', 'batch', 'traversal'):
    law = np.asarray(_law(proposal, target_probs, (), verifier=ALL[name].verifier, tree=UNEQUAL))
    assert chi_square(counts, law).p_value < 1e-9


@pytest.mark.parametrize(('name', 'tree'), [('greedy_block', CHAIN), ('spectr_gbv', CHAINS)])
def test_the_state_is_advanced_as_the_law_assumes(name, tree):
  verifier = ALL[name].verifier
  tokens = [2, 0, 1] if tree is CHAIN else [2, 2, 0, 1, 1, 3]
  proposal, target_probs = as_float32(make_guesses(13, tree, 5, tokens, agreement=0.5))
  for state in (verifier.init_state(tree), _HELD_BACK):
    verdict, node = _draw(
      jax.random.key(9), proposal, target_probs, state, verifier=verifier, tree=tree, num_draws=2000
    )
    after = jax.jit(
      jax.vmap(lambda node, token: verifier.advance(tree, proposal, target_probs, state, node, token))  # noqa: B023
    )(node, verdict.next_token)
    np.testing.assert_array_equal(verdict.state.left, after.left)
    np.testing.assert_allclose(verdict.state.log_ratio, after.log_ratio, rtol=1e-6, atol=1e-6)
    # Stopping d short of the end leaves d - 1 positions to modify; after a whole path all is as if new.
    np.testing.assert_array_equal(after.left[:, -1], np.maximum(tree.max_depth - tree.depths[node] - 1, 0))
    is_whole = np.asarray(tree.depths[node] == tree.max_depth)
    assert is_whole.any()
    assert (np.asarray(after.left)[is_whole] == 0).all()


def test_an_exponential_race_has_no_finite_law():
  proposal, target_probs = make_guesses(0, UNEQUAL, 5, DISTINCT)
  with pytest.raises(NotImplementedError, match='proven token for token'):
    ALL['ersd'].verifier.law(UNEQUAL, proposal, target_probs, ())
