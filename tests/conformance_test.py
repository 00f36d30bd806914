"""The conformance kit: it passes what is right, and catches typical errors of verifiers, each as a plain function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, SamplingParams, TokenTree, logits_to_probs, verify
from spectr_jax.proposal import Proposal
from spectr_jax.testing import check_verifier
from tests.slow import slow_but

_SAMPLES = 10_000
pytestmark = pytest.mark.usefixtures('optimized')


_CHAIN = TokenTree.chains(1, 2)
_check = functools.partial(check_verifier, tree=_CHAIN, num_samples=_SAMPLES)


def _ours(method='race_traversal', tree=_CHAIN):
  return jax.jit(
    lambda key, tokens, draft_probs, target_probs: (
      verify(key, tree, tokens, draft_probs, target_probs, method=method).tokens
    )
  )


def speculative(seed, tokens, lengths, draft_probs, target_probs, *, residual=None):
  """Rejection sampling of chains in NumPy (Leviathan et al. 2023, Algorithm 1); by default `residual` is [q - p]+."""
  rng = np.random.default_rng(seed)
  rows, places = np.arange(len(tokens)), np.arange(tokens.shape[1])
  guesses = np.maximum(tokens, 0)[..., None]
  p, q = (np.take_along_axis(laws, guesses, axis=2)[..., 0] for laws in (draft_probs, target_probs[:, :-1]))
  is_kept = (rng.random(tokens.shape) * p < q) & (places < lengths[:, None])
  num_kept = np.cumprod(is_kept, axis=1).sum(axis=1)
  own_p = draft_probs[rows, np.minimum(num_kept, len(places) - 1)]
  own_q = target_probs[rows, num_kept]
  left = np.maximum(own_q - own_p, 0) if residual is None else residual(own_p, own_q)
  sums = np.cumsum(np.where((num_kept < lengths)[:, None], left, own_q), axis=1, dtype=np.float64)
  found = np.concatenate([np.where(places < num_kept[:, None], tokens, -1), np.full((len(rows), 1), -1)], axis=1)
  found[rows, num_kept] = (rng.random((len(rows), 1)) * sums[:, -1:] >= sums).sum(axis=1)
  return found


def _failed(conformance):
  return {check.compared for check in conformance.checks if not check.is_passed}


@pytest.mark.parametrize('method', slow_but(('block',), ('speculative', 'block', 'greedy_block')))
def test_methods_for_chains_pass(method):
  @jax.jit
  def with_state(key, tokens, draft_probs, target_probs, state):
    found = verify(key, _CHAIN, tokens, draft_probs, target_probs, method=method, state=state)
    return found.tokens, found.state

  ours = with_state if method == 'greedy_block' else _ours(method)
  found = _check(ours, is_ragged=METHODS[method].takes_grown)
  assert found.is_passed, found


@pytest.mark.slow
@pytest.mark.parametrize('method', ['race_traversal', 'spectr'])
def test_methods_for_trees_pass(method):
  tree = TokenTree((0, 0, 1, 1, 2))
  found = check_verifier(_ours(method, tree), tree=tree, num_samples=2_000)
  assert found.is_passed, found


@pytest.mark.slow
def test_distinct_and_given_guesses():
  tree = TokenTree.chains(2, 1)
  assert check_verifier(_ours('gsd', tree), tree=tree, children='without_replacement', num_samples=20_000).is_passed
  assert check_verifier(_ours('specinfer', tree), tree=tree, children='given', num_samples=20_000).is_passed


def test_wrong_residuals_are_caught():
  right = _check(speculative)
  assert right.is_passed, right
  assert 'speculative passed' in str(right)
  target_itself = functools.partial(speculative, residual=lambda p, q: q)
  target_itself.__name__ = 'target_itself'
  assert {'no zeros', 'zeros, some contexts with p = q'} <= _failed(_check(target_itself))
  # Without the guess, which is right for given guesses alone.
  without = functools.partial(speculative, residual=lambda p, q: np.where(p == p.max(), 0, q))
  without.__name__ = 'without'
  assert 'no zeros' in _failed(_check(without))


@pytest.mark.slow
def test_noise_by_position_is_caught():
  """Only the joint distribution over rounds shows it, and only for methods that decide on blocks."""
  decide = jax.jit(lambda *x: verify(x[0], TokenTree.chains(1, 3), *x[1:], method='block').tokens)

  def by_position(row_keys, positions, tokens, draft_probs, target_probs):
    fold = jax.vmap(lambda key, at: jax.vmap(lambda depth: jax.random.fold_in(key, at + depth))(jnp.arange(4)))
    return decide(fold(row_keys, positions), tokens, draft_probs, target_probs)

  def by_round(row_keys, positions, tokens, draft_probs, target_probs):
    return decide(jax.vmap(jax.random.fold_in)(row_keys, positions), tokens, draft_probs, target_probs)

  tree = TokenTree.chains(1, 3)
  assert check_verifier(by_round, tree=tree, num_samples=100_000).is_passed
  assert not check_verifier(by_position, tree=tree, num_samples=100_000).is_passed


@jax.jit
def _from_logits(key, tokens, draft_probs, target_logits, temperature, top_k, top_p):
  target_probs = logits_to_probs(target_logits, SamplingParams(temperature, top_k=top_k, top_p=top_p))
  return verify(key, _CHAIN, tokens, draft_probs, target_probs, method='speculative').tokens


def _with_parameters(change):
  """A verifier from logits and parameters, which `change` may spoil."""

  def from_logits(key, tokens, draft_probs, target_logits, temperature, top_k, top_p):
    return _from_logits(key, tokens, draft_probs, target_logits, *change(temperature, top_k, top_p))

  return from_logits


@pytest.mark.slow
def test_parameters_of_a_neighbor_are_caught():
  assert _check(_with_parameters(lambda *own: own)).is_passed
  found = _check(_with_parameters(lambda *own: tuple(np.roll(x, 1) for x in own)))
  assert {'temperature 0', 'temperature 0.7, top-p 0.8'} <= _failed(found)


@pytest.mark.slow
def test_filters_in_another_order_than_in_plain_sampling_are_caught():
  @jax.jit
  def plain(logits, temperature, top_k, top_p):
    ones = SamplingParams(jnp.ones(len(logits)), top_k=top_k, top_p=top_p)
    masked = jnp.where(logits_to_probs(logits[:, None], ones) > 0, logits[:, None], -jnp.inf)
    return logits_to_probs(masked, SamplingParams(temperature))[:, 0]

  ours = _with_parameters(lambda *own: own)
  assert _failed(_check(ours, plain_fn=plain)) == {'temperature 0.7, top-p 0.8'}


@pytest.mark.slow
def test_guesses_from_another_distribution_are_caught():
  """Drawn in bfloat16, while the distributions are reported in float32."""

  def in_bfloat16(key, probs):
    sums = jnp.cumsum(jnp.asarray(probs, jnp.bfloat16), axis=1)
    level = jax.random.uniform(key, (len(probs), 1), jnp.bfloat16) * sums[:, -1:]
    return jnp.minimum(jnp.sum(level >= sums, axis=1), probs.shape[1] - 1)

  def in_float32(key, probs):
    return jax.random.categorical(key, jnp.log(probs))

  assert _check(speculative, draft_fn=in_float32, num_samples=40_000).is_passed
  assert not _check(speculative, draft_fn=in_bfloat16, num_samples=40_000).is_passed


@pytest.mark.slow
def test_drafts_are_enumerated_where_the_distribution_is_given():
  verifier = METHODS['speculative'].verifier
  enumerated = jax.jit(lambda tokens, *laws: verifier.law(_CHAIN, Proposal(tokens, laws[0]), laws[1], ()))

  def law(*arrays):
    with jax.enable_x64(True):
      return np.asarray(enumerated(*arrays))

  def wrong(*arrays):
    return (law(*arrays) + law(*arrays)[::-1]) / 2

  ours = _ours('speculative')
  found = _check(ours, law_fn=law, num_samples=1000)
  exact = [check for check in found.checks if check.part == 'exact']
  assert len(exact) == 2
  assert all(check.is_passed and check.value < 1e-10 for check in exact), found
  assert not any(check.is_passed for check in _check(ours, law_fn=wrong, num_samples=1000).checks[:2])


@pytest.mark.parametrize(
  ('function', 'options', 'message'),
  [
    (lambda logits: None, {}, "takes 'logits', which is not known; allowed are key, seed"),
    (lambda key: 1 / 0, {}, 'raised ZeroDivisionError'),
    (lambda tokens: tokens[:, 0], {}, r'must return tokens as whole numbers \[8192, up to 3\]'),
    (lambda tokens: tokens.astype(np.float32), {}, 'must return tokens as whole numbers'),
    (lambda tokens: np.full((len(tokens), 3), 9), {}, r'returned \[9, 9, 9\] for a row with guesses down to depth 0'),
    (lambda tokens: np.full((len(tokens), 3), -1), {}, 'expected at least one token'),
    (speculative, {'children': 'beam'}, 'children must be one of independent'),
    (speculative, {'arrays': 'mlx'}, 'arrays numpy or torch'),
    (speculative, {'tree': TokenTree.slots((2,))}, 'the tree must be one for all rows'),
    (speculative, {'num_samples': 0}, 'num_samples must be'),
    (speculative, {'seed': -1}, 'seed must be'),
  ],
)
def test_errors_name_what_is_wrong(function, options, message):
  with pytest.raises(ValueError, match=message):
    _check(function, **options)
