"""The inversion of a cumulative sum, with which tokens are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels.launch import as_kernel

_ROWS, _LANES = 8, 128


def first_above(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first index of positive weight whose cumulative sum exceeds `level`, and the sum before it.

  If rounding leaves every sum at or below the level, it is the last index of positive weight.

  Args:
    weights: `[n]`, not negative; some hundreds, the same on all devices.
    level: Scalar.

  Returns:
    int32 scalar; scalar.
  """
  if weights.dtype != jnp.float32:
    return search(weights, level)
  index, before = as_kernel(search, first_above_kernel, weights, level)
  return index, before


def search(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`first_above`, the plain form."""
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


def first_above_kernel(weights: jax.Array, level: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """`first_above` of M entries as a kernel.

  Args:
    weights: float32 `[M, n]`.
    level: float32 `[M]`.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    int32 `[M]`; float32 `[M]`.
  """
  from jax.experimental import pallas as pl

  num_entries, size = weights.shape
  width = size + -size % _LANES
  none = width

  def kernel(level_ref, weights_ref, index_ref, before_ref):
    level = level_ref[...]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (_LANES, _LANES), axis) for axis in (0, 1))
    up_to = jnp.where(row <= column, 1.0, 0.0)
    sum_before = jnp.zeros(level.shape, jnp.float32)
    first, last = jnp.full(level.shape, none), jnp.full(level.shape, -1)
    before_first, before_last = jnp.zeros_like(sum_before), jnp.zeros_like(sum_before)
    for start in range(0, width, _LANES):
      own = weights_ref[:, start : start + _LANES]
      # At full precision, since a token's probability is the difference between two of these sums.
      sums = jnp.dot(own, up_to, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32) + sum_before
      place = start + jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)

      def at(found, place=place, sums=sums, own=own):
        return jnp.sum(jnp.where(place == found, sums - own, 0), axis=1, keepdims=True)

      above = jnp.min(jnp.where((sums > level) & (own > 0), place, none), axis=1, keepdims=True)
      positive = jnp.max(jnp.where(own > 0, place, -1), axis=1, keepdims=True)
      before_first = jnp.where(first == none, at(above), before_first)
      before_last = jnp.where(positive >= 0, at(positive), before_last)
      first, last = jnp.where(first == none, above, first), jnp.where(positive >= 0, positive, last)
      sum_before = sums[:, _LANES - 1 :]
    is_any = first < none
    index_ref[...] = jnp.where(is_any, first, jnp.maximum(last, 0))
    before_ref[...] = jnp.where(is_any, before_first, before_last)

  def block(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  index, before = pl.pallas_call(
    kernel,
    grid=(pl.cdiv(num_entries, _ROWS),),
    in_specs=[block(1), block(width)],
    out_specs=[block(1), block(1)],
    out_shape=[jax.ShapeDtypeStruct((num_entries, 1), dtype) for dtype in (jnp.int32, jnp.float32)],
    interpret=interpret,
    name='first_above',
  )(level[:, None], jnp.pad(weights, ((0, 0), (0, width - size))))
  return index[:, 0], before[:, 0]
