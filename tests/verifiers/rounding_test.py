"""What rounding can change: which tokens come out, and hardly their distribution, also where draft and target agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from coarse import coarse
from guesses import ALL, CHAIN, CHAINS, UNEQUAL, as_float32, laws_of, make_guesses, random_law, stack

from spectr_jax import SamplingParams, TokenTree, generate
from spectr_jax.models import table
from spectr_jax.proposal import Proposal
from spectr_jax.testing import ContextTables, enumeration, enumeration_error, random_tables
from tests.slow import slow

# Every method whose decisions have a law: those of an exponential race are compared token for token.
_METHODS = {name: method for name, method in ALL.items() if method.is_lossless and not method.is_seed_exact}
_WAYS = ('equal', '1e-7', '1e-6', '1e-5', '1e-4', '1e-3', 'bfloat16', 'bfloat16_logits')


def _nearly(rng, law, way):
  """A distribution that differs from `law` by rounding, or by little more."""
  if way == 'bfloat16':
    near = law.astype(ml_dtypes.bfloat16).astype(np.float64)
  elif way == 'bfloat16_logits':
    with np.errstate(divide='ignore'):
      near = np.exp(np.log(law).astype(ml_dtypes.bfloat16).astype(np.float64))
  else:
    near = law * (1 + (0 if way == 'equal' else float(way)) * rng.standard_normal(law.shape))
  return near / near.sum(axis=-1, keepdims=True)


def _tables(seed, vocab_size, max_length, way):
  """Tables whose draft is nearly the target; with zeros and distributions of a single token."""
  target = random_tables(seed, vocab_size, max_length, zero_share=0.3).target_probs
  return ContextTables(_nearly(np.random.default_rng(seed), target, way), target, max_length)


def _fits(method, tree):
  try:
    return method.tree_for(tree) == tree
  except ValueError:
    return False


def _trees():
  """A tree for every method: of several drafts where it takes them."""
  for name, method in _METHODS.items():
    tree = next(tree for tree in (TokenTree.chains(2, 2), CHAIN, TokenTree()) if _fits(method, tree))
    yield name, tree


def _cases(*by_default):
  return [pytest.param(*case, id=case[0], marks=() if case[0] in by_default else pytest.mark.slow) for case in _trees()]


_CASES = _cases('block', 'race_traversal')


@pytest.mark.parametrize(('name', 'tree'), _CASES)
@pytest.mark.parametrize('way', ['1e-7', slow('1e-4'), slow('bfloat16')])
def test_nearly_equal_distributions_exactly(name, tree, way):
  tables = _tables(1, 3, 3 + tree.max_depth, way)
  # 1 - P is as small as 1e-7 and S with it, so a quotient of both has 1e-16 / 1e-7 of rounding at most.
  assert enumeration_error(coarse(_METHODS[name]), tree, tables, 3) <= 1e-10


def _round_distance(method, tree, tables):
  """How far a float32 round, then sampling, is from the target, or from the same in float64 with a state, in TV."""
  found, exact = _round_law(method, tree, tables, np.float32)
  if jax.tree.leaves(method.verifier.init_state(tree)):
    with jax.enable_x64(True):
      exact, _ = _round_law(method, tree, tables, np.float64)
  return np.abs(found - exact).sum() / 2


def _round_law(method, tree, tables, dtype):
  """The joint distribution of the first L + 1 tokens, of which a round decides in `dtype`, and the target's."""
  vocab_size, length = tables.vocab_size, tree.max_depth + 1
  laws = [x.astype(np.float32) for x in (tables.draft_probs, tables.target_probs)]
  state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == 'f' else x, method.verifier.init_state(tree))
  arguments = *(jnp.asarray(x.astype(dtype)) for x in laws), 0, 0, state
  emitted, _ = jax.device_get(enumeration._round_law(*arguments, method=method, tree=tree))
  assert emitted[0].dtype == dtype
  target = laws[1].astype(np.float64)
  target /= target.sum(axis=1, keepdims=True)
  found = np.zeros(vocab_size**length)
  for depth, weights in enumerate(emitted):  # what follows a round is sampled from the target
    weights = weights.astype(np.float64).reshape(-1)
    for more in range(depth + 1, length):
      first = (vocab_size**more - 1) // (vocab_size - 1)
      weights = (weights[:, None] * target[first : first + len(weights)]).reshape(-1)
    found += weights
  return found, ContextTables(target, target, tables.max_length).joint_target_law(length).reshape(-1)


