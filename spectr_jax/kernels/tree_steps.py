"""Recursions along the depths of a tree, over tables `[L + 1, W]` of its nodes by depth and slot.

The plain forms are scans. On a TPU every iteration of a scan is several launches, so there each recursion is a kernel
that goes through the depths by itself. On a GPU the iterations of a short scan are launched one by one, so there it is
unrolled, and becomes part of what is launched together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.expm1 import expm1

_ROWS_TOGETHER = 8  # for which a kernel goes through the depths at the same time, at most
_MOST_BYTES = 4 * 2**20  # of these rows, which are in the vector memory twice
_LANES = 128


@operation
def race_credits(
  is_candidate: jax.Array,
  is_before: jax.Array,
  is_sibling: jax.Array,
  shares: jax.Array,
  log_ratios: jax.Array,
) -> jax.Array:
  """The logarithms of the credits of race traversal, depth by depth; see `verify.race_traversal.RaceTraversal`.

  Args:
    is_candidate: bool `[L, W, W]`, at `[d, i, j]` whether slot j of depth d + 1 is a candidate after context i.
    is_before: bool `[L, W, W]`, at `[d, j, k]` whether context k of depth d + 1 is visited before its sibling j.
    is_sibling: bool `[L, W, W]`, whether k and j follow the same context; each is its own sibling.
    shares: `[L, W]`, the probability that the race above picks the token of a slot; 0 if the slot stands for no
      context.
    log_ratios: `[L, W]`, log of q(x) / pt(x) of that token.

  Returns:
    log P by slot, `[L + 1, W]`; -inf where it is 0.
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


@scan_depths.form('gpu')
def _unrolled(step, start, depths, *, reverse=False):
  return jax.lax.scan(step, start, depths, reverse=reverse, unroll=True)


def _is_float32(is_candidate, is_before, is_sibling, shares, log_ratios):
  return shares.dtype == jnp.float32


@race_credits.kernel('tpu', takes=_is_float32)
def credits_kernel(is_candidate, is_before, is_sibling, shares, log_ratios, *, interpret: bool = False):
  """`race_credits` of M rows as a kernel; all arguments and the result with M in front.

  Args:
    is_candidate, is_before, is_sibling, shares, log_ratios: As of `race_credits`.
    interpret: Whether to run without a TPU, for tests.
  """
  _, num_depths, width = shares.shape

  def kernel(candidate_ref, before_ref, sibling_ref, share_ref, ratio_ref, credit_ref):
    is_first = jax.lax.broadcasted_iota(jnp.int32, (len(share_ref), width, 1), 1) == 0
    credit = jnp.where(is_first, 0.0, -jnp.inf)
    credit_ref[:, 0:1] = _as_row(credit)
    for depth in range(num_depths):
      share, ratio = share_ref[:, depth : depth + 1], ratio_ref[:, depth : depth + 1]
      above = jnp.sum(jnp.where(candidate_ref[:, depth] != 0, credit, 0), axis=1, keepdims=True)
      passed = jnp.minimum(above + ratio, 0)
      kept_back = -share * expm1(passed)
      before = jnp.where(before_ref[:, depth] != 0, kept_back, share)
      divisor = _as_row(jnp.sum(jnp.where(sibling_ref[:, depth] != 0, before, 0), axis=2, keepdims=True))
      is_open = share > 0
      following = jnp.log(jnp.where(is_open, share / jnp.where(is_open, divisor, 1), 1)) + passed
      following = jnp.where(is_open, jnp.minimum(following, 0), -jnp.inf)
      credit_ref[:, depth + 1 : depth + 2] = following
      credit = _as_column(following)

  masks = (x.astype(jnp.int32) for x in (is_candidate, is_before, is_sibling))
  shape = jax.ShapeDtypeStruct((len(shares), num_depths + 1, width), shares.dtype)
  return _by_rows(kernel, shape, interpret, 'race_credits')(*masks, shares, log_ratios)


