"""Texts that end a continuation: where they are found, and that rows end there whatever ran on."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import spectr_jax
from spectr_jax import Request, Stop, StopStrings, finish_reason, generate_many
from spectr_jax.engine import refill
from tests.engine.runs import KINDS, LENGTHS, NEW, PROMPTS, assert_same, begin, generate, make_keys
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """A tokenizer whose tokens are bytes."""

  pieces: tuple[bytes, ...]

  def decode(self, ids):
    return b''.join(self.pieces[i] for i in ids).decode(errors='replace')


_TOKENIZER = _Pieces((b'ab', b'c', b'bca', b' ', b'\xc3', b'\xa9d'))


@pytest.mark.parametrize(
  ('texts', 'tokens', 'expected'),
  [
    (['z'], [0, 1, 2], None),
    (['ab'], [0], Stop(1, '')),
    (['bc'], [0, 1, 3], Stop(2, 'a')),  # begins inside of a token and ends with one
    (['cbc'], [1, 2, 3], Stop(2, '')),  # ends inside of a token
    (['abcb'], [0, 1, 2, 0], Stop(3, '')),  # spans three
    (['caa'], [2, 2, 0], Stop(3, 'bcab')),  # after a false start
    (['b'], [3, 3, 0, 0], Stop(3, '  a')),  # the first of several
    (['ca', 'bc'], [2], Stop(1, '')),  # of one token, what ends first
    (['c', 'bc'], [2], Stop(1, '')),  # of what ends together, the longest
    (['c', 'abca'], [0, 1, 0], Stop(2, 'ab')),  # what is complete first, not what begins first
    (['é'], [3, 4, 5, 3], Stop(3, ' ')),  # a character of two tokens
    (['d'], [4, 5], Stop(2, 'é')),
  ],
)
def test_places(texts, tokens, expected):
  stop = StopStrings(_TOKENIZER, texts)
  assert stop.find(tokens) == expected
  length = len(tokens) if expected is None else expected.num_tokens
  # It does not matter where a search goes on.
  for searched in range(length):
    assert stop.find(np.array(tokens), searched) == expected
  assert stop.text_of(tokens[:length]) == (_TOKENIZER.decode(tokens) if expected is None else expected.text)
  assert finish_reason(tokens[:length], (), stop) == ('length' if expected is None else 'stop')


def test_reasons():
  stop = StopStrings(_TOKENIZER, ['c'])
  assert finish_reason([0, 1]) == 'length'
  assert finish_reason([0, 1], (1, 3)) == 'eos'
  assert finish_reason([0, 1], (1, 3), stop) == 'stop'
  assert finish_reason(np.array([0, 3]), (1, 3), stop) == 'eos'


@pytest.mark.parametrize(
  'texts', [[], [''], ['a', ''], 'ab', [3], ['\ufffd'], ['a\ufffd'], ['a', '\udcff'], ['\ud800b']]
)
def test_texts_that_are_refused(texts):
  with pytest.raises(ValueError, match='stop'):
    StopStrings(_TOKENIZER, texts)


_STOP = StopStrings(_TOKENIZER, ['cab', '  ', 'da'])
_OPTIONS = {'eos_id': 4, 'logprobs': True, 'num_samples': 3, 'max_new_tokens': 24}


def _expected_length(tokens):
  """Tokens until the text of the whole continuation so far has a stop text."""
  for length in range(1, len(tokens) + 1):
    text = _TOKENIZER.decode(tokens[:length])
    if any(len(text.split(stop)) > 1 for stop in _STOP.texts):
      return length
  return len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize('method', slow_but(('race_traversal',), KINDS))
def test_rows_end_as_if_nothing_had_run_on(tables, method):
  plain = jax.device_get(generate(tables, method, make_keys(2), **_OPTIONS))
  stopped = functools.partial(generate, tables, method, make_keys(2), stop=_STOP, **_OPTIONS)
  ended = stopped(rounds_at_a_time=1)
  for other in (3, 100):
    assert_same(ended, stopped(rounds_at_a_time=other))
  cut = 0
  for row, length in enumerate(plain.lengths):
    wanted = _expected_length(plain.tokens[row, :length])
    assert ended.lengths[row] == wanted
    for name, nothing in (('tokens', -1), ('origins', -1), ('logprobs', np.nan)):
      kept, whole = (getattr(result, name)[row] for result in (ended, plain))
      np.testing.assert_array_equal(kept[:wanted], whole[:wanted])
      np.testing.assert_array_equal(kept[wanted:], nothing)
    cut += wanted < length
  assert 0 < cut < 12


@pytest.mark.slow
@pytest.mark.parametrize('method', slow_but(('race_traversal',), KINDS))
def test_a_cut_is_that_of_a_limit(tables, method):
  """Tokens and counts are those of a run with as many new tokens; the noise does not depend on the limit."""
  limit = 7
  whole, limited = (
    jax.device_get(generate(tables, method, make_keys(5), num_samples=3, logprobs=True, max_new_tokens=size))
    for size in (12, limit)
  )
  np.testing.assert_array_equal(whole.lengths, 12)
  assert_same(whole.cut(dict.fromkeys(range(12), limit)).of_size(limit), limited)


def test_what_cannot_be_cut(tables):
  result = jax.device_get(generate(tables, 'spectr', make_keys(), statistics=True))
  with pytest.raises(ValueError, match='statistics are of whole rounds'):
    result.cut({0: 1})
  result = dataclasses.replace(result, statistics=None)
  for length in (0, 13):
    with pytest.raises(ValueError, match=f'row 1 has 12 tokens, and cannot be cut to {length}'):
      result.cut({1: length})
  with pytest.raises(ValueError, match='stop is for calls outside of a trace and without statistics'):
    generate(tables, 'spectr', make_keys(), statistics=True, stop=_STOP)


@pytest.mark.slow
def test_finished_rows_stay_as_they_are(tables):
  decoder, state = begin(tables, 'spectr', make_keys(3))
  whole = jax.device_get(generate(tables, 'spectr', make_keys(3)))
  state = spectr_jax.engine.decode_rounds(decoder, state, 1)
  before = jax.device_get(state.result)
  state = spectr_jax.engine.finish(decoder, state, [1, 3])
  assert state.is_done.tolist() == [False, True, False, True]
  state = spectr_jax.engine.decode_rounds(decoder, state)
  np.testing.assert_array_equal(state.result.of_size(NEW).tokens[::2], whole.tokens[::2])
  np.testing.assert_array_equal(state.result.tokens[1::2], before.tokens[1::2])
  np.testing.assert_array_equal(state.result.lengths[1::2], before.lengths[1::2])
  # Such a row is free for another prompt.
  keys, prompt = make_keys(3)[:1], PROMPTS[:1]
  state = spectr_jax.engine.decode_rounds(decoder, refill(decoder, state, [3], keys, prompt, LENGTHS[:1]))
  np.testing.assert_array_equal(state.result.of_size(NEW).tokens[3], whole.tokens[0])
  for rows in ([-1], [4]):
    with pytest.raises(ValueError, match='rows must be from 0 to 3'):
      spectr_jax.engine.finish(decoder, state, rows)


@pytest.mark.slow
def test_many_requests_end_as_in_a_batch(tables):
  keys = spectr_jax.engine.sample_keys(make_keys(2), 3)
  requests = [Request(i, PROMPTS[i // 3, : LENGTHS[i // 3]].tolist(), key) for i, key in enumerate(keys)]
  batch = generate(tables, 'race_traversal', make_keys(2), stop=_STOP, **_OPTIONS)
  options = {'method': 'race_traversal', 'tree': spectr_jax.TokenTree.chains(2, 3), 'max_new_tokens': 24}
  for rounds in (1, 4):
    reasons = set()
    for continuation in generate_many(
      *tables, requests, batch_size=5, longest_prompt=6, eos_id=4, logprobs=True, stop=_STOP, rounds_at_a_time=rounds,
      **options,
    ):  # fmt: skip
      for name in ('tokens', 'origins', 'logprobs'):
        own = getattr(batch, name)[continuation.name, : batch.lengths[continuation.name]]
        np.testing.assert_array_equal(getattr(continuation, name), own)
      assert continuation.num_target_calls == batch.num_target_calls[continuation.name]
      assert continuation.finish_reason == finish_reason(continuation.tokens, (4,), _STOP)
      reasons.add(continuation.finish_reason)
    assert reasons >= {'stop', 'eos'}
