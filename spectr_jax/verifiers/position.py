"""Candidates of the next position: the nodes below an accepted one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.proposal import Proposal
from spectr_jax.tree import Tree

_NOT_THERE = -2  # unlike every token, and unlike the -1 of a child that could not be drawn


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


def has_drawn_children(tree: Tree, tokens: jax.Array, is_given: jax.Array) -> jax.Array:
  """bool `[N + 1]`: nodes with children that were drawn, for a proposal with given candidates.

  Args:
    tree: The row's tree, with at least one node.
    tokens: int32 `[N]`, -1 for nodes that do not exist.
    is_given: bool `[N]`.
  """
  is_drawn = (tokens >= 0) & ~is_given
  return jnp.zeros(tree.num_nodes + 1, bool).at[jnp.asarray(tree.parent_of)[1:]].max(is_drawn)


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
  paths = jnp.asarray(tree.paths)
  if is_pooled:
    spelled = jnp.where(paths < 0, _NOT_THERE, proposal.tokens[paths - 1])
    is_active = jnp.all(spelled == spelled[node], axis=-1)
  else:
    is_active = jnp.arange(tree.num_nodes + 1) == node
  nodes = jnp.asarray(tree.levels)[jnp.asarray(tree.depths)[node] + 1]
  tokens = proposal.tokens[nodes - 1]
  is_valid = (nodes >= 0) & is_active[jnp.asarray(tree.parent_of)[nodes]] & (tokens >= 0)
  # Active nodes share their distributions, but only those with children have the draft's.
  has_law = is_active & (tree.num_children > 0)
  rank = has_law
  if proposal.is_given is not None:
    rank = has_law * (1 + has_drawn_children(tree, proposal.tokens, proposal.is_given))
  parent = jnp.argmax(rank)
  node = jnp.where(jnp.any(has_law), parent, node).astype(jnp.int32)
  return Position(
    node=node,
    draft_probs=proposal.probs[jnp.asarray(tree.law_index)[parent]],
    target_probs=target_probs[node],
    nodes=nodes,
    tokens=jnp.where(is_valid, tokens, 0),
    is_valid=is_valid,
    is_given=None if proposal.is_given is None else is_valid & proposal.is_given[nodes - 1],
  )
