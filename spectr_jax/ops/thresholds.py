"""Thresholds on probabilities, for top-k and top-p.

A bisection over the bits of a float finds them, without a sort. A CPU has a form of its own for several rows, which
together do not fit into its cache; and row by row, no row waits for the slowest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

THRESHOLDS = 'thresholds'  # the search's scope in compiled programs


def largest_threshold(probs: jax.Array, goal: jax.Array, weights: jax.Array | None) -> jax.Array:
  """Finds the largest t such that the tokens with probability at least t have a total weight of `goal` or more.

  Args:
    probs: `[..., V]`, not negative.
    goal: `[...]`, or broadcastable to it.
    weights: `[..., V]`, the tokens' weights; None gives every token the weight 1.

  Returns:
    `[..., 1]`, t; the tokens to keep are those with probability at least t. 0 where all tokens together weigh less.
  """
  goal = jnp.broadcast_to(goal, probs.shape[:-1])
  if goal.size == 1:
    return _together(probs, goal, weights)
  return jax.lax.platform_dependent(probs, goal, weights, cpu=_row_by_row, default=_together)


def _together(probs, goal, weights):
  """The plain form: one search for all rows, which ends with the slowest of them."""
  # Floats that are not negative order like their bits. The search bisects over bits and compares them as floats.
  bits_dtype = {4: jnp.int32, 8: jnp.int64}[probs.dtype.itemsize]
  goal = goal[..., None]

  def measure(threshold):
    kept = probs >= jax.lax.bitcast_convert_type(threshold, probs.dtype)
    count = jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32)
    mass = count if weights is None else jnp.sum(jnp.where(kept, weights, 0), axis=-1, keepdims=True)
    return mass >= goal, count

  def unsettled(carry):
    low, high, low_count, high_count = carry
    # Settled: the next float, or at most one token between the two.
    return jnp.any((high - low > 1) & (low_count - high_count > 1))

  def halve(carry):
    low, high, low_count, high_count = carry
    middle = low + (high - low) // 2
    is_enough, count = measure(middle)
    return (
      jnp.where(is_enough, middle, low),
      jnp.where(is_enough, high, middle),
      jnp.where(is_enough, count, low_count),
      jnp.where(is_enough, high_count, count),
    )

  high = jax.lax.bitcast_convert_type(jnp.max(probs, axis=-1, keepdims=True), bits_dtype) + 1
  low = jnp.zeros_like(high)
  everything = jnp.full(low.shape, probs.shape[-1], jnp.int32)
  with jax.named_scope(THRESHOLDS):
    low, *_ = jax.lax.while_loop(unsettled, halve, (low, high, everything, jnp.zeros_like(everything)))
  return jax.lax.bitcast_convert_type(low, probs.dtype)


def _row_by_row(probs, goal, weights):
  """The search of each row by itself."""
  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[goal.ndim :]), (probs, goal, weights))
  return jax.lax.map(lambda row: _together(*row), rows).reshape(*goal.shape, 1)
