"""Draws of tokens from whole distributions on a TPU, as one kernel.

XLA makes some twenty launches of a draw, and reads the distributions twice. The kernel reads them once, in order, and
keeps for every draw the block of tokens that it falls into.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens that are added up at a time, the lanes of a register
_ROWS = 8  # distributions per step of the grid, the sublanes of a register
_AT_ONCE = 64  # blocks per turn of a loop: their sums overlap, where one alone would wait for its own
_MEMORY = 64 * 2**20


def _kernel(uniforms, laws, tokens):
  from jax.experimental import pallas as pl

  num_blocks, num_draws = laws.shape[1] // BLOCK, uniforms.shape[1]
  at_once = min(_AT_ONCE, num_blocks)
  num_turns = -(-num_blocks // at_once)
  wide = (_ROWS, BLOCK)

  def blocks(turn):
    """The indices of a turn's blocks, and the blocks; those that the turn before has visited are 0."""
    start = jnp.minimum(turn * at_once, num_blocks - at_once)
    indices = [start + i for i in range(at_once)]
    found = (laws[:, pl.ds(pl.multiple_of(i * BLOCK, BLOCK), BLOCK)] for i in indices)
    return indices, [jnp.where(i >= turn * at_once, block, 0) for i, block in zip(indices, found)]

  def add(turn, total):
    return total + functools.reduce(jnp.add, blocks(turn)[1])

  total = jax.lax.fori_loop(0, num_turns, add, jnp.zeros(wide, laws.dtype))
  total = jnp.sum(total, axis=1, keepdims=True)
  levels = [uniforms[:, i : i + 1] * total for i in range(num_draws)]

  def visit(turn, carry):
    before, found = carry
    indices, here = blocks(turn)
    masses = [jnp.sum(block, axis=1, keepdims=True) for block in here]
    for i, block, mass in zip(indices, here, masses):
      # The last block with any mass before which there is no more than the level. So none without mass is chosen,
      # whatever rounding does to the sums.
      new = block, jnp.broadcast_to(before, wide), jnp.full(wide, i, jnp.int32)
      is_own = [(mass > 0) & (before <= level) for level in levels]
      found = tuple(tuple(jnp.where(mine, x, y) for x, y in zip(new, own)) for mine, own in zip(is_own, found))
      before = before + mass
    return before, found

  nothing = jnp.zeros(wide, laws.dtype), jnp.zeros(wide, laws.dtype), jnp.zeros(wide, jnp.int32)
  start = jnp.zeros((_ROWS, 1), laws.dtype), (nothing,) * num_draws
  _, found = jax.lax.fori_loop(0, num_turns, visit, start)

  lane = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
  is_before = (lane < jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)).astype(laws.dtype)
  lane = jax.lax.broadcasted_iota(jnp.int32, wide, 1)
  for i, (level, (weights, before, index)) in enumerate(zip(levels, found)):
    # Likewise within the block: nothing stands before the first token with any mass, exactly.
    below = jnp.dot(weights, is_before, precision=jax.lax.Precision.HIGHEST, preferred_element_type=laws.dtype)
    is_own = (weights > 0) & (below <= level - before)
    last = jnp.max(jnp.where(is_own, lane, 0), axis=1, keepdims=True)
    tokens[:, i : i + 1] = index[:, :1] * BLOCK + last


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

  num_laws, vocab_size = laws.shape
  num_draws = uniforms.shape[1]

  def rows(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  # The last step may have rows beyond the end, of any values, which are not written.
  return pl.pallas_call(
    _kernel,
    grid=(pl.cdiv(num_laws, _ROWS),),
    in_specs=[rows(num_draws), rows(vocab_size)],
    out_specs=rows(num_draws),
    out_shape=jax.ShapeDtypeStruct(uniforms.shape, jnp.int32),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    interpret=interpret,
    name='draw_tokens',
  )(uniforms, laws)
