"""Prompt lookup: what it finds in texts and corpora, alone and beside samples, and that it changes no distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse
from exact import assert_engine_is_exact
from feature_drafter import FeatureDrafter
from tiny_heads import tiny_head, tiny_medusa

import spectr_jax
from spectr_jax import METHODS, Decoder, Request, SamplingParams, TokenTree
from spectr_jax.draft import DraftContext, Likeliest, growing, lookup_beside, lookup_corpus, lookup_drafter
from spectr_jax.draft.corpus import NUM_SAMPLED
from spectr_jax.draft.lookup import Lookup, LookupDrafter, continuations
from spectr_jax.engine.loop import noise_keys, propose, run_rounds
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.models import table
from spectr_jax.sharding import make_mesh
from spectr_jax.testing import enumeration_error, random_tables, tiny_transformers
from tests.slow import slow

_VOCAB = 4
_CHAINS = TokenTree.chains(2, 3)


def _own(text, taken, longest, shortest, num_tokens):
  """The longest match in the text whose next token is not taken, and what follows; (0, None) if there is none."""
  best = 0, None
  for place in range(len(text) - 1):
    count = 0
    while count < longest and count <= place and text[place - count] == text[-1 - count]:
      count += 1
    if count >= shortest and count >= best[0] and text[place + 1] not in taken:
      best = count, place
  if best[1] is None:
    return best
  grown = list(text)
  for i in range(num_tokens):
    grown.append(grown[best[1] + 1 + i])
  return best[0], grown[len(text) :]


def _elsewhere(text, documents, taken, longest, shortest, num_tokens):
  """The same in other texts."""
  for size in range(min(longest, len(text)), shortest - 1, -1):
    followings = [
      document[place + size :]
      for document in documents
      for place in range(len(document) - size + 1)
      if document[place : place + size] == text[len(text) - size :]
    ]
    followings.sort()
    if len(followings) > NUM_SAMPLED:
      followings = [followings[len(followings) * i // NUM_SAMPLED] for i in range(NUM_SAMPLED)]
    followings = [followers for followers in followings if followers and followers[0] not in taken]
    if not followings:
      continue
    chain = []
    while len(chain) < num_tokens and (nexts := [each[len(chain)] for each in followings if len(each) > len(chain)]):
      chain.append(max(nexts, key=nexts.count))
      followings = [each for each in followings if each[: len(chain)] == chain]
    return size, chain + [-1] * (num_tokens - len(chain))
  return 0, None


def _continuations(text, documents, num_chains, num_tokens, longest, shortest):
  """What `continuations` finds with a corpus, in plain Python."""
  chains = []
  for _ in range(num_chains):
    taken = {chain[0] for chain in chains}
    own = _own(text, taken, longest, shortest, num_tokens)
    other = _elsewhere(text, documents, taken, longest, shortest, num_tokens)
    chain = (own if own[0] >= other[0] else other)[1]
    chains += [chain] if chain else []
  return chains + [[-1] * num_tokens] * (num_chains - len(chains))


@functools.partial(jax.jit, static_argnames='sizes')
def _find(texts, lengths, corpus, sizes):
  return jax.vmap(lambda text, length: continuations(text, length, *sizes, corpus))(texts, lengths)


@pytest.mark.parametrize('sizes', [(3, 5, 6, 2), (1, 4, 1, 1)], ids=str)
def test_continuations_are_those_of_plain_python(sizes):
  rng = np.random.default_rng(0)
  texts = rng.integers(0, rng.integers(1, 5, (300, 1)), (300, 24)).astype(np.int32)
  lengths = rng.integers(1, 25, 300)
  expected = [_continuations(text[:length].tolist(), [], *sizes) for text, length in zip(texts, lengths)]
  chains = np.asarray(_find(texts, lengths, None, sizes))
  np.testing.assert_array_equal(chains, expected)
  assert 0.05 < (chains[:, 0, 0] < 0).mean() < 0.95


def _documents(rng, *, num_documents=5, longest=30):
  """Random texts, some of them empty or repeated, with few tokens so that much occurs twice."""
  num_tokens = int(rng.integers(1, 5))
  documents = [rng.integers(0, num_tokens, rng.integers(0, longest)).tolist() for _ in range(num_documents)]
  return [*documents, documents[0], [num_tokens]]


@pytest.mark.parametrize('seed', range(50))
def test_suffixes_are_sorted(seed):
  documents = _documents(np.random.default_rng(seed), longest=int(1.5**seed % 97) + 2)
  corpus = lookup_corpus(documents)
  tokens = np.asarray(corpus.tokens).tolist()
  assert tokens == [token for document in documents if document for token in (*document, -1)]
  suffixes = [tokens[place : tokens.index(-1, place)] for place in range(len(tokens))]
  assert np.asarray(corpus.suffixes).tolist() == sorted(range(len(tokens)), key=lambda place: (suffixes[place], place))


def _padded(documents, size):
  """The corpus with documents of a token that no text has, so that all have one shape and one program."""
  num_tokens = sum(len(document) + 1 for document in documents if document)
  return lookup_corpus([*documents, [99] * (size - num_tokens - 1)])


@pytest.mark.parametrize('sizes', [(3, 5, 6, 2), (1, 4, 1, 1), (4, 3, 3, 1)], ids=str)
def test_continuations_with_a_corpus_are_those_of_plain_python(sizes):
  rng, alone, beside, ended = np.random.default_rng(0), 0, 0, 0
  for _ in range(12):
    documents = _documents(rng, num_documents=int(rng.integers(1, 12)), longest=60)
    corpus = _padded(documents, 900)
    texts = rng.integers(0, rng.integers(1, 6, (40, 1)), (40, 12)).astype(np.int32)
    lengths = rng.integers(1, 13, 40)
    ragged = [text[:length].tolist() for text, length in zip(texts, lengths)]
    expected = np.array([_continuations(text, documents, *sizes) for text in ragged])
    np.testing.assert_array_equal(_find(texts, lengths, corpus, sizes), expected)
    own = np.array([_continuations(text, [], *sizes) for text in ragged])
    alone, beside = alone + (expected == own).all((1, 2)).mean() / 12, beside + (expected[:, 0, 0] >= 0).mean() / 12
    ended += ((expected[..., 0] >= 0) & (expected[..., -1] < 0)).sum()
  assert 0.02 < alone < 0.9
  assert 0.2 < beside < 0.99
  assert ended or sizes[1] == 1


def test_of_many_occurrences_some_are_looked_at():
  rng = np.random.default_rng(1)
  documents = [[7, 8, int(token), 5] for token in rng.choice(4, 1000, p=(0.5, 0.3, 0.15, 0.05))]
  text = np.array([[0, 7, 8, 0]], np.int32)
  chains = _find(text, np.array([3]), lookup_corpus(documents), (4, 3, 8, 2))
  np.testing.assert_array_equal(chains[0], [[0, 5, -1], [1, 5, -1], [2, 5, -1], [3, 5, -1]])
  np.testing.assert_array_equal(chains[0], _continuations([0, 7, 8], documents, 4, 3, 8, 2))


def test_longer_matches_come_first_and_the_text_at_equal_ones():
  text = jnp.array([[9, 2, 6, 1, 2, 7, 1, 2]], jnp.int32)
  context, tree = DraftContext(jnp.array([8]), None, text), TokenTree.chains(3, 2)
  corpus = lookup_corpus([[5, 1, 2, 8, 8], [7, 1, 2, 3]])
  # 7 1 2 is in the corpus alone; of 1 2 the text's own comes first; the text's 9 2 6 agrees in one token only.
  guesses = Lookup(3, 2).guesses(context, tree, corpus)
  np.testing.assert_array_equal(guesses, [[3, 7, 8, -1, 1, 8]])
  np.testing.assert_array_equal(Lookup(3, 2).guesses(context, tree), [[7, -1, -1, 1, -1, -1]])


def test_guesses_of_a_tree():
  text, tree = jnp.array([[7, 8, 1, 7, 8, 2, 7, 8]], jnp.int32), TokenTree((0, 0, 1, 2, 3))
  context = DraftContext(jnp.array([8]), None, text)
  # After 7 8 came 2 7 8, and before that 1 7 8; the second chain of the tree has two tokens.
  np.testing.assert_array_equal(Lookup(3, 2).guesses(context, tree), [[2, 1, 7, 7, 8]])
  np.testing.assert_array_equal(Lookup(3, 2, num_chains=1).guesses(context, tree), [[2, -1, 7, -1, 8]])
  np.testing.assert_array_equal(Lookup(3, 3).guesses(context, tree), np.full((1, 5), -1))


class _Mixing(LookupDrafter):
  has_mixed_positions = True


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: lookup_drafter(4, lookup_min=0), 'lookup_min and lookup_max must be at least 1'),
    (lambda: lookup_drafter(4, lookup_max=2, lookup_min=3), 'lookup_min at most lookup_max; got 3 and 2'),
    (lambda: Lookup(num_chains=0), 'num_given must be at least 1, got 0'),
    (lambda: Lookup().guesses(DraftContext(None, None, ()), TokenTree.prefix((1, 2))), 'branches at the root alone'),
    (lambda: _decoder(lookup_drafter(_VOCAB), 'block', TokenTree.chains(1, 2)), 'takes drawn candidates only'),
    (lambda: _decoder(lookup_beside(_models()[1]), 'spectr', _CHAINS), 'this draft mixes them'),
    (lambda: _decoder(_Mixing(**vars(_looking())), 'race', _CHAINS), 'must give all its candidates'),
    (lambda: lookup_beside(_looking()), 'draws all guesses of one tree'),
    (lambda: lookup_beside(growing(tiny_head(), Likeliest())), 'draws all guesses of one tree'),
    (lambda: growing(lookup_beside(tiny_head()), Likeliest()), 'draws all guesses of one tree'),
    (lambda: _generate_beside(FeatureDrafter(5), TokenTree.chains(1, 3)), 'all guesses of one tree'),
    (lambda: lookup_corpus([]), 'needs at least one token'),
    (lambda: lookup_corpus([[], ()]), 'needs at least one token'),
    (lambda: lookup_corpus([[1, -1]]), 'a document of a lookup corpus is a sequence of token ids'),
    (lambda: lookup_corpus([[2**31]]), 'a document of a lookup corpus is a sequence of token ids'),
    (lambda: lookup_corpus([[0.5]]), 'a document of a lookup corpus is a sequence of token ids'),
    (lambda: lookup_corpus(['text']), 'a document of a lookup corpus is a sequence of token ids'),
    (lambda: lookup_drafter(4, corpus=lookup_corpus([[4]])), 'holds ids up to 4, the vocabulary is 0 to 3'),
    (lambda: lookup_beside(_models()[1], corpus=lookup_corpus([[7]])), 'holds ids up to 7, the vocabulary is 0 to 3'),
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
  return [table.table_model(jnp.float32(own)) for own in (logits + 0.5 * noise[0], 0.5 * logits + noise[1])]


def _looking(**options):
  return lookup_drafter(_VOCAB, **options)


@functools.cache
def _drafter(name, seed=0):
  """Alone or beside a model, on request with a corpus of two documents, one of which counts up."""
  options = {}
  if 'corpus' in name:
    corpus = lookup_corpus([np.arange(9) % _VOCAB, np.random.default_rng(seed).integers(0, _VOCAB, 12)])
    options = {'lookup_min': 1, 'corpus': corpus}
  return lookup_beside(_models()[1], **options) if 'beside' in name else _looking(**options)


def _decoder(drafter, method, tree, **options):
  sizes = {'max_new_tokens': 12, 'cache_size': 20} | options
  return Decoder.make(_models()[0], drafter, method=method, tree=tree, **sizes)


_PROMPTS = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [3, 0, 0, 0, 0, 0, 0, 0], [1, 2, 1, 1, 2, 0, 0, 0]])
_LENGTHS = np.array([7, 1, 5])
_KEYS = jax.random.split(jax.random.key(0), 3)


def _assert_same(first, second, rows=slice(None)):
  for field in ('tokens', 'lengths', 'num_target_calls', 'origins'):
    np.testing.assert_array_equal(getattr(first, field), getattr(second, field)[rows], err_msg=field)


_DRAFTERS = ['alone', 'beside', 'alone, corpus', 'beside, corpus']


@pytest.mark.slow
@pytest.mark.parametrize('name', _DRAFTERS)
def test_rows_decode_as_by_themselves(name):
  """Whatever the batch: other rows, with or without guesses; samples; rows that were other prompts' before; a mesh."""
  drafter, method = _drafter(name), 'race_traversal'
  options = {'method': method, 'tree': _CHAINS, 'max_new_tokens': 12, 'eos_id': 3}
  target = _models()[0]
  both = spectr_jax.generate(_KEYS, target, drafter, _PROMPTS, _LENGTHS, **options)
  assert (np.asarray(both.tokens) == 3).any()
  alone = spectr_jax.generate(_KEYS[1:2], target, drafter, _PROMPTS[1:2], _LENGTHS[1:2], **options)
  _assert_same(alone, both, slice(1, 2))
  divided = DecodeSharding(make_mesh({'data': 1, 'model': 1}))
  _assert_same(both, spectr_jax.generate(_KEYS, target, drafter, _PROMPTS, _LENGTHS, sharding=divided, **options))
  samples = spectr_jax.generate(_KEYS, target, drafter, _PROMPTS, _LENGTHS, num_samples=2, **options)
  _assert_same(both, samples, slice(None, None, 2))
  requests = [Request(row, _PROMPTS[row, : _LENGTHS[row]].tolist(), _KEYS[row]) for row in range(3)]
  continued = spectr_jax.generate_many(target, drafter, requests, batch_size=1, longest_prompt=8, **options)
  for each in continued:
    np.testing.assert_array_equal(each.tokens, np.asarray(both.tokens)[each.name, : both.lengths[each.name]])


