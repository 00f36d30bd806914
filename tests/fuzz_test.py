"""Decoding on random tables, prompts, lengths, trees, distributions and ends of text: what must hold whatever they are.

`pytest -m slow -n 0 tests/fuzz_test.py` tries 150 cases of 24 programs; with `--cases=20000` so many of 96.

The models remember: a distribution depends on every token of the context and on its position, and many tokens never
follow. A cache that is read beyond a row's length, kept from a rejected draft or wrong in a position gives another one,
and a token that cannot follow sooner or later.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import METHODS, Decoder, Model, ModelOutput, TokenTree
from spectr_jax.engine import ORIGIN_DRAFT
from spectr_jax.methods import with_children
from spectr_jax.model import KVCache
from spectr_jax.sampling import SamplingParams, logits_to_probs
from tests.slow import slow

_VOCAB, _MODULUS, _LONGEST = 6, 61, 16
_GARBAGE = 999.0


def _weights(tokens, positions):
  return (tokens + 1) * (3 * positions + 1)


def _apply(params, tokens, positions, mask, cache):
  """Logits `params[context]`, the context being the sum of the weights of its tokens."""
  new = _weights(tokens, positions).astype(jnp.float32)[:, :, None, None]
  keys, values = cache.append(0, new, new, num_pending_slots=mask.shape[-1])
  is_committed = jnp.arange(cache.keys[0].shape[-1]) < cache.lengths[:, None]
  committed = jnp.sum(jnp.where(is_committed, cache.keys[0][:, 0, 0], 0), axis=1)
  pending = jnp.sum(jnp.where(mask, keys[:, 0], 0), axis=-1)
  logits = params[(committed[:, None] + pending).astype(jnp.int32) % _MODULUS]
  return ModelOutput(logits, cache.with_pending([(keys, values)], tokens.shape[1]))


def _init_cache(batch_size, cache_size):
  cache = KVCache.empty(
    num_layers=1, batch_size=batch_size, num_heads=1, head_dim=1, cache_size=cache_size, dtype=jnp.float32
  )
  return dataclasses.replace(cache, keys=tuple(jnp.full_like(keys, _GARBAGE) for keys in cache.keys))


def _random_model(rng) -> Model:
  logits = rng.normal(scale=rng.choice([0.3, 2.0, 8.0]), size=(_MODULUS, _VOCAB)).astype(np.float32)
  never = rng.random(logits.shape) < rng.choice([0.0, 0.4, 0.7])
  never[np.arange(_MODULUS), rng.integers(0, _VOCAB, _MODULUS)] = False
  return Model(jnp.asarray(np.where(never, -np.inf, logits)), _apply, _init_cache, _VOCAB)


@dataclasses.dataclass(frozen=True)
class _Program:
  """What is compiled."""

  method: object
  tree: TokenTree
  batch_size: int
  prompt_length: int
  max_new_tokens: int
  eos_ids: tuple[int, ...]


_TREES = [
  TokenTree.chains(1, 1),
  TokenTree.chains(1, 4),
  TokenTree.chains(3, 2),
  TokenTree.chains(2, 5),
  TokenTree.prefix((2, 2, 1)),
  TokenTree((0, 0, 1, 1, 2, 4)),
]
_VERSIONS = [*METHODS.values(), with_children(METHODS['traversal'], 'without_replacement')]


def _fits(method, tree):
  try:
    return method.tree_for(tree) == tree
  except ValueError:
    return False


@functools.cache
def _programs(number: int) -> list[_Program]:
  """So many, every method among them."""
  rng, programs = np.random.default_rng(0), []
  for place in range(number):
    method = _VERSIONS[place % len(_VERSIONS)]
    trees = [TokenTree()] if method.max_drafts == 0 else [tree for tree in _TREES if _fits(method, tree)]
    batch_size, prompt_length, max_new_tokens = (int(rng.choice(some)) for some in ((1, 3), (1, 5), (1, 2, 9)))
    eos_ids = ((), (0,), (1, 3))[rng.integers(3)]
    tree = trees[rng.integers(len(trees))]
    programs.append(_Program(method, tree, batch_size, prompt_length, max_new_tokens, eos_ids))
  return programs


@dataclasses.dataclass(frozen=True)
class _Case:
  program: _Program
  seed: int
  temperature: np.ndarray
  top_k: np.ndarray
  top_p: np.ndarray
  is_round_by_round: bool = False

  @property
  def sampling(self):
    return SamplingParams(self.temperature, top_k=self.top_k, top_p=self.top_p)


def _random_case(program, rng, seed) -> _Case:
  size = program.batch_size
  return _Case(
    program,
    seed,
    rng.choice([0.0, 0.3, 1.0, 2.5], size),
    rng.integers(0, _VOCAB + 2, size),
    rng.choice([1e-6, 0.2, 0.7, 0.95, 1.0], size),
    bool(rng.integers(2)),
  )


def _is_cache(x):
  return isinstance(x, KVCache)


def _spoil(cache):
  """Other garbage in every slot that is not committed; what is no cache stays."""
  if not _is_cache(cache):
    return cache
  is_free = jnp.arange(cache.keys[0].shape[-1]) >= cache.lengths[:, None]
  return dataclasses.replace(
    cache, keys=tuple(jnp.where(is_free[:, None, None], 7 * _GARBAGE, keys) for keys in cache.keys)
  )


def _decode(case: _Case, target, draft, keys, prompts, lengths):
  program = case.program
  decoder = Decoder.make(
    target, draft, method=program.method, tree=program.tree, max_new_tokens=program.max_new_tokens,
    cache_size=_LONGEST, eos_id=program.eos_ids or None,
  )  # fmt: skip
  state = spectr_jax.engine.init_decode(decoder, keys, prompts, lengths, sampling=case.sampling)
  if not case.is_round_by_round:
    return jax.device_get(spectr_jax.engine.decode_rounds(decoder, state).result)
  for _ in range(program.max_new_tokens):
    caches = jax.tree.map(_spoil, (state.target_cache, state.draft_state), is_leaf=_is_cache)
    state = dataclasses.replace(state, **dict(zip(('target_cache', 'draft_state'), caches)))
    state = spectr_jax.engine.decode_rounds(decoder, state, 1)
  return jax.device_get(state.result)


_to_probs = jax.jit(logits_to_probs)


def _probs_of(model, case, prompts, lengths, result):
  """The target's distribution of every token that was emitted, `[B, max_new_tokens, V]`, from whole texts."""
  contexts = np.zeros(result.tokens.shape, np.int64)
  for row, (prompt, length) in enumerate(zip(prompts, lengths)):
    text = [*prompt[:length], *result.tokens[row, : result.lengths[row]]]
    sums = np.cumsum(_weights(np.array(text), np.arange(len(text))))
    contexts[row, : result.lengths[row]] = sums[length - 1 : -1]
  logits = np.asarray(model.params)[contexts % _MODULUS]
  return np.asarray(_to_probs(logits, case.sampling.for_rows(len(prompts))))


