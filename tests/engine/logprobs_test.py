"""Log probabilities of new tokens, against forwards of the whole text without a cache."""

import dataclasses

import numpy as np
import pytest

import spectr_jax
from tests.engine.runs import KINDS, LENGTHS, NEW, PROMPTS, assert_same, begin, generate, make_keys
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures('highest')


@pytest.fixture(scope='module')
def expected(target, uncached_logits):
  """`(prompt, tokens) -> [NEW]`: log probabilities of the tokens after a prompt, NaN beyond them."""

  def expected(prompt, tokens):
    texts = [[*prompt, *tokens[:i]] for i in range(len(tokens))]
    logits = np.float64(uncached_logits(target, texts + texts[-1:] * (NEW - len(texts))))[: len(texts)]
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.append(log_probs[np.arange(len(tokens)), tokens], np.full(NEW - len(tokens), np.nan))

  return expected


@pytest.mark.parametrize('method', slow_but(('race_traversal',), KINDS))
def test_are_those_of_a_forward_without_a_cache(target, draft, expected, method):
  """In a ragged batch, whatever tokens are sampled from, with a row that ends early."""
  options = {'temperature': np.array([0.7, 1.0, 1.3, 0.0]), 'top_k': 6, 'min_p': 0.05}
  result = generate((target, draft), method, make_keys(), eos_id=(3, 5, 7, 9, 11, 13), logprobs=True, **options)
  assert result.logprobs.dtype == np.float32
  assert (np.asarray(result.lengths) < NEW).any()
  for row, length in enumerate(np.asarray(result.lengths)):
    wanted = expected(PROMPTS[row, : LENGTHS[row]].tolist(), result.tokens[row, :length].tolist())
    np.testing.assert_allclose(result.logprobs[row], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_grow_with_the_rounds_and_change_nothing_else(tables):
  plain = generate(tables, 'spectr', make_keys(3))
  assert plain.logprobs is None
  decoder, state = begin(tables, 'spectr', make_keys(3), logprobs=True)
  while not np.asarray(state.is_done).all():
    state = spectr_jax.engine.decode_rounds(decoder, state, 1)
    # The target excludes some tokens, and none of them is emitted.
    np.testing.assert_array_equal(np.isfinite(state.result.logprobs), np.asarray(state.result.tokens) >= 0)
  assert_same(plain, dataclasses.replace(state.result.of_size(NEW), logprobs=None))
