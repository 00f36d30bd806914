"""Top-k, top-p and min-p: filters that keep the tokens whose probability is at least a threshold.

All filters of a row find one threshold together, and the distribution is written once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spectr_jax.kernels.dispatch import launch, lazy, operation
from spectr_jax.kernels.softmax import totals
from spectr_jax.kernels.thresholds import largest_threshold
from spectr_jax.sharding import dividing_axes, shards_in_program

FILTERS = 'filters'  # their scope in compiled programs
# Per row of a kernel: eight rows of them are in the vector memory of a TPU, twice, and what is kept of them.
MOST_TOKENS = 3 * 2**17
keep_in_rows, find_in_rows = lazy('tpu.filter_rows:keep_in_rows'), lazy('tpu.filter_rows:find_in_rows')


@dataclasses.dataclass(frozen=True)
class Distributions:
  """Distributions `[..., V]` as filters see them; all numbers of a distribution are columns `[..., 1]`."""

  probs: Any

  def zeros(self) -> jax.Array:
    return jnp.zeros((*self.probs.shape[:-1], 1), self.probs.dtype)

  def largest(self) -> jax.Array:
    return jnp.max(self.probs, axis=-1, keepdims=True)

  def mass_from(self, threshold: jax.Array) -> jax.Array:
    """The mass of the tokens with probability at least a threshold."""
    return totals(jnp.where(self.probs < threshold, 0, self.probs))

  def largest_threshold(
    self, goal: jax.Array, *, is_weighted: bool, above: tuple[jax.Array, jax.Array] | None = None
  ) -> jax.Array:
    """`thresholds.largest_threshold`, where all arguments are columns."""
    goal = jnp.broadcast_to(goal, (*self.probs.shape[:-1], 1))
    above = None if above is None else (above[0], above[1][..., 0])
    return largest_threshold(self.probs, goal[..., 0], is_weighted=is_weighted, above=above)


@dataclasses.dataclass(frozen=True)
class Filter:
  """A filter, which keeps the tokens whose probability is at least a threshold; with `keeps_all` as its value, all.

  `find` gives the threshold `[..., 1]` of distributions by values `[..., 1]` and the threshold of the filters before
  it, or None if it is the first. It may be any number where the value keeps all.
  """

  keeps_all: float
  find: Callable[[Distributions, jax.Array, jax.Array | None], jax.Array]


def _find_top_k(distributions: Distributions, values: jax.Array, before: jax.Array | None) -> jax.Array:
  del before  # the same tokens are among the k most probable ones
  return distributions.largest_threshold(jnp.maximum(values, 1), is_weighted=False)


def _find_top_p(distributions: Distributions, values: jax.Array, before: jax.Array | None) -> jax.Array:
  if before is None:
    return distributions.largest_threshold(values, is_weighted=True)
  # A row that no filter before has cut gets what it would get alone, without rounding.
  mass = jnp.where(before > 0, distributions.mass_from(before), 1)
  return distributions.largest_threshold(mass * values, is_weighted=True, above=(before, mass))


def _find_min_p(distributions: Distributions, values: jax.Array, before: jax.Array | None) -> jax.Array:
  del before  # the most probable token is always kept
  return values * distributions.largest()


# In their order.
FILTERS_BY_NAME = {
  'top_k': Filter(0, _find_top_k),
  'top_p': Filter(1.0, _find_top_p),
  'min_p': Filter(0.0, _find_min_p),
}


def filtered(probs: jax.Array, values: Mapping[str, jax.Array | None]) -> jax.Array:
  """Distributions `[B, N, V]` after the filters of their rows. Rows that use none stay as they are, to the bit.

  `values` has those of B rows by name of a filter; None for a filter that no row uses.
  """
  names = tuple(name for name in FILTERS_BY_NAME if values[name] is not None)
  if not names:
    return probs
  # The same for all nodes of a row. Numbers of tokens are exact as floats, since no vocabulary has 2^24 of them.
  own = jnp.stack([jnp.asarray(values[name], probs.dtype) for name in names], axis=-1)[:, None]
  with jax.named_scope(FILTERS):
    return apply_filters(probs, own, names)


@operation
def apply_filters(probs: jax.Array, values: jax.Array, names: tuple[str, ...]) -> jax.Array:
  """Distributions `[B, N, V]` after filters `names` with `values` `[B, 1, F]`, of which all rows use some or none."""
  return _if_any(_keep_plainly, probs, values, names)


def _if_any(keep_fn, probs, values, names):
  """The distributions as they are if no row uses a filter."""
  is_used = jnp.any(values != jnp.asarray([FILTERS_BY_NAME[name].keeps_all for name in names], probs.dtype))
  form = functools.partial(keep_fn, functools.partial(_find, names))
  return jax.lax.cond(is_used, form, lambda probs, _: probs, probs, values)


@apply_filters.form('gpu')
def _keep_without_asking(probs, values, names):  # a GPU waits for the host at a choice
  return _keep_plainly(functools.partial(_find, names, asks=False), probs, values)


def _find(
  names: tuple[str, ...], distributions: Distributions, values: jax.Array, *, asks: bool = True
) -> tuple[jax.Array, jax.Array]:
  """The threshold of filters with `values` `[..., F]` and the mass from there on, columns; 0 and 1 for a row without.

  A filter that no row uses is left out if `asks`.
  """
  threshold, is_filtered = None, False
  for i, name in enumerate(names):
    each, own = FILTERS_BY_NAME[name], values[..., i : i + 1]
    is_used = own != each.keeps_all
    lowest = distributions.zeros() if threshold is None else threshold

    def raised(each=each, own=own, before=threshold, is_used=is_used, lowest=lowest):
      return jnp.where(is_used, jnp.maximum(lowest, each.find(distributions, own, before)), lowest)

    threshold = jax.lax.cond(jnp.any(is_used), raised, lambda lowest=lowest: lowest) if asks else raised()
    is_filtered |= is_used
  assert threshold is not None
  return threshold, jnp.where(is_filtered, distributions.mass_from(threshold), 1)


def _keep(probs: jax.Array, threshold: jax.Array, mass: jax.Array) -> jax.Array:
  """Distributions `[..., V]` from thresholds `[..., 1]` on; one that is not finite stays as it is."""
  return jnp.where(probs < threshold, 0, probs) / mass


def _keep_plainly(find, probs, values):
  return _keep(probs, *find(Distributions(probs), values))


def _takes_rows(probs, values, names):
  """Whether a TPU's kernel takes the rows: whole ones, or all divided over the devices of one axis."""
  axes = dividing_axes()
  if probs.dtype != jnp.float32 or not probs.size or probs.shape[-1] > MOST_TOKENS:
    return False
  return not axes or (len(axes) == 1 and shards_in_program(probs.shape[-1]) > 1)


