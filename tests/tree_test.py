"""Token trees: numbering and every derived array, by hand."""

import heapq

import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.tree import TokenTree
from tests.slow import slow_but

CHAINS = TokenTree.chains(2, 3)  # 0 -> 1 -> 3 -> 5 and 0 -> 2 -> 4 -> 6
UNEQUAL = TokenTree((0, 0, 1, 1, 2, 4))  # 0 -> (1 -> (3, 4 -> 6), 2 -> 5)


@pytest.mark.parametrize(
  ('tree', 'parents'),
  [
    (TokenTree.chains(1, 1), (0,)),
    (TokenTree.chains(1, 3), (0, 1, 2)),
    (TokenTree.chains(3, 1), (0, 0, 0)),
    (TokenTree.chains(2, 2), (0, 0, 1, 2)),
    (TokenTree.chains(3, 3), (0, 0, 0, 1, 2, 3, 4, 5, 6)),
    (TokenTree.prefix((1,)), (0,)),
    (TokenTree.prefix((3,)), (0, 0, 0)),
    (TokenTree.prefix((2, 2)), (0, 0, 1, 1, 2, 2)),
    (TokenTree.prefix((1, 3, 1)), (0, 1, 1, 1, 2, 3, 4)),
    (TokenTree.prefix([2, 1, 2]), (0, 0, 1, 2, 3, 3, 4, 4)),
    (TokenTree.prefix(np.array([2, 2])), (0, 0, 1, 1, 2, 2)),
    (TokenTree.prefix((3, 1, 1, 1)), TokenTree.chains(3, 4).parents),
    (TokenTree.specinfer(3), (0, 1, 2, 2, 2)),
    (TokenTree.specinfer(5), (0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8)),
  ],
)
def test_shapes_by_hand(tree, parents):
  assert tree.parents == parents
  assert tree.is_chain == (len(parents) == tree.max_depth)


def test_large_prefix_trees():
  for factors in ((4, 2, 2, 1), (2, 3, 1, 2), (7,), (5, 1, 4), (1, 1, 3, 1, 1, 1)):
    tree, widths = TokenTree.prefix(factors), np.cumprod(factors)
    np.testing.assert_array_equal(np.bincount(tree.depths), [1, *widths])
    assert (tree.num_nodes, tree.max_depth) == (sum(widths), len(factors))
    for depth, factor in enumerate(factors):
      assert set(tree.num_children[tree.depths == depth].tolist()) == {factor}
  assert TokenTree.specinfer(6) == tree


@pytest.mark.parametrize(
  ('tree', 'arrays'),
  [
    (CHAINS, {
      'parent_of': [0, 0, 0, 1, 2, 3, 4],
      'depths': [0, 1, 1, 2, 2, 3, 3],
      'num_children': [2, 1, 1, 1, 1, 0, 0],
      'paths': [[-1, -1, -1], [1, -1, -1], [2, -1, -1], [1, 3, -1], [2, 4, -1], [1, 3, 5], [2, 4, 6]],
      'levels': [[0, -1], [1, 2], [3, 4], [5, 6], [-1, -1]],
      'parent_nodes': [0, 1, 2, 3, 4],
      'parent_index': [0, 1, 2, 3, 4, -1, -1],
    }),
    (UNEQUAL, {
      'parent_of': [0, 0, 0, 1, 1, 2, 4],
      'depths': [0, 1, 1, 2, 2, 2, 3],
      'num_children': [2, 2, 1, 0, 1, 0, 0],
      'paths': [[-1, -1, -1], [1, -1, -1], [2, -1, -1], [1, 3, -1], [1, 4, -1], [2, 5, -1], [1, 4, 6]],
      'levels': [[0, -1, -1], [1, 2, -1], [3, 4, 5], [6, -1, -1], [-1, -1, -1]],
      'parent_nodes': [0, 1, 2, 4],
      'parent_index': [0, 1, 2, -1, 3, -1, -1],
      'ancestors': [
        [1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 1, 0, 1],
      ],
    }),
  ],
  ids=['chains', 'unequal'],
)  # fmt: skip
def test_arrays_by_hand(tree, arrays):
  assert (tree.num_nodes, tree.max_depth, tree.is_chain) == (6, 3, False)
  for name, expected in arrays.items():
    np.testing.assert_array_equal(getattr(tree, name), expected, err_msg=name)
  assert tree.ancestors.dtype == bool
  parents = np.flatnonzero(tree.num_children)
  np.testing.assert_array_equal(tree.first_child[parents], [tree.parents.index(node) + 1 for node in parents])


