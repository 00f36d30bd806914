"""Token trees: which guesses stand after which, the same for all rows, or chosen by every row under static bounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.tree_search import integer, optimal_chain_sizes, optimal_parents, positive


@dataclasses.dataclass(frozen=True)
class TokenTree:
  """A static tree of guesses. Node 0 is the root, the last committed token; nodes 1..N hold guesses.

  Nodes are numbered breadth first, so a node's children are neighbors and so are the nodes of a depth. Two drafts of
  two tokens, `TokenTree.chains(2, 2)`, are

      0 -> 1 -> 3
      0 -> 2 -> 4      parents = (0, 0, 1, 2)

  Nodes that happen to hold equal tokens stay separate nodes.

  A tree also bounds trees that grow while they are drafted: `slots` fixes how many nodes each depth may have, and a
  drafter then chooses the parents of every row (`Proposal.parents`, `RowTree`).

  Attributes:
    parents: The parent of each node 1..N, in breadth-first order; hashable, so a tree can be a static argument.
    is_grown: Whether rows have parents of their own, for which these are the defaults. Any node above the last depth
      may then have children.

  Raises:
    ValueError: The parents are not in breadth-first order.
  """

  parents: tuple[int, ...] = ()
  is_grown: bool = False

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
    """K independent drafts of L tokens each under the root; K and L are at least 1, else ValueError."""
    if num_drafts < 1 or draft_length < 1:
      raise ValueError(f'num_drafts and draft_length must be at least 1, got {num_drafts} and {draft_length}')
    first = (0,) * num_drafts
    return cls(first + tuple(range(1, num_drafts * (draft_length - 1) + 1)))

  @classmethod
  def slots(cls, widths: Sequence[int]) -> TokenTree:
    """Bounds of trees that grow while they are drafted: how many nodes there are at depth 1, 2, ..., at most.

    Each width is at least 1, else ValueError. By default the nodes of a depth share the ones above evenly.
    """
    widths = [positive('a width', width) for width in widths]
    if not widths:
      raise ValueError('widths must hold at least one number of nodes, got none')
    parents, first, above = [], 0, 1
    for width in widths:
      parents += [first + slot * above // width for slot in range(width)]
      first, above = first + above, width
    return cls(tuple(parents), is_grown=True)

  @classmethod
  def from_parents(cls, parents: Iterable[int]) -> TokenTree:
    """A tree whose nodes come in another order: they are numbered again breadth first, and siblings keep their order.

    Raises ValueError unless the parent of each node 1..N is an integer from 0 on and below its node.
    """
    children = [[]]
    for node, parent in enumerate(parents, start=1):
      parent = integer('a parent', parent)
      if not 0 <= parent < node:
        raise ValueError(f'the parent of node {node} must be between 0 and {node - 1}, got {parent}')
      children[parent].append(node)
      children.append([])
    numbered, queue = [], [0]
    for number, node in enumerate(queue):  # the queue grows while it is read
      numbered += [number] * len(children[node])
      queue += children[node]
    return cls(tuple(numbered))

  @classmethod
  def prefix(cls, factors: Sequence[int]) -> TokenTree:
    """The tree in which all nodes of a depth have equally many children (SpecTr, Sun et al. 2023, Algorithm 5).

    `prefix((4, 2, 2, 1))` has 4 + 8 + 16 + 16 nodes, and `prefix((K, 1, 1))` is `chains(K, 3)`. ValueError without
    factors, or for one that is not an integer of at least 1.
    """
    factors = [positive('a factor', factor) for factor in factors]
    if not factors:
      raise ValueError('factors must hold at least one number of children, got none')
    parents, level = [], range(1)
    for factor in factors:
      parents += [node for node in level for _ in range(factor)]
      level = range(level.stop, len(parents) + 1)
    return cls(tuple(parents))

  @classmethod
  def specinfer(cls, draft_length: int) -> TokenTree:
    """SpecInfer's tree: three drafts of L tokens that share their first two tokens, 2 + 3 (L - 2) nodes.

    The shape is the one that "Speculative Decoding via Exponential Races" (Section 5) compares with. L is an integer of
    at least 3, else ValueError.
    """
    draft_length = integer('draft_length', draft_length)
    if draft_length < 3:
      raise ValueError(f'draft_length must be at least 3, two shared tokens and one more, got {draft_length}')
    return cls.prefix((1, 1, 3) + (1,) * (draft_length - 3))

  @classmethod
  def optimal(cls, acceptance, num_nodes: int, max_depth: int | None = None) -> TokenTree:
    """The tree of at most N nodes with the most accepted tokens in expectation, where the order of siblings matters.

    A node is accepted with the product of the probabilities along its path, and the tree holds the N nodes for which
    it is largest, fewer only if no others can be accepted at all. Of equally likely nodes the shallower one comes
    first, then the one with fewer siblings before it, then the one whose parent came first. Takes O(N log N) steps; the
    tree is that of a Tunstall code. Methods whose siblings are exchangeable have `optimal_factors`, and those that try
    every branch `optimal_chains`.

    Source: "Speculative Decoding via Exponential Races", Algorithm 3.

    Args:
      acceptance: `[W]` a_1, a_2, ...: the probability that a node's first, second, ... child, in the order drawn, is
        the one that is accepted, given that the node was; not conditional on the rejection of earlier siblings, so
        their sum is at most 1. Or `[D, W]`, a row for each depth of the parent, the last one for everything below. A
        child counts at most as likely as the one before it. No node gets more than W children.
      num_nodes: N, at least 1.
      max_depth: The longest path allowed, or None for any.

    Raises:
      ValueError: `acceptance` has another shape, values outside [0, 1] or a row with a sum above 1; `num_nodes` or
        `max_depth` is below 1; or no node can be accepted at all.
    """
    return cls.from_parents(optimal_parents(acceptance, num_nodes, max_depth))

  @classmethod
  def optimal_chains(cls, kept, num_nodes: int, max_depth: int | None = None, *, tolerance: float = 0.0) -> TokenTree:
    """The best K chains of L tokens with at most N nodes: the search for methods that try every branch.

    Such a method goes on to the next branch where one fails. What it keeps is no product of one chance per depth, so
    neither `optimal` nor `optimal_factors` describes it. With c_d(k) the probability that at least d + 1 tokens of k
    chains are kept in a call, K chains of L tokens yield c_0(K) + ... + c_{L-1}(K) tokens. That is what the search
    maximises over all K and L. It takes c_d(k) to be the same however long the chains are, as it is for
    `spectr_jax.theory.stateless_kept_bound`. Trees that branch below the root are not among those searched.

    Source: this library.

    Args:
      kept: `[D, W]`: c_d(k) at `[d, k - 1]`, as predicted or measured. NaN where it is not known; k chains are no
        longer than the numbers above the first NaN in their column. No more than W chains, no longer than D.
      num_nodes: N, at least 1.
      max_depth: The longest chain allowed, or None for any.
      tolerance: Share of the tokens that shorter chains may cost. Of the K whose best chains yield at least
        (1 - tolerance) times the most, the one with the shortest chains is taken: every depth is one more step of the
        draft, and steps follow each other.

    Returns:
      The chains. Among equally good ones those with the fewest nodes, then the fewest chains.

    Raises:
      ValueError: `kept` has another shape, values outside [0, 1], or no number in its first row for at most N chains;
        `num_nodes` or `max_depth` is below 1; or nothing is ever kept.
    """
    return cls.chains(*optimal_chain_sizes(kept, num_nodes, max_depth, tolerance=tolerance))

  @property
  def bounds(self) -> TokenTree:
    """Itself: a tree that is the same for all rows is its own bounds; see `RowTree`."""
    return self

  def of_row(self, parents: jax.Array | None) -> Tree:
    """The tree of one row, whose nodes 1..N have `parents`, int32 `[N]`, each a node of the depth above.

    They are -1 for a slot that the row does not use, which has the token -1 and no children; None for a tree that is
    the same for all rows.
    """
    if parents is None:
      return self
    size, is_used = self.num_nodes + 1, parents >= 0
    parent_of = jnp.pad(jnp.where(is_used, parents, jnp.asarray(self.parent_of[1:])), (1, 0)).astype(jnp.int32)
    num_children = jnp.zeros(size, jnp.int32).at[jnp.where(is_used, parents, size)].add(1, mode='drop')
    # Each node, its parent, its parent's parent, ...; 0 from the root on.
    nodes = jnp.arange(size, dtype=jnp.int32)
    above = jax.lax.scan(lambda node, _: (parent_of[node], node), nodes, length=self.max_depth)[1]
    up = self.depths[:, None] - 1 - np.arange(self.max_depth)
    paths = jnp.where(up < 0, -1, above[np.maximum(up, 0), np.arange(size)[:, None]]).astype(jnp.int32)
    return RowTree(
      bounds=self,
      parent_of=parent_of,
      num_children=num_children,
      paths=paths,
      parent_index=jnp.where(num_children > 0, jnp.asarray(self.parent_index), jnp.int32(-1)),
      postorder=_postorder(paths, parent_of, jnp),
    )

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
  def child_index(self) -> np.ndarray:
    """int32 `[N + 1]`: a node's place among its siblings, 0 for the first; 0 for the root."""
    index = np.arange(self.num_nodes + 1, dtype=np.int32) - self.first_child[self.parent_of]
    index[0] = 0
    return index

  @functools.cached_property
  def most_children(self) -> int:
    """The most children that a node may have."""
    if self.is_grown:
      return int(np.bincount(self.depths)[1:].max())
    return int(self.num_children.max())

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
    return _ancestors(self.paths, np)

  @functools.cached_property
  def postorder(self) -> np.ndarray:
    """int32 `[N + 1]`: the nodes in the order in which each comes after its children, siblings in order."""
    return _postorder(self.paths, self.parent_of, np)

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
    """int32 `[R]`: nodes that have children, or may have, in order; the nodes whose draft distribution is needed."""
    may_have = self.depths < self.max_depth if self.is_grown else self.num_children
    return np.flatnonzero(may_have).astype(np.int32)

  @functools.cached_property
  def parent_index(self) -> np.ndarray:
    """int32 `[N + 1]`: a node's place among `parent_nodes`; -1 for leaves, whose draft distribution nobody needs."""
    index = np.full(self.num_nodes + 1, -1, np.int32)
    index[self.parent_nodes] = np.arange(len(self.parent_nodes))
    return index

  @property
  def is_chains(self) -> bool:
    """Whether it is `chains(K, L)` for some K and L: drafts of equal length that share nothing."""
    num_drafts = self.num_children[0]
    return bool(num_drafts) and self == TokenTree.chains(int(num_drafts), self.max_depth)

  @property
  def is_chain(self) -> bool:
    """Whether at most one guess stands at each depth: a single draft."""
    return self.num_nodes == self.max_depth


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTree:
  """The tree of one row, where rows choose their parents; `TokenTree.of_row` makes it.

  It has the arrays of `TokenTree`, some of which are data. N and L are those of the bounds, and so are depths, levels
  and `parent_nodes`.

  Attributes:
    bounds: The tree that bounds it, static.
    parent_of: int32 `[N + 1]`, the root's own entry is 0; slots that are not used stand below their default parent.
    num_children: int32 `[N + 1]`, slots that are not used left out.
    paths: int32 `[N + 1, L]`, the nodes from depth 1 down to each node, itself included, then -1.
    parent_index: int32 `[N + 1]`, a node's place among `parent_nodes`; -1 for nodes without children.
    postorder: int32 `[N + 1]`, the nodes in the order in which each comes after its children, siblings in order.
  """

  bounds: TokenTree = dataclasses.field(metadata={'static': True})
  parent_of: jax.Array
  num_children: jax.Array
  paths: jax.Array
  parent_index: jax.Array
  postorder: jax.Array

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
  def child_index(self) -> jax.Array:
    """int32 `[N + 1]`: a node's place among its siblings, 0 for the first; 0 for the root."""
    return jnp.sum(_is_earlier_sibling(self.parent_of, jnp), axis=1, dtype=jnp.int32)

  @property
  def ancestors(self) -> jax.Array:
    """bool `[N + 1, N + 1]`: whether column is row itself or above it; the attention mask of a tree forward."""
    return _ancestors(self.paths, jnp)


# The tree that a verifier gets: the same for all rows, or a row's own. Both have the attributes that verifiers read;
# some arrays of the second are traced.
Tree = TokenTree | RowTree


# Of arrays of either kind; `xp` is `numpy` or `jax.numpy`.


def _ancestors(paths: Any, xp: Any) -> Any:
  nodes = xp.arange(len(paths))
  return (paths[:, :, None] == nodes).any(axis=1) | (nodes == 0)


def _is_earlier_sibling(parent_of: Any, xp: Any) -> Any:
  """bool `[N + 1, N + 1]`: whether column is a sibling of row that comes before it."""
  node = xp.arange(len(parent_of))
  return (parent_of[:, None] == parent_of) & (node < node[:, None]) & (node > 0)


def _postorder(paths: Any, parent_of: Any, xp: Any) -> Any:
  ancestors = _ancestors(paths, xp)
  size = ancestors.sum(axis=0)  # of the subtree below each node
  before = xp.where(_is_earlier_sibling(parent_of, xp), size, 0).sum(axis=1)  # nodes below earlier siblings
  place = (ancestors * before).sum(axis=1) + size - 1
  return xp.argsort(place).astype(xp.int32)
