"""Thresholds on probabilities, for top-k and top-p.

A search over the bits of a float finds them, without a sort. A CPU bisects, row by row, since several rows do not fit
into its cache together, and no row waits for the slowest. An accelerator tries many thresholds in one pass over the
distributions, which on a mesh is one transfer between devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from spectr_jax.ops.kernels import launch
from spectr_jax.ops.platforms import by_platform
from spectr_jax.ops.threshold_kernels import is_covered, keep_rows, search_parts, step_parts, step_parts_plainly
from spectr_jax.sharding import shards_in_program

THRESHOLDS = 'thresholds'  # the search's scope in compiled programs
THRESHOLD_PASSES = 8  # the most that it takes in float32 on an accelerator
_NUM_SECTIONS = 16
_NUM_PARTS = 8


def largest_threshold(probs: jax.Array, goal: jax.Array, weights: jax.Array | None) -> jax.Array:
  """Finds the largest t such that the tokens with probability at least t have a total weight of `goal` or more.

  Args:
    probs: `[..., V]`, not negative.
    goal: `[...]`, or broadcastable to it.
    weights: `[..., V]`, the tokens' weights; None gives every token the weight 1.

  Returns:
    `[..., 1]`, t; the tokens to keep are those with probability at least t. 0 where all tokens together weigh less.
  """
  goal = jnp.broadcast_to(goal, probs.shape[:-1])
  return by_platform(probs, goal, weights, cpu=_row_by_row, default=_together)


def keep_largest(probs: jax.Array, goal: jax.Array, *, is_weighted: bool) -> jax.Array:
  """Distributions without all but the largest probabilities that together weigh enough, ties included.

  Args:
    probs: `[..., V]`, distributions.
    goal: `[...]`, the weight to keep; a distribution with 0 stays as it is.
    is_weighted: Whether tokens weigh their probability; otherwise each weighs 1.

  Returns:
    Distributions `[..., V]`.
  """
  plain = functools.partial(_keep_largest, is_weighted=is_weighted)
  on_tpu = functools.partial(_keep_by_kernel, is_weighted=is_weighted)
  return by_platform(probs, goal, tpu=on_tpu, default=plain)


def _keep_from(probs, threshold, goal):
  """`keep_largest` by thresholds `[..., 1]`."""
  kept = jnp.where(probs >= threshold, probs, 0)
  return jnp.where(goal[..., None] > 0, kept / jnp.sum(kept, axis=-1, keepdims=True), probs)


def _keep_largest(probs, goal, *, is_weighted):
  """The plain form."""
  threshold = largest_threshold(probs, jnp.where(goal > 0, goal, 1), probs if is_weighted else None)
  return _keep_from(probs, threshold, goal)


def _keep_by_kernel(probs, goal, *, is_weighted):
  """The form of a TPU: whole rows are kept by a kernel; rows that are divided over devices are searched by another."""
  num_shards = shards_in_program(probs.shape[-1])
  axes = _dividing_axes()
  if not is_covered(probs, num_shards) or len(axes) > 1 or (axes and num_shards == 1):
    return _keep_largest(probs, goal, is_weighted=is_weighted)
  rows, goals = probs.reshape(-1, probs.shape[-1]), goal.reshape(-1).astype(probs.dtype)
  if not axes:
    (kept,) = launch(
      lambda *arrays: (_keep_largest(*arrays, is_weighted=is_weighted),),
      lambda *arrays: (keep_rows(*arrays, is_weighted=is_weighted),),
      rows,
      goals,
    )
    return kept.reshape(probs.shape)

  def search(probs, goal):
    forms = (functools.partial(form, is_weighted=is_weighted) for form in (step_parts_plainly, step_parts))
    step = functools.partial(launch, *forms, probs, goal)
    return search_parts(step, lambda sums: jax.lax.psum(sums, axes), goal)

  divided = PartitionSpec(None, axes[0])
  with jax.named_scope(THRESHOLDS):
    found = jax.shard_map(
      search, in_specs=(divided, PartitionSpec()), out_specs=PartitionSpec(), axis_names=set(axes), check_vma=False
    )(rows, goals[:, None])
  return _keep_from(probs, found.reshape(*goal.shape, 1), goal)


def _dividing_axes() -> list[str]:
  """The axes of the mesh over which the compiler divides work."""
  mesh = jax.sharding.get_abstract_mesh()
  named = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return [name for name, size, kind in named if kind != AxisType.Manual and size > 1]


def _together(probs, goal, weights):
  """One search for all rows, which ends with the slowest of them; the plain form."""
  return _search(probs, goal, weights, num_sections=_NUM_SECTIONS, sum_fn=functools.partial(jnp.sum, axis=-1))


def _row_by_row(probs, goal, weights):
  """The search of each row by itself."""
  bisect = functools.partial(_search, num_sections=2, sum_fn=_sum_in_parts)
  if goal.size == 1:
    return bisect(probs, goal, weights)
  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[goal.ndim :]), (probs, goal, weights))
  return jax.lax.map(lambda row: bisect(*row), rows).reshape(*goal.shape, 1)


def _sum_in_parts(values):
  """The sum over the last axis. XLA's CPU backend adds up parts as vectors, and a whole row number by number.

  Each shard of a mesh has parts of its own, so one sum per shard is all that devices exchange. To move parts between
  them would stop the program: on CPUs that waits for every device, and those of other rows may be done searching.
  """
  num_shards = shards_in_program(values.shape[-1])
  if values.shape[-1] % (num_shards * _NUM_PARTS) == 0:
    parts = values.reshape(*values.shape[:-1], num_shards, _NUM_PARTS, -1)
    values = functools.reduce(jnp.add, (parts[..., i, :] for i in range(_NUM_PARTS)))
    return jnp.sum(values, axis=(-2, -1))
  return jnp.sum(values, axis=-1)


def _search(probs, goal, weights, *, num_sections, sum_fn):
  """Cuts the bracket of each row into equal sections, over and over, and keeps the one with the threshold."""
  # Floats that are not negative order like their bits. The search is over bits, which it compares as floats.
  bits_dtype = {4: jnp.int32, 8: jnp.int64}[probs.dtype.itemsize]
  goal = goal[..., None]

  def measure(threshold):
    kept = probs >= jax.lax.bitcast_convert_type(threshold, probs.dtype)
    # As floats, which hold numbers of tokens up to 2^24 exactly and are added up with the masses.
    count = sum_fn(kept.astype(probs.dtype))[..., None]
    mass = count if weights is None else sum_fn(jnp.where(kept, weights, 0))[..., None]
    return mass >= goal, count.astype(jnp.int32)

  def unsettled(carry):
    low, high, low_count, high_count = carry
    # Settled: the next float, or at most one token between the two.
    return jnp.any((high - low > 1) & (low_count - high_count > 1))

  def cut(carry):
    low, high, low_count, high_count = carry
    step = (high - low + num_sections - 1) // num_sections
    points = [low + jnp.minimum(i * step, high - low) for i in range(1, num_sections)]
    for point, (is_enough, count) in zip(points, map(measure, points)):
      # From the lowest on: those with enough raise the lower end, up to the first without, which is the upper one.
      raises, ends = is_enough & (point < high), ~is_enough & (point < high)
      low, low_count = jnp.where(raises, point, low), jnp.where(raises, count, low_count)
      high, high_count = jnp.where(ends, point, high), jnp.where(ends, count, high_count)
    return low, high, low_count, high_count

  high = jax.lax.bitcast_convert_type(jnp.max(probs, axis=-1, keepdims=True), bits_dtype) + 1
  low = jnp.zeros_like(high)
  everything = jnp.full(low.shape, probs.shape[-1], jnp.int32)
  with jax.named_scope(THRESHOLDS):
    low, *_ = jax.lax.while_loop(unsettled, cut, (low, high, everything, jnp.zeros_like(everything)))
  return jax.lax.bitcast_convert_type(low, probs.dtype)