def _check(case, target, prompts, lengths, result):
  program = case.program
  depth = program.tree.max_depth
  distributions = _probs_of(target, case, prompts, lengths, result)
  assert not result.failures.any()
  for row in range(program.batch_size):
    length, calls = result.lengths[row], result.num_target_calls[row]
    tokens, rest = np.split(result.tokens[row], [length])
    origins = result.origins[row, :length]
    assert 1 <= length <= program.max_new_tokens
    assert (rest == -1).all()
    assert (result.origins[row, length:] == -1).all()
    assert ((tokens >= 0) & (tokens < _VOCAB)).all()
    is_eos = np.isin(tokens, program.eos_ids)
    assert not is_eos[:-1].any()
    assert is_eos[-1] or length == program.max_new_tokens
    probs = distributions[row, np.arange(length), tokens]
    assert (probs > 0).all() or not program.method.is_lossless_on(program.tree), (row, tokens, probs)
    if case.temperature[row] == 0 and program.method.is_lossless_on(program.tree):
      assert (probs == 1).all()
    # Every call but one that the end cut off emits one token of the target's own, and at most L of the draft.
    num_drafted = int((origins == ORIGIN_DRAFT).sum())
    assert calls - 1 <= length - num_drafted <= calls
    assert length <= calls * (depth + 1)
    by_depth = result.accepted_by_depth[row]
    assert by_depth.sum() == num_drafted
    assert (np.diff(by_depth, prepend=calls) <= 0).all()


