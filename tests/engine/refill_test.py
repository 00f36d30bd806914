"""Many prompts, few rows: every continuation is what its key and prompt alone give."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import METHODS, SamplingParams, TokenTree, generate
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.generate import generate_many
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.reading import init_decode, refill
from spectr_jax.engine.request import Request
from spectr_jax.engine.rows import Rows
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.methods import with_gumbel
from spectr_jax.models.table import table_model
from spectr_jax.sharding import make_mesh
from tests.slow import slow, slow_but

_NEW, _LONGEST, _EOS = 9, 20, 2


def _requests(count, vocab_size=6, seed=1):
  rng = np.random.default_rng(seed)
  keys = jax.random.split(jax.random.key(7), count)
  return [
    Request(f'request {i}', rng.integers(0, vocab_size, rng.integers(1, _LONGEST + 1)).tolist(), keys[i])
    for i in range(count)
  ]


def _by_itself(models, request, **options):
  """Tokens, origins and target calls of `generate`."""
  prompt = np.zeros((1, _LONGEST), np.int32)
  prompt[0, : len(request.tokens)] = request.tokens
  lengths = np.array([len(request.tokens)])
  result = generate(request.key[None], *models, prompt, lengths, **{'max_new_tokens': _NEW} | options)
  length = int(result.lengths[0])
  return result.tokens[0, :length], result.origins[0, :length], int(result.num_target_calls[0])


def _together(models, requests, **options):
  sizes = {'batch_size': 4, 'longest_prompt': _LONGEST, 'max_new_tokens': _NEW}
  return generate_many(*models, iter(requests), **sizes | options)


def _assert_as_by_themselves(models, requests, continuations, **options):
  continuations = {each.name: each for each in continuations}
  assert set(continuations) == {request.name for request in requests}
  for request in requests:
    tokens, origins, num_calls = _by_itself(models, request, **options)
    np.testing.assert_array_equal(continuations[request.name].tokens, tokens, err_msg=request.name)
    np.testing.assert_array_equal(continuations[request.name].origins, origins)
    assert continuations[request.name].num_target_calls == num_calls


@pytest.mark.parametrize(
  ('method', 'tree'),
  [
    slow('autoregressive', None),
    slow('spectr', TokenTree.chains(2, 2)),
    ('greedy_block', TokenTree.chains(1, 3)),  # has a state of its own
    slow('ersd', TokenTree.chains(2, 2)),  # keyed by position
  ],
  ids=['autoregressive', 'spectr', 'greedy_block', 'ersd'],
)
def test_each_is_continued_as_by_itself(tables, method, tree):
  requests = _requests(20)
  options = {'method': method, 'tree': tree, 'eos_id': _EOS, 'sampling': SamplingParams(0.9, top_k=5)}
  continuations = list(_together(tables, requests, rounds_at_a_time=3, **options))
  # Not in order: who is done first is given first.
  assert [each.name for each in continuations] != [request.name for request in requests]
  _assert_as_by_themselves(tables, requests, continuations, **options)
  again = list(_together(tables, requests, rounds_at_a_time=1, batch_size=3, **options))
  _assert_as_by_themselves(tables, requests, again, **options)


@pytest.mark.slow
@pytest.mark.usefixtures('highest')
def test_caches_of_transformers_are_given_on(target, draft):
  """A row's cache holds nothing of the prompt before."""
  requests = _requests(7, target.vocab_size)
  options = {'method': 'race_block', 'tree': TokenTree.chains(2, 2), 'eos_id': _EOS}
  continuations = _together((target, draft), requests, batch_size=2, rounds_at_a_time=2, **options)
  _assert_as_by_themselves((target, draft), requests, continuations, **options)


@pytest.mark.parametrize('count', slow_but([0, 4], [0, 1, 3, 4, 5]))
def test_any_number_of_requests(tables, count):
  options = {'method': 'speculative', 'tree': TokenTree.chains(1, 2)}
  requests = _requests(count)
  _assert_as_by_themselves(tables, requests, _together(tables, requests, **options), **options)


