"""K-SEQ: n i.i.d. candidates tried in turn against one threshold."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome, one_after_another, ratio
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


def overlap(draft_probs: jax.Array, target_probs: jax.Array, gamma: jax.Array) -> jax.Array:
  """beta(gamma) = sum_x min(p(x), q(x)/gamma), the chance that one candidate is accepted; scalar."""
  return jnp.sum(jnp.minimum(draft_probs, target_probs / gamma))


def any_accepted(beta: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """1 - (1 - beta)^n, without cancellation for small beta."""
  return -jnp.expm1(num_candidates * jnp.log1p(-jnp.minimum(beta, 1)))


def solve_gamma(draft_probs: jax.Array, target_probs: jax.Array, num_candidates: jax.Array, *, num_rounds: int):
  """gamma*, the root in [1, n] of 1 - (1 - beta)^n = gamma beta(gamma), from above.

  Left minus right falls as gamma grows. Any gamma from the root up to n is lossless and none below is, so the bisection
  returns the upper end of its last bracket.

  Args:
    draft_probs: `[V]`.
    target_probs: `[V]`.
    num_candidates: n, scalar; may be traced.
    num_rounds: Bisection rounds; the bracket shrinks to (n - 1) / 2^num_rounds.

  Returns:
    Scalar in [1, n], 1 for n = 1.
  """
  dtype = draft_probs.dtype

  def halve(_, bracket):
    low, high = bracket
    middle = (low + high) / 2
    beta = overlap(draft_probs, target_probs, middle)
    is_below = any_accepted(beta, num_candidates) > middle * beta
    return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

  bracket = jnp.ones((), dtype), num_candidates.astype(dtype)
  rounds = jnp.where(num_candidates > 1, num_rounds, 0)
  _, high = jax.lax.fori_loop(0, rounds, halve, bracket)
  return high


@dataclasses.dataclass(frozen=True)
class KSeq:
  """K-SEQ (SpecTr, Algorithm 2) for i.i.d. candidates; lossless, at least (1 - 1/e) of the optimal acceptance.

  Each candidate in turn is accepted with probability min(1, q/(gamma p)); when none is, the token comes from
  [q - min(p, q/gamma) (1 - (1 - beta)^n) / beta]+.

  Attributes:
    num_rounds: Bisection rounds for gamma. They change the acceptance by less than 1e-4, the law not at all.
  """

  num_rounds: int = 16
  proposal_rules = (Independent,)

  def gamma(self, draft_probs, target_probs, num_candidates):
    """The threshold in use; replaced in negative controls."""
    return solve_gamma(draft_probs, target_probs, num_candidates, num_rounds=self.num_rounds)

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    num_candidates = jnp.maximum(jnp.sum(is_valid), 1)
    gamma = self.gamma(draft_probs, target_probs, num_candidates)
    beta = overlap(draft_probs, target_probs, gamma)
    accept = jnp.minimum(1, ratio(target_probs[candidates], draft_probs[candidates]) / gamma)
    # (1 - (1 - beta)^n) / beta tends to n as beta vanishes.
    is_possible = beta > 0
    scale = jnp.where(is_possible, any_accepted(beta, num_candidates) / jnp.where(is_possible, beta, 1), num_candidates)
    covered = jnp.minimum(draft_probs, target_probs / gamma) * scale
    return Outcome(one_after_another(accept, is_valid), positive_part_or(target_probs - covered, target_probs))
