"""Recursions along the depths of a tree, over tables `[L + 1, W]` of its nodes by depth and slot.

The plain forms are scans. On a TPU every iteration of a scan is several launches, so there each recursion is a kernel
that goes through the depths by itself. On a CPU and a GPU the iterations of a short scan are launched one by one, so
there it is unrolled, and becomes part of what is launched together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation


@operation
def race_credits(
  is_candidate: jax.Array, is_before: jax.Array, is_sibling: jax.Array, shares: jax.Array, log_ratios: jax.Array
) -> jax.Array:
  """The logarithms of the credits of race traversal by slot, `[L + 1, W]`, -inf for 0.

  Arguments are those of `Contexts`, `Plan` and `_Races` in `spectr_jax.verifiers`; `shares` `[L, W]` is 0 for a slot
  without a context.
  """

  def next_depth(log_credit, depth):
    is_candidate, is_before, is_sibling, shares, log_ratios = depth
    log_above = jnp.sum(jnp.where(is_candidate, log_credit[:, None], 0), axis=0)
    log_passed = jnp.minimum(0, log_above + log_ratios)
    # 1 - sum of m before each context. The shares of siblings sum to 1. So this is the sum of s - m over the siblings
    # before, and of s over the others. In this form nothing cancels.
    kept_back = -shares * jnp.expm1(log_passed)
    divisor = jnp.sum(jnp.where(is_sibling, jnp.where(is_before, kept_back, shares), 0), axis=-1)
    is_open = shares > 0
    log_next = jnp.log(jnp.where(is_open, shares / jnp.where(is_open, divisor, 1), 1)) + log_passed
    log_next = jnp.where(is_open, jnp.minimum(log_next, 0), -jnp.inf)
    return log_next, log_next

  root = jnp.where(jnp.arange(shares.shape[1]) == 0, 0, -jnp.inf).astype(shares.dtype)
  depths = is_candidate, is_before, is_sibling, shares, log_ratios
  with jax.named_scope('credits'):
    return jnp.concatenate([root[None], scan_depths(next_depth, root, depths)[1]])


@operation
def scan_depths(step: Callable[..., Any], start: Any, depths: Any, *, reverse: bool = False) -> Any:
  """`jax.lax.scan`."""
  return jax.lax.scan(step, start, depths, reverse=reverse)


_MOST_UNROLLED = 16  # depths


@scan_depths.form(
  ('cpu', 'gpu'), takes=lambda step, start, depths, **_: len(jax.tree.leaves(depths)[0]) <= _MOST_UNROLLED
)
def _unrolled(step, start, depths, *, reverse=False):
  return jax.lax.scan(step, start, depths, reverse=reverse, unroll=True)


race_credits.register_kernel('tpu', 'tpu.recursions:race_credits', takes=lambda *arrays: arrays[3].dtype == jnp.float32)


@operation
def first_kept(is_child: jax.Array, is_before: jax.Array, is_kept: jax.Array, nodes: jax.Array) -> jax.Array:
  """The node, an int32 scalar, of the first kept context in the order of visits: children before parents.

  `is_child` and `is_before` are bool `[L, W, W]` as in `Contexts` and `Plan` of `spectr_jax.verifiers`; `is_kept`, bool
  `[L + 1, W]`, is True at the root; `nodes`, int32 `[L + 1, W]`, are below (L + 1) W.
  """
  ranks = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
  scale, none = ranked(nodes), nodes.shape[1] * ranked(nodes)

  def shallower(first, depth):
    """`first` `[W]`: the first node kept from each context on, -1 for none."""
    is_child, ranks, is_kept, nodes = depth
    # Ranks first, then nodes: the smallest pair has the first child below which something is kept.
    pairs = jnp.where(is_child & (first >= 0), ranks * scale + first, none)
    smallest = jnp.min(pairs, axis=-1)
    own = jnp.where(is_kept, nodes, -1)
    return jnp.where(smallest < none, smallest % scale, own), None

  leaves = jnp.where(is_kept[-1], nodes[-1], -1)
  with jax.named_scope('visits'):
    first, _ = scan_depths(shallower, leaves, (is_child, ranks, is_kept[:-1], nodes[:-1]), reverse=True)
  return first[0]


def ranked(nodes):
  """More than any node, so that a rank times this and a node are in order of the rank first."""
  return nodes.shape[-2] * nodes.shape[-1]


first_kept.register_kernel('tpu', 'tpu.recursions:first_kept')
