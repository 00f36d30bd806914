"""Negative controls: methods with typical errors, which a proof of losslessness has to catch."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings import Coupling, KSeq, Maximal, MaximalAfter, Outcome, Race, SingleDraft
from spectr_jax.couplings.coupling import ratio
from spectr_jax.methods import Method
from spectr_jax.proposal import Independent, LikeliestAndOne
from spectr_jax.verifiers import Block, GreedyBlock, RaceLayers, RaceTraversal, UniVer, Verifier, Walk


@dataclasses.dataclass(frozen=True)
class ResidualLeftOut(Coupling):
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
class LawBeforeTopP(Verifier):
  """A verifier that is given another draft distribution than the one drawn from, such as the one before top-p."""

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
  """A race with one ticket for a token drawn twice, but with the winner's distribution for two tickets."""

  def select(self, draft_probs, target_probs, candidates, is_valid):
    pick_probs, scale = super().select(draft_probs, target_probs, candidates, is_valid)
    is_repeat = jnp.any(jnp.tril(candidates[:, None] == candidates, -1) & is_valid, axis=-1)
    tickets = jnp.where(is_repeat, 0, pick_probs)
    total = jnp.sum(tickets)
    return tickets / jnp.where(total > 0, total, 1), scale


@dataclasses.dataclass(frozen=True)
class CreditNotDivided(RaceTraversal):
  """Race traversal with credit m in place of m / (1 - sum of m before), which keeps late contexts too rarely."""

  def _log_credits(self, contexts, races):
    def next_depth(log_credit, depth):
      is_candidate, shares, log_ratios = depth
      log_above = jnp.sum(jnp.where(is_candidate, log_credit[:, None], 0), axis=0)
      log_next = jnp.log(jnp.where(shares > 0, shares, 1)) + jnp.minimum(0, log_above + log_ratios)
      log_next = jnp.where(shares > 0, log_next, -jnp.inf)
      return log_next, log_next

    root = jnp.where(jnp.arange(races.shares.shape[1]) == 0, 0, -jnp.inf).astype(races.shares.dtype)
    below = jax.lax.scan(next_depth, root, (contexts.is_candidate, races.shares, races.log_ratios))[1]
    return jnp.concatenate([root[None], below])


@dataclasses.dataclass(frozen=True)
class LikelierKeptFirst(RaceTraversal):
  """Race traversal that takes the likeliest of the branches where a context is kept; the credit is of a fixed order."""

  def _first_kept(self, tree, contexts, races, is_kept):
    return super()._first_kept(tree, contexts, self._reversed(races), is_kept)

  def _arrivals(self, contexts, races, keep_probs):
    return super()._arrivals(contexts, self._reversed(races), keep_probs)

  def _reversed(self, races):
    is_other = ~jnp.eye(races.is_before.shape[-1], dtype=bool)
    return dataclasses.replace(races, is_before=races.is_sibling & ~races.is_before & is_other)


@dataclasses.dataclass(frozen=True)
class CopiesHaveCredit(RaceTraversal):
  """Race traversal that visits a token drawn twice once per copy, each time with the credit of both."""

  def _contexts(self, tree, proposal):
    contexts = super()._contexts(tree, proposal)
    exists = jnp.any(contexts.is_same, axis=-1)
    # The root is the only context of its depth.
    return dataclasses.replace(contexts, stands=exists.at[0].set(contexts.stands[0]))


@dataclasses.dataclass(frozen=True)
class ResidualOfParent(RaceTraversal):
  """Race traversal that draws the next token from the residual of the parent of the context that is kept."""

  def _weights(self, tree, proposal, target_probs, races, log_credit, node):
    return super()._weights(tree, proposal, target_probs, races, log_credit, jnp.asarray(tree.parent_of)[node])


@dataclasses.dataclass(frozen=True)
class Hierarchical(Block):
  """Hierarchical speculative decoding (HSD) with capped prefix ratios on one draft, as its authors' code has it.

  The joint ratio of a prefix, divided by the largest one before it if that is above 1, is the P of block verification
  (`Block`), and so are its step-back probabilities, max(0, 1 - S / (S + 1 - P)). The whole draft however is kept with
  probability min(1, q(draft) / p(draft)), a ratio that is not capped. Where a prefix had a ratio above 1 that is more
  than P, and uses the target's mass twice. With the capped ratio in its place it is `Block`.

  Source: the function `_speculative_sampling` with `backward` and `clever` of ZhouYuxuanYX/Hierarchical-Speculative-
  Decoding, for a single draft.
  """

  takes_grown = False

  def _step(self, tree, proposal, target_probs, node, log_kept):
    step = super()._step(tree, proposal, target_probs, node, log_kept)
    parents, own = jnp.asarray(tree.parent_of)[1:], jnp.maximum(proposal.tokens, 0)
    ratios = ratio(target_probs[parents, own], proposal.probs[jnp.asarray(tree.parent_index)[parents], own])
    whole = jnp.exp(jnp.minimum(0, jnp.sum(jnp.log(jnp.where(proposal.tokens >= 0, ratios, 1)))))
    is_end = ~jnp.any(step.position.is_valid)
    return dataclasses.replace(step, accept=jnp.where(is_end, whole, step.accept))