@pytest.mark.slow
@pytest.mark.parametrize('name', _DRAFTERS)
def test_greedy_tokens_are_those_of_autoregressive_decoding_in_fewer_calls(name):
  options = {'max_new_tokens': 12, 'sampling': SamplingParams(0.0)}
  plain = spectr_jax.generate(_KEYS, _models()[0], None, _PROMPTS, _LENGTHS, **options)
  drafter = _drafter(name)
  result = spectr_jax.generate(_KEYS, _models()[0], drafter, _PROMPTS, _LENGTHS, tree=_CHAINS, **options)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert 'corpus' not in name or (np.asarray(result.num_target_calls) < 8).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  ('method', 'documents'),
  [(method, None) for method in ('race_traversal', 'spectr', 'race_block', 'ersd')]
  + [('race_traversal', [[2, 3, 0, 1]])],
)
def test_rounds_that_pass_give_the_same_tokens(method, documents):
  """Where no row has a guess the target is called on one token per row; the tokens do not depend on that."""
  drafter, results = _looking(corpus=None if documents is None else lookup_corpus(documents)), []
  for can_skip_trees in (True, False):
    decoder = _decoder(dataclasses.replace(drafter, can_skip_trees=can_skip_trees), method, _CHAINS, statistics=True)
    state = spectr_jax.engine.init_decode(decoder, _KEYS[1:2], _PROMPTS[1:2], _LENGTHS[1:2])
    results.append(spectr_jax.engine.decode_rounds(decoder, state).result)
  _assert_same(*results)
  np.testing.assert_array_equal(results[0].statistics.visits, results[1].statistics.visits)
  origins = np.asarray(results[0].origins)
  assert (origins == spectr_jax.engine.ORIGIN_DRAFT).any()
  assert (origins[0, : 1 if documents else 2] == spectr_jax.engine.ORIGIN_CORRECTION).all()


