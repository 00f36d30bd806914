"""Prompt lookup: what it finds, alone and beside a model's samples, and that it changes no distribution."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse
from feature_drafter import FeatureDrafter
from tiny_heads import tiny_head, tiny_medusa

import spectr_jax
from spectr_jax import (
  METHODS,
  Decoder,
  Likeliest,
  Request,
  SamplingParams,
  TokenTree,
  growing,
  lookup_beside,
  lookup_drafter,
)
from spectr_jax.draft import DraftContext
from spectr_jax.draft.lookup import Lookup, continuations
from spectr_jax.engine.loop import noise_keys, propose, run_rounds
from spectr_jax.models import table
from spectr_jax.testing import (
  chi_square,
  engine_counts,
  enumeration_error,
  ordinary_law,
  random_tables,
  tiny_transformers,
)
from tests.slow import slow

_VOCAB = 4
_CHAINS = TokenTree.chains(2, 3)


def _continuations(text, num_chains, num_tokens, longest, shortest):
  """What `continuations` finds, in plain Python."""
  places = []
  for place in range(len(text) - 1):
    count = 0
    while count < longest and count <= place and text[place - count] == text[-1 - count]:
      count += 1
    if count >= shortest:
      places.append((count, place))
  found, firsts = [], set()
  for _, place in sorted(places, reverse=True):
    if text[place + 1] not in firsts and len(found) < num_chains:
      firsts.add(text[place + 1])
      grown = list(text)
      for i in range(num_tokens):
        grown.append(grown[place + 1 + i])
      found.append(grown[len(text) :])
  return found + [[-1] * num_tokens] * (num_chains - len(found))


@pytest.mark.parametrize('sizes', [(3, 5, 6, 2), (1, 4, 1, 1)], ids=str)
def test_continuations_are_those_of_plain_python(sizes):
  rng = np.random.default_rng(0)
  find = jax.jit(jax.vmap(lambda text, length: continuations(text, length, *sizes)))
  texts = rng.integers(0, rng.integers(1, 5, (300, 1)), (300, 24)).astype(np.int32)
  lengths = rng.integers(1, 25, 300)
  expected = [_continuations(text[:length].tolist(), *sizes) for text, length in zip(texts, lengths)]
  found = np.asarray(find(texts, lengths))
  np.testing.assert_array_equal(found, expected)
  assert 0.05 < (found[:, 0, 0] < 0).mean() < 0.95


def test_guesses_of_a_tree():
  text, tree = jnp.array([[7, 8, 1, 7, 8, 2, 7, 8]], jnp.int32), TokenTree((0, 0, 1, 2, 3))
  context = DraftContext(jnp.array([8]), None, text)
  # After 7 8 came 2 7 8, and before that 1 7 8; the second chain of the tree has two tokens.
  np.testing.assert_array_equal(Lookup(3, 2).guesses(context, tree), [[2, 1, 7, 7, 8]])
  np.testing.assert_array_equal(Lookup(3, 2, num_chains=1).guesses(context, tree), [[2, -1, 7, -1, 8]])
  np.testing.assert_array_equal(Lookup(3, 3).guesses(context, tree), np.full((1, 5), -1))


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: lookup_drafter(4, lookup_min=0), 'lookup_min and lookup_max must be at least 1'),
    (lambda: lookup_drafter(4, lookup_max=2, lookup_min=3), 'lookup_min at most lookup_max; got 3 and 2'),
    (lambda: Lookup(num_chains=0), 'num_given must be at least 1, got 0'),
    (lambda: Lookup().guesses(DraftContext(None, None, ()), TokenTree.prefix((1, 2))), 'branches at the root alone'),
    (lambda: _decoder(lookup_drafter(_VOCAB), 'block', TokenTree.chains(1, 2)), 'takes drawn candidates only'),
    (lambda: _decoder(lookup_beside(_models()[1]), 'spectr', _CHAINS), 'this drafter mixes them'),
    (lambda: _decoder(dataclasses.replace(_looking(), mixes=True), 'race', _CHAINS), 'must give all its candidates'),
    (lambda: lookup_beside(_looking()), 'draws all guesses of one tree'),
    (lambda: lookup_beside(growing(tiny_head(), Likeliest())), 'draws all guesses of one tree'),
    (lambda: growing(lookup_beside(tiny_head()), Likeliest()), 'draws all guesses of one tree'),
    (lambda: _generate_beside(FeatureDrafter(5), TokenTree.chains(1, 3)), 'all guesses of one tree'),
  ],
)
def test_what_does_not_fit(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@functools.cache
def _models():
  """A target that repeats itself, and a draft that is not sure of it."""
  logits = 3.0 * np.roll(np.eye(_VOCAB), 1, axis=1)
  noise = np.random.default_rng(0).normal(size=(2, _VOCAB, _VOCAB))
  return [
    table.table_model(jnp.asarray(own, jnp.float32)) for own in (logits + 0.5 * noise[0], 0.5 * logits + noise[1])
  ]


def _looking(**options):
  return lookup_drafter(_VOCAB, **options)


def _drafter(name):
  return _looking() if name == 'alone' else lookup_beside(_models()[1])


def _decoder(drafter, method, tree, **options):
  sizes = {'max_new_tokens': 12, 'cache_size': 20} | options
  return Decoder.make(_models()[0], drafter, method=method, tree=tree, **sizes)


_PROMPTS = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [3, 0, 0, 0, 0, 0, 0, 0], [1, 2, 1, 1, 2, 0, 0, 0]])
_LENGTHS = np.array([7, 1, 5])
_KEYS = jax.random.split(jax.random.key(0), 3)


def _assert_same(first, second, rows=slice(None)):
  for field in ('tokens', 'lengths', 'num_target_calls', 'origins'):
    np.testing.assert_array_equal(getattr(first, field), getattr(second, field)[rows], err_msg=field)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['alone', 'beside'])
def test_rows_decode_as_by_themselves(name):
  """Whatever the batch: other rows, with or without guesses; samples; rows that were other prompts' before; turns."""
  drafter, method = _drafter(name), 'race_traversal'
  options = {'method': method, 'tree': _CHAINS, 'max_new_tokens': 12, 'eos_id': 3}
  target = _models()[0]
  both = spectr_jax.generate(_KEYS, target, drafter, _PROMPTS, _LENGTHS, **options)
  assert (np.asarray(both.tokens) == 3).any()
  alone = spectr_jax.generate(_KEYS[1:2], target, drafter, _PROMPTS[1:2], _LENGTHS[1:2], **options)
  _assert_same(alone, both, slice(1, 2))
  samples = spectr_jax.generate(_KEYS, target, drafter, _PROMPTS, _LENGTHS, num_samples=2, **options)
  _assert_same(both, samples, slice(None, None, 2))
  requests = [Request(row, _PROMPTS[row, : _LENGTHS[row]].tolist(), _KEYS[row]) for row in range(3)]
  found = spectr_jax.generate_many(target, drafter, requests, batch_size=1, longest_prompt=8, **options)
  for each in found:
    np.testing.assert_array_equal(each.tokens, np.asarray(both.tokens)[each.name, : both.lengths[each.name]])


