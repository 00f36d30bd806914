"""The layout of distributions in memory."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from spectr_jax.kernels.dispatch import by_platform
from spectr_jax.sharding import dividing_axes, shards_in_program


def in_rows(laws: jax.Array) -> jax.Array:
  """Distributions `[..., V]`, on a TPU with each in one piece, or with its part of each on a device.

  The compiler may put the distributions of all nodes side by side, token by token. That suits one sum over all of them,
  and costs copies wherever a few are read.

  Args:
    laws: The distributions.
  """
  layout = Layout(major_to_minor=tuple(range(laws.ndim)))
  axes = dividing_axes()

  def constrain(laws):
    return with_layout_constraint(laws, layout)

  if len(axes) > 1 or (axes and shards_in_program(laws.shape[-1]) == 1):
    return laws
  if axes:  # the compiler would gather what it is to lay out
    divided = PartitionSpec(*[None] * (laws.ndim - 1), axes[0])
    constrain = jax.shard_map(
      constrain, in_specs=divided, out_specs=divided, axis_names=set(axes), check_vma=False
    )  # fmt: skip
  return by_platform(laws, tpu=constrain, default=lambda laws: laws)
