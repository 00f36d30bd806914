"""Searches for thresholds on probabilities as TPU kernels; the plain form is `thresholds.largest_threshold`.

A pass over a few rows is some hundred cycles of work, a tenth of what a launch takes. So whole rows are searched within
one kernel. Of rows that are divided over devices a kernel adds up the parts for several thresholds at once.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

MOST_TOKENS = 2**18  # per row on a device: eight rows of them are in the vector memory, twice
_ROWS = 8
_CHUNK = 2048  # tokens of each row that are added up at a time
_MEMORY = 64 * 2**20
_HIGHEST = 0x3F800001  # the bits of the float after 1: no probability is larger
_WHOLE_SECTIONS, _PART_SECTIONS = 4, 8


def _num_passes(num_sections: int) -> int:
  """Passes after which a bracket between 0 and `_HIGHEST` has no float inside."""
  size, count = _HIGHEST, 0
  while size > 1:
    size, count = -(-size // num_sections), count + 1
  return count


def _points(low, high, num_sections):
  """The bits between sections, equally far from each other and not above the upper end."""
  step = (high - low + num_sections - 1) // num_sections
  return [jnp.minimum(low + i * step, high) for i in range(1, num_sections)]


def _as_floats(bits):
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _narrow(low, high, points, is_enough):
  """The section with the threshold: from the last point with enough to the first without."""
  for point, enough in zip(points, is_enough):
    low = jnp.where(enough & (point < high), jnp.maximum(point, low), low)
  for point, enough in zip(reversed(points), reversed(list(is_enough))):
    high = jnp.where(~enough & (point < high), point, high)
  return low, high


def _sums(probs_ref, thresholds, is_weighted):
  """The sums `[8, 1]` of the probabilities, or the numbers of tokens, from each of the thresholds `[8, 1]` on."""
  from jax.experimental import pallas as pl

  size = probs_ref.shape[1]
  # Once for all lanes, and not in every turn of the loop.
  thresholds = [jnp.broadcast_to(threshold, (_ROWS, 128)) for threshold in thresholds]
  zero = tuple(jnp.zeros((_ROWS, 128), jnp.float32) for _ in thresholds)

  def add(probs, totals):
    kept = [jnp.where(probs >= threshold, probs if is_weighted else 1.0, 0.0) for threshold in thresholds]
    return tuple(total + part for total, part in zip(totals, kept))

  def add_chunk(i, totals):
    for j in range(_CHUNK // 128):
      totals = add(probs_ref[:, pl.ds(i * _CHUNK + j * 128, 128)], totals)
    return totals

  num_chunks = size // _CHUNK
  totals = jax.lax.fori_loop(0, num_chunks, add_chunk, zero) if num_chunks else zero
  start = num_chunks * _CHUNK
  for i in range(start, size - 127, 128):
    totals = add(probs_ref[:, i : i + 128], totals)
  sums = [jnp.sum(total, axis=1, keepdims=True) for total in totals]
  if rest := size % 128:
    probs = probs_ref[:, size - rest :]
    sums = [
      total
      + jnp.sum(jnp.where(probs >= threshold[:, :rest], probs if is_weighted else 1.0, 0.0), axis=1, keepdims=True)
      for total, threshold in zip(sums, thresholds)
    ]
  return sums


def _search(probs_ref, goal, is_weighted):
  """The bits of the thresholds `[8, 1]` of eight whole rows."""

  def cut(_, bracket):
    low, high = bracket
    points = _points(low, high, _WHOLE_SECTIONS)
    sums = _sums(probs_ref, [_as_floats(point) for point in points], is_weighted)
    return _narrow(low, high, points, [found >= goal for found in sums])

  low = jnp.zeros(goal.shape, jnp.int32)
  return jax.lax.fori_loop(0, _num_passes(_WHOLE_SECTIONS), cut, (low, jnp.full_like(low, _HIGHEST)))[0]


def keep_rows(probs: jax.Array, goal: jax.Array, *, is_weighted: bool, interpret: bool = False) -> jax.Array:
  """Whole rows without all but their largest probabilities, as `thresholds.keep_largest`.

  Args:
    probs: float32 `[M, V]`, from 0 to 1 but for rounding by one unit in the last place.
    goal: float32 `[M]`; 0 keeps a row as it is.
    is_weighted: Whether tokens weigh their probability; otherwise each weighs 1.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    `[M, V]`.
  """

  from jax.experimental import pallas as pl

  def kernel(goal_ref, probs_ref, kept_ref):
    goal = goal_ref[...]
    threshold = _as_floats(jnp.where(goal > 0, _search(probs_ref, goal, is_weighted), 0))
    (mass,) = _sums(probs_ref, [threshold], True)
    threshold, mass = (jnp.broadcast_to(x, (_ROWS, 128)) for x in (threshold, jnp.where(goal > 0, mass, 1)))

    def keep(start, width):
      place = pl.ds(start, width)
      probs = probs_ref[:, place]
      kept_ref[:, place] = jnp.where(probs >= threshold[:, :width], probs, 0) / mass[:, :width]

    size = probs_ref.shape[1]
    num_chunks = size // _CHUNK
    if num_chunks:

      @pl.loop(0, num_chunks)
      def _(i):
        for j in range(0, _CHUNK, 128):
          keep(i * _CHUNK + j, 128)

    for start in range(num_chunks * _CHUNK, size, 128):
      keep(start, min(128, size - start))

  return _call(kernel, probs, [goal[:, None]], [(probs.shape[1], jnp.float32)], interpret, 'keep_largest')[0]


def step_parts(
  probs: jax.Array,
  goal: jax.Array,
  low: jax.Array,
  high: jax.Array,
  sums: jax.Array,
  *,
  is_weighted: bool,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A step of the search over rows that are divided over devices: the next brackets, and the sums that narrow them.

  Args:
    probs: float32 `[M, V]`, the parts of the rows on this device.
    goal: float32 `[M, 1]`.
    low, high: int32 `[M, 1]`, the ends of the brackets as bits.
    sums: float32 `[M, S]`, over all devices, of the tokens from the points between the sections of the bracket on; -1
      to keep the bracket.
    is_weighted: Whether tokens weigh their probability; otherwise each weighs 1.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    The next `low` and `high`, and the sums of the tokens on this device.
  """

  def kernel(goal_ref, low_ref, high_ref, total_ref, probs_ref, next_low_ref, next_high_ref, sums_ref):
    low, high = _narrow_by(low_ref[...], high_ref[...], total_ref[...], goal_ref[...])
    next_low_ref[...], next_high_ref[...] = low, high
    points = _as_floats(_inner_points(low, high))
    thresholds = [points[:, i : i + 1] for i in range(_PART_SECTIONS - 1)]
    sums_ref[...] = _side_by_side(_sums(probs_ref, thresholds, is_weighted), sums_ref.shape)

  outputs = [(1, jnp.int32), (1, jnp.int32), (_PART_SECTIONS - 1, jnp.float32)]
  return tuple(_call(kernel, probs, [goal, low, high, sums], outputs, interpret, 'step_thresholds'))


