"""Negative controls: methods broken in the ways such systems break. A proof that does not catch them proves nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from spectr_jax.couplings import Coupling, KSeq, Maximal, Outcome
from spectr_jax.methods import Method
from spectr_jax.proposal import Independent
from spectr_jax.verify import Stateless, Verifier, Walk


@dataclasses.dataclass(frozen=True)
class ResidualLeftOut:
  """A coupling that draws the correction from the target itself instead of the residual."""

  coupling: Coupling
  proposal_rules = (Independent,)

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    outcome = self.coupling(draft_probs, target_probs, candidates, is_valid)
    return dataclasses.replace(outcome, residual=target_probs)


@dataclasses.dataclass(frozen=True)
class GammaTooSmall(KSeq):
  """K-SEQ with a threshold below the smallest that is lossless."""

  def gamma(self, draft_probs, target_probs, num_candidates):
    return jnp.maximum(1, 0.9 * super().gamma(draft_probs, target_probs, num_candidates))


@dataclasses.dataclass(frozen=True)
class LawBeforeTopP(Stateless):
  """A verifier told another draft law than the one drawn from, as when it is recomputed or taken before top-p."""

  verifier: Verifier
  proposal_rules = (Independent,)

  def _seen(self, proposal):
    probs = proposal.probs + 0.1
    return dataclasses.replace(proposal, probs=probs / jnp.sum(probs, axis=-1, keepdims=True))

  def verify(self, keys, tree, proposal, target_probs, state):
    return self.verifier.verify(keys, tree, self._seen(proposal), target_probs, state)

  def law(self, tree, proposal, target_probs, state):
    return self.verifier.law(tree, self._seen(proposal), target_probs, state)


_broken = functools.partial(Method, proposal_rule=Independent(), is_lossless=False, source='negative control')

CONTROLS: dict[str, Method] = {
  method.name: method
  for method in (
    _broken('speculative_residual_left_out', Walk(ResidualLeftOut(Maximal())), max_drafts=1),
    _broken('spectr_residual_left_out', Walk(ResidualLeftOut(KSeq()))),
    _broken('spectr_gamma_too_small', Walk(GammaTooSmall())),
    _broken('speculative_many_drafts', Walk(Maximal())),
    _broken('speculative_law_before_top_p', LawBeforeTopP(Walk(Maximal())), max_drafts=1),
    _broken('spectr_law_before_top_p', LawBeforeTopP(Walk(KSeq()))),
  )
}
