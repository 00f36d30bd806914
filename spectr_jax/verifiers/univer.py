"""UniVer: credit for the draft's likeliest tokens and one drawn beside them; every branch is tried, leaves first."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.kernels.tree_steps import scan_depths
from spectr_jax.proposal import LikeliestAndOne, Proposal
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import slots_of
from spectr_jax.verifiers.credit_traversal import CreditTraversal, Plan, ascending, excess_of_single, law_rows, siblings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Shared(Plan):
  """The credit as it is shared; the distribution of a drawn candidate is p' = p / `left` outside of D."""

  masses: jax.Array  # `[L, W]`, m of the contexts from depth 1 on
  given: jax.Array  # int32 `[R, W]`, the tokens of D by row of `Proposal.probs`; V elsewhere
  left: jax.Array  # `[R]`, the probability p outside of D; 1 if D is empty, or all of p


@dataclasses.dataclass(frozen=True)
class UniVer(CreditTraversal[_Shared]):
  """UniVer verification: lossless on any tree whose siblings are the likeliest tokens and one drawn.

  Weng, Hu, Yairi 2026, "UniVer: A Unified Perspective for Multi-step and Multi-draft Speculative Decoding": the frame
  is that of `CreditTraversal`, and the plan is the optimum for these candidates. The masses are derived here, since the
  paper's abstract names the plan and not its formulas.

  Below a context with distributions p and q and credit P, let D be the given candidates, the draft's likeliest tokens,
  and y the drawn one, from p' = p without D. Then

      m(y) = min(1, P q(y) / p'(y)),
      m(d) = (1 - m(y)) P q(d) / R,    R = 1 - sum of min(p', P q) outside of D.

  R is what y leaves on average, so M(d) = P q(d), and M = min(p', P q) elsewhere. No plan keeps more: a given token
  cannot have more than P q, and a drawn one no more than min(p', P q). Candidates are visited in ascending order of m,
  rounded to 1/256. S is the sum of [P q - p']+ outside of D, and the next token comes from there.

  With one draft it is block verification. Drafts are whole: a node is missing only where its distribution has no more
  tokens.
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
    last_child = jnp.zeros_like(parents).at[parents[1:]].max(jnp.arange(1, len(parents), dtype=parents.dtype))
    is_drawn = (slots.is_node & (nodes == last_child[parents[nodes]]))[1:]
    tokens = jnp.where(contexts.stands[1:], proposal.tokens[nodes[1:] - 1], 0)
    below = slots.of_parents[0]
    is_candidate = contexts.is_candidate[slots.of_parents]
    given = jnp.where(is_candidate & ~is_drawn[below], tokens[below], target_probs.shape[1])  # V indexes nothing
    left = self._left(tree, proposal, target_probs, given)
    # By the slot of the candidate: the row of the context above, and the probabilities there.
    rows = jnp.take_along_axis(jnp.asarray(slots.parent_index[:-1]), contexts.above[1:], axis=1)
    q = target_probs[jnp.asarray(tree.parent_nodes)[rows], tokens]
    of_drawn = ratio(q, proposal.probs[rows, tokens] / left[rows])
    log_ratios = jnp.log(jnp.minimum(of_drawn, jnp.finfo(q.dtype).max))  # bounded, so that a credit of 0 stays 0
    root = jnp.where(jnp.arange(q.shape[1]) == 0, 0, -jnp.inf).astype(q.dtype)
    depths = contexts.is_candidate, siblings(contexts), is_drawn, q, log_ratios
    # Only where candidates are given does a depth need S above it. As a rule that is near the root.
    wide_nodes = np.flatnonzero(np.asarray(tree.num_children) > 1)
    num_wide = int(np.asarray(tree.depths)[wide_nodes].max(initial=-1)) + 1
    log_credit, levels = root, []
    with jax.named_scope('credits'):
      for depth in range(num_wide):
        own = wide_nodes[np.asarray(tree.depths)[wide_nodes] == depth]
        places = np.asarray(slots.of_nodes)[own]
        own_rows = np.asarray(tree.parent_index)[own]
        credits = jnp.exp(log_credit[places])
        laws = (proposal.probs, own_rows), (target_probs, own)
        items = credits, left[own_rows], given[own_rows]
        own_excess = map_needed(_excess_beside, credits > 0, jnp.zeros_like(credits), laws, items)
        excess = jnp.zeros_like(log_credit).at[places].set(own_excess)
        log_credit, level = self._next_depth(log_credit, (*(x[depth] for x in depths), excess))
        levels.append(jax.tree.map(lambda x: x[None], level))
      if num_wide < len(q):
        rest = *(x[num_wide:] for x in depths), jnp.zeros_like(q[num_wide:])
        levels.append(scan_depths(self._next_depth, log_credit, rest)[1])
    log_credits, is_before, masses = jax.tree.map(lambda *x: jnp.concatenate(x), *levels)
    number = jnp.where(contexts.stands[slots.of_parents], jnp.sum(is_candidate, axis=1), 0)
    plan = _Shared(is_before, number, masses, given, left)
    return contexts, plan, jnp.concatenate([root[None], log_credits])

  def _left(self, tree: Tree, proposal: Proposal, target_probs, given):
    """`_Shared.left`."""
    is_any = jnp.any(given < target_probs.shape[1], axis=1)
    ones = jnp.ones(len(given), target_probs.dtype)
    left = map_needed(_sum_beside, is_any, ones, (law_rows(tree, proposal, target_probs)[0],), given)
    return jnp.where(left > 0, left, 1)

  def _next_depth(self, log_credit, depth):
    """From log P of the contexts of a depth, `[W]`, to those of the next; `depth` holds what belongs to the two."""
    is_candidate, is_sibling, is_drawn, q, log_ratios, excess = depth
    is_given, is_drawn_here = is_candidate & ~is_drawn, is_candidate & is_drawn  # by context and slot

    def of_contexts(values, is_part):
      return jnp.sum(jnp.where(is_part, values, 0), axis=1)

    def of_slots(values):
      return jnp.sum(jnp.where(is_candidate, values[:, None], 0), axis=0)

    # 1 - sum of M, which is R less P q(D); with an only candidate nothing is shared.
    is_shared = jnp.any(is_given, axis=1)
    unkept = jnp.where(is_shared, excess - jnp.expm1(log_credit), 1)
    room = unkept + jnp.where(is_shared, jnp.exp(log_credit) * of_contexts(q, is_given), 0)
    log_above = of_slots(log_credit)
    log_drawn = jnp.minimum(0, log_above + log_ratios)
    left = -jnp.expm1(jnp.where(jnp.any(is_drawn_here, axis=1), of_contexts(log_drawn, is_drawn_here), -jnp.inf))
    log_given = self._log_given(log_above + jnp.log(q), of_slots(jnp.log(left)), of_slots(jnp.log(room)))
    # Where nothing is left or there is no room, the logarithms of a given candidate mean nothing.
    is_possible = jnp.any(is_candidate, axis=0) & (is_drawn | ((q > 0) & (of_slots(left * room) > 0)))
    log_masses = jnp.where(is_possible, jnp.where(is_drawn, log_drawn, log_given), -jnp.inf)
    masses = jnp.exp(log_masses)
    is_before = ascending(masses, is_sibling)
    # 1 - sum of m before each, as what is left after all and the masses from it on: nothing cancels.
    divisor = of_slots(left * ratio(unkept, room)) + jnp.sum(jnp.where(is_sibling & ~is_before, masses, 0), axis=1)
    is_open = masses > 0
    log_next = jnp.where(is_open, jnp.minimum(0, log_masses - jnp.log(jnp.where(is_open, divisor, 1))), -jnp.inf)
    return log_next, (log_next, is_before, masses)

  def _excess(self, tree: Tree, proposal: Proposal, target_probs, plan: _Shared, log_credits, is_open):
    laws, credits = law_rows(tree, proposal, target_probs), jnp.exp(log_credits)
    is_beside = is_open & jnp.any(plan.given < target_probs.shape[1], axis=1)
    with jax.named_scope('excess'):
      alone = excess_of_single(laws, credits, is_open & ~is_beside, jnp.zeros_like(credits))
      return map_needed(_excess_beside, is_beside, alone, laws, (credits, plan.left, plan.given))

  def _residual(self, tree: Tree, proposal: Proposal, target_probs, plan: _Shared, log_credit, node):
    row = jnp.asarray(tree.parent_index)[node]
    return _left_beside(proposal.probs[row], target_probs[node], jnp.exp(log_credit), plan.left[row], plan.given[row])

  def _numbers(self, plan: _Shared, log_above):
    del log_above
    return {'mass': plan.masses}


def _sum_beside(p, given):
  """The probability outside of the given tokens."""
  return jnp.sum(p.at[given].set(0, mode='drop'))


def _left_beside(p, q, credit, left, given):
  """[P q - p / left]+ outside of the given tokens, `[V]`."""
  return positive_part(credit * q - p / left).at[given].set(0, mode='drop')


def _excess_beside(*arguments):
  """S beside given tokens; the arguments are those of `_left_beside`."""
  return jnp.sum(_left_beside(*arguments))
