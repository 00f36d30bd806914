"""The maximal coupling of one candidate with the target."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Outcome, one_after_another, ratio
from spectr_jax.couplings.explanation import Explanation
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class Maximal(Coupling):
  """Accepts X with probability min(1, q(X)/p(X)), else draws from [q - p]+ (SpecTr, Algorithm 1).

  It is for a single candidate. With several valid ones the emitted token does not have the target's distribution.
  """

  proposal_rules = (Independent,)
  explanation = Explanation(
    'The candidate is accepted with probability min(1, q/p).',
    '[q − p]₊',
    'A guess is always accepted if the target finds it at least as likely as the draft does, and in proportion if not.'
    ' At the first rejection the token is drawn from what the draft offers too rarely.',
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    accept = jnp.minimum(1, ratio(target_probs[candidates], draft_probs[candidates]))
    return Outcome(
      one_after_another(accept, is_valid),
      positive_part_or(target_probs - draft_probs, target_probs),
    )
