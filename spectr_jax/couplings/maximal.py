"""The maximal coupling of one candidate with the target."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome, one_after_another, ratio
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class Maximal:
  """Accept X with probability min(1, q(X)/p(X)), else draw from [q - p]+ (SpecTr, Algorithm 1).

  For one candidate: where more are valid, the outcome is not the target's law.
  """

  proposal_rules = (Independent,)

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    accept = jnp.minimum(1, ratio(target_probs[candidates], draft_probs[candidates]))
    return Outcome(
      one_after_another(accept, is_valid),
      positive_part_or(target_probs - draft_probs, target_probs),
    )
