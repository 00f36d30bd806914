"""Token trees: numbering and every derived array, by hand."""

import numpy as np
import pytest

from spectr_jax.tree import TokenTree

CHAINS = TokenTree.chains(2, 3)  # 0 -> 1 -> 3 -> 5 and 0 -> 2 -> 4 -> 6
UNEQUAL = TokenTree((0, 0, 1, 1, 2, 4))  # 0 -> (1 -> (3, 4 -> 6), 2 -> 5)


@pytest.mark.parametrize(
  ('num_drafts', 'draft_length', 'parents'),
  [
    (1, 1, (0,)),
    (1, 3, (0, 1, 2)),
    (3, 1, (0, 0, 0)),
    (2, 2, (0, 0, 1, 2)),
    (3, 3, (0, 0, 0, 1, 2, 3, 4, 5, 6)),
  ],
)
def test_chains(num_drafts, draft_length, parents):
  tree = TokenTree.chains(num_drafts, draft_length)
  assert tree.parents == parents
  assert (tree.num_nodes, tree.max_depth) == (num_drafts * draft_length, draft_length)
  assert tree.is_chain == (num_drafts == 1)


def test_arrays_of_chains():
  np.testing.assert_array_equal(CHAINS.parent_of, [0, 0, 0, 1, 2, 3, 4])
  np.testing.assert_array_equal(CHAINS.depths, [0, 1, 1, 2, 2, 3, 3])
  np.testing.assert_array_equal(CHAINS.num_children, [2, 1, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(CHAINS.first_child[:5], [1, 3, 4, 5, 6])
  np.testing.assert_array_equal(
    CHAINS.paths, [[-1, -1, -1], [1, -1, -1], [2, -1, -1], [1, 3, -1], [2, 4, -1], [1, 3, 5], [2, 4, 6]]
  )
  np.testing.assert_array_equal(CHAINS.levels, [[0, -1], [1, 2], [3, 4], [5, 6], [-1, -1]])
  np.testing.assert_array_equal(CHAINS.parent_nodes, [0, 1, 2, 3, 4])
  np.testing.assert_array_equal(CHAINS.law_index, [0, 1, 2, 3, 4, -1, -1])


def test_arrays_of_an_unequal_tree():
  assert (UNEQUAL.num_nodes, UNEQUAL.max_depth, UNEQUAL.is_chain) == (6, 3, False)
  np.testing.assert_array_equal(UNEQUAL.parent_of, [0, 0, 0, 1, 1, 2, 4])
  np.testing.assert_array_equal(UNEQUAL.depths, [0, 1, 1, 2, 2, 2, 3])
  np.testing.assert_array_equal(UNEQUAL.num_children, [2, 2, 1, 0, 1, 0, 0])
  np.testing.assert_array_equal(UNEQUAL.first_child[[0, 1, 2, 4]], [1, 3, 5, 6])
  np.testing.assert_array_equal(
    UNEQUAL.paths, [[-1, -1, -1], [1, -1, -1], [2, -1, -1], [1, 3, -1], [1, 4, -1], [2, 5, -1], [1, 4, 6]]
  )
  np.testing.assert_array_equal(UNEQUAL.levels, [[0, -1, -1], [1, 2, -1], [3, 4, 5], [6, -1, -1], [-1, -1, -1]])
  np.testing.assert_array_equal(UNEQUAL.parent_nodes, [0, 1, 2, 4])
  np.testing.assert_array_equal(UNEQUAL.law_index, [0, 1, 2, -1, 3, -1, -1])
  np.testing.assert_array_equal(
    UNEQUAL.ancestors,
    np.array(
      [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
      ],
      bool,
    ),
  )


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


@pytest.mark.parametrize(
  'parents',
  [
    (1,),  # its own parent
    (0, 2),
    (-1,),
    (0, 1, 0),  # not breadth first
    (0, 0, 2, 1),
    (0, 3, 3, 3),
  ],
)
def test_wrong_parents_are_refused(parents):
  with pytest.raises(ValueError, match='breadth first'):
    TokenTree(parents)


@pytest.mark.parametrize(('num_drafts', 'draft_length'), [(0, 1), (1, 0), (-1, 3)])
def test_empty_chains_are_refused(num_drafts, draft_length):
  with pytest.raises(ValueError, match='must be at least 1'):
    TokenTree.chains(num_drafts, draft_length)


def test_trees_are_static_arguments():
  same = TokenTree((0, 0, 1, 2))
  assert same == TokenTree.chains(2, 2)
  assert hash(same) == hash(TokenTree.chains(2, 2))
  assert same != TokenTree((0, 0, 1, 1))
  _ = same.levels  # computing an array does not change what the tree is
  assert same == TokenTree.chains(2, 2)
  assert len({same, TokenTree.chains(2, 2), CHAINS}) == 2
