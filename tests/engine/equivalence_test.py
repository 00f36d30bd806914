"""Equivalences: greedy decoding, one draft, rounds in chunks, under jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import METHODS, TokenTree
from spectr_jax.methods import with_epsilon
from spectr_jax.models.causal_lm import causal_lm, config_of
from tests.engine.runs import (
  KINDS,
  LENGTHS,
  LOSSLESS,
  NEW,
  PROMPTS,
  TREES,
  VERSIONS,
  assert_same,
  begin,
  generate,
  make_keys,
)
from tests.slow import slow, slow_but

pytestmark = pytest.mark.usefixtures('highest')


def _assert_greedy(models, method):
  greedy = generate(models, 'autoregressive', jax.random.key(0), temperature=0.0)
  result = generate(models, method, jax.random.key(1), temperature=0.0)
  np.testing.assert_array_equal(result.tokens, greedy.tokens)
  assert len(np.unique(greedy.tokens)) > 3
  if TREES[method].num_nodes:
    assert (result.num_target_calls < greedy.num_target_calls).any()


@pytest.mark.parametrize('method', slow_but(['spectr', 'greedy_block'], LOSSLESS))
def test_temperature_zero_is_greedy_on_tables(tables, method):
  """Distributions of one token: siblings run out, ratios are 0, 1 or 0/0."""
  sharper = dataclasses.replace(tables[1], params=tables[1].params + 2 * jnp.maximum(tables[0].params, -9.0))
  _assert_greedy((tables[0], sharper), method)


@pytest.mark.parametrize('method', slow_but(['race_traversal'], KINDS))
def test_temperature_zero_is_greedy(target, draft, method):
  _assert_greedy((target, draft), method)


@pytest.mark.slow
@pytest.mark.parametrize('method', slow_but(['race_traversal'], [name for name in KINDS if name != 'autoregressive']))
def test_double_precision(target, draft, method):
  with jax.enable_x64(True):
    models = [
      causal_lm(model.params, dataclasses.replace(config_of(model), dtype='float64')) for model in (target, draft)
    ]
    assert models[0].params['embedding'].dtype == np.float64
    results = [generate(models, name, make_keys(), temperature=0.0) for name in (method, 'autoregressive')]
  np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
  assert results[0].num_target_calls.sum() < results[1].num_target_calls.sum()
  assert results[0].tokens.dtype == results[0].lengths.dtype == np.int32


def test_greedy_is_the_argmax_of_the_text(target, uncached_logits):
  result = generate((target, None), 'autoregressive', jax.random.key(0), temperature=0.0)
  for prompt, length, row in zip(PROMPTS, LENGTHS, np.asarray(result.tokens)):
    text = [*prompt[:length].tolist(), *row.tolist()]
    logits = uncached_logits(target, [text[:end] for end in range(length, length + NEW)])
    np.testing.assert_array_equal(row, logits.argmax(-1))


@pytest.mark.parametrize(
  ('method', 'other'),
  [
    ('spectr', 'speculative'), *(slow(name, 'speculative') for name in ('specinfer', 'batch', 'gsd', 'race')),
    slow('race_block', 'block'), slow('spectr_gbv', 'greedy_block'),
  ],
)  # fmt: skip
def test_with_one_draft_methods_are_the_same(tables, method, other):
  """Token for token: they use the same noise for the same decisions."""
  for seed in range(5):
    assert_same(*(generate(tables, name, make_keys(seed), tree=TokenTree.chains(1, 3)) for name in (method, other)))


@pytest.mark.slow
def test_no_over_acceptance_is_speculative(tables):
  method = with_epsilon(METHODS['decoding_opt'], 0.0)
  for seed in range(3):
    exact = generate(tables, 'speculative', make_keys(seed))
    assert_same(generate(tables, method, make_keys(seed), tree=TREES['speculative']), exact)
    over = generate(tables, 'decoding_opt', make_keys(seed))
    assert (over.tokens != exact.tokens).any()
    assert int(over.num_target_calls.sum()) <= int(exact.num_target_calls.sum())


def _assert_chunks_are_one_run(models, method, chunk, **options):
  decoder, state = begin(models, method, make_keys(6), **options)
  shown = np.asarray(state.result.tokens)
  assert (shown == -1).all()
  num_chunks, has_state = 0, False
  while not state.is_done.all():
    state = spectr_jax.engine.decode_rounds(decoder, state, chunk)
    has_state |= any(np.any(leaf) for leaf in jax.tree.leaves(state.verifier_state))
    # What was shown stays: results can be streamed.
    now = np.asarray(state.result.tokens)
    np.testing.assert_array_equal(now[shown >= 0], shown[shown >= 0])
    shown, num_chunks = now, num_chunks + 1
  whole = generate(models, method, make_keys(6), **options)
  assert_same(state.result.of_size(whole.tokens.shape[1]), whole)
  assert (np.asarray(state.result.tokens[:, whole.tokens.shape[1] :]) == -1).all()  # what the limit cuts off is nowhere
  assert num_chunks == -(-int(whole.num_target_calls.max()) // chunk)
  after = spectr_jax.engine.decode_rounds(decoder, state, 2).result.of_size(whole.tokens.shape[1])
  assert_same(after, whole)  # nothing is left to do
  assert has_state == (method in ('greedy_block', 'spectr_gbv'))


@pytest.mark.slow
@pytest.mark.parametrize('method', list(VERSIONS))
def test_rounds_in_chunks_are_one_run(tables, target, draft, method):
  for chunk in (1, 3):
    _assert_chunks_are_one_run(tables, method, chunk)
  if method in KINDS:
    _assert_chunks_are_one_run((target, draft), method, 1)


def test_chunks_keep_a_state_where_rows_end(tables):
  """A verifier's state outlives a chunk, and rows that have ended do not disturb those that have not."""
  _assert_chunks_are_one_run(tables, 'greedy_block', 1, eos_id=2)


def test_no_rounds_change_nothing(tables):
  decoder, state = begin(tables, 'spectr', make_keys())
  state = spectr_jax.engine.decode_rounds(decoder, state, 0)
  assert (np.asarray(state.result.num_target_calls) == 0).all()
  with pytest.raises(ValueError, match='must not be negative'):
    spectr_jax.engine.decode_rounds(decoder, state, -1)


def test_under_jit(tables):
  @jax.jit
  def run(keys, temperature, prompts, lengths):
    return generate(tables, 'speculative', keys, prompts, lengths, temperature=temperature)

  expected = generate(tables, 'speculative', make_keys(7), temperature=0.8)
  assert_same(run(make_keys(7), 0.8, PROMPTS, LENGTHS), expected)