@pytest.mark.slow
def test_corpora_of_one_size_share_programs_and_are_no_constants():
  counts = []
  for seed in (0, 1):
    decoder = _decoder(_drafter('alone, corpus', seed), 'race_traversal', _CHAINS)
    state = spectr_jax.engine.init_decode(decoder, _KEYS, _PROMPTS, _LENGTHS)
    spectr_jax.engine.decode_rounds(decoder, state)
    counts.append(run_rounds._cache_size())
  assert counts[0] == counts[1]


@pytest.mark.slow
def test_rounds_and_turns_share_programs_and_memory_is_linear():
  decoder = _decoder(_looking(), 'race_traversal', _CHAINS, cache_size=40)
  state = spectr_jax.engine.init_decode(decoder, _KEYS, _PROMPTS, _LENGTHS)
  state = spectr_jax.engine.decode_rounds(decoder, state, 1)
  # The committed text is all that lookup keeps.
  assert state.draft_state == ()
  assert state.text.shape == (3, 40)
  compiled, old = run_rounds._cache_size(), state
  state = spectr_jax.engine.decode_rounds(decoder, state)
  assert run_rounds._cache_size() == compiled
  assert old.text.is_deleted()
  sizes = []
  for cache_size in (2**14, 2**15):
    more = _decoder(_looking(), 'race_traversal', _CHAINS, cache_size=cache_size)
    state = spectr_jax.engine.init_decode(more, _KEYS, _PROMPTS, _LENGTHS)
    sizes.append(run_rounds.lower(more, state, np.int32(1)).compile().memory_analysis().temp_size_in_bytes)
  assert sizes[1] < 2.2 * sizes[0]
  assert sizes[1] < 64 * 3 * 2**15