def _try(case):
  program, rng = case.program, np.random.default_rng(case.seed)
  target = _random_model(rng)
  draft = target if rng.random() < 0.1 else _random_model(rng)
  prompts = rng.integers(0, _VOCAB, (program.batch_size, program.prompt_length))
  lengths = rng.integers(1, program.prompt_length + 1, program.batch_size)
  prompts[np.arange(program.prompt_length) >= lengths[:, None]] = 10**6  # what stands behind need not be an id
  keys = jax.random.split(jax.random.key(case.seed), program.batch_size)
  result = _decode(case, target, draft, keys, prompts, lengths)
  _check(case, target, prompts, lengths, result)
  if case.is_round_by_round:
    whole = _decode(dataclasses.replace(case, is_round_by_round=False), target, draft, keys, prompts, lengths)
    jax.tree.map(np.testing.assert_array_equal, result, whole)


@pytest.mark.slow
def test_decoding_keeps_its_promises(request):
  num_cases = request.config.getoption('--cases')
  programs = _programs(96 if num_cases > 1000 else 24)
  assert {program.method.name for program in programs} == set(METHODS)
  for number in range(num_cases):
    case = _random_case(programs[number % len(programs)], np.random.default_rng((1, number)), number)
    try:
      _try(case)
    except AssertionError as error:
      raise AssertionError(f'{case}: {error}') from error


def _case():
  program = _Program(METHODS['spectr'], TokenTree.chains(3, 2), 3, 5, 9, ())
  return _Case(program, 0, np.ones(3), np.zeros(3, int), np.ones(3))


def _wrong_lengths(cache, path, num_committed):
  cache = cache.commit(path, num_committed)
  return dataclasses.replace(cache, lengths=jnp.where(num_committed == 1, cache.lengths + 1, cache.lengths))


def _first_child_always(cache, path, num_committed):
  return cache.commit(jnp.minimum(path, jnp.arange(path.shape[1])), num_committed)


def _none_rolled_back(cache, path, num_committed):
  return cache.commit(path, jnp.where(num_committed > 1, path.shape[1], num_committed))


@pytest.mark.slow
@pytest.mark.parametrize('commit', [slow(_wrong_lengths), slow(_first_child_always), _none_rolled_back])
def test_a_broken_cache_is_noticed(commit):
  rng, case = np.random.default_rng(1), _case()
  noticed = 0
  for seed in range(4):
    target, draft = _random_model(rng), _random_model(rng)
    never = rng.random((_MODULUS, _VOCAB)) < 0.5
    never[:, 0] = False
    logits = jnp.where(never, -jnp.inf, rng.normal(size=never.shape).astype(np.float32))
    right = dataclasses.replace(target, params=logits)
    prompts, lengths = rng.integers(0, _VOCAB, (3, 5)), np.array([5, 2, 3])
    keys = jax.random.split(jax.random.key(seed), 3)
    _check(case, right, prompts, lengths, _decode(case, right, draft, keys, prompts, lengths))
    wrong = dataclasses.replace(right, commit_fn=commit)
    try:
      _check(case, right, prompts, lengths, _decode(case, wrong, draft, keys, prompts, lengths))
    except AssertionError:
      noticed += 1
  assert noticed
