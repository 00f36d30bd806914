"""Losses summed block by block: values and gradients beside those of all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.models.transformer import TransformerConfig, init_params
from train import step
from train.blocks import sum_over_blocks

BOS = 1


@pytest.mark.parametrize('size', [1, 3, 4, 7, 20])
def test_sums_and_gradients_are_those_of_all_tokens(size):
  keys = jax.random.split(jax.random.key(0), 3)
  kernel, inputs, shift = (jax.random.normal(key, shape) for key, shape in zip(keys, [(5, 6), (2, 7, 5), (6,)]))
  weights = jnp.arange(14.0).reshape(2, 7)

  def sums(kernel, inputs, shift, weights):
    values = jax.nn.logsumexp(inputs @ kernel + shift, axis=-1)
    return jnp.sum(values * weights), {'squares': jnp.sum(values**2 * weights)}

  def loss(kernel, inputs, size):
    total, others = sum_over_blocks(sums, kernel, inputs, shift, weights, size=size)
    return 3 * total, others

  differentiate = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
  found, expected = differentiate(kernel, inputs, size), differentiate(kernel, inputs, 7)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)
  np.testing.assert_allclose(jax.jit(loss, static_argnums=2)(kernel, inputs, size)[0], expected[0][0], rtol=1e-5)


@pytest.mark.parametrize(('by', 'num_products'), [((0,), 2), ((1,), 2), ((0, 1), 3)])
def test_gradients_are_taken_by_what_they_are_asked_for_alone(by, num_products):
  """A frozen output head costs no product of its own."""
  kernel, inputs = jnp.ones((5, 6)) / 3, jnp.arange(70.0).reshape(2, 7, 5) / 35
  weights = jnp.arange(14.0).reshape(2, 7)

  def sums(kernel, inputs, _, weights):
    return jnp.sum(jax.nn.logsumexp(inputs @ kernel, axis=-1) * weights), ()

  def loss(kernel, inputs, size):
    return sum_over_blocks(sums, kernel, inputs, (), weights, size=size)[0]

  grad = jax.grad(loss, by)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), grad(kernel, inputs, 3), grad(kernel, inputs, 7)
  )
  assert str(jax.make_jaxpr(grad, static_argnums=2)(kernel, inputs, 3)).count('dot_general') == num_products


@pytest.mark.parametrize('scale', [1.0, 30.0, 1e4])
@pytest.mark.parametrize('shift', [0.0, 70.0, -70.0, 1e4, -1e4])
def test_totals_of_logits_of_any_size(scale, shift):
  """Beyond 88 an exponential of float32 overflows, below -103 it is 0."""
  logits = np.float32(scale * np.random.default_rng(0).normal(size=(3, 50)) + shift)
  exact = np.float64(logits)
  top = exact.max(-1)
  wanted = top + np.log(np.exp(exact - top[:, None]).sum(-1))
  np.testing.assert_allclose(jax.jit(step.log_total)(logits), wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize('share', [None, 1.0, 0.25])
def test_the_loss_of_training_is_the_sum_of_the_losses_of_tokens(share, monkeypatch):
  config = TransformerConfig(40, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, max_length=24)
  params, other = (jax.tree.map(lambda x: 2 * x, init_params(jax.random.key(seed), config)) for seed in (0, 1))
  rows = np.random.default_rng(0).integers(2, 40, (2, 14))
  rows[:, [0, 6]] = BOS
  teacher = None if share is None else step.Teacher(other, config, share)
  monkeypatch.setattr(step, '_BLOCK_LOGITS', 2 * 4 * 40)  # 13 tokens in blocks of 4

  def whole(params):
    losses, weights = step.token_losses(params, rows, step.Learner(config, BOS), teacher)
    return losses.sum(), weights.sum()

  def in_blocks(params):
    return step.summed_losses(params, rows, step.Learner(config, BOS), teacher)

  (expected, count), wanted = jax.jit(jax.value_and_grad(whole, has_aux=True))(params)
  (found, found_count), grads = jax.jit(jax.value_and_grad(in_blocks, has_aux=True))(params)
  assert found_count == count == 24
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), grads, wanted)


def test_no_array_of_all_logits_is_made(monkeypatch):
  config = TransformerConfig(1000, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, max_length=64)
  params = init_params(jax.random.key(0), config)
  rows = np.full((2, 65), 5)
  monkeypatch.setattr(step, '_BLOCK_LOGITS', 2 * 8 * 1000)
  grad = jax.jit(jax.grad(lambda params: step.summed_losses(params, rows, step.Learner(config, BOS))[0]))
  text = grad.lower(params).compile().as_text()
  assert 'f32[2,8,1000]' in text
  assert 'f32[2,64,1000]' not in text