@pytest.mark.parametrize('method', ['spectr', *map(slow, ('race_traversal', 'specinfer', 'race'))])
@pytest.mark.parametrize('num_chains', [slow(1), 2])
@pytest.mark.parametrize('documents', [None, [[0, 1], [1, 1, 0, 0], [1, 0, 1]]], ids=['text', 'corpus'])
def test_lookup_is_exact(method, documents, num_chains):
  """Also where a document ends within a chain."""
  tree, corpus = TokenTree.chains(num_chains, 2), None if documents is None else lookup_corpus(documents)

  def guess(text, length):
    context = DraftContext(jnp.maximum(length, 1)[None], None, text[None])
    return jnp.where(length > 0, Lookup(2, 1).guesses(context, tree, corpus)[0], -1)

  assert enumeration_error(coarse(METHODS[method]), tree, random_tables(0, 2, 6), 5, guess_fn=guess) < 1e-10


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
  sizes = {'method': 'race', 'tree': _CHAINS, 'max_new_tokens': 4, 'cache_size': 9}
  decoder = Decoder.make(tiny_transformers()[0], lookup_beside(draft, lookup_min=1), **sizes)
  state = spectr_jax.engine.init_decode(decoder, _KEYS, _TEXTS, _TEXT_LENGTHS)
  proposal = jax.jit(propose)(decoder, state, noise_keys(decoder, state)[0])
  # The first text has a continuation, 2 1 2, which stands in the first chain; all else is drawn.
  np.testing.assert_array_equal(proposal.is_given[0], [True, False] * 3)
  np.testing.assert_array_equal(proposal.tokens[0, ::2], [2, 1, 2])
  assert not proposal.is_given[1].any()


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(
  ('name', 'method', 'has_corpus'),
  [
    *(('alone', method, False) for method in ('spectr', 'race_block', 'race_traversal', 'ersd')),
    *((name, method, False) for name in _BESIDE for method in ('race', 'race_block', 'race_traversal')),
    ('alone', 'spectr', True), ('alone', 'race_traversal', True), ('beside', 'race_traversal', True),
    ('beside a head', 'race_traversal', True), ('beside a head', 'race_block', True),
  ],
)  # fmt: skip
def test_lookup_in_the_loop(name, method, has_corpus):
  corpus = lookup_corpus([[3, 1, 4], [4, 4, 0, 2, 3, 0], [1, 3], [2, 1, 0, 0, 4, 1]]) if has_corpus else None
  options = {'lookup_max': 3, 'lookup_min': 1, 'corpus': corpus}
  drafter = lookup_drafter(5, **options) if name == 'alone' else lookup_beside(_BESIDE[name](), **options)
  options = {'prompts': ([1, 2, 1, 2, 1], [3], [0, 4, 4]), 'num_tokens': 4, 'num_samples': 7_500, 'seed': 7}
  assert_engine_is_exact(drafter, method, TokenTree.chains(2, 2), **options)
