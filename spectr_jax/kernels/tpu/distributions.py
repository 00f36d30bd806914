"""Kernels of whole distributions: their softmax, and draws."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spectr_jax.kernels.blocks import BLOCK
from spectr_jax.kernels.tpu.calls import LANES, ROWS, call_by_rows

_AT_ONCE = 64  # registers per turn of a loop


def _softmax(logits, scales, probs):
  num_parts = logits.shape[1] // LANES
  at_once = min(_AT_ONCE, num_parts)
  wide = (ROWS, LANES)

  def parts(turn):
    # The last turn visits some parts once more: the largest stay the largest, and sums leave them out.
    start = jnp.minimum(turn * at_once, num_parts - at_once)
    return [(i, pl.ds(pl.multiple_of(i * LANES, LANES), LANES)) for i in (start + j for j in range(at_once))]

  def each(function, start):
    return jax.lax.fori_loop(0, -(-num_parts // at_once), function, start)

  def find(turn, top):
    return functools.reduce(jnp.maximum, [logits[:, part] for _, part in parts(turn)], top)

  top = jnp.max(each(find, jnp.full(wide, -jnp.inf, logits.dtype)), axis=1, keepdims=True)
  factor = 1 / scales[...]

  def weigh(turn, total):
    for i, part in parts(turn):
      weights = jnp.exp((logits[:, part] - top) * factor)
      probs[:, part] = weights
      total += jnp.where(i >= turn * at_once, weights, 0)
    return total

  share = 1 / jnp.sum(each(weigh, jnp.zeros(wide, logits.dtype)), axis=1, keepdims=True)

  def divide(turn, _):
    for i, part in parts(turn):
      probs[:, part] *= jnp.where(i >= turn * at_once, share, 1)
    return 0

  each(divide, 0)


def scaled_softmax(logits: jax.Array, scales: jax.Array) -> jax.Array:
  """The softmax of `logits / scales`, float32 `[M, V]`, V a multiple of 128, with positive scales `[M]`.

  It is NaN in rows whose largest logit is not finite.
  """
  results = [(logits.shape[1], logits.dtype)]
  return call_by_rows(_softmax, logits, scales[:, None], results=results, needs_memory=True, name='softmax')[0]


def first_above(weights: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
  """`first_above` of M entries, of weights float32 `[M, n]` and levels `[M]`: int32 `[M]`, float32 `[M]`."""
  size = weights.shape[1]
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

      def at(index, place=place, sums=sums, own=own):
        return jnp.sum(jnp.where(place == index, sums - own, 0), axis=1, keepdims=True)

      above = jnp.min(jnp.where((sums > level) & (own > 0), place, none), axis=1, keepdims=True)
      positive = jnp.max(jnp.where(own > 0, place, -1), axis=1, keepdims=True)
      before_first = jnp.where(first == none, at(above), before_first)
      before_last = jnp.where(positive >= 0, at(positive), before_last)
      first, last = jnp.where(first == none, above, first), jnp.where(positive >= 0, positive, last)
      sum_before = sums[:, BLOCK - 1 :]
    is_any = first < none
    index_ref[...] = jnp.where(is_any, first, jnp.maximum(last, 0))
    before_ref[...] = jnp.where(is_any, before_first, before_last)

  index, before = call_by_rows(
    kernel,
    level[:, None],
    jnp.pad(weights, ((0, 0), (0, width - size))),
    results=[(1, jnp.int32), (1, jnp.float32)],
    name='first_above',
  )
  return index[:, 0], before[:, 0]


def _group_size(num_blocks):
  return math.isqrt(num_blocks - 1) + 1


def _draw(uniforms, probs, tokens, sums):
  """Chooses a group of blocks, a block of it, and a token of that: each by the sums of what stands before."""
  num_blocks = probs.shape[1] // BLOCK
  group_size = _group_size(num_blocks)
  num_groups = -(-num_blocks // group_size)
  wide = (ROWS, BLOCK)

  def blocks(group):
    """The blocks of a group; those of the last one that the group before has are 0."""
    start = jnp.minimum(group * group_size, num_blocks - group_size)
    indices = [start + i for i in range(group_size)]
    whole = (probs[:, pl.ds(pl.multiple_of(i * BLOCK, BLOCK), BLOCK)] for i in indices)
    return [jnp.where(i >= group * group_size, block, 0) for i, block in zip(indices, whole)]

  def choose(masses, level):
    """The last mass that is not 0 with no more than the level before it, so none of mass 0; and what is before it."""
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
  is_before = (lane < jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)).astype(probs.dtype)
  lane = jax.lax.broadcasted_iota(jnp.int32, wide, 1)
  for i in range(uniforms.shape[1]):
    level = uniforms[:, i : i + 1] * total
    group, before = choose(masses, level)
    level -= before
    own_group = jnp.broadcast_to(group, wide)

    def take(g, own, own_group=own_group):
      return tuple(jnp.where(own_group == g, block, mine) for block, mine in zip(blocks(g), own))

    own = jax.lax.fori_loop(0, num_groups, take, (jnp.zeros(wide, probs.dtype),) * group_size)
    block, before = choose(map(mass_of, own), level)
    own_block = jnp.broadcast_to(block, wide)
    weights = functools.reduce(jnp.add, [jnp.where(own_block == j, mine, 0) for j, mine in enumerate(own)])
    # Within the block, likewise.
    below = jnp.dot(weights, is_before, precision=jax.lax.Precision.HIGHEST, preferred_element_type=probs.dtype)
    is_own = (weights > 0) & (below <= level - before)
    token = jnp.max(jnp.where(is_own, lane, 0), axis=1, keepdims=True)
    start = jnp.minimum(group * group_size, num_blocks - group_size)
    tokens[:, i : i + 1] = (start + block) * BLOCK + token


def draw_tokens(uniforms: jax.Array, probs: jax.Array) -> jax.Array:
  """`draw_several` of M distributions float32 `[M, V]`, V a multiple of 128: int32 `[M, K]`, never one of weight 0."""
  num_blocks = probs.shape[1] // BLOCK
  num_groups = -(-num_blocks // _group_size(num_blocks))
  return call_by_rows(
    _draw,
    uniforms,
    probs,
    results=[(uniforms.shape[1], jnp.int32)],
    fewest=ROWS,
    needs_memory=True,
    scratch_shapes=[pltpu.VMEM((num_groups, ROWS, BLOCK), jnp.float32)],
    name='draw_tokens',
  )[0]