@dataclasses.dataclass(frozen=True)
class MassOfOneBranch(RaceLayers):
  """Layers that keep a context as if it were alone in its layer, with h = S / (S + 1 - P)."""

  def _unkept(self, masses, excess):
    return 1 - masses + excess


@dataclasses.dataclass(frozen=True)
class CopiesForgotten(RaceLayers):
  """Layers in which a token drawn twice has the mass of one copy."""

  def _together(self, own, is_same):
    return own


@dataclasses.dataclass(frozen=True)
class RoomNotDivided(UniVer):
  """UniVer whose given candidates have (1 - m(y)) P q(d), which is less than P q(d) on average."""

  def _log_given(self, log_target_mass, log_left, log_room):
    return log_target_mass + log_left


@dataclasses.dataclass(frozen=True)
class DrawnAmongGiven(LikeliestAndOne):
  """Draws the last sibling from the whole distribution, so that it may be one of the likeliest."""

  def _likeliest(self, probs, count):
    return super()._likeliest(probs, count)[0], probs


@dataclasses.dataclass(frozen=True)
class SecondIfFirst(Independent):
  """Draws further children only if the first is token 0, so their number depends on a token drawn before."""

  may_run_out: bool = dataclasses.field(default=True, init=False)

  def _grown(self, tokens):
    is_there = (jnp.arange(tokens.shape[0]) == 0) | (tokens[0] == 0)
    return jnp.where(is_there, tokens, -1)

  def __call__(self, key, probs, first_child, num_children):
    return self._grown(super().__call__(key, probs, first_child, num_children))

  def probability(self, probs, tokens):
    is_consistent = jnp.all((tokens >= 0) == (self._grown(jnp.maximum(tokens, 0)) >= 0))
    return jnp.where(is_consistent, jnp.prod(jnp.where(tokens >= 0, probs[jnp.maximum(tokens, 0)], 1)), 0)


@dataclasses.dataclass(frozen=True)
class Reranked(Independent):
  """Draws one child more than needed and drops the one with the lowest draft probability."""

  def _best(self, probs, tokens):
    return tokens[jnp.sort(jnp.argsort(-probs[tokens], stable=True)[:-1])]

  def __call__(self, key, probs, first_child, num_children):
    def draw_from(part):
      return super(Reranked, self).__call__(jax.random.fold_in(key, part), probs, first_child, num_children)

    return self._best(probs, jnp.concatenate([draw_from(0), draw_from(1)[:1]]))

  def probability(self, probs, tokens):
    drawn = np.array(list(itertools.product(range(probs.shape[0]), repeat=tokens.shape[0] + 1)), np.int32)
    is_kept = jax.vmap(lambda own: jnp.all(self._best(probs, own) == tokens))(drawn)
    return jnp.sum(jnp.where(is_kept, jnp.prod(probs[drawn], axis=-1), 0))


_broken = functools.partial(Method, proposal_rule=Independent(), is_lossless=False, source='negative control')

CONTROLS: dict[str, Method] = {
  method.name: method
  for method in (
    _broken('speculative_residual_left_out', Walk(ResidualLeftOut(Maximal())), max_drafts=1),
    _broken('spectr_residual_left_out', Walk(ResidualLeftOut(KSeq()))),
    _broken('spectr_gamma_too_small', Walk(GammaTooSmall())),
    _broken('speculative_many_drafts', Walk(Maximal())),
    _broken('race_one_ticket', Walk(MaximalAfter(OneTicket()))),
    _broken('race_block_one_ticket', Block(OneTicket())),
    _broken('greedy_block_level_too_few', GreedyBlock(num_levels_dropped=1), max_drafts=1),
    _broken('block_keyed_by_position', Block(SingleDraft()), max_drafts=1, is_seed_exact=True),
    _broken('race_block_keyed_by_position', Block(Race()), is_seed_exact=True),
    _broken('race_traversal_one_ticket', RaceTraversal(OneTicket())),
    _broken('race_traversal_credit_not_divided', CreditNotDivided()),
    _broken('race_traversal_likelier_kept_first', LikelierKeptFirst()),
    _broken('race_traversal_copies_have_credit', CopiesHaveCredit()),
    _broken('race_traversal_residual_of_parent', ResidualOfParent()),
    _broken('race_traversal_second_if_first', RaceTraversal(), proposal_rule=SecondIfFirst()),
    _broken('race_traversal_reranked', RaceTraversal(), proposal_rule=Reranked()),
    _broken('hsd_as_published', Hierarchical(SingleDraft()), max_drafts=1),
    _broken('race_layers_mass_of_one_branch', MassOfOneBranch()),
    _broken('race_layers_copies_forgotten', CopiesForgotten()),
    _broken('univer_room_not_divided', RoomNotDivided(), proposal_rule=LikeliestAndOne()),
    _broken('univer_drawn_among_given', UniVer(), proposal_rule=DrawnAmongGiven()),
    _broken('speculative_law_before_top_p', LawBeforeTopP(Walk(Maximal())), max_drafts=1),
    _broken('spectr_law_before_top_p', LawBeforeTopP(Walk(KSeq()))),
  )
}