@pytest.mark.parametrize(('name', 'tree'), _CASES)
def test_float32_moves_little_of_the_distribution(name, tree):
  """Where P is 1 and S is 0 up to rounding, rounding decides h; but such a place is reached as rarely."""
  for seed, way in enumerate(_WAYS):
    assert _round_distance(_METHODS[name], tree, _tables(seed, 3, tree.max_depth, way)) <= 2e-6, way


@pytest.mark.parametrize(('name', 'tree'), _cases('traversal_without_replacement'))
def test_float32_moves_little_of_peaked_distributions(name, tree):
  """As at a low temperature: nearly all mass is on one token, and the others have any probability of a float32."""
  for seed in range(16):
    rng, tables = np.random.default_rng(seed), _tables(seed, 3, tree.max_depth, 'equal')
    gaps = -np.sort(rng.uniform(0, 87, tables.draft_probs.shape)) * [0, 1, 1]
    draft = rng.permuted(np.exp(gaps), axis=1)
    draft /= draft.sum(axis=1, keepdims=True)
    assert _round_distance(_METHODS[name], tree, dataclasses.replace(tables, draft_probs=draft)) <= 2e-6, seed


def test_a_distance_that_matters_is_noticed():
  method = dataclasses.replace(_METHODS['speculative'], max_drafts=None)  # for a single draft only
  assert _round_distance(method, TokenTree.chains(2, 2), _tables(0, 3, 2, '1e-3')) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('name', ['speculative', 'block', 'greedy_block', 'traversal', 'race_traversal'])
def test_float32_moves_little_over_a_large_vocabulary(name):
  """Given the guesses, over all of V outcomes after every node."""
  tree, verifier = TokenTree.chains(1, 4), _METHODS[name].verifier
  for seed, way in enumerate(_WAYS):
    rng = np.random.default_rng(seed)
    weights = np.exp(3 * rng.standard_normal((5, 32_000)))
    target = weights / weights.sum(axis=1, keepdims=True)
    draft = _nearly(rng, target[:4], way)
    tokens = np.array([rng.choice(len(law), p=law) for law in draft], np.int32)
    row32 = as_float32((Proposal(tokens, draft), target))
    found = np.asarray(laws_of(*stack([row32]), verifier=verifier, tree=tree), np.float64)
    with jax.enable_x64(True):
      row64 = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else np.asarray(x), row32)
      exact = np.asarray(laws_of(*stack([row64]), verifier=verifier, tree=tree))
    assert exact.dtype == np.float64
    assert np.abs(found - exact).sum() / 2 <= 1e-5, way


@functools.partial(jax.jit, static_argnames=('verifier', 'tree'))
def _nodes(keys, proposal, target_probs, *, verifier, tree):
  verdict = jax.vmap(lambda keys: verifier.verify(keys, tree, proposal, target_probs, ()))(keys)
  return verdict.path, verdict.num_accepted, verdict.next_token


@pytest.mark.parametrize('num_drafts', [4, slow(3), slow(7)])
def test_rounding_does_not_decide_which_branch_comes_first(num_drafts):
  """Shares of equal distributions are equal up to rounding, on both sides of a class's bound at q/p = 1."""
  tree, verifier = TokenTree.chains(num_drafts, 2), _METHODS['race_traversal'].verifier
  rng = np.random.default_rng(0)
  tokens = np.r_[rng.permutation(20)[:num_drafts], rng.integers(20, size=num_drafts)]
  proposal, _ = make_guesses(0, tree, 20, tokens)
  laws = {(): proposal.probs[0], **{(int(x),): law for x, law in zip(tokens, proposal.probs[1:])}}
  ends = [random_law(rng, 20) for _ in range(num_drafts)]
  target = np.array([laws[()], *(laws[int(x),] for x in tokens[:num_drafts]), *ends])
  keys = jax.random.split(jax.random.key(0), (500, tree.max_depth + 1))
  found = []
  for _ in range(3):
    noisy = as_float32(target * (1 + 1e-6 * rng.standard_normal(target.shape)))
    found.append(_nodes(keys, as_float32(proposal), noisy, verifier=verifier, tree=tree))
  (path, num_accepted, _), *others = jax.device_get(found)
  assert (num_accepted == 2).all()
  assert len(np.unique(path[:, 0])) == num_drafts  # each branch is the one that is kept for some keys
  for other in others:
    assert (other[0] == path).all(axis=1).mean() >= 0.998


