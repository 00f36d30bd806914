"""Negative controls: methods broken in the ways such systems break. A proof that does not catch them proves nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from spectr_jax.couplings import Coupling, KSeq, Maximal, Only, Outcome, Pick, Race, Selected
from spectr_jax.methods import Method
from spectr_jax.proposal import Independent
from spectr_jax.verify import Block, GreedyBlock, Stateless, Verifier, Walk


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


@dataclasses.dataclass(frozen=True)
class OneTicket(Race):
  """A race in which a token drawn twice has one ticket, while the law of the winner is taken to be that with two."""

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Pick:
    pick = super().__call__(draft_probs, target_probs, candidates, is_valid)
    is_repeat = jnp.any(jnp.tril(candidates[:, None] == candidates, -1) & is_valid, axis=-1)
    tickets = jnp.where(is_repeat, 0, pick.pick_probs)
    total = jnp.sum(tickets)
    return dataclasses.replace(pick, pick_probs=tickets / jnp.where(total > 0, total, 1))


_broken = functools.partial(Method, proposal_rule=Independent(), is_lossless=False, source='negative control')

CONTROLS: dict[str, Method] = {
  method.name: method
  for method in (
    _broken('speculative_residual_left_out', Walk(ResidualLeftOut(Maximal())), max_drafts=1),
    _broken('spectr_residual_left_out', Walk(ResidualLeftOut(KSeq()))),
    _broken('spectr_gamma_too_small', Walk(GammaTooSmall())),
    _broken('speculative_many_drafts', Walk(Maximal())),
    _broken('race_one_ticket', Walk(Selected(OneTicket()))),
    _broken('race_block_one_ticket', Block(OneTicket())),
    _broken('greedy_block_level_too_few', GreedyBlock(num_levels_dropped=1), max_drafts=1),
    _broken('block_keyed_by_position', Block(Only()), max_drafts=1, is_seed_exact=True),
    _broken('race_block_keyed_by_position', Block(Race()), is_seed_exact=True),
    _broken('speculative_law_before_top_p', LawBeforeTopP(Walk(Maximal())), max_drafts=1),
    _broken('spectr_law_before_top_p', LawBeforeTopP(Walk(KSeq()))),
  )
}
