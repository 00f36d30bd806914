"""Kernels of small recursions, whose every step XLA would make a launch: races, brackets of gamma, depths of trees."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spectr_jax.kernels.gamma import narrow_rows
from spectr_jax.kernels.race_fit import Sums, fit
from spectr_jax.kernels.tpu.calls import LANES, call_kernel
from spectr_jax.kernels.tree_steps import ranked

_UNROLLED = 8  # nodes of an integral that are added up before their sum is
_ROWS_TOGETHER = 8  # for which a kernel goes through the depths at the same time, at most
_MOST_BYTES = 4 * 2**20  # of these rows, which are in the vector memory twice


def expm1(x: jax.Array) -> jax.Array:
  """e^x - 1 for kernels, where `jnp.expm1` is not available; with a relative error of a few units in the last place."""
  # x (1 + x/2 (1 + x/3 (...))) to x^9, which is below 1e-9 of the sum for |x| < .5.
  series = jnp.ones_like(x)
  for i in range(9, 1, -1):
    series = 1 + x / i * series
  return jnp.where(jnp.abs(x) < 0.5, x * series, jnp.exp(x) - 1)


def narrow_sections(betas: jax.Array, points: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """`narrow_sections` of M rows, `[M, S + 1]`, in float32; `num_candidates` is `[M]`."""

  def kernel(betas_ref, points_ref, number_ref, next_ref):
    next_ref[...] = narrow_rows(betas_ref[...], points_ref[...], number_ref[...], expm1)

  shape = jax.ShapeDtypeStruct(points.shape, points.dtype)
  return call_kernel(kernel, betas, points, num_candidates[:, None], out_shape=shape, name='narrow_sections')


def fit_races(
  masses: jax.Array,
  num_candidates: jax.Array,
  *,
  nodes: Sequence[float],
  spacing: Sequence[float],
  num_rounds: int,
  step: float,
  log_range: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`fit_race` of M races without given candidates, all arrays float32 with M in front."""
  num_races, num_classes, _ = masses.shape
  tiny = jnp.finfo(masses.dtype).tiny
  integral = jnp.asarray([nodes, spacing], masses.dtype)
  # A point of weight 0 adds nothing.
  integral = jnp.pad(integral, ((0, 0), (0, -len(nodes) % _UNROLLED))).reshape(2, -1, _UNROLLED, 1)

  def power(base, exponent):
    return jnp.exp(exponent * jnp.log(jnp.maximum(base, tiny)))

  def place_of(values):
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)

  def up_to(values):
    return functools.reduce(
      jnp.add, (jnp.where(place_of(values) >= i, values[i : i + 1], 0) for i in range(num_classes))
    )

  def largest(values, is_reached):
    top = jnp.zeros_like(values)
    for i in range(num_classes):
      top = jnp.maximum(top, jnp.where(is_reached(place_of(values), i), values[i : i + 1], 0))
    return top

  sums = Sums(
    up_to,
    lambda values: largest(values, lambda place, i: place >= i),
    lambda values: largest(values, lambda place, i: place <= i),
    power,
    expm1,
  )

  def kernel(integral_ref, masses_ref, number_ref, weights_ref, is_high_ref, probs_ref):
    number = number_ref[...]

    def probs(weights, mass, is_high, low_mass):
      def add(node, spacing):
        decay = jnp.exp(-weights * node)
        arrival = mass * decay
        high = jnp.sum(jnp.where(is_high, arrival, 0), axis=0, keepdims=True) + low_mass
        low = jnp.sum(jnp.where(is_high, 0, arrival), axis=0, keepdims=True)
        others = [power(phi, number - 1) * spacing for phi in (high, low)]
        return jnp.where(is_high, *others) * decay

      def add_several(i, total):
        node, spacing = integral_ref[0, i], integral_ref[1, i]
        return total + sum(add(node[j : j + 1], spacing[j : j + 1]) for j in range(_UNROLLED))

      return number * mass * weights * jax.lax.fori_loop(0, integral_ref.shape[1], add_several, jnp.zeros_like(mass))

    options = {'num_rounds': num_rounds, 'step': step, 'log_range': log_range}
    log_weights, is_high, fitted = fit(sums, probs, masses_ref[0], masses_ref[1], number, **options)
    weights_ref[...] = log_weights
    is_high_ref[...] = is_high.astype(jnp.int32)
    probs_ref[...] = fitted

  # Few races are one block; many come in blocks of all lanes.
  width = num_races if num_races <= LANES else LANES
  padding = -num_races % width
  # A race of padding has one class.
  filled = jnp.pad(jnp.moveaxis(masses, 0, 2), ((0, 0), (0, 0), (0, padding)), constant_values=1 / num_classes)
  number = jnp.pad(num_candidates, (0, padding), constant_values=2)[None]
  size = num_races + padding
  block = pl.BlockSpec((num_classes, width), lambda i: (0, i))
  shape = jax.ShapeDtypeStruct((num_classes, size), masses.dtype)
  log_weights, is_high, probs = call_kernel(
    kernel,
    integral,
    jnp.moveaxis(filled, 1, 0),
    number,
    grid=(size // width,),
    in_specs=[
      pl.BlockSpec(integral.shape, lambda i: (0, 0, 0, 0)),
      pl.BlockSpec((2, num_classes, width), lambda i: (0, 0, i)),
      pl.BlockSpec((1, width), lambda i: (0, i)),
    ],
    out_specs=[block] * 3,
    out_shape=[shape, jax.ShapeDtypeStruct(shape.shape, jnp.int32), shape],
    name='fit_races',
  )
  return log_weights[:, :num_races].T, (is_high != 0)[:, :num_races].T, probs[:, :num_races].T


def race_credits(is_candidate, is_before, is_sibling, shares, log_ratios):
  """`race_credits` of M rows; all arguments and the result with M in front."""
  _, num_depths, width = shares.shape

  def kernel(candidate_ref, before_ref, sibling_ref, share_ref, ratio_ref, credit_ref):
    is_first = jax.lax.broadcasted_iota(jnp.int32, (len(share_ref), width, 1), 1) == 0
    credit = jnp.where(is_first, 0.0, -jnp.inf)
    credit_ref[:, 0:1] = _as_row(credit)
    for depth in range(num_depths):
      share, ratio = share_ref[:, depth : depth + 1], ratio_ref[:, depth : depth + 1]
      above = jnp.sum(jnp.where(candidate_ref[:, depth] != 0, credit, 0), axis=1, keepdims=True)
      passed = jnp.minimum(above + ratio, 0)
      kept_back = -share * expm1(passed)
      before = jnp.where(before_ref[:, depth] != 0, kept_back, share)
      divisor = _as_row(jnp.sum(jnp.where(sibling_ref[:, depth] != 0, before, 0), axis=2, keepdims=True))
      is_open = share > 0
      following = jnp.log(jnp.where(is_open, share / jnp.where(is_open, divisor, 1), 1)) + passed
      following = jnp.where(is_open, jnp.minimum(following, 0), -jnp.inf)
      credit_ref[:, depth + 1 : depth + 2] = following
      credit = _as_column(following)

  masks = (x.astype(jnp.int32) for x in (is_candidate, is_before, is_sibling))
  shape = jax.ShapeDtypeStruct((len(shares), num_depths + 1, width), shares.dtype)
  return _call_by_trees(kernel, *masks, shares, log_ratios, result=shape, name='race_credits')


def first_kept(is_child, is_before, is_kept, nodes):
  """`first_kept` of M rows; all arguments with M in front, the result `[M]`."""
  _, num_depths, width = is_kept.shape
  scale, none = ranked(nodes), width * ranked(nodes)

  def kernel(child_ref, before_ref, own_ref, found_ref):
    first = own_ref[:, num_depths - 1 : num_depths]
    for depth in reversed(range(num_depths - 1)):
      rank = _as_row(jnp.sum(before_ref[:, depth], axis=2, keepdims=True))
      pairs = jnp.where((child_ref[:, depth] != 0) & (first >= 0), rank * scale + first, none)
      smallest = _as_row(jnp.min(pairs, axis=2, keepdims=True))
      # The remainder of the rank, without a division.
      rest = smallest
      for i in range(width - 1, 0, -1):
        rest = jnp.where(smallest >= i * scale, jnp.minimum(rest, smallest - i * scale), rest)
      first = jnp.where(smallest < none, rest, own_ref[:, depth : depth + 1])
    found_ref[...] = first

  own = jnp.where(is_kept, nodes, -1)
  masks = (x.astype(jnp.int32) for x in (is_child, is_before))
  shape = jax.ShapeDtypeStruct((len(own), 1, width), jnp.int32)
  return _call_by_trees(kernel, *masks, own, result=shape, name='first_kept')[:, 0, 0]


def _call_by_trees(kernel, *arrays, result: jax.ShapeDtypeStruct, name: str):
  """A call of a kernel for several entries of the first axis at a time, which take little longer than one."""
  num_together = _rows_together(len(arrays[0]), arrays)

  def block(shape):
    return pl.BlockSpec((num_together, *shape[1:]), lambda i: (i, *[0] * (len(shape) - 1)))

  return call_kernel(
    kernel,
    *arrays,
    grid=(len(arrays[0]) // num_together,),
    in_specs=[block(x.shape) for x in arrays],
    out_specs=block(result.shape),
    out_shape=result,
    name=name,
  )


def _rows_together(num_rows, arrays):
  """A divisor of the number of rows, as large as there is memory for; 1 where a single row is larger."""
  row_bytes = sum(4 * math.prod(x.shape[1:-1]) * -(-x.shape[-1] // LANES) * LANES for x in arrays)
  num_together = math.gcd(num_rows, _ROWS_TOGETHER)
  while num_together > 1 and num_together * row_bytes > _MOST_BYTES:
    num_together //= 2
  return num_together


def _diagonal(size):
  row, column = (jax.lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))
  return row == column


def _as_row(column):
  """`[M, 1, W]` of `[M, W, 1]`, by a sum with one term, which a kernel has the operations for."""
  zero = jnp.zeros((), column.dtype)
  return jnp.sum(jnp.where(_diagonal(column.shape[1]), column, zero), axis=1, keepdims=True)


def _as_column(row):
  return jnp.sum(jnp.where(_diagonal(row.shape[2]), row, jnp.zeros((), row.dtype)), axis=2, keepdims=True)
