"""Accepting more than is right, by a chosen amount: fewer rejections for a bias."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome, one_after_another, ratio
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class OverAccept:
  """Accept X with probability min(1, (q(X) + epsilon)/p(X)). Not lossless, on purpose.

  "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024), section 4. With the best rejection
  law, [q - p]+ (Theorem 4, Decoding-OPT), the chance of rejection and the bias in total variation add up to TV(p, q)
  (Theorem 5). With the target's own law in its place (Decoding-UNO) the bias is larger.

  Attributes:
    epsilon: What is added to the target's probability, at least 0; 0 with the best rejection law is `Maximal`.
    has_best_residual: Decoding-OPT if True, else Decoding-UNO.

  Raises:
    ValueError: `epsilon` is negative.
  """

  epsilon: float
  has_best_residual: bool
  proposal_rules = (Independent,)

  def __post_init__(self):
    if not self.epsilon >= 0:
      raise ValueError(f'epsilon must be at least 0, got {self.epsilon}')

  @property
  def is_lossless(self) -> bool:
    return self.epsilon == 0 and self.has_best_residual

  def numbers(self, draft_probs, target_probs, candidates, is_valid) -> dict[str, jax.Array]:
    """What is added to the target's probability, to be shown; arguments as of a call."""
    del draft_probs, candidates, is_valid
    return {'epsilon': jnp.asarray(self.epsilon, target_probs.dtype)}

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    accept = jnp.minimum(1, ratio(target_probs[candidates] + self.epsilon, draft_probs[candidates]))
    residual = positive_part_or(target_probs - draft_probs, target_probs) if self.has_best_residual else target_probs
    return Outcome(one_after_another(accept, is_valid), residual)
