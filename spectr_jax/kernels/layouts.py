"""The layout of arrays in memory, where the compiler's own choice costs copies on some platform."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from spectr_jax.kernels.dispatch import operation
from spectr_jax.sharding import dividing_axes, shards_in_program


def _as_it_is(array):
  return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


@operation
def in_rows(probs: jax.Array) -> jax.Array:
  """Distributions `[..., V]`, on a TPU with each in one piece, or with its part of each on a device.

  The compiler may put those of all nodes side by side, token by token, which costs copies wherever a few are read.
  """
  return probs


@in_rows.form('tpu')
def _in_rows(probs):
  axes = dividing_axes()
  if not axes:
    return _as_it_is(probs)
  if len(axes) > 1 or shards_in_program(probs.shape[-1]) == 1:
    return probs
  # The compiler would gather what it is to lay out.
  divided = PartitionSpec(*[None] * (probs.ndim - 1), axes[0])
  return jax.shard_map(
    _as_it_is, in_specs=divided, out_specs=divided, axis_names=set(axes), check_vma=False
  )(probs)  # fmt: skip


@operation
def heads_in_order(products: jax.Array) -> jax.Array:
  """The products `[..., N, out]` of queries, keys and values, on a GPU token by token.

  XLA would compute all in the order of the keys in a cache, side by side for one number of a head.
  """
  return products


heads_in_order.register('gpu', _as_it_is, takes=lambda products: products.shape[-2] > 1)
