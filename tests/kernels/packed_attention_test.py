"""Attention within packed documents: the kernel for TPUs, interpreted, beside attention in blocks of queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import packed_attention
from spectr_jax.kernels.attention import attend
from spectr_jax.sharding import make_mesh


def arrays_of(num_tokens, dtype=jnp.float32, *, batch_size=2, num_heads=2, head_dim=16):
  keys = jax.random.split(jax.random.key(0), 4)
  query = jax.random.normal(keys[0], (batch_size, num_tokens, num_heads, head_dim), dtype)
  new_keys = jax.random.normal(keys[1], (batch_size, num_heads, head_dim, num_tokens), dtype)
  values = jax.random.normal(keys[2], (batch_size, num_heads, num_tokens, head_dim), dtype)
  begins = jax.random.bernoulli(keys[3], 4 / num_tokens, (batch_size, num_tokens))
  return query, new_keys, values, jnp.cumsum(begins, axis=1)[:, None]


def by_one_product(query, keys, values, documents):
  places = jnp.arange(documents.shape[-1])
  mask = (documents[:, 0, :, None] == documents) & (places[:, None] >= places)
  return attend(query, keys, values, mask)


def value_and_grads(attend_fn, arrays):
  def loss(*arrays):
    return jnp.sum(jnp.sin(attend_fn(*arrays, documents).astype(jnp.float32)))

  *differentiated, documents = arrays
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*differentiated)


# 640 tokens are blocks of 128, 256 are one block.
@pytest.mark.parametrize(('num_tokens', 'head_dim'), [(256, 16), (640, 36)])
def test_the_kernel_attends_as_one_product_does(num_tokens, head_dim):
  arrays = arrays_of(num_tokens, head_dim=head_dim)
  found = value_and_grads(lambda *arrays: packed_attention.by_kernel(*arrays, interpret=True), arrays)
  # Sums of float32 in another order.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, value_and_grads(by_one_product, arrays)
  )


def test_the_kernel_in_bfloat16_is_as_near_to_float32_as_attention_in_blocks():
  arrays = arrays_of(256, jnp.bfloat16)
  exact = value_and_grads(by_one_product, [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays])
  by_kernel = value_and_grads(lambda *arrays: packed_attention.by_kernel(*arrays, interpret=True), arrays)
  by_blocks = value_and_grads(packed_attention.attend_packed, arrays)

  def distance(found, wanted):
    return float(jnp.linalg.norm(found.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted))

  kernel_distances, block_distances = (jax.tree.map(distance, found[1], exact[1]) for found in (by_kernel, by_blocks))
  # The kernel keeps its weights in float32. A tenth more than the distance of the blocks is for chance.
  assert all(x <= 1.1 * y for x, y in zip(kernel_distances, block_distances, strict=True))


@pytest.mark.parametrize('num_tokens', [5, 128, 200])
@pytest.mark.parametrize('is_sharded', [False, True])
def test_other_backends_attend_in_blocks(num_tokens, is_sharded):
  mesh = make_mesh({}, jax.devices()[:1]) if is_sharded else None
  arrays = arrays_of(num_tokens)
  found = value_and_grads(lambda *arrays: packed_attention.attend_packed(*arrays, mesh=mesh), arrays)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, value_and_grads(by_one_product, arrays)
  )
