"""Traversal verification: leaves first, whole paths at a time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import ratio
from spectr_jax.proposal import Independent, Proposal, WithoutReplacement
from spectr_jax.sampling import draw, positive_part
from spectr_jax.tree import TokenTree
from spectr_jax.verify.record import Decisions, Record
from spectr_jax.verify.verifier import Stateless, Verdict


@functools.lru_cache(maxsize=64)
def _visits(tree: TokenTree) -> np.ndarray:
  """int32 `[N + 1]`: every node after its children, siblings in the order drawn; the root last."""
  visits = []
  unfinished = [(0, False)]
  while unfinished:
    node, is_done = unfinished.pop()
    if is_done:
      visits.append(node)
      continue
    unfinished.append((node, True))
    first = int(tree.first_child[node])
    unfinished.extend((child, False) for child in reversed(range(first, first + int(tree.num_children[node]))))
  return np.array(visits, np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Values:
  """What is known when a node is visited, all earlier ones having been rejected; one entry per node.

  The target's law below a node, as its rejected children have left it, is [q - c p]+ / z: a law to which a multiple of
  p is subtracted again and again. Where children are drawn without replacement, a rejected token keeps the c that it
  had when it was taken from p.

  Attributes:
    log_value: `[N + 1]`, log P of the nodes entered so far.
    c: `[N + 1]`, as of children.
    z: `[N + 1]`, likewise.
    rejected_c: `[N + 1]`, the parent's c when the node was rejected, -1 for those that were not.
  """

  log_value: jax.Array
  c: jax.Array
  z: jax.Array
  rejected_c: jax.Array


@dataclasses.dataclass(frozen=True)
class Traversal(Stateless):
  """Visits leaves depth first and accepts a leaf's whole path, or deletes the leaf and updates its parent.

  Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding". With P = 1 at the root and
  P_v = min(1, P_u q_u(x_v) / p_u(x_v)) below u, a leaf is accepted with probability P. When it is rejected, with
  S = sum of [P_u q_u - p_u]+ at its parent u, q_u becomes [P_u q_u - p_u]+, normalised, and P_u becomes
  S / (S + 1 - P_u); drawn without replacement, p_u also loses the token. A node whose children are all gone is a leaf
  with the P that it has by then. At the root a token comes from what is left of its q.

  Attributes:
    with_replacement: Whether siblings were drawn with replacement; repeated ones are visited one by one.
  """

  with_replacement: bool = True

  @property
  def proposal_rules(self):
    return (Independent,) if self.with_replacement else (WithoutReplacement,)

  def _draft_probs(self, tree: TokenTree, proposal: Proposal, node):
    return proposal.probs[jnp.asarray(tree.law_index)[node]]

  def _rejected_tokens(self, tree: TokenTree, proposal: Proposal, values: _Values, node):
    """Tokens of the rejected children of `node`, or V, which indexes nothing; `[N + 1]`."""
    is_own = (jnp.asarray(tree.parent_of) == node) & (values.rejected_c >= 0)
    tokens = jnp.pad(proposal.tokens, (1, 0), constant_values=-1)
    return jnp.where(is_own & (tokens >= 0), tokens, proposal.probs.shape[-1])

  def _left_of_draft(self, tree: TokenTree, proposal: Proposal, values: _Values, node):
    """p_u as `[V]` weights, before normalisation."""
    draft_probs = self._draft_probs(tree, proposal, node)
    if self.with_replacement:
      return draft_probs
    return draft_probs.at[self._rejected_tokens(tree, proposal, values, node)].set(0, mode='drop')

  def _left_of_target(self, tree: TokenTree, proposal: Proposal, target_probs, values: _Values, node, c):
    """q_u as `[V]` weights that sum to z, for a given c."""
    draft_probs = self._draft_probs(tree, proposal, node)
    weights = positive_part(target_probs[node] - c * draft_probs)
    if self.with_replacement:
      return weights
    tokens = self._rejected_tokens(tree, proposal, values, node)
    at = jnp.minimum(tokens, weights.shape[0] - 1)
    kept = jnp.maximum(target_probs[node][at] - values.rejected_c * draft_probs[at], 0)
    return weights.at[tokens].set(kept, mode='drop')

  def _enter(self, tree: TokenTree, proposal: Proposal, target_probs, values: _Values, depth, leaf) -> _Values:
    """Sets the values on the path to `leaf` from `depth` on, none of whose nodes has been entered before."""
    path = jnp.asarray(tree.paths)[leaf]
    is_new = (path >= 0) & (jnp.arange(len(path)) >= depth - 1)
    parents = jnp.asarray(tree.parent_of)[path]
    tokens = proposal.tokens[path - 1]
    draft_probs = proposal.probs[jnp.asarray(tree.law_index)[parents], tokens]
    # Below the first the parents are new as well: c = 0 and z = 1.
    first = parents[depth - 1]
    norm = 1 if self.with_replacement else jnp.sum(self._left_of_draft(tree, proposal, values, first))
    target = jnp.maximum(target_probs[parents, tokens] - values.c[parents] * draft_probs, 0) / values.z[parents]
    ratios = ratio(target, draft_probs) * jnp.where(parents == first, norm, 1)
    log_ratios = jnp.log(jnp.where(tokens >= 0, ratios, 0))
    # min(0, . + log ratio) again and again: a sum, less what it would have exceeded 0 by.
    sums = values.log_value[first] + jnp.cumsum(jnp.where(is_new, log_ratios, 0))
    log_values = sums - jnp.maximum(jax.lax.cummax(jnp.where(is_new, sums, -jnp.inf)), 0)
    nodes = jnp.where(is_new, path, tree.num_nodes + 1)
    return dataclasses.replace(values, log_value=values.log_value.at[nodes].set(log_values, mode='drop'))

  def _reject(self, tree: TokenTree, proposal: Proposal, target_probs, values: _Values, node) -> _Values:
    """Deletes a node and updates its parent; a node that does not exist leaves no trace."""
    parent = jnp.asarray(tree.parent_of)[node]
    log_value, c, z = values.log_value[parent], values.c[parent], values.z[parent]
    norm = 1 if self.with_replacement else jnp.sum(self._left_of_draft(tree, proposal, values, parent))
    # Beyond the cap [q - c p]+ is left only where p is below 1/cap, and to be 0 there p would have to be 0.
    cap = jnp.sqrt(jnp.finfo(target_probs.dtype).max)
    next_c = jnp.minimum(c + z * jnp.exp(-log_value) / norm, cap)
    next_z = jnp.sum(self._left_of_target(tree, proposal, target_probs, values, parent, next_c))
    has_mass = next_z > 0
    log_mass = jnp.where(has_mass, log_value + jnp.log(jnp.where(has_mass, next_z, 1)) - jnp.log(z), -jnp.inf)
    total = jnp.exp(log_mass) - jnp.expm1(log_value)
    # P = 1 and no mass: draft and target agree.
    next_log_value = jnp.where(total > 0, log_mass - jnp.log(jnp.where(total > 0, total, 1)), 0)
    exists = proposal.tokens[node - 1] >= 0
    has_mass &= exists
    return _Values(
      values.log_value.at[parent].set(jnp.where(exists, jnp.minimum(next_log_value, 0), log_value)),
      values.c.at[parent].set(jnp.where(has_mass, next_c, c)),
      values.z.at[parent].set(jnp.where(has_mass, next_z, z)),
      values.rejected_c.at[node].set(jnp.where(has_mass, next_c, c)),
    )

  def _start(self, tree: TokenTree, proposal: Proposal, target_probs) -> _Values:
    zeros = jnp.zeros(tree.num_nodes + 1, target_probs.dtype)
    return self._enter(
      tree, proposal, target_probs, _Values(zeros, zeros, zeros + 1, zeros - 1), 1, int(_visits(tree)[0])
    )

  def _next(self, tree: TokenTree, proposal: Proposal, target_probs, values: _Values, visit) -> _Values:
    """From one visit, rejected, to the next: the parent, or the first leaf below the next sibling."""
    visits, depths = jnp.asarray(_visits(tree)), jnp.asarray(tree.depths)
    node, following = visits[visit], visits[visit + 1]
    values = self._reject(tree, proposal, target_probs, values, node)
    # The parent's path ends above the sibling's depth, so nothing is entered there.
    return self._enter(tree, proposal, target_probs, values, depths[node], following)

  def _weights(self, tree: TokenTree, proposal: Proposal, target_probs, values: _Values, node):
    """Weights of the next token if `node` is accepted; `[V]`."""
    left = self._left_of_target(tree, proposal, target_probs, values, node, values.c[node])
    return jnp.where(jnp.asarray(tree.num_children)[node] > 0, left, target_probs[node])

  def _uniforms(self, keys, tree: TokenTree, dtype):
    """`[N + 2]`: for every node, and for the next token."""
    return jax.random.uniform(keys[0], (tree.num_nodes + 2,), dtype)

  def _is_rejected(self, tree: TokenTree, uniforms, carry):
    visit, values = carry
    node = jnp.asarray(_visits(tree))[visit]
    return (node != 0) & (uniforms[node] >= jnp.exp(values.log_value[node]))

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    uniforms = self._uniforms(keys, tree, target_probs.dtype)
    if tree.num_nodes == 0:
      return Verdict.at(tree, jnp.zeros((), jnp.int32), draw(uniforms[-1], target_probs[0]), state)

    def is_rejected(carry):
      return self._is_rejected(tree, uniforms, carry)

    def reject(carry):
      visit, values = carry
      return visit + 1, self._next(tree, proposal, target_probs, values, visit)

    start = jnp.zeros((), jnp.int32), self._start(tree, proposal, target_probs)
    with jax.named_scope('visits'):
      visit, values = jax.lax.while_loop(is_rejected, reject, start)
    node = jnp.asarray(_visits(tree))[visit]
    token = draw(uniforms[-1], self._weights(tree, proposal, target_probs, values, node))
    return Verdict.at(tree, node, token, state)

  def record(self, keys, tree, proposal, target_probs, state) -> Record:
    """What `verify` decides, visit by visit; the decisions are named `keep`, and the first that is kept ends it."""
    del state
    visits = jnp.asarray(_visits(tree))
    uniforms = self._uniforms(keys, tree, target_probs.dtype)

    def one_visit(carry, _):
      (visit, values), is_visiting = carry
      node = visits[visit]
      is_rejected = self._is_rejected(tree, uniforms, (visit, values))
      following = jax.lax.cond(
        is_rejected,
        lambda: (visit + 1, self._next(tree, proposal, target_probs, values, visit)),
        lambda: (visit, values),
      )
      decisions = Decisions.of_one(
        is_made=is_visiting & (node != 0) & (proposal.tokens[node - 1] >= 0),
        node=node,
        share=jnp.exp(values.log_value[node]),
        uniform=uniforms[node],
        is_chosen=~is_rejected,
        numbers={'log_kept': values.log_value[node]},
      )
      return (following, is_visiting & is_rejected), decisions

    start = jnp.zeros((), jnp.int32), self._start(tree, proposal, target_probs)
    ((visit, values), _), decisions = jax.lax.scan(one_visit, (start, jnp.ones((), bool)), length=len(visits))
    node = visits[visit]
    weights = self._weights(tree, proposal, target_probs, values, node)
    return Record({'keep': decisions}, node, weights, uniforms[-1])

  def law(self, tree, proposal, target_probs, state):
    del state
    law = jnp.zeros_like(target_probs)
    if tree.num_nodes == 0:
      return target_probs
    values = self._start(tree, proposal, target_probs)
    reach = jnp.ones((), target_probs.dtype)
    for visit, node in enumerate(_visits(tree).tolist()):
      accept = jnp.exp(values.log_value[node]) if node else jnp.ones_like(reach)
      weights = self._weights(tree, proposal, target_probs, values, node)
      law = law.at[node].set(reach * accept * weights / jnp.sum(weights))
      reach = reach * (1 - accept)
      if node:
        values = self._next(tree, proposal, target_probs, values, visit)
    return law
