"""The coupling of given candidates, which a rule chose without sampling."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome
from spectr_jax.couplings.explanation import Explanation
from spectr_jax.proposal import Independent, WithoutReplacement
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class Given:
  """Accepts each distinct candidate x with probability q(x), else draws from q without the candidates.

  The draft's distribution is not used. For every fixed set D of candidates the emitted token has the distribution q: a
  candidate x is emitted with probability q(x), any other token with probability (1 - q(D)) q(x) / (1 - q(D)). So the
  candidates may come from anywhere, such as a matched n-gram or the draft's likeliest tokens. No coupling accepts more
  than q(D), since every accepted token lies in D. With a single candidate this is the maximal coupling with a point
  mass in place of p.

  For example, candidates (3, 1, 3) with q(3) = .5 and q(1) = .2 are accepted with probabilities (.5, .2, 0).
  """

  proposal_rules = (Independent, WithoutReplacement)
  explanation = Explanation('Each candidate x is accepted with probability q(x).', 'q without the candidates')

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    is_same = candidates[:, None] == candidates
    is_copy = jnp.any(jnp.tril(is_same, -1) & is_valid, axis=-1)
    accept_probs = jnp.where(is_valid & ~is_copy, target_probs[candidates], 0)
    taken = jnp.where(is_valid, candidates, target_probs.shape[-1])  # V indexes nothing
    return Outcome(accept_probs, positive_part_or(target_probs.at[taken].set(0, mode='drop'), target_probs))
