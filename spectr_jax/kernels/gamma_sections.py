"""Sections of the brackets in which K-SEQ's thresholds lie; on a TPU a step is one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels.launch import as_kernel, expm1


def sections(low: jax.Array, high: jax.Array, num_sections: int) -> jax.Array:
  """The borders of equal sections, `[..., S + 1]`, of brackets `[..., 1]`; the last is exactly the upper end."""
  steps = jax.lax.broadcasted_iota(jnp.int32, (*low.shape[:-1], num_sections + 1), low.ndim - 1)
  return jnp.where(steps < num_sections, low + (high - low) * steps.astype(low.dtype) / num_sections, high)


def narrow_sections(betas: jax.Array, points: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """The sections of the section in which the excess 1 - (1 - beta)^n - gamma beta changes its sign.

  Without an excess at the first point, as for n = 1, the root is there.

  Args:
    betas: `[S + 1]`, beta at the points.
    points: `[S + 1]`, in ascending order, without an excess at the last.
    num_candidates: n, scalar of the same dtype.

  Returns:
    The next points, `[S + 1]`.
  """

  def plain(betas, points, number):
    return (_narrow(betas, points, number, jnp.expm1),)

  arrays = betas, points, num_candidates[None]
  return plain(*arrays)[0] if betas.dtype != jnp.float32 else as_kernel(plain, narrow_kernel, *arrays)[0]


def _narrow(betas, points, number, expm1_fn):
  """`narrow_sections`; `number` is `[1]`, and all arrays may have an axis of rows in front."""
  num_sections = points.shape[-1] - 1
  place = jax.lax.broadcasted_iota(jnp.int32, points.shape, points.ndim - 1)
  excess = -expm1_fn(number * jnp.log1p(-jnp.minimum(betas, 1))) - points * betas
  is_end = (excess <= 0) | (place == num_sections)
  first = jnp.min(jnp.where(is_end, place, num_sections), axis=-1, keepdims=True)

  def at(index):  # a sum with one term, which is one operation where an index is several
    return jnp.sum(jnp.where(place == index, points, 0), axis=-1, keepdims=True)

  return sections(at(jnp.maximum(first - 1, 0)), at(first), num_sections)


def narrow_kernel(
  betas: jax.Array, points: jax.Array, number: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array]:
  """`narrow_sections` of M rows as a TPU kernel.

  Args:
    betas, points: float32 `[M, S + 1]`.
    number: float32 `[M, 1]`, n.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    `[M, S + 1]`.
  """
  from jax.experimental import pallas as pl

  def kernel(betas_ref, points_ref, number_ref, next_ref):
    next_ref[...] = _narrow(betas_ref[...], points_ref[...], number_ref[...], expm1)

  shape = jax.ShapeDtypeStruct(points.shape, points.dtype)
  return (pl.pallas_call(kernel, out_shape=shape, interpret=interpret, name='narrow_sections')(betas, points, number),)
