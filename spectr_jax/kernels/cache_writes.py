"""Writes of kept entries into a cache, in place.

CPUs and TPUs have forms of their own because there XLA turns the plain scatter into a copy of the whole cache: on CPUs
in another type, on TPUs in another layout.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation

_MOST_SELECTED = 128  # entries; a prefill may write more, once


@operation
def write_slots(array: jax.Array, pending: jax.Array, path: jax.Array, slots: jax.Array, axis: int) -> jax.Array:
  """The array with pending entries `path`, int32 `[B, D]`, in `slots`, int32 `[B, D]`; those from S on are dropped.

  `axis`, 2 or 3, is that of the S slots of the array `[B, H, ...]`, and of the M entries of `pending`.
  """

  # Row by row and not by indices of rows, so that the compiler sees that no row of another device is needed.
  def keep(row, pending, path, slots):
    before = (slice(None),) * (axis - 1)
    return row.at[*before, slots].set(pending[*before, path], mode='drop')

  return jax.vmap(keep)(array, pending, path, slots)


@operation
def write_rows(rows: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
  """`rows` `[B, S, ...]` with `values` `[B, D, ...]` at `slots` `[B, D]`; slots beyond S are dropped."""
  return jax.vmap(lambda row, slots, values: row.at[slots].set(values, mode='drop'))(rows, slots, values)


@operation
def fastest_cache_dtype(dtype: str) -> str | None:
  """The type of caches that are written fastest for a network of a type; None for its own type."""
  return None


@fastest_cache_dtype.form('cpu', takes=lambda dtype: dtype == 'bfloat16')
def _wide(dtype):
  return 'float32'


def _bits(array):
  return jax.lax.bitcast_convert_type(array, jnp.uint16)


def _is_bfloat16(array, *_):
  return array.dtype == jnp.bfloat16


# XLA on CPUs would convert the whole array to float32 and back.
@write_slots.form('cpu', takes=_is_bfloat16)
def _write_slots_as_integers(array, pending, path, slots, axis):
  return jax.lax.bitcast_convert_type(write_slots.plain(_bits(array), _bits(pending), path, slots, axis), array.dtype)


@write_rows.form('cpu', takes=_is_bfloat16)
def _write_rows_as_integers(rows, slots, values):
  return jax.lax.bitcast_convert_type(write_rows.plain(_bits(rows), slots, _bits(values)), rows.dtype)


@write_slots.form('tpu', takes=lambda array, pending, path, slots, axis: path.shape[1] <= _MOST_SELECTED)
def _select(array, pending, path, slots, axis):
  """Writes by a product with one term per pending entry for every slot of the cache.

  For a scatter, XLA on TPUs keeps the cache with slots in front and pads the rest to multiples of 8 heads and 128
  numbers. That takes several times the memory, and a conversion for attention in every round.
  """
  size, num_pending = array.shape[axis], pending.shape[axis]
  wide = tuple(i for i in range(1, 4) if i != axis)
  # An entry may not be finite where nothing reads it, and 0 times it would not be 0.
  is_from = path[:, :, None] == jnp.arange(num_pending)
  is_here = slots[:, :, None] == jnp.arange(size)
  is_read = jnp.any(is_from & (slots < size)[:, :, None], axis=1)
  new = jnp.where(jnp.expand_dims(is_read, wide), pending, 0)
  # A product with zeros and a single one is exact.
  goes = jnp.einsum('bjm,bjs->bms', is_from.astype(new.dtype), is_here.astype(new.dtype))
  spread = jnp.einsum({2: 'bhmd,bms->bhsd', 3: 'bhdm,bms->bhds'}[axis], new, goes, precision=jax.lax.Precision.HIGHEST)
  return jnp.where(jnp.expand_dims(is_here.any(axis=1), wide), spread, array)