@pytest.mark.slow
@pytest.mark.parametrize(
  'method',
  ['race_traversal', *(slow(name) for name in ('spectr', 'race_block', 'ersd'))],
)
def test_rounds_that_pass_give_the_same_tokens(method):
  """Where no row has a guess the target is called on one token per row; the tokens do not depend on that."""
  results = []
  for may_pass in (True, False):
    decoder = _decoder(dataclasses.replace(_looking(), may_pass=may_pass), method, _CHAINS, statistics=True)
    state = spectr_jax.init_decode(decoder, _KEYS[1:2], _PROMPTS[1:2], _LENGTHS[1:2])
    results.append(spectr_jax.decode_rounds(decoder, state).result)
  _assert_same(*results)
  np.testing.assert_array_equal(results[0].statistics.visits, results[1].statistics.visits)
  origins = np.asarray(results[0].origins)
  assert (origins == spectr_jax.ORIGIN_DRAFT).any()
  assert (origins[0, :2] == spectr_jax.ORIGIN_CORRECTION).all()


@pytest.mark.slow
def test_rounds_and_turns_share_programs_and_memory_is_linear():
  decoder = _decoder(_looking(), 'race_traversal', _CHAINS, cache_size=40)
  state = spectr_jax.init_decode(decoder, _KEYS, _PROMPTS, _LENGTHS)
  state = spectr_jax.decode_rounds(decoder, state, 1)
  # The committed text is all that lookup keeps.
  assert state.draft_state == ()
  assert state.text.shape == (3, 40)
  compiled, old = run_rounds._cache_size(), state
  state = spectr_jax.decode_rounds(decoder, state)
  assert run_rounds._cache_size() == compiled
  assert old.text.is_deleted()
  sizes = []
  for cache_size in (2**14, 2**15):
    more = _decoder(_looking(), 'race_traversal', _CHAINS, cache_size=cache_size)
    state = spectr_jax.init_decode(more, _KEYS, _PROMPTS, _LENGTHS)
    sizes.append(run_rounds.lower(more, state, np.int32(1)).compile().memory_analysis().temp_size_in_bytes)
  assert sizes[1] < 2.2 * sizes[0]
  assert sizes[1] < 64 * 3 * 2**15


