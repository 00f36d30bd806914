"""Thresholds on probabilities, for top-k and top-p.

A search over the bits of a float finds them, without a sort: floats that are not negative order like their bits. It
cuts the bracket of a threshold into equal sections, over and over, and keeps the one with the threshold. An accelerator
tries all points between sections in one pass over the distributions, which on a mesh is one transfer between devices; a
GPU makes a fixed number of passes, since it waits for the host whenever it asks whether a search is done. A CPU
searches row by row, since several rows do not fit into its cache together, and no row waits for the slowest; there one
point is tried at a time, so that points are interpolated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation
from spectr_jax.sharding import shards_in_program

THRESHOLDS = 'thresholds'  # the search's scope in compiled programs
THRESHOLD_PASSES = 8  # the most that it takes in float32 on an accelerator, and half as many as in float64
_NUM_SECTIONS = 16
_NUM_PARTS = 32
_NEAR = 2**14  # floats between the ends of a bracket from which on tokens are counted
_LEAST_REST = 1e-6  # mass below a point that sums in float32 tell from 0
_MOST_GUESSES = 32  # of a search that interpolates, before it bisects
_SHORT_ROW = 64  # the most tokens of rows that a CPU searches together: a search of each takes up to 75 times as long


def search(
  measure: Callable[..., tuple[jax.Array, ...]],
  low: jax.Array,
  high: jax.Array,
  counts: tuple[jax.Array, ...] = (),
  *,
  num_sections: int,
  num_passes: int | None = None,
) -> jax.Array:
  """The bits of the largest floats from which on there are enough tokens.

  With S = 16 sections, 15 points lie between them. If 6 of these have enough, the bracket becomes that of points 6 and
  7. Rounded sums, too, do not grow as tokens are left out, so those with enough are the first ones.

  Args:
    measure: Takes a function from the numbers of points, from 1 to S - 1, to their bits, in ascending order, and the
      counts. Returns the number of points from which on there are enough, and the counts of the new bracket.
    low, high: The bits of a float from which on there are enough tokens, or 0, and of one from which on there are not.
    counts: The number of tokens from `low` on and that from `high` on; `()` with a number of passes.
    num_passes: How often a bracket is cut; None as long as more than one token and a float lie within any.
  """

  def cut(low, high, *counts):
    step = jax.lax.div(high - low + num_sections - 1, jnp.full_like(low, num_sections))

    def point(number):
      return low + jnp.minimum(number * step, high - low)

    num_enough, *counts = measure(point, *counts)
    num_enough = num_enough.astype(low.dtype)
    return point(num_enough), point(num_enough + 1), *counts

  def is_unsettled(bracket):
    low, high, low_count, high_count = bracket
    return jnp.any((high - low > 1) & (low_count - high_count > 1))

  bracket = low, high, *counts
  if num_passes is None:
    return jax.lax.while_loop(is_unsettled, lambda bracket: cut(*bracket), bracket)[0]
  return jax.lax.fori_loop(0, num_passes, lambda _, bracket: cut(*bracket), bracket)[0]


def _bits(probs):
  return jax.lax.bitcast_convert_type(probs, {4: jnp.int32, 8: jnp.int64}[probs.dtype.itemsize])


def _bracket(probs, above):
  high = _bits(jnp.max(probs, axis=-1, keepdims=True)) + 1
  return jnp.zeros_like(high) if above is None else jnp.minimum(_bits(above[0]), high - 1), high


@operation
def largest_threshold(
  probs: jax.Array, goal: jax.Array, *, is_weighted: bool, above: tuple[jax.Array, jax.Array] | None = None
) -> jax.Array:
  """The largest t `[..., 1]` such that the tokens with probability at least t weigh `goal` `[...]` or more; 0 if none.

  Tokens weigh their probability if `is_weighted`, else 1. `above` shortens the search: a number `[..., 1]` that t is no
  less than, and the weight `[...]` of the tokens with at least that probability.
  """

  def measure(point, low_count, high_count):
    num_enough = jnp.zeros_like(low_count)
    for number in range(1, _NUM_SECTIONS):
      kept = probs >= jax.lax.bitcast_convert_type(point(number), probs.dtype)
      # As floats, which hold numbers of tokens up to 2^24 exactly and are added up with the masses.
      ones = kept.astype(probs.dtype)
      count, weight = (
        jnp.sum(x, axis=-1, keepdims=True) for x in (ones, jnp.where(kept, probs, 0) if is_weighted else ones)
      )
      is_enough, count = weight >= goal[..., None], count.astype(jnp.int32)
      num_enough += is_enough
      low_count = jnp.where(is_enough, count, low_count)
      high_count = jnp.where(is_enough, high_count, jnp.maximum(count, high_count))
    return num_enough, low_count, high_count

  low, high = _bracket(probs, above)
  everything = jnp.full(low.shape, probs.shape[-1], jnp.int32)
  with jax.named_scope(THRESHOLDS):
    bits = search(measure, low, high, (everything, jnp.zeros_like(everything)), num_sections=_NUM_SECTIONS)
  return jax.lax.bitcast_convert_type(bits, probs.dtype)


@largest_threshold.form('gpu')
def _without_asking(probs, goal, *, is_weighted, above=None):
  def measure(point):
    points = point(jnp.arange(1, _NUM_SECTIONS, dtype=low.dtype))
    kept = probs[..., None, :] >= jax.lax.bitcast_convert_type(points, probs.dtype)[..., None]
    weights = jnp.sum(jnp.where(kept, probs[..., None, :] if is_weighted else 1.0, 0.0), axis=-1)
    return (jnp.sum(weights >= goal[..., None], axis=-1, keepdims=True),)

  low, high = _bracket(probs, above)
  num_passes = THRESHOLD_PASSES * probs.dtype.itemsize // 4
  with jax.named_scope(THRESHOLDS):
    bits = search(measure, low, high, num_sections=_NUM_SECTIONS, num_passes=num_passes)
  return jax.lax.bitcast_convert_type(bits, probs.dtype)


@largest_threshold.form('cpu', takes=lambda probs, *_, **__: probs.shape[-1] > _SHORT_ROW)
def _row_by_row(probs, goal, *, is_weighted, above=None):
  """The search of each row by itself, in parts, which a CPU adds up as vectors, and a whole row number by number.

  Each shard of a mesh has parts of its own, so one sum per shard is all that devices exchange. To move parts between
  them would stop the program: on CPUs that waits for every device, and those of other rows may be done searching.
  """
  num_tokens = probs.shape[-1]
  rows = probs.reshape(goal.size, shards_in_program(num_tokens), -1)
  padding = -rows.shape[-1] % _NUM_PARTS
  rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padding)), constant_values=-1)  # never kept
  parts = rows.reshape(*rows.shape[:2], _NUM_PARTS, -1)
  search = functools.partial(_search_row, parts, num_tokens=num_tokens, is_weighted=is_weighted)
  if above is None:
    above = jnp.zeros(goal.shape, probs.dtype), jnp.full(goal.shape, 1 if is_weighted else num_tokens, probs.dtype)
  bounds = (bound.reshape(-1) for bound in above)
  arguments = jnp.arange(goal.size), goal.reshape(-1), jnp.max(parts, axis=(1, 2, 3)), *bounds
  if goal.size == 1:
    thresholds = search(*(each[0] for each in arguments))
  else:
    thresholds = jax.lax.map(lambda arguments: search(*arguments), arguments)
  return thresholds.reshape(*goal.shape, 1)


def _search_row(parts, row, goal, top, lowest, weight_above, *, num_tokens, is_weighted):
  """The threshold of one row of `[R, S, P, ...]`, a scalar, by the regula falsi of Illinois (Dowell and Jarratt 1971).

  Over the bits of a float, which are nearly its logarithm, the logarithm of the number of tokens from a point on is
  smooth, and so is that of the mass of the others.

  The row's number is a part of the search's state, and all of this is two vectors: a row that is cut out before would
  be copied, and every number by itself would be a kernel of its own.
  """

  def add_up(row, values_fn):
    # Each part is compared by itself: of a whole row XLA would write down what is left of it before it adds that up.
    of_row = (jax.lax.dynamic_index_in_dim(parts[:, :, i], row, keepdims=False) for i in range(_NUM_PARTS))
    return jnp.sum(functools.reduce(jnp.add, map(values_fn, of_row)))

  def as_float(point):
    return jax.lax.bitcast_convert_type(point, parts.dtype)

  def count(row, point):
    return add_up(row, lambda probs: (probs >= as_float(point)).astype(parts.dtype))

  def measure(row, point, is_near):
    """The weight of the tokens from a point on, and the most and the fewest that they can be."""
    if not is_weighted:
      number = count(row, point)
      return number, number, number
    weight = add_up(row, lambda probs: jnp.where(probs >= as_float(point), probs, 0))
    # To count takes as long as to weigh, and many tokens lie in a wide bracket anyway.
    most, fewest = jax.lax.cond(is_near, lambda: (count(row, point),) * 2, lambda: (everything, nothing))
    return weight, most, fewest

  def excess_of(weight):
    """How far a weight is above the goal, as a difference of logarithms."""
    wanted = goal.astype(parts.dtype)
    if is_weighted:
      return jnp.log(jnp.maximum(1 - wanted, _LEAST_REST)) - jnp.log(jnp.maximum(1 - weight, _LEAST_REST))
    return jnp.log(weight + 0.5) - jnp.log(wanted)  # 0 between two numbers of tokens

  def guess(low, high, above, below):
    point = low + (above / (above - below) * (high - low).astype(parts.dtype)).astype(low.dtype)
    return jnp.clip(point, low + 1, jnp.maximum(high - 1, low + 1))

  def unsettled(carry):
    (low, high, *_), (most, fewest, *_) = carry
    # Settled: the next float, or at most one token between the two.
    return (high - low > 1) & (most - fewest > 1)

  def cut(carry):
    (low, high, point, row), (most, fewest, above, below, was_enough, number) = carry
    weight, at_most, at_least = measure(row, point, (lowest > 0) | (high - low <= _NEAR))
    is_enough = weight >= goal
    # The excess of an end that stays counts half, if it stayed before.
    share = jnp.where(is_enough == (was_enough > 0), 0.5, 1.0).astype(parts.dtype)
    above = jnp.where(is_enough, excess_of(weight), share * above)
    below = jnp.where(is_enough, share * below, excess_of(weight))
    most = jnp.where(is_enough, jnp.minimum(most, at_most), most)
    fewest = jnp.where(is_enough, fewest, jnp.maximum(fewest, at_least))
    numbers = jnp.stack([most, fewest, above, below, is_enough.astype(parts.dtype), number + 1])
    low, high = jnp.where(is_enough, point, low), jnp.where(is_enough, high, point)
    point = jnp.where(number < _MOST_GUESSES, guess(low, high, numbers[2], numbers[3]), low + (high - low) // 2)
    return jnp.stack([low, high, point, row]), numbers

  everything, nothing = jnp.asarray(num_tokens, parts.dtype), jnp.zeros((), parts.dtype)
  high = _bits(top) + 1
  # With a weighted goal all tokens below weigh less than what may be left out, so this is most often a lower end close
  # to the threshold.
  share = jnp.maximum(1 - goal, 0) if is_weighted else 1.0
  first = jnp.clip(_bits(jnp.asarray(share / (2 * num_tokens), parts.dtype)), 1, jnp.maximum(high - 1, 1))
  low, above, below = jnp.minimum(_bits(lowest), high - 1), excess_of(weight_above), excess_of(nothing)
  first = jnp.where(low > 0, guess(low, high, above, below), first)
  points = jnp.stack([low, high, first, row.astype(high.dtype)])
  numbers = jnp.stack([everything, nothing, above, below, nothing, nothing])
  with jax.named_scope(THRESHOLDS):
    (low, *_), _ = jax.lax.while_loop(unsettled, cut, (points, numbers))
  return as_float(low)
