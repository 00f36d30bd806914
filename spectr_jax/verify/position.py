"""Candidates of the next position: the nodes that stand below an accepted one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.proposal import Proposal
from spectr_jax.verify.verifier import Tree

_NOT_THERE = -2  # unlike every token, and unlike the -1 of a child that could not be drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Position:
  """The candidates after an accepted node.

  Attributes:
    node: int32 scalar, the node to stop at if none is accepted: one that spells the same as the accepted one and has
      children, where there is one.
    draft_probs: `[V]`, the distribution that the candidates were drawn from; any where none was drawn.
    target_probs: `[V]`, the target's distribution.
    nodes: int32 `[W]`, nodes of the next depth.
    tokens: int32 `[W]`, their tokens; 0 where `is_valid` is False.
    is_valid: bool `[W]`, which of them are candidates.
    is_given: bool scalar, whether the candidates are given; None where no row has any that are. If a position had both
      kinds, all would count as given: that is right for candidates from anywhere, and keeps less than could be kept.
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
    target_probs: `[N + 1, V]`.
    node: int32 scalar.
    is_pooled: False for the children of `node` alone.
  """
  paths = jnp.asarray(tree.paths)
  if is_pooled:
    spelled = jnp.where(paths < 0, _NOT_THERE, proposal.tokens[paths - 1])
    is_active = jnp.all(spelled == spelled[node], axis=-1)
  else:
    is_active = jnp.arange(tree.num_nodes + 1) == node
  nodes = jnp.asarray(tree.levels)[jnp.asarray(tree.depths)[node] + 1]
  tokens = proposal.tokens[nodes - 1]
  is_valid = (nodes >= 0) & is_active[jnp.asarray(tree.parent_of)[nodes]] & (tokens >= 0)
  # Active nodes share their distributions; the draft's means something only where there are children.
  has_law = is_active & (tree.num_children > 0)
  parent = jnp.argmax(has_law)
  node = jnp.where(jnp.any(has_law), parent, node).astype(jnp.int32)
  return Position(
    node=node,
    draft_probs=proposal.probs[jnp.asarray(tree.law_index)[parent]],
    target_probs=target_probs[node],
    nodes=nodes,
    tokens=jnp.where(is_valid, tokens, 0),
    is_valid=is_valid,
    is_given=None if proposal.is_given is None else jnp.any(is_valid & proposal.is_given[nodes - 1]),
  )
