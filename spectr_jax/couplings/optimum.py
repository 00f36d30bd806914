"""The largest acceptance that any lossless rule can have, for one token from independent and given candidates."""

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
    draft_probs, target_probs: `[..., V]`, distributions p and q; float32 or wider.
    num_drafts: n, an integer, or an array of integers that broadcasts against the leading shape. It may be traced.

  Returns:
    `[...]`, the leading shape broadcast with n's, in the dtype of p and q; 0 where n is 0.

  Raises:
    ValueError: The distributions differ in shape or have no axis; or n has no integer dtype, is negative (if its value
      is known), or does not broadcast.
  """
  pair = jnp.asarray(draft_probs), jnp.asarray(target_probs)
  num_drafts = _check(*pair, num_drafts)
  # The empty set's bound is 1. For n = 0 the value is 0; the computed bounds can be 0 * log 0 there.
  bounds = _bounds(*pair, num_drafts, None)
  return jnp.where(num_drafts > 0, jnp.clip(jnp.min(bounds, axis=-1), 0, 1), 0)


def given_optimum(
  draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int | jax.Array, is_given: jax.Array
) -> jax.Array:
  """The optimal acceptance of given tokens beside n independent candidates: the largest P(Y is one of them).

  Let D be the set of given tokens. The value is 1 or the minimum over sets A that contain D of 1 + q(A) - p(A)^n,
  whichever is smaller: Y is accepted only if it lies in A or some drawn candidate lies outside. A is D and a prefix of
  the other tokens in ascending order of q/p. Without drawn candidates the value is q(D), and without given ones it is
  `optimal_acceptance`. With one drawn candidate D adds the sum of max(q - p, 0) over D: an n-gram that the target likes
  more than the draft does is worth much, and the draft's own favorite next to nothing.

  For example, p = (3/4, 1/4), q = (1/2, 1/2) and n = 1 give 3/4. With the second token given they give
  1 + 1 - 1 = 1, and with the first one given 1 + 1/2 - 3/4 = 3/4.

  Arguments and the result are those of `optimal_acceptance`, and `is_given`, bool `[..., V]`, the tokens of D;
  ValueError for others.
  """
  draft_probs, target_probs, is_given = map(jnp.asarray, (draft_probs, target_probs, is_given))
  num_drafts = _check(draft_probs, target_probs, num_drafts)
  if is_given.shape != draft_probs.shape or is_given.dtype != bool:
    raise ValueError(f'is_given must be bool {draft_probs.shape}, got {is_given.dtype} {is_given.shape}')
  bounds = _bounds(draft_probs, target_probs, num_drafts, is_given)
  # Sorted, the given tokens come first; only prefixes that hold all of them are bounds.
  is_bound = jnp.arange(1, bounds.shape[-1] + 1) >= jnp.sum(is_given, axis=-1)[..., None]
  drawn = jnp.clip(jnp.min(jnp.where(is_bound, bounds, 1), axis=-1), 0, 1)
  alone = jnp.minimum(jnp.sum(jnp.where(is_given, target_probs, 0), axis=-1), 1)
  return jnp.where(num_drafts > 0, drawn, alone)


def _check(draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int | jax.Array) -> jax.Array:
  """The number of drafts as an array; ValueError if the arguments do not fit."""
  if draft_probs.shape != target_probs.shape or draft_probs.ndim == 0:
    raise ValueError(
      f'draft_probs and target_probs must have the same shape [..., V], got {draft_probs.shape} and'
      f' {target_probs.shape}'
    )
  known = num_drafts if isinstance(num_drafts, Tracer) else np.asarray(num_drafts)
  if not jnp.issubdtype(known.dtype, jnp.integer):
    raise ValueError(f'num_drafts must be of integers, got {known.dtype}')
  if not isinstance(num_drafts, Tracer) and np.any(known < 0):
    raise ValueError(f'num_drafts must be at least 0, got {num_drafts}')
  num_drafts = jnp.asarray(num_drafts)
  jnp.broadcast_shapes(draft_probs.shape[:-1], num_drafts.shape)  # the error names both shapes
  return num_drafts


def _bounds(draft_probs, target_probs, num_drafts, is_given) -> jax.Array:
  """The bounds `[..., V]` of the prefixes of the tokens: the given ones, then the others in ascending order of q/p."""
  # Tokens that the draft cannot draw come last, since adding them to A raises q(A) and leaves p(A) as it is.
  is_possible = draft_probs > 0
  ratios = jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), jnp.inf)
  ratios = ratios if is_given is None else jnp.where(is_given, -1, ratios)
  _, p, q = jax.lax.sort((ratios, draft_probs, target_probs), num_keys=1)
  inside = jnp.cumsum(q, axis=-1)
  # The mass of p outside A is summed from the far end. A rounding error of p(A) near 1 would be multiplied by n, but
  # the relative error of 1 - (1 - x)^n is at most that of x.
  outside = jax.lax.cumsum(p, axis=p.ndim - 1, reverse=True)
  outside = jnp.concatenate([outside[..., 1:], jnp.zeros_like(outside[..., :1])], axis=-1)
  return inside + any_accepted(outside, num_drafts[..., None])
