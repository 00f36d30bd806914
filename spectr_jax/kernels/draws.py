"""Draws of tokens by the inversion of a cumulative sum in two levels: sums of blocks, then the tokens of one.

XLA makes some twenty launches of a draw on a TPU, and reads the distributions twice. The kernel reads them once from
memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels import native
from spectr_jax.kernels.blocks import SMALL, fits_kernels, in_blocks, on_each_device
from spectr_jax.kernels.dispatch import launch, lazy, operation

_MOST_DRAWS = 16  # from one distribution that a kernel takes


@operation
def first_above(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first index of positive weight whose cumulative sum exceeds `level`, int32, and the sum before it.

  If rounding leaves every sum at or below the level, it is the last index of positive weight. `weights` `[n]` are some
  hundreds, not negative, the same on all devices.
  """
  cumulative = jnp.cumsum(weights)
  # Rounding can leave every sum at or below the level, and a parallel sum can rise at a weight of 0. So only positive
  # weights are eligible, and the last of them is taken if no sum is above.
  is_positive = weights > 0
  is_above = (cumulative > level) & is_positive
  # Not by `argmax`: a GPU takes ten times as long for it as for a minimum.
  size = weights.shape[0]
  places = jnp.arange(size, dtype=jnp.int32)
  first = jnp.min(jnp.where(is_above, places, size))
  last_positive = jnp.max(jnp.where(is_positive, places, -1))
  index = jnp.where(first < size, first, jnp.where(last_positive < 0, size - 1, last_positive))
  return index, cumulative[index] - weights[index]


first_above.register_kernel(
  'tpu', 'tpu.distributions:first_above', takes=lambda weights, level: weights.dtype == jnp.float32
)


@operation
def draw_several(uniforms: jax.Array, weights: jax.Array) -> jax.Array:
  """Draws tokens by `uniforms` `[K]` in [0, 1), int32, in proportion to `weights` `[V]`; none of weight 0."""
  return jax.vmap(_draw, (0, None))(uniforms, weights)


def _draw(uniform, weights):
  if weights.shape[0] <= SMALL:
    return first_above.plain(weights, uniform * jnp.sum(weights))[0]
  blocks, first_of = in_blocks(weights, 0)
  sums = on_each_device(jnp.sum(blocks, axis=-1))
  level = uniform * jnp.sum(sums)
  row, before = first_above(sums, level)
  column, _ = first_above(blocks[row], level - before)
  return (first_of(row) + column).astype(jnp.int32)


draw_several.register('cpu', native.draw_several, takes=lambda uniforms, weights: native.takes(uniforms, weights))


def _takes_draws(uniforms, weights):
  return fits_kernels(weights) and len(uniforms) <= _MOST_DRAWS


@draw_several.form('tpu', takes=_takes_draws)
def _draw_by_kernel(uniforms, weights):
  plain = jax.vmap(draw_several.plain)
  return launch(plain, lazy('tpu.distributions:draw_tokens'), uniforms[None].astype(weights.dtype), weights[None])[0]
