"""Prompt lookup in a corpus: the suffix array, what is found in it, and that it changes no distribution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coarse import coarse
from tiny_heads import tiny_head

import spectr_jax
from spectr_jax import METHODS, Decoder, SamplingParams, TokenTree, lookup_beside, lookup_corpus, lookup_drafter
from spectr_jax.draft import DraftContext
from spectr_jax.draft.corpus import NUM_SAMPLED
from spectr_jax.draft.lookup import Lookup, continuations
from spectr_jax.engine.loop import run_rounds
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.models import table
from spectr_jax.sharding import make_mesh
from spectr_jax.testing import (
  chi_square,
  engine_counts,
  enumeration_error,
  ordinary_law,
  random_tables,
  tiny_transformers,
)
from tests.slow import slow


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
    found = [
      document[place + size :]
      for document in documents
      for place in range(len(document) - size + 1)
      if document[place : place + size] == text[len(text) - size :]
    ]
    found.sort()
    if len(found) > NUM_SAMPLED:
      found = [found[len(found) * i // NUM_SAMPLED] for i in range(NUM_SAMPLED)]
    found = [followers for followers in found if followers and followers[0] not in taken]
    if not found:
      continue
    chain = []
    while len(chain) < num_tokens and (nexts := [each[len(chain)] for each in found if len(each) > len(chain)]):
      chain.append(max(nexts, key=nexts.count))
      found = [each for each in found if each[: len(chain)] == chain]
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


def _padded(documents, size):
  """The corpus with documents of a token that no text has, so that all have one shape and one program."""
  num_tokens = sum(len(document) + 1 for document in documents if document)
  return lookup_corpus([*documents, [99] * (size - num_tokens - 1)])


@pytest.mark.parametrize('sizes', [(3, 5, 6, 2), (1, 4, 1, 1), (4, 3, 3, 1)], ids=str)
def test_continuations_are_those_of_plain_python(sizes):
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
  found = _find(text, np.array([3]), lookup_corpus(documents), (4, 3, 8, 2))
  np.testing.assert_array_equal(found[0], [[0, 5, -1], [1, 5, -1], [2, 5, -1], [3, 5, -1]])
  np.testing.assert_array_equal(found[0], _continuations([0, 7, 8], documents, 4, 3, 8, 2))


def test_longer_matches_come_first_and_the_text_at_equal_ones():
  text = jnp.array([[9, 2, 6, 1, 2, 7, 1, 2]], jnp.int32)
  context, tree = DraftContext(jnp.array([8]), None, text), TokenTree.chains(3, 2)
  corpus = lookup_corpus([[5, 1, 2, 8, 8], [7, 1, 2, 3]])
  # 7 1 2 is in the corpus alone; of 1 2 the text's own comes first; the text's 9 2 6 agrees in one token only.
  guesses = Lookup(3, 2).guesses(context, tree, corpus)
  np.testing.assert_array_equal(guesses, [[3, 7, 8, -1, 1, 8]])
  np.testing.assert_array_equal(Lookup(3, 2).guesses(context, tree), [[7, -1, -1, 1, -1, -1]])


@pytest.mark.parametrize(
  ('make', 'message'),
  [
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


_VOCAB = 4
_CHAINS = TokenTree.chains(2, 3)
_PROMPTS = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [3, 0, 0, 0, 0, 0, 0, 0], [1, 2, 1, 1, 2, 0, 0, 0]])
_LENGTHS = np.array([7, 1, 5])
_KEYS = jax.random.split(jax.random.key(0), 3)


@functools.cache
def _models():
  """A target that likes to count up, and a draft that is not sure of it."""
  logits = 3.0 * np.roll(np.eye(_VOCAB), 1, axis=1)
  noise = np.random.default_rng(0).normal(size=(2, _VOCAB, _VOCAB))
  return [
    table.table_model(jnp.asarray(own, jnp.float32)) for own in (logits + 0.5 * noise[0], 0.5 * logits + noise[1])
  ]


@functools.cache
def _drafter(name, seed=0):
  """A drafter with a corpus of two documents, one of which counts up."""
  corpus = lookup_corpus([np.arange(9) % _VOCAB, np.random.default_rng(seed).integers(0, _VOCAB, 12)])
  bounds = {'lookup_min': 1, 'corpus': corpus}
  return lookup_drafter(_VOCAB, **bounds) if name == 'alone' else lookup_beside(_models()[1], **bounds)


def _decoder(drafter, **options):
  sizes = {'max_new_tokens': 12, 'cache_size': 20} | options
  return Decoder.make(_models()[0], drafter, method='race_traversal', tree=_CHAINS, **sizes)


def _generate(drafter, rows=slice(None), **options):
  options = {'method': 'race_traversal', 'tree': _CHAINS, 'max_new_tokens': 12} | options
  return spectr_jax.generate(_KEYS[rows], _models()[0], drafter, _PROMPTS[rows], _LENGTHS[rows], **options)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['alone', 'beside'])
def test_greedy_tokens_are_those_of_autoregressive_decoding_in_fewer_calls(name):
  plain = _generate(None, method='autoregressive', sampling=SamplingParams(0.0))
  found = _generate(_drafter(name), sampling=SamplingParams(0.0))
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  assert (np.asarray(found.num_target_calls) < 8).all()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['alone', 'beside'])
def test_rows_decode_as_by_themselves_and_over_a_mesh(name):
  both, alone = _generate(_drafter(name)), _generate(_drafter(name), slice(1, 2))
  np.testing.assert_array_equal(alone.tokens, both.tokens[1:2])
  divided = _generate(_drafter(name), sharding=DecodeSharding(make_mesh({'data': 1, 'model': 1})))
  np.testing.assert_array_equal(divided.tokens, both.tokens)


@pytest.mark.slow
def test_corpora_of_one_size_share_programs_and_are_no_constants():
  counts = []
  for seed in (0, 1):
    decoder = _decoder(_drafter('alone', seed))
    state = spectr_jax.init_decode(decoder, _KEYS, _PROMPTS, _LENGTHS)
    spectr_jax.decode_rounds(decoder, state)
    counts.append(run_rounds._cache_size())
  assert counts[0] == counts[1]


@pytest.mark.slow
def test_rounds_that_pass_give_the_same_tokens():
  """Where no row has a guess the target is called on one token per row; the tokens do not depend on that."""
  drafter = lookup_drafter(_VOCAB, corpus=lookup_corpus([[2, 3, 0, 1]]))
  results = []
  for may_pass in (True, False):
    decoder = _decoder(dataclasses.replace(drafter, may_pass=may_pass), statistics=True)
    state = spectr_jax.init_decode(decoder, _KEYS[1:2], _PROMPTS[1:2], _LENGTHS[1:2])
    results.append(spectr_jax.decode_rounds(decoder, state).result)
  for field in ('tokens', 'lengths', 'num_target_calls', 'origins'):
    np.testing.assert_array_equal(*(getattr(result, field) for result in results), err_msg=field)
  origins = np.asarray(results[0].origins)
  assert (origins == spectr_jax.ORIGIN_DRAFT).any()
  assert origins[0, 0] == spectr_jax.ORIGIN_CORRECTION


def _lookup_guess(text, length, tree, corpus):
  context = DraftContext(jnp.maximum(length, 1)[None], None, text[None])
  return jnp.where(length > 0, Lookup(2, 1).guesses(context, tree, corpus)[0], -1)


@pytest.mark.parametrize('method', ['spectr', slow('race_traversal')])
def test_lookup_is_exact(method):
  """Also where a document ends within a chain."""
  tree = TokenTree.chains(2, 2)
  guess_fn = functools.partial(_lookup_guess, tree=tree, corpus=lookup_corpus([[0, 1], [1, 1, 0, 0], [1, 0, 1]]))
  assert enumeration_error(METHODS[method], tree, random_tables(0, 2, 6), 5, guess_fn=guess_fn) < 1e-10


_ENGINE_PROMPTS = [1, 2, 1, 2, 1], [3], [0, 4, 4]
_SAMPLING = {'temperature': 0.9, 'top_k': 4, 'top_p': 0.95}


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
@pytest.mark.parametrize(
  ('name', 'method'),
  [
    ('alone', 'spectr'), ('alone', 'race_traversal'), ('beside', 'race_traversal'),
    ('beside a head', 'race_traversal'), ('beside a head', 'race_block'),
  ],
)  # fmt: skip
def test_lookup_in_the_loop(name, method):
  """The joint distribution of the first tokens is that of ordinary sampling, by chi-square."""
  target, draft = tiny_transformers()
  corpus = lookup_corpus([[3, 1, 4], [4, 4, 0, 2, 3, 0], [1, 3], [2, 1, 0, 0, 4, 1]])
  options = {'lookup_max': 3, 'lookup_min': 1, 'corpus': corpus}
  beside = tiny_head() if name == 'beside a head' else draft
  drafter = lookup_drafter(5, **options) if name == 'alone' else lookup_beside(beside, **options)
  counts = engine_counts(
    jax.random.key(6), target, drafter, _ENGINE_PROMPTS, method=coarse(METHODS[method]), tree=TokenTree.chains(2, 2),
    num_tokens=4, num_samples=7_500, batch_size=2500, **_SAMPLING,
  )  # fmt: skip
  for prompt, found in zip(_ENGINE_PROMPTS, counts):
    result = chi_square(found, ordinary_law(target, prompt, 4, **_SAMPLING))
    assert result.p_value > 1e-3, (prompt, result)
