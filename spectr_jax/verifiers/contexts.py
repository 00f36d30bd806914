"""Nodes that spell the same: the candidates after one of them, and the contexts of a whole tree."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree, Tree

NOTHING = -2  # in spellings, unlike every token and unlike the -1 of a node that does not exist


def spellings(paths: jax.Array | np.ndarray, tokens: jax.Array) -> jax.Array:
  """int32 `[..., L]`: the tokens on paths, rows of `TokenTree.paths`; `NOTHING` beyond the depth of a node."""
  return jnp.where(paths < 0, NOTHING, tokens[paths - 1])


def preferences(tree: Tree, proposal: Proposal) -> jax.Array:
  """int32 `[N + 1]`, by which one of the nodes that spell the same stands for all: the first of the highest value.

  It has children if any of them has, and drawn children if any has, since only those have the draft's distribution.
  """
  has_children = jnp.asarray(tree.num_children > 0, jnp.int32)
  if proposal.is_given is None:
    return has_children
  is_drawn = (proposal.tokens >= 0) & ~proposal.is_given
  has_drawn = jnp.zeros(tree.num_nodes + 1, bool).at[jnp.asarray(tree.parent_of)[1:]].max(is_drawn)
  return has_children + has_drawn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Position:
  """The candidates after an accepted node."""

  node: jax.Array  # int32, to stop at if no candidate is accepted; it has children if any that spells the same has
  draft_probs: jax.Array  # `[V]`, that candidates were drawn from; arbitrary if none was
  target_probs: jax.Array  # `[V]`
  nodes: jax.Array  # int32 `[W]`, nodes of the next depth
  tokens: jax.Array  # int32 `[W]`, their tokens; 0 where `is_valid` is False
  is_valid: jax.Array  # bool `[W]`, which of them are candidates
  is_given: jax.Array | None = None  # bool `[W]`; None if no row has given candidates


def next_position(
  tree: Tree, proposal: Proposal, target_probs: jax.Array, node: jax.Array, *, is_pooled: bool = True
) -> Position:
  """The candidates after an accepted node, of a tree that has any: the children of `node` alone unless `is_pooled`.

  All nodes that spell the accepted prefix are active, and their children, pooled, are the candidates (SpecTr,
  Algorithm 3). A rejected duplicate of an accepted token thus keeps its descendants in play, and with children drawn
  i.i.d. the pool is i.i.d. given the prefix.
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
    draft_probs=proposal.probs[jnp.asarray(tree.parent_index)[parent]],
    target_probs=target_probs[node],
    nodes=nodes,
    tokens=jnp.where(is_valid, tokens, 0),
    is_valid=is_valid,
    is_given=None if proposal.is_given is None else is_valid & proposal.is_given[nodes - 1],
  )


@dataclasses.dataclass(frozen=True)
class Slots:
  """The places of a tree's nodes in a table `[L + 1, W]` of its depths; NumPy arrays, the same for all rows."""

  nodes: np.ndarray  # `[L + 1, W]`, the nodes of each depth; 0 where there is none
  is_node: np.ndarray  # bool `[L + 1, W]`
  parent_index: np.ndarray  # `[L + 1, W]`, each node's row of `Proposal.probs`; -1 for nodes that cannot have children
  of_nodes: np.ndarray  # `[N + 1]`, the slot of each node in its depth
  of_parents: tuple[np.ndarray, np.ndarray]  # two `[R]`, depth and slot of the node before each row


@functools.lru_cache(maxsize=64)
def _slots_within(bounds: TokenTree) -> Slots:
  nodes = bounds.levels[:-1]
  is_node = nodes >= 0
  nodes = np.maximum(nodes, 0)
  of_nodes = np.zeros(bounds.num_nodes + 1, np.int32)
  of_nodes[nodes[is_node]] = np.nonzero(is_node)[1]
  return Slots(
    nodes=nodes,
    is_node=is_node,
    parent_index=np.where(is_node, bounds.parent_index[nodes], -1),
    of_nodes=of_nodes,
    of_parents=(bounds.depths[bounds.parent_nodes], of_nodes[bounds.parent_nodes]),
  )


def slots_of(tree: Tree) -> Slots:
  """The slots of a row's tree; of a tree that grows, those of the tree that bounds it."""
  return _slots_within(tree.bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Contexts:
  """The contexts of a row's tree: nodes that spell the same are one context, and one of them stands for it."""

  stands: jax.Array  # bool `[L + 1, W]`, whether the node of a slot stands for its context
  above: jax.Array  # int32 `[L + 1, W]`, the slot that stands for the context above, in the depth above
  is_candidate: jax.Array  # bool `[L, W, W]`, at `[d, i, j]` whether slot j of depth d + 1 is a candidate after i
  is_same: jax.Array  # bool `[L + 1, W, W]`, at `[d, i, j]` whether slots i and j of depth d spell the same

  @property
  def num_candidates(self) -> jax.Array:
    """int32 `[L, W]`, the candidates after each context, copies included."""
    return jnp.sum(self.is_candidate, axis=-1)

  @property
  def is_child(self) -> jax.Array:
    """bool `[L, W, W]`, at `[d, i, j]` whether context j of depth d + 1 stands below context i."""
    return self.is_candidate & self.stands[1:, None, :]


def contexts_of(tree: Tree, proposal: Proposal) -> Contexts:
  """The contexts of a row's guesses; its tree has at least one node."""
  slots = slots_of(tree)
  width = slots.nodes.shape[1]
  spelled = spellings(tree.paths[slots.nodes], proposal.tokens)
  exists = jnp.all((spelled == NOTHING) | (spelled >= 0), axis=-1) & slots.is_node
  is_same = jnp.all(spelled[:, :, None] == spelled[:, None, :], axis=-1) & exists[:, :, None] & exists[:, None, :]
  preference = jnp.where(slots.is_node, preferences(tree, proposal)[slots.nodes], 0)
  first = jnp.argmax(is_same * (1 + preference)[:, None, :], axis=-1)  # the slot that stands for each
  stands = (first == jnp.arange(width)) & jnp.diagonal(is_same, axis1=1, axis2=2)
  parents = jnp.asarray(slots.of_nodes)[tree.parent_of[slots.nodes]]  # in the depth above
  above = jnp.take_along_axis(jnp.roll(first, 1, axis=0), parents, axis=1).astype(jnp.int32)
  is_candidate = (above[1:, None, :] == jnp.arange(width)[:, None]) & exists[1:, None, :]
  return Contexts(stands, above, is_candidate, is_same)
