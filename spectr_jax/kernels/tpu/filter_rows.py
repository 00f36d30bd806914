"""Filters of whole rows as TPU kernels.

A pass over a few rows is some hundred cycles of work, a tenth of what a launch takes. So all filters of a row are
within one kernel.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spectr_jax.kernels.filters import Distributions
from spectr_jax.kernels.thresholds import search
from spectr_jax.kernels.tpu.calls import LANES, ROWS, call_kernel

_CHUNK = 4096  # tokens of each row that are visited at a time
_HIGHEST = 0x3F800001  # the bits of the float after 1: no probability is larger
_SECTIONS = 4


def _num_passes() -> int:
  """Passes after which a bracket between 0 and `_HIGHEST` has no float inside."""
  size, count = _HIGHEST, 0
  while size > 1:
    size, count = -(-size // _SECTIONS), count + 1
  return count


@dataclasses.dataclass(frozen=True)
class _KernelDistributions(Distributions):
  """Distributions of eight rows within a kernel; `probs` refers to their D parts, `[D, 8, V / D]`."""

  def _by_lane(self, values_fn, combine, count):
    """Values of all tokens, combined by their place in a register: `count` arrays `[8, 128]`.

    `values_fn` takes the probabilities of some tokens and returns arrays of their shape. `combine` combines two arrays
    that are not negative, in any order; zeros change nothing.
    """
    num_parts, _, size = self.probs.shape
    num_chunks = size // _CHUNK

    def add(totals, part, places):
      for place in places:
        values = values_fn(self.probs[part, :, place])
        missing = LANES - values[0].shape[1]
        values = [jnp.pad(x, ((0, 0), (0, missing))) for x in values] if missing else values
        totals = tuple(map(combine, totals, values))
      return totals

    def add_chunk(part, i, totals):
      return add(totals, part, [pl.ds(i * _CHUNK + j, LANES) for j in range(0, _CHUNK, LANES)])

    totals = tuple(jnp.zeros((ROWS, LANES), jnp.float32) for _ in range(count))
    for part in range(num_parts):
      if num_chunks:
        totals = jax.lax.fori_loop(0, num_chunks, functools.partial(add_chunk, part), totals)
      rest = range(num_chunks * _CHUNK, size, LANES)
      totals = add(totals, part, [slice(start, min(start + LANES, size)) for start in rest])
    return totals

  def _sums(self, thresholds, is_weighted):
    """The sums of the probabilities, or the numbers of tokens, from each of the thresholds on."""
    # Once for all lanes, and not in every turn of the loop.
    thresholds = [jnp.broadcast_to(threshold, (ROWS, LANES)) for threshold in thresholds]

    def values_fn(probs):
      weights = probs if is_weighted else 1.0
      return [jnp.where(probs < threshold[:, : probs.shape[1]], 0.0, weights) for threshold in thresholds]

    return [jnp.sum(x, axis=1, keepdims=True) for x in self._by_lane(values_fn, jnp.add, len(thresholds))]

  def zeros(self):
    return jnp.zeros((ROWS, 1), jnp.float32)

  def largest(self):
    (top,) = self._by_lane(lambda probs: [probs], jnp.maximum, 1)
    return jnp.max(top, axis=1, keepdims=True)

  def mass_from(self, threshold):
    return self._sums([threshold], True)[0]

  def largest_threshold(self, goal, *, is_weighted, above=None):
    del above  # it would save a pass or two, and their number would not be constant

    def measure(point):
      thresholds = [jax.lax.bitcast_convert_type(point(i), jnp.float32) for i in range(1, _SECTIONS)]
      is_enough = [(weight >= goal).astype(jnp.int32) for weight in self._sums(thresholds, is_weighted)]
      return (functools.reduce(jnp.add, is_enough),)

    low = jnp.zeros(goal.shape, jnp.int32)
    bracket = low, jnp.full_like(low, _HIGHEST)
    bits = search(measure, *bracket, num_sections=_SECTIONS, num_passes=_num_passes())
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def keep_in_rows(find, probs: jax.Array, values: jax.Array) -> jax.Array:
  """Filtered rows of `probs`, float32 `[M, V]`, from 0 to 1 but for rounding by one unit in the last place.

  `find` takes `filters.Distributions` of eight rows and their `values` `[8, F]`, and returns columns `[8, 1]`: the
  threshold from which on tokens are kept, and their mass.
  """

  def kernel(probs_ref, values_ref, kept_ref):
    threshold, mass = (
      jnp.broadcast_to(x, (ROWS, LANES)) for x in find(_KernelDistributions(probs_ref), values_ref[...])
    )

    def keep(start, width):
      place = 0, slice(None), pl.ds(start, width)
      probs = probs_ref[place]
      kept_ref[place] = jnp.where(probs < threshold[:, :width], 0, probs) / mass[:, :width]

    size = probs_ref.shape[2]
    num_chunks = size // _CHUNK
    if num_chunks:

      @pl.loop(0, num_chunks)
      def _(i):
        for j in range(0, _CHUNK, LANES):
          keep(i * _CHUNK + j, LANES)

    for start in range(num_chunks * _CHUNK, size, LANES):
      keep(start, min(LANES, size - start))

  return _call(kernel, probs[None], values, probs.shape[1], 'keep_in_rows')


def find_in_rows(find, probs: jax.Array, values: jax.Array) -> jax.Array:
  """The two columns of `find` for rows of `probs`, float32 `[M, D, V / D]` in this order in memory, `[M, 2]`."""

  def kernel(probs_ref, values_ref, found_ref):
    found_ref[0, :, :1], found_ref[0, :, 1:] = find(_KernelDistributions(probs_ref), values_ref[...])

  return _call(kernel, jnp.swapaxes(probs, 0, 1), values, 2, 'find_in_rows')


def _call(kernel, probs, values, width, name):
  """A call of a kernel for eight rows at a time, of probabilities `[D, M, V / D]` and values `[M, F]`: `[M, width]`."""
  num_parts, num_rows, size = probs.shape
  missing = max(0, ROWS - num_rows)  # fewer rows would be in a layout of their own, which takes five times as long
  probs = jnp.pad(probs, ((0, 0), (0, missing), (0, 0)))
  values = jnp.pad(values, ((0, missing), (0, 0)))

  def rows(num_parts, width):
    return pl.BlockSpec((num_parts, ROWS, width), lambda i: (0, i, 0))

  results = call_kernel(
    kernel,
    probs,
    values,
    grid=(pl.cdiv(num_rows, ROWS),),
    in_specs=[rows(num_parts, size), pl.BlockSpec((ROWS, values.shape[1]), lambda i: (i, 0))],
    out_specs=rows(1, width),
    out_shape=jax.ShapeDtypeStruct((1, num_rows + missing, width), probs.dtype),
    needs_memory=True,
    name=name,
  )
  return results[0, :num_rows]
