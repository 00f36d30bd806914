"""The softmax and sums of whole distributions, with a temperature and the first largest logit of greedy rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spectr_jax.kernels import native
from spectr_jax.kernels.blocks import argmin, fits_kernels
from spectr_jax.kernels.dispatch import launch, lazy, operation


@operation
def totals(values: jax.Array) -> jax.Array:
  """The sums `[..., 1]` of `values` `[..., V]`."""
  return jnp.sum(values, axis=-1, keepdims=True)


@totals.form('cpu', takes=native.takes)
def _ordered_totals(values):
  """In one order, whatever is summed beside them, where XLA's depends on the shape."""
  return native.totals(values.reshape(-1, values.shape[-1])).reshape(*values.shape[:-1], 1)


def log_totals(logits: jax.Array) -> jax.Array:
  """The logarithms `[..., 1]` of the sums of exp of `logits` `[..., V]`, of which one must be finite."""
  largest = jnp.max(logits, axis=-1, keepdims=True)
  return largest + jnp.log(totals(jnp.exp(logits - largest)))


@operation
def softmax(logits: jax.Array, scale: jax.Array, is_greedy: jax.Array) -> jax.Array:
  """The softmax of logits `[B, N, V]` divided by a positive `scale` `[B, 1]`; NaN where the largest is not finite.

  Rows that are greedy, bool `[B, 1]`, get the point mass at the first largest logit.
  """
  # Only indices pass through the choice: one between distributions would copy them.
  none = functools.partial(jnp.full, logits.shape[:-1], -1, jnp.int32)
  points = jax.lax.cond(jnp.any(is_greedy), lambda: _points(logits, is_greedy), none)
  return _at_points(_of_rows(logits, scale), points)


softmax.register('cpu', native.softmax, takes=lambda logits, *_: native.takes(logits))


@softmax.form('gpu')
def _without_choice(logits, scale, is_greedy):
  # A GPU waits for the host at a choice, longer than the search takes.
  return _at_points(_of_rows(logits, scale), _points(logits, is_greedy))


@softmax.form('tpu', takes=lambda logits, scale, is_greedy: fits_kernels(logits))
def _by_kernel(logits, scale, is_greedy):
  # XLA hands the kernel the logits in fast memory if nothing else needs them, and copies no result of a kernel.
  scales = jnp.broadcast_to(scale, logits.shape[:-1]).reshape(-1)
  probs = launch(
    _of_rows, lazy('tpu.distributions:scaled_softmax'), logits.reshape(-1, logits.shape[-1]), scales
  ).reshape(logits.shape)
  return jax.lax.cond(
    jnp.any(is_greedy), lambda probs: _at_points(probs, _points(logits, is_greedy)), lambda probs: probs, probs
  )


def _of_rows(logits, scale):
  # The maximum is subtracted before the division. After it, logits at a small temperature could overflow; and a fused
  # program may divide twice with different rounding, so that logits would differ from their own maximum.
  weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / scale[..., None])
  return weights / totals(weights)


def _points(logits, is_greedy):
  return jnp.where(is_greedy, first_largest(logits), -1)


def _at_points(probs, points):
  points = points[..., None]
  is_point = jax.lax.broadcasted_iota(jnp.int32, probs.shape, probs.ndim - 1) == points
  return jnp.where(points < 0, probs, is_point.astype(probs.dtype))


@operation
def first_largest(logits: jax.Array) -> jax.Array:
  """The index of the first largest of `logits` `[B, N, V]`, int32 `[B, N]`; -1 where the largest is not finite."""
  largest = jnp.max(logits, axis=-1, keepdims=True)
  place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
  first = jnp.min(jnp.where(logits == largest, place, logits.shape[-1] - 1), axis=-1)
  return jnp.where(jnp.isfinite(largest[..., 0]), first, -1).astype(jnp.int32)


@first_largest.form('cpu')
def _first_largest_in_blocks(logits):  # an argmin over a whole vocabulary is not vectorised on CPU
  largest = jnp.max(logits, axis=-1)
  return jnp.where(jnp.isfinite(largest), jax.vmap(jax.vmap(argmin))(-logits), -1).astype(jnp.int32)


@operation
def shares(logits: jax.Array) -> jax.Array:
  """The softmax of rows `[N, E]`."""
  return jax.nn.softmax(logits, axis=-1)


@shares.form('cpu', takes=native.takes)
def _ordered_shares(logits):
  """Each sum in one order, whatever rows there are beside."""
  return native.softmax(logits[None], jnp.ones((1, 1), jnp.float32), jnp.zeros((1, 1), bool))[0]