def test_empty_tree():
  tree = TokenTree()
  assert (tree.num_nodes, tree.max_depth, tree.is_chain) == (0, 0, True)
  np.testing.assert_array_equal(tree.depths, [0])
  np.testing.assert_array_equal(tree.num_children, [0])
  np.testing.assert_array_equal(tree.ancestors, [[True]])
  assert tree.paths.shape == (1, 0)
  assert tree.parent_nodes.shape == (0,)


def test_arrays_agree_on_random_trees():
  """What the arrays promise of each other, on trees nobody drew by hand."""
  rng = np.random.default_rng(0)
  for _ in range(20):
    parents = np.sort(rng.integers(0, np.arange(1, 13)))
    tree = TokenTree(tuple(int(p) for p in parents))
    for node in range(1, 13):
      path = [n for n in tree.paths[node].tolist() if n >= 0]
      assert path[-1] == node
      assert len(path) == tree.depths[node]
      assert [0, *path[:-1]] == [int(tree.parent_of[n]) for n in path]
      np.testing.assert_array_equal(np.flatnonzero(tree.ancestors[node]), sorted({0, *path}))
    for node in range(13):
      children = np.flatnonzero(tree.parent_of[1:] == node) + 1
      first, count = int(tree.first_child[node]), int(tree.num_children[node])
      assert children.tolist() == list(range(first, first + count)) if count else not children.size
    assert sorted(tree.levels[tree.levels >= 0].tolist()) == list(range(13))


def test_trees_are_static_arguments():
  same = TokenTree((0, 0, 1, 2))
  assert same == TokenTree.chains(2, 2)
  assert hash(same) == hash(TokenTree.chains(2, 2))
  assert same != TokenTree((0, 0, 1, 1))
  _ = same.levels  # computing an array does not change what the tree is
  assert same == TokenTree.chains(2, 2)
  assert len({same, TokenTree.chains(2, 2), CHAINS}) == 2


def _shuffled(tree, rng, keep_siblings):
  """Parents of `tree` under a random valid numbering, in which siblings may have to keep their order."""
  ready = [(rng.random(), 1)] if tree.num_nodes else []
  number, parents = {0: 0}, []
  waiting = set(range(2, tree.num_nodes + 1))
  while ready:
    _, node = heapq.heappop(ready)
    parent = int(tree.parent_of[node])
    parents.append(number[parent])
    number[node] = len(parents)
    for other in sorted(waiting):
      above = int(tree.parent_of[other])
      elder = range(int(tree.first_child[above]), other) if keep_siblings else ()
      if above in number and all(sibling in number for sibling in elder):
        waiting.remove(other)
        heapq.heappush(ready, (rng.random(), other))
  assert len(parents) == tree.num_nodes
  return parents


def _shape(tree, node=0):
  first, count = int(tree.first_child[node]), int(tree.num_children[node])
  return tuple(sorted(_shape(tree, child) for child in range(first, first + count)))


@pytest.mark.parametrize(
  ('parents', 'numbered'),
  [
    ((), ()),
    ((0, 1, 0), (0, 0, 1)),
    ((0, 1, 2, 0, 4), (0, 0, 1, 2, 3)),  # depth first
    ((0, 0, 2, 1), (0, 0, 1, 2)),
    ((0, 0, 2, 2, 1, 5, 3), (0, 0, 1, 2, 2, 3, 4)),
    (np.array([0, 1, 0], np.int32), (0, 0, 1)),
    (iter([0, 0, 0]), (0, 0, 0)),
  ],
)
def test_from_parents(parents, numbered):
  tree = TokenTree.from_parents(parents)
  assert tree.parents == numbered
  assert all(type(parent) is int for parent in tree.parents)


def test_from_parents_undoes_any_numbering():
  rng = np.random.default_rng(1)
  for _ in range(50):
    tree = TokenTree(tuple(np.sort(rng.integers(0, np.arange(1, 11))).tolist()))
    assert TokenTree.from_parents(_shuffled(tree, rng, keep_siblings=True)) == tree
    assert _shape(TokenTree.from_parents(_shuffled(tree, rng, keep_siblings=False))) == _shape(tree)