def _inner_points(low, high):
  """The points between the sections of brackets `[M, 1]`, `[M, S]`; see `_points`."""
  shape = len(low), _PART_SECTIONS - 1
  step = (high - low + _PART_SECTIONS - 1) // _PART_SECTIONS
  return jnp.minimum(low + (1 + jax.lax.broadcasted_iota(jnp.int32, shape, 1)) * step, high)


def _narrow_by(low, high, sums, goal):
  """The brackets `[M, 1]` that the sums `[M, S]` from the points on leave of others; `goal` is `[M, 1]`."""
  points = _inner_points(low, high)
  # Rounded sums, too, do not grow as tokens are left out, so those with enough are the first ones.
  is_new, is_enough = (points < high) & (sums >= 0), sums >= goal
  next_low = jnp.max(jnp.where(is_new & is_enough, points, low), axis=1, keepdims=True)
  next_high = jnp.min(jnp.where(is_new & ~is_enough, points, high), axis=1, keepdims=True)
  return next_low, next_high


def _side_by_side(columns, shape):
  place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  found = jnp.zeros(shape, columns[0].dtype)
  for i, column in enumerate(columns):
    found = jnp.where(place == i, column, found)
  return found


def _call(kernel, probs, columns, outputs, interpret, name):
  """A call of a kernel for eight rows at a time; its arguments are the columns `[8, ...]` and the rows."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  num_rows, size = probs.shape
  if num_rows < _ROWS:  # fewer would be in a layout of their own, which takes five times as long
    *columns, probs = (jnp.pad(x, ((0, _ROWS - num_rows), (0, 0))) for x in (*columns, probs))

  def block(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  found = pl.pallas_call(
    kernel,
    grid=(pl.cdiv(num_rows, _ROWS),),
    in_specs=[*(block(x.shape[1]) for x in columns), block(size)],
    out_specs=[block(width) for width, _ in outputs],
    out_shape=[jax.ShapeDtypeStruct((len(probs), width), dtype) for width, dtype in outputs],
    interpret=interpret,
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    name=name,
  )(*columns, probs)
  return [x[:num_rows] for x in found]


def search_parts(step_fn, total_fn, goal: jax.Array) -> jax.Array:
  """The thresholds of rows that are divided over devices; run by each device.

  Args:
    step_fn: `step_parts` of the rows, as a function of brackets and sums.
    total_fn: The sum of an array over devices.
    goal: float32 `[M, 1]`.

  Returns:
    `[M, 1]`, the largest floats at which the tokens from there on weigh `goal` or more; 0 where all weigh less.
  """

  def step(_, carry):
    low, high, sums = step_fn(*carry)
    return low, high, total_fn(sums)

  low = jnp.zeros(goal.shape, jnp.int32)
  sums = jnp.full((len(goal), _PART_SECTIONS - 1), -1, jnp.float32)
  low, high, sums = jax.lax.fori_loop(0, _num_passes(_PART_SECTIONS), step, (low, jnp.full_like(low, _HIGHEST), sums))
  return _as_floats(_narrow_by(low, high, sums, goal)[0])


def step_parts_plainly(probs, goal, low, high, sums, *, is_weighted: bool):
  """`step_parts`, the plain form."""
  low, high = _narrow_by(low, high, sums, goal)
  kept = probs[:, None] >= _as_floats(_inner_points(low, high))[..., None]
  found = jnp.sum(jnp.where(kept, probs[:, None] if is_weighted else 1.0, 0.0), axis=-1)
  return low, high, found


def is_covered(probs: jax.Array, num_shards: int) -> bool:
  """Whether the kernels take these distributions.

  Args:
    probs: `[..., V]`.
    num_shards: The number of equal parts of V on different devices.
  """
  return probs.dtype == jnp.float32 and math.prod(probs.shape) > 0 and probs.shape[-1] // num_shards <= MOST_TOKENS
