"""Products of rows and kernels in blocks of 4 or 8 bits, as `.gguf` files have them.

Inputs are rounded to 8 bits, each block of a row with a scale of its own, as llama.cpp does: sums over a block are then
sums of integers, which are exact. A row's product does not depend on the rows beside it, so a model that computes so has
one distribution, whether a draft guesses ahead or not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels import native
from spectr_jax.kernels.dispatch import operation

_LARGEST = 127  # magnitude of a rounded input


def rounded_inputs(rows: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
  """Inputs as 8 bits.

  Args:
    rows: `[N, in]`.
    num_blocks: Blocks of a row, which divide it.

  Returns:
    float32 `[N, num_blocks, block]`, integers from -127 to 127, and float32 `[N, num_blocks]`, what they are multiplied
    with: NaN where an input of the block is not finite.
  """
  blocks = rows.astype(jnp.float32).reshape(rows.shape[0], num_blocks, -1)
  largest = jnp.max(jnp.abs(blocks), axis=-1)
  factor = jnp.where(largest > 0, _LARGEST / largest, 0)
  scale = jnp.where(jnp.isfinite(largest), largest / _LARGEST, jnp.nan)
  return jnp.round(blocks * factor[..., None]), scale


def block_values(weights: jax.Array, num_bits: int) -> jax.Array:
  """The integers of a kernel in blocks.

  Args:
    weights: uint8 `[..., lines, 16, 4]`, as of `BlockKernel`.
    num_bits: 4 or 8.

  Returns:
    float32 `[..., block, 16]`: from 0 to 15 in 4 bits, from -128 to 127 in 8.
  """
  if num_bits == 4:
    weights = jnp.concatenate([weights & 15, weights >> 4], axis=-3)
  else:
    weights = jax.lax.bitcast_convert_type(weights, jnp.int8)
  inputs_last = jnp.moveaxis(weights, -1, -2)  # [..., lines, 4, 16]
  return inputs_last.reshape(*weights.shape[:-3], -1, weights.shape[-2]).astype(jnp.float32)


@operation
def block_product(
  rows: jax.Array, weights: jax.Array, scales: jax.Array, least: jax.Array | None, num_out: int
) -> jax.Array:
  """The product of rows, rounded to 8 bits, and a kernel in blocks.

  Args:
    rows: `[N, in]` in float32 or bfloat16.
    weights: uint8 `[P, blocks, lines, 16, 4]`, the kernel's integers in panels of 16 outputs, see `BlockKernel`.
    scales: float16 or float32 `[P, blocks, 16]`, what the integers are multiplied with.
    least: Likewise, what is added to their products in 4 bits; None in 8 bits.
    num_out: The kernel's outputs.

  Returns:
    float32 `[N, num_out]`.
  """
  num_blocks = weights.shape[1]
  inputs, input_scales = rounded_inputs(rows, num_blocks)

  def add(block, sums):
    own = jax.lax.dynamic_index_in_dim(weights, block, axis=1, keepdims=False)
    values = block_values(own, 8 if least is None else 4)
    some = jax.lax.dynamic_index_in_dim(inputs, block, axis=1, keepdims=False)
    scale = jax.lax.dynamic_index_in_dim(input_scales, block, axis=1, keepdims=False)[:, None, None]
    products = jnp.einsum('ni,pio->npo', some, values, precision='highest')
    sums += products * (scale * jax.lax.dynamic_index_in_dim(scales, block, axis=1, keepdims=False).astype(jnp.float32))
    if least is None:
      return sums
    total = scale * jnp.sum(some, axis=-1)[:, None, None]
    return sums + total * jax.lax.dynamic_index_in_dim(least, block, axis=1, keepdims=False).astype(jnp.float32)

  zeros = jnp.zeros((rows.shape[0], weights.shape[0], native.PANEL), jnp.float32)
  sums = jax.lax.fori_loop(0, num_blocks, add, zeros)
  return sums.reshape(rows.shape[0], -1)[:, :num_out]


@block_product.form('cpu', takes=lambda *operands: native.form() is not None)
def _native(rows, weights, scales, least, num_out):
  return native.block_product(rows, weights, scales, least, num_out)
