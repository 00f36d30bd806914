"""Attention of many queries in blocks against attention in one piece, rotary angles, and gradients of products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import attention
from spectr_jax.kernels.matrices import matmul

B, N, H, D, S = 3, 7, 2, 4, 21


def _inputs(dtype, *, num_committed=(0, 5, S), window=None):
  rng = np.random.default_rng(0)

  def array(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  slots = np.arange(S) < np.array(num_committed)[:, None, None]
  if window is not None:
    slots = slots & (np.array(num_committed)[:, None, None] + np.arange(N)[:, None] - np.arange(S) < window)
  prefix = array(B, H, D, S).astype(jnp.float32), array(B, H, S, D).astype(jnp.float32), jnp.asarray(slots)
  return array(B, N, H, D), array(B, H, D, N), array(B, H, N, D), jnp.tril(jnp.ones((1, N, N), bool)), prefix


@pytest.mark.parametrize('size', [1, 8, 21, 64])
@pytest.mark.parametrize('soft_cap', [None, 2.0])
@pytest.mark.parametrize('window', [None, 6])
def test_blocks_of_the_prefix_are_the_whole(monkeypatch, size, soft_cap, window):
  """Ragged rows, one of them without a prefix and one whose prefix fills the cache, which no block size divides."""
  monkeypatch.setattr(attention, '_BLOCK_SLOTS', size)
  inputs = _inputs('float32', window=window)
  expected = attention._attend(*inputs, soft_cap=soft_cap)
  found = jax.jit(lambda *x: attention._attend_in_blocks(*x, soft_cap=soft_cap))(*inputs)
  np.testing.assert_allclose(found, expected, atol=2e-6)


def test_blocks_multiply_in_the_type_of_the_queries():
  inputs = _inputs('bfloat16')
  expected = attention._attend(*inputs, soft_cap=None)
  found = attention._attend_in_blocks(*inputs, soft_cap=None)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(found.astype('float32'), expected.astype('float32'), atol=2e-2)


def test_slots_that_no_query_sees_are_not_visited(monkeypatch):
  """NaN behind the committed tokens of the longest row, but for the last block with any of them."""
  monkeypatch.setattr(attention, '_BLOCK_SLOTS', 7)
  query, keys, values, mask, (old_keys, old_values, slots) = _inputs('float32', num_committed=(0, 5, 9))
  bad = jnp.arange(S) >= 14
  old_keys = jnp.where(bad, jnp.nan, old_keys)
  old_values = jnp.where(bad[:, None], jnp.nan, old_values)
  found = attention._attend_in_blocks(query, keys, values, mask, (old_keys, old_values, slots), soft_cap=None)
  assert np.isfinite(found).all()


@pytest.mark.parametrize('positions', [[[0, 0, 0]], [[0, 3, 1000]]])
def test_angles_are_those_of_the_positions(positions):
  """On a CPU they are the result of a branch."""
  positions, frequencies = jnp.array(positions), jnp.array([1.0, 0.1], jnp.float32)
  sin, cos = jax.jit(lambda x: attention.rotary_angles(x, frequencies, magnitude=1.5))(positions)
  angles = np.asarray(positions, np.float32)[:, :, None, None] * np.asarray(frequencies)
  np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-5)
  np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-5)


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_of_a_product_are_products(axis, dtype):
  """Against JAX's own, which are of the accumulation's type; the kernel's gradient is as wide as the kernel."""
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(5, 6)), dtype)
  kernel = jnp.asarray(rng.normal(size=(6, 3) if axis == 0 else (3, 6)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)

  def loss(product):
    return lambda x, kernel: jnp.sum(weights * product(x, kernel))

  def plain(x, kernel):
    kernel = kernel.astype(x.dtype)
    return jnp.matmul(x, kernel if axis == 0 else kernel.T, preferred_element_type=jnp.float32)

  found = jax.grad(loss(lambda x, kernel: matmul(x, kernel, axis=axis)), (0, 1))(x, kernel)
  expected = jax.grad(loss(plain), (0, 1))(x, kernel)
  tolerance = 1e-6 if dtype == 'float32' else 3e-2
  for ours, theirs in zip(found, expected, strict=True):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_allclose(ours.astype('float32'), theirs.astype('float32'), rtol=tolerance, atol=tolerance)


def test_a_loop_of_products_with_a_bfloat16_row_keeps_no_float32_copy_of_the_kernel():
  kernel = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

  @jax.jit
  def multiply(row, kernel, num_steps):
    return jax.lax.fori_loop(0, num_steps, lambda _, row: matmul(row, kernel).astype(row.dtype), row)

  # With the pass that moves code out of loops, which the tests do without.
  compiled = multiply.lower(jax.ShapeDtypeStruct((1, 512), jnp.bfloat16), kernel, 8).compile(
    {'xla_disable_hlo_passes': ''}
  )
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * kernel.size
