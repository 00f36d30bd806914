"""Traversal verification: whole paths at a time, leaves first."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.proposal import Independent, Proposal, ProposalRule, WithoutReplacement
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.verifier import (
  Decisions,
  Record,
  RecordedVerifier,
  Verdict,
  run_steps,
  stop_at,
  uniforms_of_nodes,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Values:
  """The state of a traversal when a node is visited, all earlier ones having been rejected; one entry per node.

  After its rejected children, the target's distribution below a node is [q - c p]+ / z, since each rejection subtracts
  a multiple of p. With children drawn without replacement, a rejected token keeps the c that it had when it was removed
  from p.
  """

  log_value: jax.Array  # log P of the nodes entered so far
  c: jax.Array
  z: jax.Array
  rejected_c: jax.Array  # the parent's c when the node was rejected, -1 for nodes that were not


@dataclasses.dataclass(frozen=True)
class Traversal(RecordedVerifier):
  """Visits leaves depth first and accepts a leaf's whole path, or deletes the leaf and updates its parent.

  Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding". With P = 1 at the root and
  P_v = min(1, P_u q_u(x_v) / p_u(x_v)) below u, a leaf is accepted with probability P. When it is rejected, with
  S = sum of [P_u q_u - p_u]+ at its parent u, q_u becomes [P_u q_u - p_u]+, normalized, and P_u becomes
  S / (S + 1 - P_u); drawn without replacement, p_u also loses the token. A node whose children are all rejected is a
  leaf with its current P. At the root the token comes from the q that is left there.

  A record has the decisions visit by visit; they are named `keep`, and the first that is kept is the last.

  Attributes:
    with_replacement: Whether siblings were drawn with replacement; repeated tokens are visited one by one.
  """

  with_replacement: bool = True
  takes_grown = True
  explanation = Explanation(
    'Leaves first: the whole path to a leaf is kept if u < P, with P = min(1, P · q/p) along it. A rejected leaf is'
    ' deleted, and takes [Pq − p]₊ as the new q at its parent, whose P becomes S/(S + 1 − P).',
    'what the rejected children have left of q',
    'Whole paths are tried, leaves first, and the first that passes is kept. A path that fails takes its share out of'
    ' the target, and the next one is judged against what is left.',
  )

  @property
  def proposal_rules(self) -> tuple[type[ProposalRule], ...]:
    """The rule that this version covers."""
    return (Independent,) if self.with_replacement else (WithoutReplacement,)

  def for_rule(self, rule: ProposalRule) -> Traversal:
    """The version for siblings drawn with or without replacement."""
    return Traversal(with_replacement=isinstance(rule, Independent))

  def _draft_probs(self, tree: Tree, proposal: Proposal, node):
    return proposal.probs[jnp.asarray(tree.parent_index)[node]]

  def _rejected_tokens(self, tree: Tree, proposal: Proposal, values: _Values, node):
    """Tokens of the rejected children of `node`, `[N + 1]`; V, which indexes nothing, for all other nodes."""
    is_own = (jnp.asarray(tree.parent_of) == node) & (values.rejected_c >= 0)
    tokens = jnp.pad(proposal.tokens, (1, 0), constant_values=-1)
    return jnp.where(is_own & (tokens >= 0), tokens, proposal.probs.shape[-1])

  def _left_of_draft(self, tree: Tree, proposal: Proposal, values: _Values, node):
    """p_u as `[V]` weights, before normalization."""
    draft_probs = self._draft_probs(tree, proposal, node)
    if self.with_replacement:
      return draft_probs
    return draft_probs.at[self._rejected_tokens(tree, proposal, values, node)].set(0, mode='drop')

  def _left_of_target(self, tree: Tree, proposal: Proposal, target_probs, values: _Values, node, c):
    """q_u as `[V]` weights that sum to z, for a given c."""
    draft_probs = self._draft_probs(tree, proposal, node)
    weights = positive_part(target_probs[node] - c * draft_probs)
    if self.with_replacement:
      return weights
    tokens = self._rejected_tokens(tree, proposal, values, node)
    at = jnp.minimum(tokens, weights.shape[0] - 1)
    kept = jnp.maximum(target_probs[node][at] - values.rejected_c * draft_probs[at], 0)
    return weights.at[tokens].set(kept, mode='drop')

  def _enter(self, tree: Tree, proposal: Proposal, target_probs, values: _Values, depth, leaf) -> _Values:
    """Sets the values on the path to `leaf` from `depth` on, none of whose nodes has been entered before.

    P_i = min(1, P_{i-1} r_i) for all i at once: the logarithm is the sum of the log ratios, less the most by which any
    sum up to i exceeds 0. For example, from P = 1/2 the ratios 4, 1/2, 4 have the sums log 2, 0, log 4, which exceed 0
    by log 2, log 2 and log 4 at most so far, so P is 1, 1/2, 1.
    """
    path = jnp.asarray(tree.paths)[leaf]
    is_new = (path >= 0) & (jnp.arange(len(path)) >= depth - 1)
    parents = jnp.asarray(tree.parent_of)[path]
    tokens = proposal.tokens[path - 1]
    draft_probs = proposal.probs[jnp.asarray(tree.parent_index)[parents], tokens]
    # Below the first new node the parents are new as well, with c = 0 and z = 1.
    first = parents[depth - 1]
    norm = 1 if self.with_replacement else jnp.sum(self._left_of_draft(tree, proposal, values, first))
    left = jnp.maximum(target_probs[parents, tokens] - values.c[parents] * draft_probs, 0)
    # Two quotients, since z p can be 0 in floats where neither is; and bounded, so that logarithms below inf add up.
    ratios = ratio(left, draft_probs) * (jnp.where(parents == first, norm, 1) / values.z[parents])
    ratios = jnp.minimum(ratios, jnp.finfo(ratios.dtype).max)
    log_ratios = jnp.log(jnp.where(tokens >= 0, ratios, 0))
    sums = values.log_value[first] + jnp.cumsum(jnp.where(is_new, log_ratios, 0))
    log_values = sums - jnp.maximum(jax.lax.cummax(jnp.where(is_new, sums, -jnp.inf)), 0)
    nodes = jnp.where(is_new, path, tree.num_nodes + 1)
    return dataclasses.replace(values, log_value=values.log_value.at[nodes].set(log_values, mode='drop'))

  def _reject(self, tree: Tree, proposal: Proposal, target_probs, values: _Values, node) -> _Values:
    """Deletes a node and updates its parent; a node that does not exist leaves no trace.

    With q_u = [q - c p]+ / z, what is left of P q_u once p is subtracted is P [q - (c + z/P) p]+ / z: c grows by z/P,
    and with z' the new sum the mass left is S = P z' / z. For example, with P = 1, q = (.5, .5) and p = (.75, .25) the
    first rejection leaves [q - p]+ = (0, .25): c = 1, z = .25, S = .25, and the new P is S/(S + 1 - P) = 1.
    """
    parent = jnp.asarray(tree.parent_of)[node]
    log_value, c, z = values.log_value[parent], values.c[parent], values.z[parent]
    norm = 1 if self.with_replacement else jnp.sum(self._left_of_draft(tree, proposal, values, parent))
    # Finite, so that c p is 0 where p is. At the bound c p is above 1 for the smallest p that is not 0.
    next_c = jnp.minimum(c + z * jnp.exp(-log_value) / norm, jnp.finfo(target_probs.dtype).max)
    next_z = jnp.sum(self._left_of_target(tree, proposal, target_probs, values, parent, next_c))
    has_mass = next_z > 0
    log_mass = jnp.where(has_mass, log_value + jnp.log(jnp.where(has_mass, next_z, 1)) - jnp.log(z), -jnp.inf)
    total = jnp.exp(log_mass) - jnp.expm1(log_value)
    # With P = 1 and no mass left, draft and target agree.
    next_log_value = jnp.where(total > 0, log_mass - jnp.log(jnp.where(total > 0, total, 1)), 0)
    exists = proposal.tokens[node - 1] >= 0
    has_mass &= exists
    return _Values(
      values.log_value.at[parent].set(jnp.where(exists, jnp.minimum(next_log_value, 0), log_value)),
      values.c.at[parent].set(jnp.where(has_mass, next_c, c)),
      values.z.at[parent].set(jnp.where(has_mass, next_z, z)),
      values.rejected_c.at[node].set(jnp.where(has_mass, next_c, c)),
    )

  def _start(self, tree: Tree, proposal: Proposal, target_probs) -> _Values:
    zeros = jnp.zeros(tree.num_nodes + 1, target_probs.dtype)
    return self._enter(tree, proposal, target_probs, _Values(zeros, zeros, zeros + 1, zeros - 1), 1, tree.postorder[0])

  def _next(self, tree: Tree, proposal: Proposal, target_probs, values: _Values, visit) -> _Values:
    """Goes from a rejected visit to the next: the parent, or the first leaf below the next sibling."""
    visits, depths = jnp.asarray(tree.postorder), jnp.asarray(tree.depths)
    node, following = visits[visit], visits[visit + 1]
    values = self._reject(tree, proposal, target_probs, values, node)
    # The parent's path ends above the sibling's depth, so nothing is entered there.
    return self._enter(tree, proposal, target_probs, values, depths[node], following)

  def _weights(self, tree: Tree, proposal: Proposal, target_probs, values: _Values, node):
    """Weights `[V]` of the next token if `node` is accepted."""
    left = self._left_of_target(tree, proposal, target_probs, values, node, values.c[node])
    return jnp.where(jnp.asarray(tree.num_children)[node] > 0, left, target_probs[node])

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    uniforms = uniforms_of_nodes(keys, tree, target_probs.dtype)
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[-1], state, {})
    visits = jnp.asarray(tree.postorder)

    def is_rejected(carry):
      visit, values = carry
      node = visits[visit]
      return (node != 0) & (uniforms[node] >= jnp.exp(values.log_value[node]))

    def reject(carry):
      visit, values = carry
      return (visit + 1, self._next(tree, proposal, target_probs, values, visit)), None

    def describe(number, carry, following, seen):
      del following, seen
      visit, values = carry
      node = visits[visit]
      return Decisions.of_one(
        # From the node that is kept on, the visit stays the same while the number goes on.
        is_made=(visit == number) & (node != 0) & (proposal.tokens[node - 1] >= 0),
        node=node,
        share=jnp.exp(values.log_value[node]),
        uniform=uniforms[node],
        is_chosen=~is_rejected(carry),
        numbers={'log_kept': values.log_value[node]},
      )

    start = jnp.zeros((), jnp.int32), self._start(tree, proposal, target_probs)
    with jax.named_scope('visits'):
      (visit, values), decisions = run_steps(
        is_rejected, reject, start, num_steps=tree.num_nodes + 1, describe=describe if is_explained else None
      )
    node = visits[visit]
    weights = self._weights(tree, proposal, target_probs, values, node)
    return stop_at(tree, node, weights, uniforms[-1], state, {'keep': decisions} if is_explained else {})

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    visits = jnp.asarray(tree.postorder)

    def at_visit(carry, visit):
      values, reach = carry
      node = visits[visit]
      accept = jnp.where(node == 0, 1, jnp.exp(values.log_value[node]))
      weights = self._weights(tree, proposal, target_probs, values, node)
      law = reach * accept * weights / jnp.sum(weights)
      # The root is visited last and always accepted, so the values after it are never used.
      return (self._next(tree, proposal, target_probs, values, visit), reach * (1 - accept)), law

    start = self._start(tree, proposal, target_probs), jnp.ones((), target_probs.dtype)
    _, laws = jax.lax.scan(at_visit, start, jnp.arange(tree.num_nodes + 1))
    return jnp.zeros_like(target_probs).at[visits].set(laws)
