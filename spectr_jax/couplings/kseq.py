"""K-SEQ: n i.i.d. candidates tried in turn against one threshold."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation, Outcome, ThresholdCoupling, one_after_another, ratio
from spectr_jax.kernels.gamma import any_accepted, overlap, solve_gamma
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class KSeq(ThresholdCoupling):
  """K-SEQ (SpecTr, Algorithm 2) for i.i.d. candidates; lossless, at least (1 - 1/e) of the optimal acceptance.

  Each candidate in turn is accepted with probability min(1, q/(gamma p)). If all are rejected, the token is drawn from
  [q - min(p, q/gamma) (1 - (1 - beta)^n) / beta]+.

  Attributes:
    num_rounds: The accuracy of gamma, as rounds of bisection. At 16 the acceptance is within 1e-4 of its limit. The
      distribution of the emitted token does not depend on it.
  """

  num_rounds: int = 16
  proposal_rules = (Independent,)
  explanation = Explanation(
    'K-SEQ tries the candidates in turn against one threshold γ: each is accepted with min(1, q/(γp)).',
    '[q − min(p, q/γ) · (1 − (1 − β)ⁿ)/β]₊',
    'The candidates are tried one after the other against one threshold, just high enough that no token comes out too'
    ' often. If all fail, the token is drawn from what the target still lacks.',
  )

  def gamma(self, draft_probs, target_probs, num_candidates):
    return solve_gamma(draft_probs, target_probs, num_candidates, num_rounds=self.num_rounds)

  def numbers(self, draft_probs, target_probs, candidates, is_valid) -> dict[str, jax.Array]:
    """The threshold at a position, for display."""
    del candidates
    return {'gamma': self.gamma_at(draft_probs, target_probs, is_valid)}

  def accept_probs(self, draft_probs, target_probs, is_valid, gamma) -> jax.Array:
    return one_after_another(jnp.minimum(1, ratio(target_probs, draft_probs) / gamma), is_valid)

  def outcome(self, draft_probs, target_probs, candidates, is_valid, gamma) -> Outcome:
    num_candidates = jnp.maximum(jnp.sum(is_valid), 1)
    beta = overlap(draft_probs, target_probs, gamma)
    # The limit of (1 - (1 - beta)^n) / beta for beta -> 0 is n.
    is_possible = beta > 0
    scale = jnp.where(is_possible, any_accepted(beta, num_candidates) / jnp.where(is_possible, beta, 1), num_candidates)
    covered = jnp.minimum(draft_probs, target_probs / gamma) * scale
    return Outcome(
      self.accept_probs(draft_probs[candidates], target_probs[candidates], is_valid, gamma),
      positive_part_or(target_probs - covered, target_probs),
    )
