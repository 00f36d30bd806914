"""The tree of one row, where rows choose the parents of their guesses under static bounds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
  from spectr_jax.tree import TokenTree


def postorder(ancestors: Any, parent_of: Any, xp: Any) -> Any:
  """The nodes of a tree, each after its children; see `TokenTree.postorder`.

  Args:
    ancestors: bool `[N + 1, N + 1]`.
    parent_of: int32 `[N + 1]`.
    xp: `numpy` or `jax.numpy`.
  """
  size = ancestors.sum(axis=0)  # of the subtree below each node
  node = xp.arange(len(parent_of))
  is_earlier_sibling = (parent_of[:, None] == parent_of) & (node < node[:, None]) & (node > 0)
  before = xp.where(is_earlier_sibling, size, 0).sum(axis=1)  # nodes below earlier siblings
  place = (ancestors * before).sum(axis=1) + size - 1
  return xp.argsort(place).astype(xp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTree:
  """The tree of one row, where rows choose their parents: the arrays of `TokenTree`, some of which are data.

  Depths, levels and `parent_nodes` are those of the bounds. Below, N, L and R are theirs too.

  Attributes:
    parents: int32 `[N]`, the parent of each node 1..N, a node of the depth above; -1 for a slot that the row does not
      use. Such a slot has the token -1 and no children.
    bounds: The tree that bounds it, static.
  """

  parents: jax.Array
  bounds: TokenTree = dataclasses.field(metadata={'static': True})

  @property
  def num_nodes(self) -> int:
    """N, slots that the row does not use included."""
    return self.bounds.num_nodes

  @property
  def max_depth(self) -> int:
    """L."""
    return self.bounds.max_depth

  @property
  def most_children(self) -> int:
    """The most children that a node may have."""
    return self.bounds.most_children

  @property
  def depths(self) -> np.ndarray:
    """int32 `[N + 1]`, 0 for the root."""
    return self.bounds.depths

  @property
  def levels(self) -> np.ndarray:
    """int32 `[L + 2, W]`: the nodes of each depth, padded with -1; the last row is empty."""
    return self.bounds.levels

  @property
  def parent_nodes(self) -> np.ndarray:
    """int32 `[R]`: nodes that may have children, in order."""
    return self.bounds.parent_nodes

  @property
  def parent_of(self) -> jax.Array:
    """int32 `[N + 1]`, the root's own entry is 0; slots that are not used stand below their default parent."""
    parents = jnp.where(self.parents < 0, jnp.asarray(self.bounds.parent_of[1:]), self.parents)
    return jnp.pad(parents, (1, 0)).astype(jnp.int32)

  @property
  def num_children(self) -> jax.Array:
    """int32 `[N + 1]`, slots that are not used left out."""
    at = jnp.where(self.parents < 0, self.num_nodes + 1, self.parents)
    return jnp.zeros(self.num_nodes + 1, jnp.int32).at[at].add(1, mode='drop')

  @property
  def child_index(self) -> jax.Array:
    """int32 `[N + 1]`: a node's place among its siblings, 0 for the first; 0 for the root."""
    node, parent_of = jnp.arange(self.num_nodes + 1), self.parent_of
    is_earlier = (parent_of[:, None] == parent_of) & (node < node[:, None]) & (node > 0)
    return jnp.sum(is_earlier, axis=1, dtype=jnp.int32)

  @property
  def _above(self) -> jax.Array:
    """int32 `[L, N + 1]`: each node, its parent, its parent's parent, ...; 0 from the root on."""
    parent_of, nodes = self.parent_of, jnp.arange(self.num_nodes + 1, dtype=jnp.int32)
    return jax.lax.scan(lambda node, _: (parent_of[node], node), nodes, length=self.max_depth)[1]

  @property
  def paths(self) -> jax.Array:
    """int32 `[N + 1, L]`: the nodes from depth 1 down to each node, itself included, then -1."""
    up = self.depths[:, None] - 1 - np.arange(self.max_depth)
    nodes = self._above[np.maximum(up, 0), np.arange(self.num_nodes + 1)[:, None]]
    return jnp.where(up < 0, -1, nodes).astype(jnp.int32)

  @property
  def ancestors(self) -> jax.Array:
    """bool `[N + 1, N + 1]`: whether column is row itself or above it; the attention mask of a tree forward."""
    nodes = jnp.arange(self.num_nodes + 1)
    return jnp.any(self._above[:, :, None] == nodes, axis=0) | (nodes == 0)

  @property
  def postorder(self) -> jax.Array:
    """int32 `[N + 1]`: the nodes in the order in which each comes after its children, siblings in order."""
    return postorder(self.ancestors, self.parent_of, jnp)

  @property
  def law_index(self) -> jax.Array:
    """int32 `[N + 1]`: a node's place among `parent_nodes`; -1 for nodes without children."""
    return jnp.where(self.num_children > 0, jnp.asarray(self.bounds.law_index), jnp.int32(-1))