_MODEL = table.table_model(jnp.asarray(np.random.default_rng(5).normal(size=(9, 9)), jnp.float32))


def _apply_rounded(*arguments):
  output = _MODEL.apply_fn(*arguments)
  return dataclasses.replace(output, logits=output.logits.astype(jnp.bfloat16))


def _apply_widened(*arguments):
  output = _apply_rounded(*arguments)
  return dataclasses.replace(output, logits=output.logits.astype(jnp.float32))


@pytest.mark.parametrize(
  'name', ['block', slow('spectr'), slow('race_traversal'), slow('ersd'), slow('autoregressive')]
)
def test_logits_in_bfloat16_are_widened(name):
  """The distribution of such a model is the softmax of its rounded logits, computed and drawn from in float32."""
  tree = {'block': CHAIN, 'autoregressive': TokenTree()}.get(name, CHAINS)
  found = []
  for apply_fn in (_apply_rounded, _apply_widened):
    model = dataclasses.replace(_MODEL, apply_fn=apply_fn)
    draft = None if name == 'autoregressive' else model
    prompts = np.zeros((64, 1), np.int32)
    options = {
      'method': coarse(ALL[name]),
      'tree': tree,
      'max_new_tokens': 12,
      'logprobs': True,
      'sampling': SamplingParams(top_p=0.9),
    }
    found.append(generate(jax.random.key(0), model, draft, prompts, np.ones(64, np.int32), **options))
  np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
  np.testing.assert_array_equal(found[0].logprobs, found[1].logprobs)
  assert found[0].logprobs.dtype == jnp.float32


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'int32'])
@pytest.mark.parametrize('name', ['speculative', 'spectr', 'gsd', 'ersd', 'block', 'traversal', 'race_traversal'])
def test_narrow_distributions_are_refused(name, dtype):
  verifier, tree = ALL[name].verifier, CHAIN if name in ('speculative', 'block') else UNEQUAL
  proposal, target_probs = as_float32(make_guesses(0, tree, 5))
  keys, state = jax.random.split(jax.random.key(0), tree.max_depth + 1), verifier.init_state(tree)
  narrow = dataclasses.replace(proposal, probs=proposal.probs.astype(dtype))
  for decide in (verifier.verify, verifier.explain):
    with pytest.raises(ValueError, match=f'^proposal.probs must be float32 or wider, .*; got {dtype}$'):
      decide(keys, tree, narrow, target_probs, state)
    with pytest.raises(ValueError, match=f'^target_probs must be float32 or wider, .*; got {dtype}$'):
      decide(keys, tree, proposal, target_probs.astype(dtype), state)


_TINY = {  # p, q and the two candidates
  'the product of what is left and p is 0': ([1, 1e-30, 1e-31, 0], [1 - 1e-7, 1e-7, 1e-31, 0], [0, 2]),
  'only rounding is left of q': ([1, 1e-30, 0, 0], [1, 1.1e-30, 0, 0], [0, 1]),
  'what is left of q is as small as p': ([1, 1e-36, 2e-37, 0], [1 - 1e-6, 1e-6, 1e-37, 0], [0, 2]),
  'only a large c removes the mass of p': ([1, 1e-25, 0, 0], [0.25, 0.5, 0.25, 0], [0, 1]),
  'p is the smallest float32': ([1, 1.2e-38, 0, 0], [0.25, 0.5, 0.25, 0], [0, 1]),
}


@pytest.mark.parametrize('case', list(_TINY))
def test_the_smallest_probabilities(case):
  """Peaked distributions, as of a low temperature, have second candidates of any probability that a float32 holds."""
  p, q, tokens = _TINY[case]
  rows = stack([(Proposal(np.array(tokens, np.int32), np.array([p])), np.array([q, q, q]))])
  rows32 = as_float32(rows)
  for name in ('specinfer', 'gsd', 'traversal', 'traversal_without_replacement'):
    law = laws_of(*rows32, verifier=ALL[name].verifier, tree=TokenTree.chains(2, 1))
    with jax.enable_x64(True):
      exact = laws_of(*jax.tree.map(jnp.asarray, rows), verifier=ALL[name].verifier, tree=TokenTree.chains(2, 1))
    np.testing.assert_allclose(law, exact, rtol=0, atol=1e-6, err_msg=name)
