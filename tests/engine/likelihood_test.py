"""The log likelihood of given texts: that of forwards without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spectr_jax
from spectr_jax import NotFiniteError, log_likelihood
from spectr_jax.engine import likelihood
from spectr_jax.models import causal_lm, transformer

_CONFIG = causal_lm.lm1b_config(17, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, context_length=160)


@pytest.fixture(scope='module')
def model():
  return causal_lm.causal_lm(transformer.init_params(jax.random.key(0), _CONFIG), _CONFIG)


@pytest.fixture(scope='module')
def texts():
  rng = np.random.default_rng(0)
  return [rng.integers(0, 17, length) for length in (1, 2, 16, 70, 131)]


@pytest.fixture(scope='module')
def expected(model, texts):
  """Log probabilities `[P - 1, V]` of each text, by one causal forward of the whole text."""
  forward = transformer.Transformer(_CONFIG).apply

  def of_text(text):
    positions, causal = jnp.arange(len(text))[None], jnp.tril(jnp.ones((len(text),) * 2, bool))
    logits = forward({'params': model.params}, jnp.asarray(text)[None], positions, causal)[0]
    return np.asarray(jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32)))

  return list(map(of_text, texts))


@pytest.mark.slow
def test_every_token_has_the_log_probability_of_a_plain_forward(model, texts, expected):
  result = log_likelihood(model, texts, num_top=3)
  assert result.logprobs.shape == result.is_greedy.shape == (5, 131)
  assert result.top_tokens.shape == result.top_logprobs.shape == (5, 131, 3)
  for row, text in enumerate(texts):
    assert np.isnan(result.logprobs[row, [0, *range(len(text), 131)]]).all()
    assert not result.is_greedy[row, [0, *range(len(text), 131)]].any()
    assert (result.top_tokens[row, len(text) :] == -1).all()
    log_probs, places = expected[row], np.s_[row, 1 : len(text)]
    own = np.take_along_axis(log_probs, text[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(result.logprobs[places], own, atol=1e-4)
    np.testing.assert_array_equal(result.is_greedy[places], log_probs.argmax(1) == text[1:])
    best = np.sort(log_probs, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(result.top_logprobs[places], best, atol=1e-4)
    tops = np.take_along_axis(log_probs, result.top_tokens[places], axis=1)
    np.testing.assert_allclose(tops, best, atol=1e-4)


def test_texts_do_not_depend_on_their_batch(model, texts):
  together = log_likelihood(model, texts)
  for row in (1, 3):
    alone = log_likelihood(model, texts[row : row + 1])
    np.testing.assert_allclose(alone.logprobs[0, 1:], together.logprobs[row, 1 : len(texts[row])], atol=1e-5)


def test_greedy_texts_are_told_from_others(model):
  prompt = np.array([[3, 1, 4]])
  result = spectr_jax.generate(
    jax.random.key(0), model, None, prompt, [3], method='autoregressive', max_new_tokens=9,
    sampling=spectr_jax.SamplingParams(temperature=0), logprobs=True,
  )  # fmt: skip
  text = [*prompt[0], *np.asarray(result.tokens[0])]
  total, is_greedy = log_likelihood(model, [text]).of(0, 3, 12)
  assert is_greedy
  assert total == pytest.approx(float(result.logprobs.sum()), abs=1e-4)
  text[-1] = (text[-1] + 1) % 17
  assert not log_likelihood(model, [text]).of(0, 3, 12)[1]


def test_impossible_tokens_are_minus_infinity(model):
  wider = model.with_vocab_size(20)
  result = log_likelihood(wider, [[3, 19, 2]], num_top=20)
  assert result.logprobs[0, 1] == -np.inf
  assert np.isfinite(result.logprobs[0, 2])
  assert (result.top_logprobs[0, 1] == -np.inf).sum() == 3


def _apply_nan(params, tokens, positions, mask, cache):
  output = causal_lm.causal_lm(params, _CONFIG).apply(tokens, positions, mask, cache)
  is_bad = (tokens == 7)[..., None]
  return dataclasses.replace(output, logits=jnp.where(is_bad, jnp.nan, output.logits))


def test_what_cannot_be_read_is_refused(model):
  for texts, message in (
    ([], 'there is no text'),
    ([[1], []], 'text 1 must be integers'),
    ([[1, 17]], 'text 0 has ids from 1 to 17'),
    ([[1] * 161], 'text 0 has 161 tokens, the model takes 160'),
  ):
    with pytest.raises(ValueError, match=message):
      log_likelihood(model, texts)
  for num_top in (-1, 18, 1.0):
    with pytest.raises(ValueError, match='num_top must be from 0 to 17'):
      log_likelihood(model, [[1]], num_top=num_top)
  broken = dataclasses.replace(model, apply_fn=_apply_nan)
  with pytest.raises(NotFiniteError, match='row 1, '):
    log_likelihood(broken, [[1, 2, 3], [1, 7, 3]])
  assert np.isfinite(log_likelihood(broken, [[1, 2, 3]]).logprobs[0, 1:]).all()


def test_one_width_is_one_program_for_all_lengths(model, texts):
  def wide(text):
    return log_likelihood(model, [text], num_top=2, width=192)

  for text in texts:
    alone = log_likelihood(model, [text], num_top=2)
    before = likelihood._read._cache_size()
    for one, other in zip(alone, wide(text), strict=True):
      assert one.shape == other.shape
      np.testing.assert_allclose(one, other, atol=1e-5)
    assert text is texts[0] or likelihood._read._cache_size() == before
  for width in (0, 100, 128, -64):
    with pytest.raises(ValueError, match='width must be a multiple of 64 of at least 131'):
      log_likelihood(model, [texts[-1]], width=width)
