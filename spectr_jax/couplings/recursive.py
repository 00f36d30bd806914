"""Recursive rejection: each candidate in turn is tested against the residual of the target after earlier rejections."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Explanation, Outcome, ratio
from spectr_jax.kernels.on_demand import where_needed
from spectr_jax.proposal import Independent, WithoutReplacement
from spectr_jax.sampling import positive_part


@dataclasses.dataclass(frozen=True)
class Recursive(Coupling):
  """Recursive rejection sampling, with or without replacement.

  The residual r starts as q. A candidate X is accepted with probability min(1, r(X)/p(X)). If it is rejected, r becomes
  [r - p]+, normalized; if that is 0 everywhere, r stays. If all candidates are rejected, the token is drawn from r.
  This is SpecInfer's multi-step speculative sampling (Miao et al. 2024, Algorithm 2). Without replacement p loses every
  rejected token and is normalized again (Jeon et al. 2024; "Speculative Decoding via Exponential Races", Algorithm 4).

  Since [[a]+ - b]+ = [a - b]+ for b >= 0, r is [q - c p]+ / z with two numbers c and z, and no distribution except p
  and q is stored. A rejected token has r = 0 from then on, so removing it from p changes only p's norm.

  Attributes:
    with_replacement: Whether the candidates were drawn with replacement.
  """

  with_replacement: bool = True

  @property
  def proposal_rules(self):
    return (Independent,) if self.with_replacement else (WithoutReplacement,)

  @property
  def explanation(self) -> Explanation:
    """The description of either version."""
    differ = '' if self.with_replacement else ' Candidates differ: p loses each rejected token.'
    return Explanation(
      'The candidates are tried in turn with min(1, r/p), where r is what the rejected ones before have left of q.'
      + differ,
      'r, which is what the rejected candidates have left of q',
      ('The candidates' if self.with_replacement else 'The candidates, which all differ,')
      + ' are tried one after the other, each against what the rejected ones have left of the target. If all fail, the'
      ' token is drawn from that rest.',
    )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    nothing = jnp.zeros(candidates.shape, target_probs.dtype), jnp.zeros((), target_probs.dtype)
    accept_probs, c = where_needed(
      jnp.any(is_valid), self._try_all, nothing, draft_probs, target_probs, candidates, is_valid
    )
    return Outcome(accept_probs, positive_part(target_probs - c * draft_probs))

  def _try_all(self, draft_probs, target_probs, candidates, is_valid):
    """The probability `[n]` that each candidate is the accepted one, and c after the last candidate."""
    dtype = target_probs.dtype

    def is_unfinished(carry):
      is_waiting, _, reach, *_ = carry
      return jnp.any(is_waiting) & (reach > 0)

    def try_next(carry):
      is_waiting, accept_probs, reach, c, z, left = carry
      i = jnp.argmax(is_waiting)
      token = candidates[i]
      # The mass left of p is summed, since 1 minus the removed mass cancels if one token has nearly all of it.
      norm = 1 if left is None else jnp.sum(left)
      p = draft_probs[token]
      residual = jnp.maximum(target_probs[token] - c * p, 0)
      # Two quotients, since z p can be 0 in floats where neither is. A token with p = 0 cannot have been drawn.
      accept = jnp.minimum(1, ratio(residual, p) * (norm / z))
      next_c = c + z / norm
      next_z = jnp.sum(positive_part(target_probs - next_c * draft_probs))
      has_mass = next_z > 0
      return (
        is_waiting.at[i].set(False),
        accept_probs.at[i].set(reach * accept),
        reach * (1 - accept),
        jnp.where(has_mass, next_c, c),
        jnp.where(has_mass, next_z, z),
        None if left is None else left.at[token].set(0),
      )

    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    left = None if self.with_replacement else draft_probs
    start = is_valid, jnp.zeros(candidates.shape, dtype), one, zero, one, left
    with jax.named_scope('candidates'):
      _, accept_probs, _, c, _, _ = jax.lax.while_loop(is_unfinished, try_next, start)
    return accept_probs, c
