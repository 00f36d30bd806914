"""Draws of tokens by the inversion of a cumulative sum in two levels: sums of blocks, then the tokens of one.

XLA makes some twenty launches of a draw on a TPU, and reads the distributions twice. The kernel reads them once from
memory.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from spectr_jax.kernels.blocks import BLOCK, SMALL, fits_kernels, in_blocks, on_each_device
from spectr_jax.kernels.dispatch import launch, operation

_MOST_DRAWS = 16  # from one distribution that a kernel takes
_ROWS = 8  # distributions per step of the grid, the sublanes of a register
_MEMORY = 64 * 2**20


@operation
def first_above(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The first index of positive weight whose cumulative sum exceeds `level`, and the sum before it.

  If rounding leaves every sum at or below the level, it is the last index of positive weight.

  Args:
    weights: `[n]`, not negative; some hundreds, the same on all devices.
    level: Scalar.

  Returns:
    int32 scalar; scalar.
  """
  cumulative = jnp.cumsum(weights)
  # Rounding can leave every sum at or below the level, and a parallel sum can rise at a weight of 0. So only positive
  # weights are eligible, and the last of them is taken if no sum is above.
  is_positive = weights > 0
  is_above = (cumulative > level) & is_positive
  # Not by `argmax`: a GPU takes ten times as long for it as for a minimum.
  size = weights.shape[0]
  places = jnp.arange(size, dtype=jnp.int32)
  first = jnp.min(jnp.where(is_above, places, size))
  last_positive = jnp.max(jnp.where(is_positive, places, -1))
  index = jnp.where(first < size, first, jnp.where(last_positive < 0, size - 1, last_positive))
  return index, cumulative[index] - weights[index]