def test_requests_are_taken_when_there_is_a_row(tables):
  taken = 0

  def endless():
    nonlocal taken
    for request in itertools.cycle(_requests(5)):
      taken += 1
      yield request

  options = {'method': 'speculative', 'tree': TokenTree.chains(1, 2), 'batch_size': 4}
  for done, _ in enumerate(itertools.islice(_together(tables, endless(), **options), 50)):
    assert taken <= 4 + done


@pytest.mark.slow
def test_programs_do_not_depend_on_the_number_of_requests(tables, traces):
  options, first = {'method': 'spectr', 'tree': TokenTree.chains(2, 2), 'batch_size': 8}, len(traces['target'])
  list(_together(tables, _requests(20), **options))
  before = len(traces['target'])
  # The first prompts, those that follow, and the round; a trace of one token tells what features there are.
  assert len(set(traces['target'][first:]) - {(8, 1)}) <= 3
  list(_together(tables, _requests(60, seed=2), **options))
  assert len(traces['target']) == before


@pytest.mark.slow
def test_on_a_mesh(tables):
  sharding = DecodeSharding(make_mesh({}, jax.devices()[:1]))
  options = {'method': 'spectr', 'tree': TokenTree.chains(2, 2)}
  continuations = _together(tables, _requests(6), sharding=sharding, **options)
  _assert_as_by_themselves(tables, _requests(6), continuations, **options)


def test_bad_requests_are_named(tables):
  good = _requests(2)
  options = {'method': 'autoregressive'}
  sizes, ids = f'tokens, allowed are 1 to {_LONGEST}', 'ids from .*, the vocabulary is 0 to 5'
  for tokens, message in (
    ([], f'has 0 {sizes}'), ([0] * (_LONGEST + 1), f'has {_LONGEST + 1} {sizes}'), ([0, 6], ids), ([-1], ids),
    ([2**32], ids), (np.array([2**32 + 1]), ids), ([0.5], 'must be integers'), ([[0]], 'must be integers'),
  ):  # fmt: skip
    bad = dataclasses.replace(good[0], name='bad', tokens=tokens)
    with pytest.raises(ValueError, match=f'prompt bad .*{message}'):
      list(_together(tables, [good[1], bad], **options))
  for name in ('batch_size', 'longest_prompt', 'rounds_at_a_time'):
    with pytest.raises(ValueError, match='must be at least 1'):
      list(_together(tables, good, **options | {name: 0}))


def test_logits_that_are_not_finite_are_named(tables):
  target = table_model(tables[0].params.at[5].set(jnp.nan))
  requests = [dataclasses.replace(request, tokens=[0]) for request in _requests(30)]
  with pytest.raises(ValueError, match='prompt request .*: row .*logits of the target are not finite'):
    list(_together((target, tables[1]), requests, method='autoregressive'))


def test_rows_are_refilled_one_by_one(tables):
  """What other rows hold, and how far they are, does not change."""
  options = {'method': with_gumbel(METHODS['autoregressive']), 'max_new_tokens': 6}
  keys, prompts = jax.random.split(jax.random.key(0), 3), np.array([[0, 1], [2, 3], [4, 5]])
  decoder = Decoder.make(*tables, cache_size=12, **options)
  state = init_decode(decoder, keys, prompts, np.array([2, 2, 1]))
  state = decode_rounds(decoder, state, 2)
  before = jax.device_get(state.result)
  state = refill(decoder, state, [1, 3], keys[:2], np.array([[5, 0, 1], [0, 0, 0]]), np.array([3, 1]))
  assert state.result.lengths.tolist() == [2, 0, 2]
  np.testing.assert_array_equal(state.result.tokens[::2], before.tokens[::2])
  result = decode_rounds(decoder, state).result.of_size(6)
  expected = generate(keys[:1], *tables, np.array([[5, 0, 1]]), np.array([3]), **options)
  np.testing.assert_array_equal(result.tokens[1], expected.tokens[0])
  expected = generate(keys, *tables, prompts, np.array([2, 2, 1]), **options)
  np.testing.assert_array_equal(result.tokens[::2], expected.tokens[::2])


