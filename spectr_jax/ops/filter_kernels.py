"""Filters of whole rows as TPU kernels.

A pass over a few rows is some hundred cycles of work, a tenth of what a launch takes. So all filters of a row are
within one kernel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

MOST_TOKENS = 2**18  # per row: eight rows of them are in the vector memory, twice
_ROWS = 8
_CHUNK = 2048  # tokens of each row that are visited at a time
_MEMORY = 64 * 2**20
_HIGHEST = 0x3F800001  # the bits of the float after 1: no probability is larger
_SECTIONS = 4


def _num_passes() -> int:
  """Passes after which a bracket between 0 and `_HIGHEST` has no float inside."""
  size, count = _HIGHEST, 0
  while size > 1:
    size, count = -(-size // _SECTIONS), count + 1
  return count


def _points(low, high):
  """The bits between sections, equally far from each other and not above the upper end."""
  step = jax.lax.div(high - low + _SECTIONS - 1, _SECTIONS)
  return [jnp.minimum(low + i * step, high) for i in range(1, _SECTIONS)]


def _narrow(low, high, points, is_enough):
  """The section with the threshold: from the last point with enough to the first without."""
  for point, enough in zip(points, is_enough):
    low = jnp.where(enough & (point < high), jnp.maximum(point, low), low)
  for point, enough in zip(reversed(points), reversed(list(is_enough))):
    high = jnp.where(~enough & (point < high), point, high)
  return low, high


@dataclasses.dataclass(frozen=True)
class _KernelLaws:
  """`filters.Laws` of eight rows `[8, V]` within a kernel."""

  ref: Any

  def visit(self, add, totals):
    """`totals` after `add(totals, probs)` of the rows' parts, from the first to the last, each `[8, 128]` or less."""
    from jax.experimental import pallas as pl

    size = self.ref.shape[1]

    def add_chunk(i, totals):
      for j in range(0, _CHUNK, 128):
        totals = add(totals, self.ref[:, pl.ds(i * _CHUNK + j, 128)])
      return totals

    num_chunks = size // _CHUNK
    if num_chunks:
      totals = jax.lax.fori_loop(0, num_chunks, add_chunk, totals)
    for start in range(num_chunks * _CHUNK, size, 128):
      totals = add(totals, self.ref[:, start : min(start + 128, size)])
    return totals

  def _sums(self, thresholds, is_weighted):
    """The sums of the probabilities, or the numbers of tokens, from each of the thresholds on."""
    # Once for all lanes, and not in every turn of the loop.
    thresholds = [jnp.broadcast_to(threshold, (_ROWS, 128)) for threshold in thresholds]

    def add(totals, probs):
      width = probs.shape[1]
      kept = [jnp.where(probs < threshold[:, :width], 0.0, probs if is_weighted else 1.0) for threshold in thresholds]
      kept = [part if width == 128 else jnp.pad(part, ((0, 0), (0, 128 - width))) for part in kept]
      return tuple(total + part for total, part in zip(totals, kept))

    totals = self.visit(add, tuple(jnp.zeros((_ROWS, 128), jnp.float32) for _ in thresholds))
    return [jnp.sum(total, axis=1, keepdims=True) for total in totals]

  def largest(self):
    def add(top, probs):
      width = probs.shape[1]
      return jnp.maximum(top, probs if width == 128 else jnp.pad(probs, ((0, 0), (0, 128 - width))))

    return jnp.max(self.visit(add, jnp.zeros((_ROWS, 128), jnp.float32)), axis=1, keepdims=True)

  def mass_from(self, threshold):
    return self._sums([threshold], True)[0]

  def largest_threshold(self, goal, *, is_weighted, above=None):
    def cut(_, bracket):
      low, high = bracket
      points = _points(low, high)
      sums = self._sums([jax.lax.bitcast_convert_type(point, jnp.float32) for point in points], is_weighted)
      return _narrow(low, high, points, [found >= goal for found in sums])

    lowest = jnp.zeros(goal.shape, jnp.float32) if above is None else above[0]
    low = jax.lax.bitcast_convert_type(lowest, jnp.int32)
    low, _ = jax.lax.fori_loop(0, _num_passes(), cut, (low, jnp.full_like(low, _HIGHEST)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def keep_in_rows(find, probs: jax.Array, *values: jax.Array, interpret: bool = False) -> tuple[jax.Array]:
  """Filtered rows.

  Args:
    find: Takes `filters.Laws` of eight rows and values, columns `[8, 1]`, and returns columns: the threshold from which
      on tokens are kept, and their mass.
    probs: float32 `[M, V]`, from 0 to 1 but for rounding by one unit in the last place.
    *values: float32 `[M, 1]`.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    `[M, V]`.
  """

  def kernel(probs_ref, *refs):
    *value_refs, kept_ref = refs
    found = find(_KernelLaws(probs_ref), *(ref[...] for ref in value_refs))
    threshold, mass = (jnp.broadcast_to(column, (_ROWS, 128)) for column in found)

    from jax.experimental import pallas as pl

    def keep(place):
      probs = probs_ref[:, place]
      width = probs.shape[1]
      kept_ref[:, place] = jnp.where(probs < threshold[:, :width], 0, probs) / mass[:, :width]

    size = probs_ref.shape[1]
    num_chunks = size // _CHUNK
    if num_chunks:

      @pl.loop(0, num_chunks)
      def _(i):
        for j in range(0, _CHUNK, 128):
          keep(pl.ds(i * _CHUNK + j, 128))

    for start in range(num_chunks * _CHUNK, size, 128):
      keep(pl.ds(start, min(128, size - start)))

  return (_call(kernel, probs, values, [probs.shape[1]], interpret, 'keep_in_rows')[0],)


def find_in_rows(find, probs: jax.Array, *values: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """What `find` finds for rows, columns `[M, 1]`; arguments as of `keep_in_rows`."""

  def kernel(probs_ref, *refs):
    *value_refs, threshold_ref, mass_ref = refs
    threshold_ref[...], mass_ref[...] = find(_KernelLaws(probs_ref), *(ref[...] for ref in value_refs))

  threshold, mass = _call(kernel, probs, values, [1, 1], interpret, 'find_in_rows')
  return threshold, mass


def _call(kernel, probs, values, widths, interpret, name):
  """A call of a kernel for eight rows at a time, whose results are float32 and have these widths."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  num_rows = len(probs)
  if num_rows < _ROWS:  # fewer would be in a layout of their own, which takes five times as long
    probs, *values = (jnp.pad(x, ((0, _ROWS - num_rows), (0, 0))) for x in (probs, *values))

  def block(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  found = pl.pallas_call(
    kernel,
    grid=(pl.cdiv(num_rows, _ROWS),),
    in_specs=[block(x.shape[1]) for x in (probs, *values)],
    out_specs=[block(width) for width in widths],
    out_shape=[jax.ShapeDtypeStruct((len(probs), width), jnp.float32) for width in widths],
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    name=name,
  )(probs, *values)
  return [x[:num_rows] for x in found]


def is_covered(probs: jax.Array) -> bool:
  """Whether the kernels take these distributions `[..., V]`."""
  return probs.dtype == jnp.float32 and math.prod(probs.shape) > 0 and probs.shape[-1] <= MOST_TOKENS
