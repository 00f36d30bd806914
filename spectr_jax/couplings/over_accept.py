"""Over-acceptance by a chosen amount, which trades a bias for fewer rejections."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Explanation, Outcome, one_after_another, ratio
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@dataclasses.dataclass(frozen=True)
class OverAccept(Coupling):
  """Accepts X with probability min(1, (q(X) + epsilon)/p(X)). It is not lossless, on purpose.

  Source: "A Theoretical Perspective for Speculative Decoding Algorithm" (Yin et al. 2024), section 4. With the best
  residual, [q - p]+ (Theorem 4, Decoding-OPT), the probability of rejection and the bias in total variation add up to
  TV(p, q) (Theorem 5). With q itself as the residual (Decoding-UNO) the bias is larger.

  Attributes:
    epsilon: The amount added to the target's probability, at least 0. With 0 and the best residual this is `Maximal`.
    has_best_residual: Decoding-OPT if True, else Decoding-UNO.

  Raises:
    ValueError: `epsilon` is negative.
  """

  epsilon: float
  has_best_residual: bool
  proposal_rules = (Independent,)
  explanation = Explanation(
    'The candidate is accepted with min(1, (q + ε)/p): more than is right, on purpose.',
    'the rejection distribution',
    'A guess is accepted somewhat more often than is right. That saves calls of the target and biases the text, on'
    ' purpose.',
  )

  def __post_init__(self):
    if not self.epsilon >= 0:
      raise ValueError(f'epsilon must be at least 0, got {self.epsilon}')

  @property
  def is_biased(self) -> bool:
    """True if the emitted token's distribution differs from the target's."""
    return self.epsilon > 0 or not self.has_best_residual

  def with_epsilon(self, epsilon: float) -> OverAccept:
    """The same coupling with another `epsilon`."""
    return dataclasses.replace(self, epsilon=epsilon)

  def numbers(self, draft_probs, target_probs, candidates, is_valid) -> dict[str, jax.Array]:
    """The amount added to the target's probability, for display."""
    del draft_probs, candidates, is_valid
    return {'epsilon': jnp.asarray(self.epsilon, target_probs.dtype)}

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    accept = jnp.minimum(1, ratio(target_probs[candidates] + self.epsilon, draft_probs[candidates]))
    residual = positive_part_or(target_probs - draft_probs, target_probs) if self.has_best_residual else target_probs
    return Outcome(one_after_another(accept, is_valid), residual)