@first_above.kernel('tpu', takes=lambda weights, level: weights.dtype == jnp.float32)
def first_above_kernel(weights: jax.Array, level: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """`first_above` of M entries as a kernel.

  Args:
    weights: float32 `[M, n]`.
    level: float32 `[M]`.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    int32 `[M]`; float32 `[M]`.
  """
  from jax.experimental import pallas as pl

  num_entries, size = weights.shape
  width = size + -size % BLOCK
  none = width

  def kernel(level_ref, weights_ref, index_ref, before_ref):
    level = level_ref[...]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    up_to = jnp.where(row <= column, 1.0, 0.0)
    sum_before = jnp.zeros(level.shape, jnp.float32)
    first, last = jnp.full(level.shape, none), jnp.full(level.shape, -1)
    before_first, before_last = jnp.zeros_like(sum_before), jnp.zeros_like(sum_before)
    for start in range(0, width, BLOCK):
      own = weights_ref[:, start : start + BLOCK]
      # At full precision, since a token's probability is the difference between two of these sums.
      sums = jnp.dot(own, up_to, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32) + sum_before
      place = start + jax.lax.broadcasted_iota(jnp.int32, own.shape, 1)

      def at(found, place=place, sums=sums, own=own):
        return jnp.sum(jnp.where(place == found, sums - own, 0), axis=1, keepdims=True)

      above = jnp.min(jnp.where((sums > level) & (own > 0), place, none), axis=1, keepdims=True)
      positive = jnp.max(jnp.where(own > 0, place, -1), axis=1, keepdims=True)
      before_first = jnp.where(first == none, at(above), before_first)
      before_last = jnp.where(positive >= 0, at(positive), before_last)
      first, last = jnp.where(first == none, above, first), jnp.where(positive >= 0, positive, last)
      sum_before = sums[:, BLOCK - 1 :]
    is_any = first < none
    index_ref[...] = jnp.where(is_any, first, jnp.maximum(last, 0))
    before_ref[...] = jnp.where(is_any, before_first, before_last)

  def block(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  index, before = pl.pallas_call(
    kernel,
    grid=(pl.cdiv(num_entries, _ROWS),),
    in_specs=[block(1), block(width)],
    out_specs=[block(1), block(1)],
    out_shape=[jax.ShapeDtypeStruct((num_entries, 1), dtype) for dtype in (jnp.int32, jnp.float32)],
    interpret=interpret,
    name='first_above',
  )(level[:, None], jnp.pad(weights, ((0, 0), (0, width - size))))
  return index[:, 0], before[:, 0]


@operation
def draw_several(uniforms: jax.Array, weights: jax.Array) -> jax.Array:
  """Draws tokens from one distribution, with probability proportional to their weights.

  Args:
    uniforms: `[K]`, in [0, 1).
    weights: `[V]`, not negative, with any positive sum.

  Returns:
    int32 `[K]`; never a token of weight 0.
  """
  return jax.vmap(_draw, (0, None))(uniforms, weights)


def _draw(uniform, weights):
  if weights.shape[0] <= SMALL:
    return first_above.plain(weights, uniform * jnp.sum(weights))[0]
  blocks, first_of = in_blocks(weights, 0)
  sums = on_each_device(jnp.sum(blocks, axis=-1))
  level = uniform * jnp.sum(sums)
  row, before = first_above(sums, level)
  column, _ = first_above(blocks[row], level - before)
  return (first_of(row) + column).astype(jnp.int32)


def _takes_draws(uniforms, weights):
  return fits_kernels(weights) and len(uniforms) <= _MOST_DRAWS


@draw_several.form('tpu', takes=_takes_draws)
def _draw_by_kernel(uniforms, weights):
  plain = jax.vmap(draw_several.plain)
  return launch(plain, draws_kernel, uniforms[None].astype(weights.dtype), weights[None])[0]


def _group_size(num_blocks):
  return math.isqrt(num_blocks - 1) + 1


def _kernel(uniforms, laws, tokens, sums):
  """Chooses a group of blocks, a block of it, and a token of that: each by the sums of what stands before."""
  from jax.experimental import pallas as pl

  num_blocks = laws.shape[1] // BLOCK
  group_size = _group_size(num_blocks)
  num_groups = -(-num_blocks // group_size)
  wide = (_ROWS, BLOCK)

  def blocks(group):
    """The blocks of a group; those of the last one that the group before has are 0."""
    start = jnp.minimum(group * group_size, num_blocks - group_size)
    indices = [start + i for i in range(group_size)]
    found = (laws[:, pl.ds(pl.multiple_of(i * BLOCK, BLOCK), BLOCK)] for i in indices)
    return [jnp.where(i >= group * group_size, block, 0) for i, block in zip(indices, found)]

  def choose(masses, level):
    """The last of some masses that is not 0 and before which there is no more than the level, and what is before it.

    So none without mass is chosen, whatever rounding does to the sums: nothing stands before the first, exactly.
    """
    before = jnp.zeros_like(level)
    place, passed = jnp.zeros(level.shape, jnp.int32), before
    for i, mass in enumerate(masses):
      is_own = (mass > 0) & (before <= level)
      place, passed = jnp.where(is_own, i, place), jnp.where(is_own, before, passed)
      before = before + mass
    return place, passed

  def mass_of(block):
    return jnp.sum(block, axis=1, keepdims=True)

  @pl.loop(0, num_groups)
  def _(group):
    sums[group] = functools.reduce(jnp.add, blocks(group))

  masses = [mass_of(sums[group]) for group in range(num_groups)]
  total = functools.reduce(jnp.add, masses)
  lane = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
  is_before = (lane < jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)).astype(laws.dtype)
  lane = jax.lax.broadcasted_iota(jnp.int32, wide, 1)
  for i in range(uniforms.shape[1]):
    level = uniforms[:, i : i + 1] * total
    group, before = choose(masses, level)
    level -= before
    own_group = jnp.broadcast_to(group, wide)

    def take(g, own, own_group=own_group):
      return tuple(jnp.where(own_group == g, block, mine) for block, mine in zip(blocks(g), own))

    own = jax.lax.fori_loop(0, num_groups, take, (jnp.zeros(wide, laws.dtype),) * group_size)
    block, before = choose(map(mass_of, own), level)
    own_block = jnp.broadcast_to(block, wide)
    weights = functools.reduce(jnp.add, [jnp.where(own_block == j, mine, 0) for j, mine in enumerate(own)])
    # Within the block, likewise.
    below = jnp.dot(weights, is_before, precision=jax.lax.Precision.HIGHEST, preferred_element_type=laws.dtype)
    is_own = (weights > 0) & (below <= level - before)
    token = jnp.max(jnp.where(is_own, lane, 0), axis=1, keepdims=True)
    start = jnp.minimum(group * group_size, num_blocks - group_size)
    tokens[:, i : i + 1] = (start + block) * BLOCK + token


def draws_kernel(uniforms: jax.Array, laws: jax.Array, *, interpret: bool = False) -> jax.Array:
  """`draw_several` of M distributions as a TPU kernel.

  Args:
    uniforms: float32 `[M, K]` in [0, 1).
    laws: float32 `[M, V]`, weights that are not negative; V is a multiple of 128.
    interpret: Whether to run the kernel's operations one by one on any backend, for tests.

  Returns:
    int32 `[M, K]`, K tokens of each distribution; never one of weight 0.
  """
  from jax.experimental import pallas as pl  # takes seconds to import
  from jax.experimental.pallas import tpu as pltpu

  num_laws, num_draws = uniforms.shape
  vocab_size = laws.shape[1]
  num_blocks = vocab_size // BLOCK
  num_groups = -(-num_blocks // _group_size(num_blocks))

  if num_laws < _ROWS:  # fewer would be in a layout of their own, which takes twice as long
    uniforms, laws = (jnp.pad(x, ((0, _ROWS - num_laws), (0, 0))) for x in (uniforms, laws))

  def rows(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  # The last step may have rows beyond the end, of any values, which are not written.
  tokens = pl.pallas_call(
    _kernel,
    grid=(pl.cdiv(num_laws, _ROWS),),
    in_specs=[rows(num_draws), rows(vocab_size)],
    out_specs=rows(num_draws),
    out_shape=jax.ShapeDtypeStruct(uniforms.shape, jnp.int32),
    scratch_shapes=[pltpu.VMEM((num_groups, _ROWS, BLOCK), jnp.float32)],
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    interpret=interpret,
    name='draw_tokens',
  )(uniforms, laws)
  return tokens[:num_laws]
