"""Token-level verification: walk down the tree, one coupling per position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Outcome
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import draw
from spectr_jax.tree import TokenTree
from spectr_jax.verify.verifier import Verdict


@dataclasses.dataclass(frozen=True)
class Walk:
  """Applies `coupling` at the root, then below each accepted node (SpecTr, Algorithm 3).

  At each position *all* nodes that spell the accepted prefix are active, and their children, pooled, are the
  candidates. A rejected duplicate of an accepted token thus keeps its descendants in play, and with children drawn
  i.i.d. the pool is always i.i.d. given the prefix. Where no active node has children, a bonus token comes from the
  target.

  Attributes:
    coupling: Selects one of the candidates of a position.
  """

  coupling: Coupling

  def init_state(self, tree):
    del tree
    return ()

  def _step(self, tree: TokenTree, proposal: Proposal, target_probs, node) -> tuple[jax.Array, jax.Array, Outcome]:
    """Candidates after an accepted node, and what may happen among them.

    Returns:
      The node to stop at if none is accepted: one that spells the same and has children, where there is one. Node
      numbers of the candidates, int32 `[W]`, -1 where there is none. The outcome over them, which is the target's law
      where there is no candidate at all.
    """
    paths = jnp.asarray(tree.paths)
    spelled = jnp.where(paths < 0, -1, proposal.tokens[paths - 1])
    is_active = jnp.all(spelled == spelled[node], axis=-1)
    level = jnp.asarray(tree.levels)[jnp.asarray(tree.depths)[node] + 1]
    is_candidate = (level >= 0) & is_active[jnp.asarray(tree.parent_of)[level]]
    # Active nodes share their laws; the draft's was taken only where there are children.
    law_index = jnp.asarray(tree.law_index)
    parent = jnp.argmax(is_active & (law_index >= 0))
    target = target_probs[node]
    outcome = self.coupling(proposal.probs[law_index[parent]], target, proposal.tokens[level - 1], is_candidate)
    has_candidates = jnp.any(is_candidate)
    outcome = Outcome(
      jnp.where(has_candidates, outcome.accept_probs, 0), jnp.where(has_candidates, outcome.residual, target)
    )
    return jnp.where(has_candidates, parent, node), jnp.where(is_candidate, level, -1), outcome

  def verify(self, key, tree, proposal, target_probs, state) -> Verdict:
    if tree.num_nodes == 0:
      token = draw(jax.random.uniform(key, dtype=target_probs.dtype), target_probs[0])
      return Verdict(jnp.zeros(0, jnp.int32), jnp.zeros((), jnp.int32), token, state)

    def is_walking(carry):
      return carry[2] < 0

    def walk(carry):
      node, depth, _ = carry
      stop, candidates, outcome = self._step(tree, proposal, target_probs, node)
      uniforms = jax.random.uniform(jax.random.fold_in(key, depth), (2,), target_probs.dtype)
      # A parallel sum can rise at a zero: without the second condition a slot that holds no candidate could be taken.
      is_accepted = (uniforms[0] < jnp.cumsum(outcome.accept_probs)) & (outcome.accept_probs > 0)
      is_any = jnp.any(is_accepted)
      token = draw(uniforms[1], outcome.residual)
      accepted = candidates[jnp.argmax(is_accepted)]
      return jnp.where(is_any, accepted, stop), depth + is_any, jnp.where(is_any, -1, token)

    start = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
    node, num_accepted, token = jax.lax.while_loop(is_walking, walk, start)
    path = jnp.maximum(jnp.asarray(tree.paths)[node], 0)
    return Verdict(path, num_accepted, token, state)

  def law(self, tree, proposal, target_probs, state):
    del state
    reach = jnp.zeros(tree.num_nodes + 1, target_probs.dtype).at[0].set(1)
    law = jnp.zeros((tree.num_nodes + 1, target_probs.shape[-1]), target_probs.dtype)
    if tree.num_nodes == 0:
      return law.at[0].set(target_probs[0])
    for node in range(tree.num_nodes + 1):
      stop, candidates, outcome = self._step(tree, proposal, target_probs, node)
      reached = reach[node]
      reach = reach.at[candidates].add(reached * outcome.accept_probs, mode='drop', wrap_negative_indices=False)
      residual = outcome.residual / jnp.sum(outcome.residual)
      law = law.at[stop].add(reached * (1 - jnp.sum(outcome.accept_probs)) * residual)
    return law
