"""The softmax of whole rows on a TPU, as one kernel that reads and writes them once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_LANES = 128
_ROWS = 8  # rows per step of the grid, the sublanes of a register
_AT_ONCE = 64  # registers per turn of a loop
_MEMORY = 64 * 2**20


def _kernel(logits, scales, probs):
  from jax.experimental import pallas as pl

  num_parts = logits.shape[1] // _LANES
  at_once = min(_AT_ONCE, num_parts)
  wide = (_ROWS, _LANES)

  def parts(turn):
    # The last turn visits some parts once more: the largest stay the largest, and sums leave them out.
    start = jnp.minimum(turn * at_once, num_parts - at_once)
    return [(i, pl.ds(pl.multiple_of(i * _LANES, _LANES), _LANES)) for i in (start + j for j in range(at_once))]

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


def scaled_softmax(logits: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
  """The softmax of `logits / scales`.

  Args:
    logits: float32 `[M, V]`; V is a multiple of 128.
    scales: float32 `[M]`, positive.
    interpret: Whether to run the kernel's operations one by one on any backend, for tests.

  Returns:
    float32 `[M, V]`; NaN in rows whose largest logit is not finite.
  """
  from jax.experimental import pallas as pl  # takes seconds to import
  from jax.experimental.pallas import tpu as pltpu

  num_rows, width = logits.shape

  def rows(size):
    return pl.BlockSpec((_ROWS, size), lambda i: (i, 0))

  # The last step may have rows beyond the end, of any values, which are not written.
  return pl.pallas_call(
    _kernel,
    grid=(pl.cdiv(num_rows, _ROWS),),
    in_specs=[rows(width), rows(1)],
    out_specs=rows(width),
    out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    interpret=interpret,
    name='softmax',
  )(logits, scales[:, None])
