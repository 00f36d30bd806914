"""Race traversal: races give candidates credit, and every branch of the tree is tried, leaves first."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.couplings.given import with_given
from spectr_jax.couplings.race import Race
from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.kernels.tree_steps import race_credits
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Contexts, slots_of
from spectr_jax.verifiers.credit_traversal import CreditTraversal, Plan, ascending, excess_of_single, law_rows, siblings

# The number of races that an accelerator solves together; chains rarely have more contexts with several candidates.
RACES_AT_ONCE = 8


def _may_race(slots: jax.Array) -> bool:
  """Whether depths have room, the last axis of `slots`, for several candidates; in a single chain nothing races."""
  return slots.shape[-1] > 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _GivenRows:
  """The given candidates by row of `Proposal.probs`; their shares are in units of q."""

  tokens: jax.Array  # int32 `[R, W]`; V where no candidate is given
  scale: jax.Array  # `[R]`, pt(x) / q(x) of each of them
  is_alone: jax.Array  # bool `[R]`, rows whose candidates are all given


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Races(Plan):
  """The results of the races, before any acceptance, among the drawn candidates and one more if any is given."""

  shares: jax.Array  # `[L, W]`, the probability s that the race above picks the token of a context, from depth 1 on
  log_ratios: jax.Array  # `[L, W]`, log of q(x) / pt(x) of that token
  scale: jax.Array  # `[R, C]`, the distributions pt as `Race.picked_probs` takes them
  is_sibling: jax.Array  # bool `[L, W, W]`, whether k and j follow the same context; each is its own sibling
  given: _GivenRows | None


@dataclasses.dataclass(frozen=True)
class RaceTraversal(CreditTraversal[_Races]):
  """Race traversal verification: lossless on any tree with i.i.d. children; beyond the papers.

  `CreditTraversal` by races. At a context with distributions p and q and n candidates, a race gives each token x the
  share s(x), the probability that it would pick x, and pt is the distribution of the picked token. The masses are

      m(x) = s(x) min(1, P(c) q(x) / pt(x)),    M = min(pt, P(c) q),

  and candidates are visited in ascending order of s, rounded to 1/256. So S(c) is the sum of [P(c) q - pt]+, and the
  next token comes from there.

  Given candidates stand beside the drawn ones as in `Race`: pt is then the distribution of what that race picks, given
  candidates included. Where all candidates are given, pt is q on them, divided by its mass.

  With one draft it is block verification; with drafts of one token it is the race with the maximal coupling.

  Attributes:
    race: The race at contexts with several candidates.
  """

  race: Race = Race()
  proposal_rules = (Independent,)
  takes_given = True
  takes_mixed = True
  takes_grown = True
  explanation = Explanation(
    'Nodes that spell the same are one. A weighted race would pick each candidate with probability s; p̃ is the'
    ' distribution of what it picks. The root has credit P = 1. A candidate takes m = s · min(1, P · q/p̃) of the credit'
    ' above it, and its own is P = m/(1 − Σ m of its siblings before it), in ascending order of s. Every branch is'
    ' tried, leaves first, and the first node with u < h is kept. At a leaf h = P, at the root h = 1, elsewhere'
    ' h = S/(S + 1 − P) with S = Σ [Pq − p̃]₊ at the next position.',
    '[Pq − p̃]₊',
    'The candidates of a position share a credit, the chance that one of them is kept; those that would win a weighted'
    ' race more often get more of it. Every branch is tried from its leaf up, and the first node whose random'
    ' number falls below its chance is kept with the path to it.',
  )

  # The contexts and their races depend on the guesses and distributions alone.

  def _steps(self, tree: Tree, proposal: Proposal, target_probs):
    contexts = self._contexts(tree, proposal)
    races = self._races(tree, proposal, target_probs, contexts)
    return contexts, races, self._log_credits(contexts, races)

  def _races(self, tree: Tree, proposal: Proposal, target_probs, contexts: Contexts) -> _Races:
    slots, dtype = slots_of(tree), target_probs.dtype
    guesses = jnp.where(slots.is_node, proposal.tokens[slots.nodes - 1], 0)
    is_valid = contexts.is_candidate[slots.of_parents]
    by_row = guesses[slots.of_parents[0] + 1]
    given, is_given, of_rows, candidates = None, None, None, (by_row, is_valid)
    race = self.race if proposal.is_given is None else self.race.beside_given()
    # A single candidate is always picked, so the picked token has the draft's distribution.
    alone = is_valid.astype(dtype), jnp.ones((len(is_valid), race.num_classes), dtype)
    number = contexts.num_candidates
    if proposal.is_given is not None:
      is_given = jnp.where(slots.is_node, proposal.is_given[slots.nodes - 1], False)
      of_rows = is_valid & is_given[slots.of_parents[0] + 1]
      candidates = (*candidates, of_rows)
      own_probs = jax.vmap(lambda node, tokens: target_probs[node, tokens])(tree.parent_nodes, jnp.maximum(by_row, 0))
      alone = jax.vmap(race.without_race)(own_probs, by_row, is_valid, of_rows)
      is_there = contexts.is_candidate & is_given[1:, None, :]
      number += jnp.any(is_there, axis=-1) - jnp.sum(is_there, axis=-1)
    own = jnp.where(contexts.stands[slots.of_parents], number[slots.of_parents], 0)
    laws = law_rows(tree, proposal, target_probs)
    picks, scale = alone
    if _may_race(contexts.is_candidate):
      with jax.named_scope('races'):
        picks, scale = map_needed(race.select, own > 1, alone, laws, candidates, at_once=RACES_AT_ONCE, is_heavy=True)
    if of_rows is not None:
      tokens = jnp.where(of_rows, by_row, target_probs.shape[1])
      given = _GivenRows(tokens, scale[:, 0], (own == 1) & jnp.any(of_rows, axis=-1))
      scale = scale[:, 1:]
    # By the slot of the candidate: the row of the context above, its own share, and the share of its token.
    above, stands = contexts.above[1:], contexts.stands[1:]
    rows = jnp.take_along_axis(jnp.asarray(slots.parent_index[:-1]), above, axis=1)
    width = above.shape[1]
    own_share = picks[rows, jnp.arange(width)]
    shares = jnp.sum(jnp.where(contexts.is_same[1:], own_share[:, None, :], 0), axis=-1)
    shares = jnp.where(stands, shares, 0)
    tokens = jnp.maximum(guesses[1:], 0)
    p = proposal.probs[rows, tokens]
    q = target_probs[jnp.take_along_axis(jnp.asarray(slots.nodes[:-1]), above, axis=1), tokens]
    picked = jax.vmap(jax.vmap(race.picked_probs))(p, q, scale[rows])
    if given is not None and is_given is not None:
      is_member = jnp.any(contexts.is_same[1:] & is_given[1:, None, :], axis=-1)
      picked = jnp.where(is_member, q * given.scale[rows], picked)
    # Bounded above, so that a credit of 0, whose logarithm is -inf, stays 0.
    log_ratios = jnp.log(jnp.minimum(ratio(q, picked), jnp.finfo(dtype).max))
    is_sibling = siblings(contexts)
    return _Races(ascending(shares, is_sibling), own, shares, log_ratios, scale, is_sibling, given)

  def _picked_probs(self, p, q, scale, given):
    """pt `[V]` of a row, with its entries at given candidates; `given` is the row's, or None."""
    if given is None:
      return self.race.picked_probs(p, q, scale)
    picked = self.race.beside_given().picked_probs(p, q, scale)
    return with_given(picked, q, given.tokens, given.scale)

  def _log_credits(self, contexts: Contexts, races: _Races):
    """log P by slot, `[L + 1, W]`; in logarithms, since products of many ratios underflow."""
    return race_credits(contexts.is_candidate, races.is_before, races.is_sibling, races.shares, races.log_ratios)

  def _excess(self, tree: Tree, proposal: Proposal, target_probs, races: _Races, log_credits, is_open):
    """S by row of `Proposal.probs`, `[R]`; 0 where no candidate follows, or where `is_open` `[R]` is False."""
    laws = law_rows(tree, proposal, target_probs)
    credits = jnp.exp(log_credits)
    nothing = jnp.zeros_like(credits)

    def of_several(p, q, credit, scale, *given):
      given = _GivenRows(*given) if given else None
      return jnp.sum(positive_part(credit * q - self._picked_probs(p, q, scale, given)))

    number, given, items = races.num_contestants, races.given, (credits, races.scale)
    is_single = is_open & (number == 1)
    if given is not None:
      items += given.tokens, given.scale, given.is_alone
      # Where all candidates are given, pt is q / q(D) on them, and 0 elsewhere.
      excess = credits * (1 - ratio(jnp.ones_like(credits), given.scale))
      nothing = jnp.where(is_open & given.is_alone, excess, nothing)
      is_single &= ~given.is_alone
    with jax.named_scope('excess'):
      alone = excess_of_single(laws, credits, is_single, nothing)
      if not _may_race(races.is_sibling):
        return alone
      return map_needed(of_several, is_open & (number > 1), alone, laws, items, at_once=RACES_AT_ONCE)

  def _residual(self, tree: Tree, proposal: Proposal, target_probs, races: _Races, log_credit, node):
    row = jnp.asarray(tree.parent_index)[node]
    q = target_probs[node]
    given = jax.tree.map(lambda x: x[row], races.given)
    picked = self._picked_probs(proposal.probs[row], q, races.scale[row], given)
    return positive_part(jnp.exp(log_credit) * q - picked)

  def _numbers(self, races: _Races, log_above):
    mass = races.shares * jnp.exp(jnp.minimum(0, log_above + races.log_ratios))
    return {'picked_share': races.shares, 'log_ratio': races.log_ratios, 'mass': mass}
