"""Draws of tokens from whole distributions on a TPU, as one kernel.

XLA makes some twenty launches of a draw, and reads the distributions twice. The kernel reads them once from memory.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens that are added up at a time, the lanes of a register
_ROWS = 8  # distributions per step of the grid, the sublanes of a register
_MEMORY = 64 * 2**20


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


def draw_tokens(uniforms: jax.Array, laws: jax.Array, *, interpret: bool = False) -> jax.Array:
  """Draws tokens by inversion of the cumulative sum.

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