@pytest.mark.parametrize(
  ('make', 'arguments', 'message'),
  [
    (TokenTree, (1,), 'breadth first'),  # its own parent
    *((TokenTree, parents, 'breadth first') for parents in ((0, 2), (-1,), (0, 1, 0), (0, 0, 2, 1), (0, 3, 3, 3))),
    *((lambda sizes: TokenTree.chains(*sizes), sizes, 'must be at least 1') for sizes in ((0, 1), (1, 0), (-1, 3))),
    (TokenTree.from_parents, (1,), 'node 1 must be between 0 and 0, got 1'),
    (TokenTree.from_parents, (0, 0, 4, 0), 'node 3 must be between 0 and 2, got 4'),
    (TokenTree.from_parents, (0, -1), 'node 2 must be between 0 and 1, got -1'),
    (TokenTree.from_parents, (0, 1.0), 'must be an integer, got 1.0'),
    (TokenTree.from_parents, (0, None), 'must be an integer, got None'),
    (TokenTree.from_parents, '01', "must be an integer, got '0'"),
    (TokenTree.prefix, (), 'at least one number'),
    (TokenTree.prefix, (0,), 'at least 1, got 0'),
    (TokenTree.prefix, (2, -1), 'at least 1, got -1'),
    (TokenTree.prefix, (2, 2.0), 'must be an integer, got 2.0'),
    (TokenTree.prefix, '2', "must be an integer, got '2'"),
    *((TokenTree.specinfer, length, 'draft_length must be') for length in (2, 0, -1, 3.0)),
    *((TokenTree.slots, widths, 'width') for widths in ((), (0,), (2, 1.5))),
  ],
)
def test_what_is_no_tree_is_refused(make, arguments, message):
  with pytest.raises(ValueError, match=message):
    make(arguments)


# Trees of rows.

_SHAPES = [
  TokenTree.chains(1, 3), TokenTree.chains(3, 4), TokenTree.prefix((2, 3, 1)), TokenTree((0, 0, 0, 2, 2, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize('tree', slow_but(_SHAPES[2:], _SHAPES), ids=lambda tree: str(tree.parents))
def test_a_row_with_a_trees_parents_has_its_arrays(tree):
  row = tree.of_row(jnp.array(tree.parents))
  assert row.bounds is tree.bounds is tree
  names = ['depths', 'levels', 'parent_nodes', 'parent_of', 'num_children', 'child_index', 'paths', 'ancestors']
  for name in (*names, 'postorder', 'parent_index'):
    np.testing.assert_array_equal(getattr(row, name), getattr(tree, name), err_msg=name)
  for name in ('num_nodes', 'max_depth', 'most_children'):
    assert getattr(row, name) == getattr(tree, name)
  # Every node after its children, and siblings in order.
  order = tree.postorder.tolist()
  assert sorted(order) == list(range(tree.num_nodes + 1))
  for node, parent in enumerate(tree.parents, start=1):
    assert order.index(node) < order.index(parent)
    for sibling in range(node + 1, tree.num_nodes + 1):
      if tree.parent_of[sibling] == parent:
        assert order.index(node) < order.index(sibling)


def test_slots_bound_what_rows_may_grow():
  bounds = TokenTree.slots((2, 3, 2))
  assert bounds.parents == (0, 0, 1, 1, 2, 3, 4)
  np.testing.assert_array_equal(bounds.parent_nodes, [0, 1, 2, 3, 4, 5])  # all but the last depth may have children
  assert bounds.most_children == 3
  assert bounds.of_row(None) is bounds
  row = bounds.of_row(jnp.array([0, -1, 1, 1, -1, 4, -1]))
  np.testing.assert_array_equal(row.num_children, [1, 2, 0, 0, 1, 0, 0, 0])
  np.testing.assert_array_equal(row.parent_index, [0, 1, -1, -1, 4, -1, -1, -1])
  np.testing.assert_array_equal(row.paths[6], [1, 4, 6])
  np.testing.assert_array_equal(np.flatnonzero(row.ancestors[6]), [0, 1, 4, 6])
