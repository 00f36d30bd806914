"""The largest acceptance that any lossless rule can have, for one token from n independent candidates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from spectr_jax.couplings.kseq import any_accepted


def optimal_acceptance(draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int | jax.Array) -> jax.Array:
  """The optimal acceptance alpha*_n: the largest P(Y is among X_1..X_n) for i.i.d. X_i from p and Y from q.

  It is the minimum over sets A of tokens of 1 + q(A) - p(A)^n. Each set gives a bound, since Y is a candidate only if
  it lies in A or some candidate lies outside. By max-flow min-cut one of the bounds is attained. So this is the value
  of the linear program (4) of SpecTr (Sun et al. 2023), and its Theorem 1 with equality.

  For a given p(A) the smallest q(A) counts. It is piecewise linear in p(A), so the minimum lies at a corner: A is a
  prefix of the tokens in ascending order of q/p. One sort and two cumulative sums replace the program's V^(n+1)
  variables. For example, p = (3/4, 1/4), q = (1/2, 1/2) and n = 2 give 1 + 1/2 - (3/4)^2 = 15/16, with the first token
  as A.

  Args:
    draft_probs: `[..., V]`, distributions p; float32 or wider.
    target_probs: `[..., V]`, distributions q.
    num_drafts: n, an integer, or an array of integers that broadcasts against the leading shape. It may be traced.

  Returns:
    `[...]`, the leading shape broadcast with n's, in the dtype of p and q; 0 where n is 0.

  Raises:
    ValueError: The distributions differ in shape or have no axis; or n has no integer dtype, is negative (if its value
      is known), or does not broadcast.
  """
  draft_probs, target_probs = jnp.asarray(draft_probs), jnp.asarray(target_probs)
  if draft_probs.shape != target_probs.shape or draft_probs.ndim == 0:
    raise ValueError(
      f'draft_probs and target_probs must have the same shape [..., V], got {draft_probs.shape} and'
      f' {target_probs.shape}'
    )
  if not isinstance(num_drafts, Tracer) and np.any(np.asarray(num_drafts) < 0):
    raise ValueError(f'num_drafts must be at least 0, got {num_drafts}')
  num_drafts = jnp.asarray(num_drafts)
  if not jnp.issubdtype(num_drafts.dtype, jnp.integer):
    raise ValueError(f'num_drafts must be of integers, got {num_drafts.dtype}')
  jnp.broadcast_shapes(draft_probs.shape[:-1], num_drafts.shape)  # the error names both shapes

  # Tokens that the draft cannot draw come last, since adding them to A raises q(A) and leaves p(A) as it is.
  is_possible = draft_probs > 0
  ratios = jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), jnp.inf)
  _, p, q = jax.lax.sort((ratios, draft_probs, target_probs), num_keys=1)
  inside = jnp.cumsum(q, axis=-1)
  # The mass of p outside A is summed from the far end. A rounding error of p(A) near 1 would be multiplied by n, but
  # the relative error of 1 - (1 - x)^n is at most that of x.
  outside = jax.lax.cumsum(p, axis=p.ndim - 1, reverse=True)
  outside = jnp.concatenate([outside[..., 1:], jnp.zeros_like(outside[..., :1])], axis=-1)
  bounds = inside + any_accepted(outside, num_drafts[..., None])
  # The empty set's bound is 1. For n = 0 the value is 0; the computed bounds can be 0 * log 0 there.
  return jnp.where(num_drafts > 0, jnp.clip(jnp.min(bounds, axis=-1), 0, 1), 0)
