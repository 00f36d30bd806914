"""Token trees: which guesses stand after which, known when a program is traced."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A static tree of guesses. Node 0 is the root, the last committed token; nodes 1..N hold guesses.

  Nodes are numbered breadth first, so a node's children are neighbours and so are the nodes of a depth. Two drafts of
  two tokens, `TokenTree.chains(2, 2)`, are

      0 -> 1 -> 3
      0 -> 2 -> 4      parents = (0, 0, 1, 2)

  Nodes that happen to hold equal tokens stay separate nodes.

  Attributes:
    parents: The parent of each node 1..N, in breadth-first order; hashable, so a tree can be a static argument.

  Raises:
    ValueError: The parents are not in breadth-first order.
  """

  parents: tuple[int, ...] = ()

  def __post_init__(self):
    lowest = 0
    for node, parent in enumerate(self.parents, start=1):
      if not lowest <= parent < node:
        raise ValueError(
          f'parents must number a tree breadth first, each at least the one before and below its own node; node {node}'
          f' has parent {parent} after {lowest}'
        )
      lowest = parent

  @classmethod
  def chains(cls, num_drafts: int, draft_length: int) -> TokenTree:
    """K independent drafts of L tokens each under the root.

    Args:
      num_drafts: K, at least 1.
      draft_length: L, at least 1.

    Raises:
      ValueError: K or L is below 1.
    """
    if num_drafts < 1 or draft_length < 1:
      raise ValueError(f'num_drafts and draft_length must be at least 1, got {num_drafts} and {draft_length}')
    first = (0,) * num_drafts
    return cls(first + tuple(range(1, num_drafts * (draft_length - 1) + 1)))

  @property
  def num_nodes(self) -> int:
    """N, the root not counted."""
    return len(self.parents)

  @functools.cached_property
  def parent_of(self) -> np.ndarray:
    """int32 `[N + 1]`, the root's own entry is 0."""
    return np.array((0, *self.parents), np.int32)

  @functools.cached_property
  def depths(self) -> np.ndarray:
    """int32 `[N + 1]`, 0 for the root."""
    depths = np.zeros(self.num_nodes + 1, np.int32)
    for node, parent in enumerate(self.parents, start=1):
      depths[node] = depths[parent] + 1
    return depths

  @functools.cached_property
  def max_depth(self) -> int:
    """L, the longest path below the root."""
    return int(self.depths.max())

  @functools.cached_property
  def num_children(self) -> np.ndarray:
    """int32 `[N + 1]`."""
    return np.bincount(np.array(self.parents, np.int64), minlength=self.num_nodes + 1).astype(np.int32)

  @functools.cached_property
  def first_child(self) -> np.ndarray:
    """int32 `[N + 1]`: children of v are `first_child[v]` and the `num_children[v] - 1` nodes after it."""
    return (1 + np.cumsum(self.num_children) - self.num_children).astype(np.int32)

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """int32 `[N + 1, L]`: the nodes from depth 1 down to each node, itself included, then -1."""
    paths = np.full((self.num_nodes + 1, self.max_depth), -1, np.int32)
    for node, parent in enumerate(self.parents, start=1):
      paths[node] = paths[parent]
      paths[node, self.depths[node] - 1] = node
    return paths

  @functools.cached_property
  def ancestors(self) -> np.ndarray:
    """bool `[N + 1, N + 1]`: whether column is row itself or above it; the attention mask of a tree forward."""
    ancestors = np.eye(self.num_nodes + 1, dtype=bool)
    for node, parent in enumerate(self.parents, start=1):
      ancestors[node] |= ancestors[parent]
    return ancestors

  @functools.cached_property
  def levels(self) -> np.ndarray:
    """int32 `[L + 2, W]`: the nodes of each depth, padded with -1; the last row is empty."""
    groups = [np.flatnonzero(self.depths == depth) for depth in range(self.max_depth + 1)]
    levels = np.full((self.max_depth + 2, max(map(len, groups))), -1, np.int32)
    for depth, group in enumerate(groups):
      levels[depth, : len(group)] = group
    return levels

  @functools.cached_property
  def parent_nodes(self) -> np.ndarray:
    """int32 `[R]`: nodes that have children, in order; the nodes whose draft law is needed."""
    return np.flatnonzero(self.num_children).astype(np.int32)

  @functools.cached_property
  def law_index(self) -> np.ndarray:
    """int32 `[N + 1]`: a node's place among `parent_nodes`; -1 for leaves, whose draft law nobody needs."""
    index = np.full(self.num_nodes + 1, -1, np.int32)
    index[self.parent_nodes] = np.arange(len(self.parent_nodes))
    return index

  @property
  def is_chain(self) -> bool:
    """Whether at most one guess stands at each depth: a single draft."""
    return self.num_nodes == self.max_depth