@apply_filters.form('tpu', takes=_takes_rows)
def _keep_on_tpu(probs, values, names):
  return _if_any(_keep_by_kernel, probs, values, names)


def _keep_by_kernel(find, probs, values):
  """By a kernel, which takes whole rows. Of rows that are divided over devices each device gets some, whole."""
  rows, axes = probs.reshape(-1, probs.shape[-1]), dividing_axes()
  values = jnp.broadcast_to(values, (*probs.shape[:-1], values.shape[-1])).reshape(len(rows), -1)
  if not axes:
    kernel = functools.partial(keep_in_rows, find)
    return launch(functools.partial(_keep_plainly, find), kernel, rows, values).reshape(probs.shape)

  columns = jax.shard_map(
    functools.partial(_find_divided, find, axes[0]),
    in_specs=(PartitionSpec(None, axes[0]), PartitionSpec()),
    out_specs=PartitionSpec(),
    axis_names=set(axes),
    check_vma=False,
  )(rows, values)
  return _keep(probs, *jnp.split(columns.reshape(*probs.shape[:-1], 2), 2, axis=-1))


def _find_divided(find, axis, probs, values):
  """What `find` finds, `[M, 2]`, for rows `[M, V]` whose parts are on the devices of an axis, by values `[M, F]`."""
  num_rows, num_devices = len(probs), jax.lax.axis_size(axis)
  own = -(-num_rows // num_devices)
  own += -own % 8 if own > 8 else 0  # whole tiles of memory, which move as they are
  probs, values = (jnp.pad(x, ((0, own * num_devices - num_rows), (0, 0))) for x in (probs, values))
  parts = jax.lax.all_to_all(probs.reshape(num_devices, own, -1), axis, split_axis=0, concat_axis=0)
  values = jax.lax.dynamic_slice_in_dim(values, jax.lax.axis_index(axis) * own, own)

  def find_plainly(parts, values):
    return jnp.concatenate(find(Distributions(parts.reshape(own, -1)), values), axis=-1)

  columns = launch(find_plainly, functools.partial(find_in_rows, find), jnp.swapaxes(parts, 0, 1), values)
  return jax.lax.all_gather(columns, axis, tiled=True)[:num_rows]