def test_rows_that_cannot_be_refilled(tables):
  options = {'method': 'autoregressive', 'max_new_tokens': 6}
  key, prompt = jax.random.key(0), np.array([[1, 2]])
  with pytest.raises(ValueError, match='cache_size must be at least 8'):
    init_decode(Decoder.make(*tables, cache_size=7, **options), key, prompt, np.array([2]))
  decoder = Decoder.make(*tables, cache_size=8, **options)
  state = init_decode(decoder, key, prompt, np.array([2]))
  with pytest.raises(ValueError, match='cache_size must be at least 9'):
    refill(decoder, state, [0], key, np.array([[1, 2, 3]]), np.array([3]))
  with pytest.raises(ValueError, match='max_new_tokens must be at most 6 here, got 7'):
    refill(decoder, state, [0], key, np.array([[1]]), np.array([1]), max_new_tokens=7)
  for rows in ([-1], [0, 0], [0, 1, 2]):
    prompts = np.tile(prompt, (2 if len(rows) > 1 else 1, 1))
    with pytest.raises(ValueError, match='rows must be one different row of 1 for each prompt'):
      refill(decoder, state, rows, key, prompts, np.array([2] * min(len(rows), 2)))


def test_requests_have_their_own_parameters_and_limits(tables):
  """In one batch: a filter first comes with a later request, and rows without filters follow rows with them."""
  options = {'method': 'spectr', 'tree': TokenTree.chains(2, 2), 'eos_id': _EOS}
  own = [None, SamplingParams(0.5), SamplingParams(0), SamplingParams(2.0, top_p=0.6), SamplingParams(1.0, top_k=2)]
  requests = [
    dataclasses.replace(each, sampling=own[i % 5], max_new_tokens=(None, 3, 1, 7)[i % 4])
    for i, each in enumerate(_requests(11))
  ]
  common = SamplingParams(0.8)
  continuations = {each.name: each for each in _together(tables, requests, sampling=common, batch_size=3, **options)}
  assert len(continuations) == 11
  for request in requests:
    limit = request.max_new_tokens or _NEW
    tokens, _, num_calls = _by_itself(
      tables, request, sampling=request.sampling or common, max_new_tokens=limit, **options
    )
    assert len(tokens) <= limit
    np.testing.assert_array_equal(continuations[request.name].tokens, tokens, err_msg=str(request))
    assert continuations[request.name].num_target_calls == num_calls


def test_a_row_that_is_not_finite_ends_alone(tables):
  """Its neighbors go on as if it had not been there, and its row takes another request."""

  # Nothing leads to token 5, after which the target has no distribution.
  target, draft = (table_model(table.params.at[:, 5].set(-100.0)) for table in tables)
  target = table_model(target.params.at[5].set(jnp.nan))
  requests = [
    dataclasses.replace(request, tokens=tokens)
    for request, tokens in zip(_requests(4), ([1, 2], [3, 5], [2], [0]), strict=True)
  ]
  options = {'method': 'speculative', 'tree': TokenTree.chains(1, 2)}
  decoder = Decoder.make(target, draft, max_new_tokens=_NEW, cache_size=_LONGEST + _NEW, **options)
  rows = Rows(decoder, batch_size=3, longest_prompt=_LONGEST)
  rows.put(requests[:3])
  failed = [piece for piece in rows.step() if piece.error is not None]
  assert [piece.request for piece in failed] == [requests[1]]
  assert f'row {failed[0].row}, ' in str(failed[0].error)
  rows.end([failed[0].row])
  assert rows.free == [failed[0].row]
  rows.put(requests[3:])
  num_done = 0
  while num_done < 3:
    num_done += sum(piece.is_done for piece in rows.step(2))
  result = rows.result
  for row, request in rows.owners.items():
    expected, _, _ = _by_itself((target, draft), request, **options)
    np.testing.assert_array_equal(result.tokens[row, : result.lengths[row]], expected)
