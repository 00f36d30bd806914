"""Candidates of the next position: the nodes below an accepted one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.proposal import Proposal
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import preferences, spellings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Position:
  """The candidates after an accepted node.

  Attributes:
    node: int32 scalar, the node to stop at if no candidate is accepted. It spells the same as the accepted node, and it
      has children if any such node has.
    draft_probs: `[V]`, the distribution that the candidates were drawn from; arbitrary if none was drawn.
    target_probs: `[V]`, the target's distribution.
    nodes: int32 `[W]`, nodes of the next depth.
    tokens: int32 `[W]`, their tokens; 0 where `is_valid` is False.
    is_valid: bool `[W]`, which of them are candidates.
    is_given: bool `[W]`, which candidates are given; None if no row has given candidates.
  """

  node: jax.Array
  draft_probs: jax.Array
  target_probs: jax.Array
  nodes: jax.Array
  tokens: jax.Array
  is_valid: jax.Array
  is_given: jax.Array | None = None


def next_position(
  tree: Tree, proposal: Proposal, target_probs: jax.Array, node: jax.Array, *, is_pooled: bool = True
) -> Position:
  """The candidates after an accepted node.

  All nodes that spell the accepted prefix are active, and their children, pooled, are the candidates (SpecTr,
  Algorithm 3). A rejected duplicate of an accepted token thus keeps its descendants in play, and with children drawn
  i.i.d. the pool is i.i.d. given the prefix.

  Args:
    tree: The row's tree, with at least one node.
    proposal: `tokens` `[N]`, `probs` `[R, V]`, and `is_given` `[N]` or None.
    target_probs: `[N + 1, V]`, the target's distribution after each node.
    node: int32 scalar, the accepted node.
    is_pooled: Whether the children of all active nodes are candidates, or those of `node` alone.
  """
  if is_pooled:
    spelled = spellings(jnp.asarray(tree.paths), proposal.tokens)
    is_active = jnp.all(spelled == spelled[node], axis=-1)
  else:
    is_active = jnp.arange(tree.num_nodes + 1) == node
  nodes = jnp.asarray(tree.levels)[jnp.asarray(tree.depths)[node] + 1]
  tokens = proposal.tokens[nodes - 1]
  is_valid = (nodes >= 0) & is_active[jnp.asarray(tree.parent_of)[nodes]] & (tokens >= 0)
  # Active nodes share their distributions, but only those with children have the draft's.
  rank = is_active * preferences(tree, proposal)
  parent = jnp.argmax(rank)
  node = jnp.where(rank[parent] > 0, parent, node).astype(jnp.int32)
  return Position(
    node=node,
    draft_probs=proposal.probs[jnp.asarray(tree.law_index)[parent]],
    target_probs=target_probs[node],
    nodes=nodes,
    tokens=jnp.where(is_valid, tokens, 0),
    is_valid=is_valid,
    is_given=None if proposal.is_given is None else is_valid & proposal.is_given[nodes - 1],
  )
