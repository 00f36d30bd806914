"""UniVer: credit for the draft's likeliest tokens and one drawn beside them; every branch is tried, leaves first."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import ratio
from spectr_jax.couplings.explanation import Explanation
from spectr_jax.proposal import LikeliestAndOne, Proposal
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import slots_of
from spectr_jax.verifiers.credit_traversal import CreditTraversal, Plan, ascending, siblings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Shared(Plan):
  """The credit as it is shared.

  Attributes:
    masses: `[L, W]`, m of the contexts from depth 1 on.
    excess: `[R]`, S by row of `Proposal.probs`.
    drawn_probs: `[R, V]`, the distribution p' of the drawn candidate.
    others: `[R, V]`, the target's distribution, with 0 at the given candidates.
  """

  masses: jax.Array
  excess: jax.Array
  drawn_probs: jax.Array
  others: jax.Array


@dataclasses.dataclass(frozen=True)
class UniVer(CreditTraversal[_Shared]):
  """UniVer verification: lossless on any tree whose siblings are the likeliest tokens and one drawn.

  Weng, Hu, Yairi 2026, "UniVer: A Unified Perspective for Multi-step and Multi-draft Speculative Decoding": the frame
  is that of `CreditTraversal`, and the plan is the optimum for these candidates. The masses are derived here, since the
  paper's abstract names the plan and not its formulas.

  Below a context with distributions p and q and credit P, let D be the given candidates, the draft's likeliest tokens,
  and y the drawn one, from p' = p without D. With M(D) the mass that the given ones have on average,

      m(y) = min(1, P q(y) / p'(y)),
      m(d) = (1 - m(y)) P q(d) / R,    R = 1 - sum of min(p', P q) outside of D.

  R is what y leaves on average, so M(d) = P q(d), and M = min(p', P q) elsewhere. No plan keeps more: a given token
  cannot have more than P q, and a drawn one no more than min(p', P q). Candidates are visited in ascending order of m,
  rounded to 1/256. S is the sum of [P q - p']+ outside of D, and the next token comes from there.

  With one draft it is block verification.
  """

  proposal_rules = (LikeliestAndOne,)
  explanation = Explanation(
    'All candidates but the last are the likeliest of the draft, D; the last, y, is drawn from p̃, which is p without D.'
    ' The root has credit P = 1. y takes m = min(1, P · q/p̃) of the credit above it, and each of D the share'
    ' (1 − m)Pq/R, with R = 1 − Σ min(p̃, Pq) outside of D. The credit of a candidate is its share, divided by 1 − Σ of'
    ' its siblings before it, in ascending order. Every branch is tried, leaves first, and the first node with u < h is'
    ' kept. At a leaf h = P, at the root h = 1, elsewhere h = S/(S + 1 − P) with S = Σ [Pq − p̃]₊ outside of D.',
    '[Pq − p̃]₊ outside of the likeliest',
    'The likeliest tokens of the draft are candidates as they are, and one more is drawn from the others; they share a'
    ' credit, so that none comes out more often than the target would write it. Every branch is tried from its leaf up,'
    ' and the first node whose random number falls below its chance is kept with the path to it.',
  )

  def _log_given(self, log_target_mass, log_left, log_room):
    """log m of a given candidate, from the logarithms of P q(d), of what the drawn one leaves, and of R."""
    return log_target_mass + log_left - log_room

  def _steps(self, tree: Tree, proposal: Proposal, target_probs):
    contexts, slots = self._contexts(tree, proposal), slots_of(tree)
    nodes, parents = jnp.asarray(slots.nodes), jnp.asarray(tree.parent_of)
    last_child = jnp.zeros_like(parents).at[parents[1:]].max(jnp.arange(1, len(parents)))
    is_drawn = (slots.is_node & (nodes == last_child[parents[nodes]]))[1:]
    tokens = jnp.where(contexts.stands[1:], proposal.tokens[slots.nodes[1:] - 1], 0)
    depths = slots.of_laws[0]
    is_candidate = contexts.is_candidate[slots.of_laws]
    given = jnp.where(is_candidate & ~is_drawn[depths], tokens[depths], target_probs.shape[1])  # V indexes nothing

    def without(probs):
      return jax.vmap(lambda probs, given: probs.at[given].set(0, mode='drop'))(probs, given)

    left, others = without(proposal.probs), without(target_probs[tree.parent_nodes])
    # Without given candidates nothing is divided, so that a chain is verified as by block verification.
    mass = jnp.where(jnp.any(given < target_probs.shape[1], axis=1), jnp.sum(left, axis=1), 1)
    drawn_probs = ratio(left, mass[:, None])
    # By the slot of the candidate: the row of the context above, and the probabilities there.
    rows, above = jnp.asarray(slots.laws[:-1]), contexts.above[1:]
    own_rows = jnp.take_along_axis(rows, above, axis=1)
    q = target_probs[jnp.asarray(tree.parent_nodes)[own_rows], tokens]
    of_drawn = ratio(q, drawn_probs[own_rows, tokens])
    log_ratios = jnp.log(jnp.minimum(of_drawn, jnp.finfo(q.dtype).max))  # bounded, so that a credit of 0 stays 0

    def next_depth(log_credit, depth):
      rows, is_candidate, is_sibling, is_drawn, q, log_ratios = depth
      parts = is_candidate & ~is_drawn, is_candidate & is_drawn  # by context and slot

      def of_contexts(values, is_part):
        return jnp.sum(jnp.where(is_part, values, 0), axis=1)

      def of_slots(values):
        return jnp.sum(jnp.where(is_candidate, values[:, None], 0), axis=0)

      credit = jnp.exp(log_credit)
      excess = jnp.sum(positive_part(credit[:, None] * others[rows] - drawn_probs[rows]), axis=1)
      unkept = excess - jnp.expm1(log_credit)  # 1 - sum of M, and R less P q(D)
      room = unkept + credit * of_contexts(q, parts[0])
      log_above = of_slots(log_credit)
      log_drawn = jnp.minimum(0, log_above + log_ratios)
      left = -jnp.expm1(jnp.where(jnp.any(parts[1], axis=1), of_contexts(log_drawn, parts[1]), -jnp.inf))
      log_given = self._log_given(log_above + jnp.log(q), of_slots(jnp.log(left)), of_slots(jnp.log(room)))
      is_there = jnp.any(is_candidate, axis=0)
      log_masses = jnp.where(is_there, jnp.where(is_drawn, log_drawn, jnp.where(q > 0, log_given, -jnp.inf)), -jnp.inf)
      # Where nothing is left, 0 - (-inf) or the like stands for a mass of 0.
      log_masses = jnp.where(is_drawn | (of_slots(left * room) > 0), log_masses, -jnp.inf)
      masses = jnp.exp(log_masses)
      is_before = ascending(masses, is_sibling)
      # 1 - sum of m before each, as what is left after all and the masses from it on: nothing cancels.
      divisor = of_slots(left * ratio(unkept, room)) + jnp.sum(jnp.where(is_sibling & ~is_before, masses, 0), axis=1)
      is_open = masses > 0
      log_next = jnp.minimum(0, log_masses - jnp.log(jnp.where(is_open, divisor, 1)))
      return log_next, (log_next, is_before, masses, excess)

    root = jnp.where(jnp.arange(rows.shape[1]) == 0, 0, -jnp.inf).astype(q.dtype)
    depths = rows, contexts.is_candidate, siblings(contexts), is_drawn, q, log_ratios
    with jax.named_scope('credits'):
      _, (log_credits, is_before, masses, excess) = jax.lax.scan(next_depth, root, depths)
    number = jnp.where(contexts.stands[slots.of_laws], jnp.sum(is_candidate, axis=1), 0)
    plan = _Shared(is_before, number, masses, excess[slots.of_laws], drawn_probs, others)
    return contexts, plan, jnp.concatenate([root[None], log_credits])

  def _excess(self, tree: Tree, proposal: Proposal, target_probs, plan: _Shared, log_credits, is_open):
    del tree, proposal, target_probs, log_credits, is_open
    return plan.excess

  def _residual(self, tree: Tree, proposal: Proposal, target_probs, plan: _Shared, log_credit, node):
    del proposal, target_probs
    row = jnp.asarray(tree.law_index)[node]
    return positive_part(jnp.exp(log_credit) * plan.others[row] - plan.drawn_probs[row])

  def _numbers(self, plan: _Shared):
    return {'mass': plan.masses}