def _lookup_guess(text, length, tree, **options):
  context = DraftContext(jnp.maximum(length, 1)[None], None, text[None])
  tokens = Lookup(**options).guesses(context, tree)[0]
  return jnp.where(length > 0, tokens, -1)


@pytest.mark.parametrize('method', ['spectr', slow('race_traversal')])
def test_lookup_is_exact(method):
  tree = TokenTree.chains(2, 2)
  guess_fn = functools.partial(_lookup_guess, tree=tree, longest=2, shortest=1)
  assert enumeration_error(METHODS[method], tree, random_tables(0, 2, 6), 5, guess_fn=guess_fn) < 1e-10


_BESIDE = {'beside': lambda: tiny_transformers()[1], 'beside a head': tiny_head, 'beside Medusa': tiny_medusa}
_TEXTS, _TEXT_LENGTHS = np.array([[1, 2, 1, 2, 1], [3, 0, 0, 0, 0], [0, 4, 4, 0, 0]]), np.array([5, 1, 3])


def _generate_beside(draft, tree=_CHAINS, rows=slice(None), **options):
  options = {'method': 'race_traversal', 'tree': tree, 'max_new_tokens': 12} | options
  drafter = None if draft is None else lookup_beside(draft, lookup_min=1)
  return spectr_jax.generate(_KEYS[rows], tiny_transformers()[0], drafter, _TEXTS[rows], _TEXT_LENGTHS[rows], **options)


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize('name', ['beside a head', slow('beside Medusa')])
def test_lookup_beside_what_reads_the_target(name):
  """Greedy tokens are the target's, rows decode as by themselves, and lookup takes none of the head's guesses away."""
  draft = _BESIDE[name]()
  plain = _generate_beside(None, method='autoregressive', sampling=SamplingParams(0.0))
  np.testing.assert_array_equal(_generate_beside(draft, sampling=SamplingParams(0.0)).tokens, plain.tokens)
  both = _generate_beside(draft)
  _assert_same(_generate_beside(draft, rows=slice(1, 2)), both, slice(1, 2))
  decoder = Decoder.make(
    tiny_transformers()[0], lookup_beside(draft, lookup_min=1), method='race', tree=_CHAINS, max_new_tokens=4,
    cache_size=9,
  )  # fmt: skip
  state = spectr_jax.init_decode(decoder, _KEYS, _TEXTS, _TEXT_LENGTHS)
  proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
  # The first text has a continuation, 2 1 2, which stands in the first chain; all else is drawn.
  np.testing.assert_array_equal(proposal.is_given[0], [True, False] * 3)
  np.testing.assert_array_equal(proposal.tokens[0, ::2], [2, 1, 2])
  assert not proposal.is_given[1].any()


_ENGINE_PROMPTS = [1, 2, 1, 2, 1], [3], [0, 4, 4]
_SAMPLING = {'temperature': 0.9, 'top_k': 4, 'top_p': 0.95}


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(
  ('name', 'method'),
  [
    ('alone', 'spectr'), ('alone', 'race_block'), ('alone', 'race_traversal'), ('alone', 'ersd'),
    *itertools.product(_BESIDE, ('race', 'race_block', 'race_traversal')),
  ],
)  # fmt: skip
def test_lookup_in_the_loop(name, method):
  """The joint distribution of the first tokens is that of ordinary sampling, by chi-square."""
  target, _ = tiny_transformers()
  options = {'lookup_max': 3, 'lookup_min': 1}
  drafter = lookup_drafter(5, **options) if name == 'alone' else lookup_beside(_BESIDE[name](), **options)
  counts = engine_counts(
    jax.random.key(6), target, drafter, _ENGINE_PROMPTS, method=coarse(METHODS[method]), tree=TokenTree.chains(2, 2),
    num_tokens=4, num_samples=7_500, batch_size=2500, **_SAMPLING,
  )  # fmt: skip
  for prompt, found in zip(_ENGINE_PROMPTS, counts):
    result = chi_square(found, ordinary_law(target, prompt, 4, **_SAMPLING))
    assert result.p_value > 1e-3, (prompt, result)
