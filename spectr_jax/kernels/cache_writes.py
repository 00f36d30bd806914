"""Writes of kept entries into a cache, in place.

CPUs and TPUs have forms of their own because there XLA turns the plain scatter into a copy of the whole cache: on CPUs
in another type, on TPUs in another layout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spectr_jax.kernels import native
from spectr_jax.kernels.dispatch import operation

_MOST_SELECTED = 128  # entries; a prefill may write more, once


@operation
def write_slots(
  arrays: Sequence[jax.Array], pending: Sequence[jax.Array], path: jax.Array, slots: jax.Array, axes: Sequence[int]
) -> list[jax.Array]:
  """The arrays with entries `path`, int32 `[B, D]`, of those pending in `slots`, int32 `[B, D]`.

  `axes` are those of the S slots of each array `[B, ...]`, and of the M entries pending for it. Slots from S on are
  dropped; none is negative.
  """

  # Row by row and not by indices of rows, so that the compiler sees that no row of another device is needed.
  def keep(row, pending, path, slots, axis):
    before = (slice(None),) * (axis - 1)
    return row.at[*before, slots].set(pending[*before, path], mode='drop')

  return [
    jax.vmap(functools.partial(keep, axis=axis))(array, own, path, slots)
    for array, own, axis in zip(arrays, pending, axes, strict=True)
  ]


def write_rows(rows: Sequence[jax.Array], slots: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
  """Each of `rows` `[B, S, ...]` with its `values` `[B, D, ...]` at `slots` `[B, D]`; slots from S on are dropped."""
  path = jnp.broadcast_to(jnp.arange(slots.shape[1], dtype=jnp.int32), slots.shape)
  values = [new.astype(old.dtype) for old, new in zip(rows, values, strict=True)]
  return write_slots(rows, values, path, slots, [1] * len(rows))


@operation
def fastest_cache_dtype(dtype: str) -> str | None:
  """The type of caches that are written fastest for a network of a type; None for its own type."""
  return None


@fastest_cache_dtype.form('cpu', takes=lambda dtype: dtype == 'bfloat16')
def _wide(dtype):
  return 'float32'


def _bits(array):
  return jax.lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


@write_slots.form('cpu')
def _write_slots_as_integers(arrays, pending, path, slots, axes):
  """XLA on CPUs would convert whole arrays of bfloat16 to float32 and back."""
  written = write_slots.plain([*map(_bits, arrays)], [*map(_bits, pending)], path, slots, axes)
  return [jax.lax.bitcast_convert_type(new, old.dtype) for new, old in zip(written, arrays)]


write_slots.register('cpu', native.write, takes=lambda *_: native.takes())


@write_slots.form('tpu', takes=lambda arrays, pending, path, slots, axes: path.shape[1] <= _MOST_SELECTED)
def _select_of_all(arrays, pending, path, slots, axes):
  kept = zip(arrays, pending, axes, strict=True)
  return [
    write_slots.plain([array], [own], path, slots, [axis])[0] if axis == 1 else _select(array, own, path, slots, axis)
    for array, own, axis in kept
  ]


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