@operation
def first_kept(is_child: jax.Array, is_before: jax.Array, is_kept: jax.Array, nodes: jax.Array) -> jax.Array:
  """The first kept context in the order of visits: children before parents, siblings by `is_before`.

  Args:
    is_child: bool `[L, W, W]`, at `[d, i, j]` whether context j of depth d + 1 stands below context i.
    is_before: bool `[L, W, W]`, at `[d, j, k]` whether context k of depth d + 1 is visited before its sibling j.
    is_kept: bool `[L + 1, W]`; the root's is True.
    nodes: int32 `[L + 1, W]`, the nodes of the slots, from 0 to a number below (L + 1) W.

  Returns:
    The node of that context, int32 scalar.
  """
  ranks = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
  scale, none = _ranked(nodes), nodes.shape[1] * _ranked(nodes)

  def shallower(found, depth):
    """`found` `[W]`: the first node kept from each context on, -1 for none."""
    is_child, ranks, is_kept, nodes = depth
    # Ranks first, then nodes: the smallest pair has the first child below which something is kept.
    pairs = jnp.where(is_child & (found >= 0), ranks * scale + found, none)
    smallest = jnp.min(pairs, axis=-1)
    own = jnp.where(is_kept, nodes, -1)
    return jnp.where(smallest < none, smallest % scale, own), None

  leaves = jnp.where(is_kept[-1], nodes[-1], -1)
  with jax.named_scope('visits'):
    found, _ = scan_depths(shallower, leaves, (is_child, ranks, is_kept[:-1], nodes[:-1]), reverse=True)
  return found[0]


def _ranked(nodes):
  """More than any node, so that a rank times this and a node are in order of the rank first."""
  return nodes.shape[-2] * nodes.shape[-1]


@first_kept.kernel('tpu')
def first_kept_kernel(is_child, is_before, is_kept, nodes, *, interpret: bool = False):
  """`first_kept` of M rows as a kernel; all arguments with M in front, the result `[M]`.

  Args:
    is_child, is_before, is_kept, nodes: As of `first_kept`.
    interpret: Whether to run without a TPU, for tests.
  """
  _, num_depths, width = is_kept.shape
  scale, none = _ranked(nodes), width * _ranked(nodes)

  def kernel(child_ref, before_ref, own_ref, found_ref):
    found = own_ref[:, num_depths - 1 : num_depths]
    for depth in reversed(range(num_depths - 1)):
      rank = _as_row(jnp.sum(before_ref[:, depth], axis=2, keepdims=True))
      pairs = jnp.where((child_ref[:, depth] != 0) & (found >= 0), rank * scale + found, none)
      smallest = _as_row(jnp.min(pairs, axis=2, keepdims=True))
      # The remainder of the rank, without a division.
      rest = smallest
      for i in range(width - 1, 0, -1):
        rest = jnp.where(smallest >= i * scale, jnp.minimum(rest, smallest - i * scale), rest)
      found = jnp.where(smallest < none, rest, own_ref[:, depth : depth + 1])
    found_ref[...] = found

  own = jnp.where(is_kept, nodes, -1)
  masks = (x.astype(jnp.int32) for x in (is_child, is_before))
  shape = jax.ShapeDtypeStruct((len(own), 1, width), jnp.int32)
  return _by_rows(kernel, shape, interpret, 'first_kept')(*masks, own)[:, 0, 0]


def _by_rows(kernel, result: jax.ShapeDtypeStruct, interpret: bool, name: str):
  """A call of a kernel for some entries of the first axis of its arguments at a time.

  Every depth waits for the one before, so that several entries take little longer than one.
  """
  from jax.experimental import pallas as pl

  num_rows = result.shape[0]

  def call(*arrays):
    num_together = _rows_together(num_rows, arrays)

    def block(shape):
      return pl.BlockSpec((num_together, *shape[1:]), lambda i: (i, *[0] * (len(shape) - 1)))

    return pl.pallas_call(
      kernel,
      grid=(num_rows // num_together,),
      in_specs=[block(x.shape) for x in arrays],
      out_specs=block(result.shape),
      out_shape=result,
      interpret=interpret,
      name=name,
    )(*arrays)

  return call


def _rows_together(num_rows, arrays):
  """A divisor of the number of rows, as large as there is memory for; 1 where a single row is larger."""
  row_bytes = sum(4 * math.prod(x.shape[1:-1]) * -(-x.shape[-1] // _LANES) * _LANES for x in arrays)
  num_together = math.gcd(num_rows, _ROWS_TOGETHER)
  while num_together > 1 and num_together * row_bytes > _MOST_BYTES:
    num_together //= 2
  return num_together


def _diagonal(size):
  row, column = (jax.lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))
  return row == column


def _as_row(column):
  """`[M, 1, W]` of `[M, W, 1]`, by a sum with one term, which a kernel has the operations for."""
  zero = jnp.zeros((), column.dtype)
  return jnp.sum(jnp.where(_diagonal(column.shape[1]), column, zero), axis=1, keepdims=True)


def _as_column(row):
  return jnp.sum(jnp.where(_diagonal(row.shape[2]), row, jnp.zeros((), row.dtype)), axis=2, keepdims=True)
