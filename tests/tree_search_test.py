"""The searches for the best tree find it: against every other tree, by hand, and in closed form."""

import fractions
import itertools
import math

import numpy as np
import pytest

from spectr_jax.tree import TokenTree
from spectr_jax.tree_search import optimal_factors

NAN = float('nan')


def _node_probabilities(tree, acceptance):
  """Of each node 1..N: the product down its path, with a running minimum over siblings."""
  table = np.minimum.accumulate(np.atleast_2d(acceptance), axis=1)
  chances = [1.0]
  for node in range(1, tree.num_nodes + 1):
    parent = int(tree.parent_of[node])
    row = table[min(int(tree.depths[parent]), len(table) - 1)]
    child = node - int(tree.first_child[parent])
    chances.append(chances[parent] * (row[child] if child < len(row) else 0.0))
  return chances[1:]


def _all_trees(num_nodes):
  """Every tree of N nodes whose siblings have an order: as many as the Catalan number of N."""
  trees = [()]
  for node in range(1, num_nodes + 1):
    trees = [(*tree, parent) for tree in trees for parent in range(tree[-1] if tree else 0, node)]
  return [TokenTree(tree) for tree in trees]


TREES = {num_nodes: _all_trees(num_nodes) for num_nodes in range(1, 7)}


def test_all_trees_and_factors_are_there():
  assert [len(set(TREES[n])) for n in range(1, 7)] == [math.comb(2 * n, n) // (n + 1) for n in range(1, 7)]
  assert sorted(FACTORS[3, 12]) == [(), (1,), (1, 1), (1, 1, 1), (1, 2), (2,), (3,)]
  assert all(_nodes(factors) <= 12 for factors in FACTORS[12, 12])


@pytest.mark.parametrize('max_depth', [None, 2, 3])
def test_optimal_beats_every_tree(max_depth):
  rng = np.random.default_rng(2)
  for trial in range(20):
    acceptance = rng.dirichlet(np.ones(4), size=(trial % 4) or None)[..., :3]  # in no order, with or without rows
    for num_nodes in (1, 3, 5, 6):
      tree = TokenTree.optimal(acceptance, num_nodes, max_depth)
      assert tree.num_nodes == num_nodes
      assert max_depth is None or tree.max_depth <= max_depth
      allowed = [other for other in TREES[num_nodes] if max_depth is None or other.max_depth <= max_depth]
      best = max(sum(_node_probabilities(other, acceptance)) for other in allowed)
      assert sum(_node_probabilities(tree, acceptance)) == pytest.approx(best, rel=1e-12)


def test_optimal_holds_the_likeliest_nodes():
  """A tree too large to enumerate: what it leaves out is no likelier than what it holds."""
  rng = np.random.default_rng(3)
  acceptance = -np.sort(-rng.dirichlet(np.ones(5), size=3))[:, :4]
  large, small = TokenTree.optimal(acceptance, 300), TokenTree.optimal(acceptance, 60)
  chances = sorted(_node_probabilities(large, acceptance), reverse=True)
  np.testing.assert_allclose(sorted(_node_probabilities(small, acceptance), reverse=True), chances[:60], rtol=1e-12)


@pytest.mark.parametrize(
  ('acceptance', 'arguments', 'parents'),
  [
    ([0.8], (3,), (0, 1, 2)),  # one child only
    ([0.5, 0.3], (3,), (0, 0, 1)),
    ([0.5, 0.3, 0.1], (6,), (0, 0, 1, 1, 2, 3)),
    ([0.6, 0.0, 0.2], (3,), (0, 1, 2)),  # the running minimum
    ([[0.5, 0.4], [0.9, 0.1]], (4,), (0, 0, 1, 3)),
    ([[0.3, 0.2, 0.1], [0.8, 0.0, 0.0], [0.01, 0.01, 0.01]], (5,), (0, 0, 0, 1, 2)),
    ([1.0], (3,), (0, 1, 2)),
    (np.full(3, 1 / 3 + 1e-8, np.float32), (3,), (0, 0, 0)),  # the sum is 1 but for rounding
    # Equally likely nodes: the shallower, then the earlier sibling, then the child of the earlier parent.
    ([0.5, 0.25], (2,), (0, 0)),
    ([0.5, 0.5], (4,), (0, 0, 1, 2)),
    ([0.5, 0.5], (5,), (0, 0, 1, 1, 2)),
    ([0.5, 0.5], (14,), (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)),
    ([[1.0, 0.0], [0.5, 0.5]], (5,), (0, 1, 1, 2, 3)),
    # No deeper than allowed.
    ([0.9, 0.05], (4, 2), (0, 0, 1, 2)),
    ([0.6, 0.3], (6, 2), (0, 0, 1, 1, 2, 2)),
    ([0.6, 0.3], (2, 1), (0, 0)),
    # What is never accepted is left out.
    ([[0.5, 0.5], [0.0, 0.0]], (3,), (0, 0)),
    ([0.5, 0.2], (7, 2), (0, 0, 1, 1, 2, 2)),
    ([1.0, 0.0], (64, 3), (0, 1, 2)),
  ],
)
def test_optimal_by_hand(acceptance, arguments, parents):
  assert TokenTree.optimal(acceptance, *arguments).parents == parents


def test_rounding_breaks_no_ties():
  """The same steps in another order are equally likely, though products of floats may differ in their last bit."""
  rng = np.random.default_rng(5)
  paths = [path for length in range(1, 7) for path in itertools.product(range(3), repeat=length)]
  for acceptance in rng.dirichlet([40, 30, 20, 10], size=8)[:, :3]:
    acceptance = -np.sort(-acceptance)
    exact = [fractions.Fraction(a) for a in acceptance.tolist()]

    def rank(path, exact=exact):
      return (-math.prod(exact[child] for child in path), len(path), path[-1], rank(path[:-1])) if path else ()

    best = sorted(paths, key=rank)[:40]
    assert len(best[-1]) < 6  # no longer path is missing
    for num_nodes in range(10, 40):
      number = {path: node for node, path in enumerate([(), *best[:num_nodes]])}
      expected = TokenTree.from_parents(number[path[:-1]] for path in best[:num_nodes])
      assert TokenTree.optimal(acceptance, num_nodes) == expected


def test_unlikely_paths_do_not_underflow():
  assert TokenTree.optimal([0.5], 3000) == TokenTree.chains(1, 3000)


@pytest.mark.parametrize(
  ('search', 'table', 'arguments', 'message'),
  [
    *(
      (search, table, (2,), message)
      for search in (TokenTree.optimal, TokenTree.optimal_chains, optimal_factors)
      for table, message in (
        ([[0.5, -0.1]], r'between 0 and 1, got -0\.1'),
        ([[1.5]], r'between 0 and 1, got 1\.5'),
        ([[]], r'with entries, got \[1, 0\]'),
      )
    ),
    *(
      (search, [[0.5]], arguments, message)
      for search in (TokenTree.optimal, TokenTree.optimal_chains, optimal_factors)
      for arguments, message in (
        ((0,), 'num_nodes must be at least 1, got 0'),
        ((2.0,), r'num_nodes must be an integer, got 2\.0'),
        ((2, 0), 'max_depth must be at least 1, got 0'),
      )[: 2 if search is optimal_factors else 3]
    ),
    (TokenTree.optimal, [0.5, np.nan], (2,), 'numbers only, got NaN'),
    (TokenTree.optimal, [], (2,), r'with entries, got \[0\]'),
    (TokenTree.optimal, 0.5, (2,), r'shape \[W\] or \[D, W\] with entries, got \[\]'),
    (TokenTree.optimal, [[[0.5]]], (2,), r'with entries, got \[1, 1, 1\]'),
    (TokenTree.optimal, [0.6, 0.5], (2,), r'sum to at most 1, got 1\.1'),
    (TokenTree.optimal, [[0.5, 0.5], [0.2, 0.9]], (2,), r'sum to at most 1, got 1\.1'),
    # The sum is checked before the running minimum.
    (TokenTree.optimal, [0.1, 0.95], (2,), r'sum to at most 1, got 1\.05'),
    (TokenTree.optimal, [0.0, 0.0], (1,), 'nothing is ever accepted'),
    (TokenTree.optimal, [[0.0, 0.0], [0.5, 0.5]], (3,), 'nothing is ever accepted'),
    (TokenTree.optimal_chains, [0.5, 0.5], (2,), r'kept must have the shape \[D, W\] with entries, got \[2\]'),
    (TokenTree.optimal_chains, [[NAN, NAN], [0.5, 0.5]], (2,), 'row for at most 2 chains, got only NaN'),
    (TokenTree.optimal_chains, [[NAN, 0.5]], (1,), 'a number in its first row for at most 1 chains, got only NaN'),
    (TokenTree.optimal_chains, [[0.0, 0.0], [0.0, 0.0]], (4,), 'nothing is ever accepted'),
    (optimal_factors, [0.5, 0.6], (4,), r'shape \[D, W\] with entries, got \[2\]'),
    (optimal_factors, [[NAN, NAN], [0.5, 0.6]], (4,), 'at least one measured number in its first row'),
  ],
)
def test_a_search_refuses(search, table, arguments, message):
  with pytest.raises(ValueError, match=message):
    search(table, *arguments)


# Chains.


def _all_chains(table, num_nodes, max_depth):
  """Of every K and L that are allowed: what counts, the less the better."""
  for num_drafts in range(1, len(table[0]) + 1):
    for length in range(1, len(table) + 1):
      known = [row[num_drafts - 1] for row in table[:length]]
      if num_drafts * length <= num_nodes and length <= (max_depth or length) and not np.isnan(known).any():
        yield -sum(known), num_drafts * length, num_drafts


@pytest.mark.parametrize('num_nodes', [1, 2, 5, 12, 40])
@pytest.mark.parametrize('max_depth', [None, 1, 3])
def test_optimal_chains_beat_all_others(num_nodes, max_depth):
  """Powers of two, of which sums are exact, so that ties count; and with gaps."""
  rng = np.random.default_rng(num_nodes)
  shapes = set()
  for _ in range(40):
    table = np.maximum.accumulate(rng.choice([0, 0.125, 0.25, 0.5, 1], (6, 5), p=[0.3, 0.3, 0.2, 0.1, 0.1])[::-1])[::-1]
    table[rng.random(table.shape) < 0.05] = NAN
    table[0, 0] = rng.choice([0.25, 0.5])
    _, nodes, num_drafts = min(_all_chains(table, num_nodes, max_depth))
    tree = TokenTree.optimal_chains(table, num_nodes, max_depth)
    assert tree == TokenTree.chains(num_drafts, nodes // num_drafts)
    shapes.add(tree)
  assert num_nodes == 1 or len(shapes) > 1


@pytest.mark.parametrize(
  ('kept', 'arguments', 'shape'),
  [
    # 1 x 4: .9 + .8 = 1.7 and no more is known; 2 x 2: .95 + .9.
    ([[0.9, 0.95], [0.8, 0.9]], (4,), (2, 2)),
    ([[0.9, 0.95], [0.8, 0.9]], (3,), (1, 2)),
    ([[0.9, 0.95], [0.8, 0.9]], (1,), (1, 1)),
    ([[0.9, 0.95], [0.8, 0.9]], (4, 1), (2, 1)),
    # Ties: the fewest nodes, then the fewest chains.
    ([[0.5, 0.5], [0.0, 0.0]], (4,), (1, 1)),
    ([[0.5, 0.75], [0.25, 0.0]], (4,), (1, 2)),
    ([[0.5, 0.5], [0.25, 0.25]], (9,), (1, 2)),
    # Not known: a chain ends above, and what is below a gap does not count.
    ([[0.5, 0.7], [NAN, 0.1], [0.5, 0.1]], (6,), (2, 3)),
    ([[0.5, 0.6], [NAN, NAN], [0.5, 0.5]], (6,), (2, 1)),
    ([[NAN, 0.1], [0.9, NAN]], (6,), (2, 1)),
    ([[0.5, NAN, 0.6]], (2,), (1, 1)),
    ([[None, 0.4]], (3,), (2, 1)),
  ],
)
def test_optimal_chains_by_hand(kept, arguments, shape):
  assert TokenTree.optimal_chains(kept, *arguments) == TokenTree.chains(*shape)


def test_optimal_chains_may_be_shorter_for_a_small_loss():
  """Of 12 nodes 1 x 12 yields 4.0 tokens, 2 x 6 3.9, 3 x 4 3.7."""
  table = np.zeros((12, 3))
  table[:, 0], table[:6, 1], table[:4, 2] = 3.0 / 12, 2.9 / 6, 2.7 / 4
  for tolerance, shape in ((0.0, (1, 12)), (0.02, (1, 12)), (0.03, (2, 6)), (0.1, (3, 4))):
    assert TokenTree.optimal_chains(table, 12, tolerance=tolerance) == TokenTree.chains(*shape)
  for tolerance in (-0.1, 1.0, NAN):
    with pytest.raises(ValueError, match='tolerance must be from 0 to below 1'):
      TokenTree.optimal_chains(table, 12, tolerance=tolerance)


def _tokens(table, factors):
  """Expected accepted tokens of a prefix tree."""
  chances = [table[min(depth, len(table) - 1)][factor - 1] for depth, factor in enumerate(factors)]
  return sum(math.prod(chances[: depth + 1]) for depth in range(len(chances)))


def _nodes(factors):
  return sum(itertools.accumulate(factors, int.__mul__))


def _all_factors(budget, width, level=1):
  """Every sequence of factors, the empty one included, that adds at most `budget` nodes below `level` nodes."""
  yield ()
  for factor in range(1, min(budget // level, width) + 1):
    for rest in _all_factors(budget - level * factor, width, level * factor):
      yield (factor, *rest)


FACTORS = {(budget, width): list(_all_factors(budget, width)) for budget in range(1, 13) for width in (1, 3, 12)}


@pytest.mark.parametrize(('budget', 'width'), list(FACTORS))
def test_optimal_factors_beat_all_others(budget, width):
  rng = np.random.default_rng(100 * budget + width)
  for trial in range(8):
    table = np.sort(rng.uniform(0, 1, (1 + trial % 4, width)) ** rng.choice([0.2, 1, 3]), axis=1)
    found = optimal_factors(table, budget)
    assert found in FACTORS[budget, width]
    best = max(_tokens(table, factors) for factors in FACTORS[budget, width])
    assert _tokens(table, found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(('budget', 'width'), list(FACTORS))
def test_ties_of_factors(budget, width):
  """Powers of two, of which sums of products are exact: the fewest nodes, then the lexicographically smallest."""
  rng = np.random.default_rng(100 * budget + width)
  for trial in range(8):
    table = rng.choice([0, 0.25, 0.5, 1], (1 + trial % 3, width))
    rising = np.sort(table, axis=1) if trial % 2 else np.maximum.accumulate(table, axis=1)
    ranked = ((-_tokens(rising, factors), _nodes(factors), factors) for factors in FACTORS[budget, width])
    assert optimal_factors(rising if trial % 2 else table, budget) == min(ranked)[2]


@pytest.mark.parametrize(
  ('acceptance', 'num_nodes', 'factors'),
  [
    ([[0.9, 0.95]], 4, (1, 1, 1, 1)),
    ([[0.1, 0.2, 0.3, 0.9]], 4, (4,)),
    ([[0.5, 0.9], [0.9, 0.95]], 6, (2, 1, 1)),
    ([[0.9], [0.9], [0.0]], 6, (1, 1)),  # the last row is used below
    ([[0.0, 0.0]], 6, ()),
    ([[0.5, 0.5]], 1, (1,)),
    # More candidates are never worse.
    ([[0.5, 0.1, 0.6]], 2, (1, 1)),
    # Gaps: from the left, never accepted where nothing is to the left, rows from above.
    ([[0.5, NAN, 0.51]], 2, (1, 1)),
    ([[NAN, 0.4]], 1, ()),
    ([[NAN, 0.4]], 5, (2,)),
    ([[NAN, 0.4]], 6, (2, 2)),
    ([[0.5, 0.6], [NAN, NAN], [0.0, 0.0]], 5, (2, 1)),
    ([[0.8, None]], 3, (1, 1, 1)),
  ],
)
def test_optimal_factors_by_hand(acceptance, num_nodes, factors):
  assert optimal_factors(acceptance, num_nodes) == factors


def test_gaps_are_filled_from_the_left_and_from_above():
  none = [NAN] * 4
  gaps = [[0.3, NAN, 0.5, NAN], none, [NAN, 0.6, 0.4, 0.7], none, none, [0.9, NAN, 0.2, 0.91]]
  full = [[0.3, 0.3, 0.5, 0.5]] * 2 + [[0.0, 0.6, 0.6, 0.7]] * 3 + [[0.9, 0.9, 0.9, 0.91]]
  for num_nodes in range(1, 40):
    assert optimal_factors(gaps, num_nodes) == optimal_factors(full, num_nodes)


def test_acceptance_that_falls_counts_as_its_running_maximum():
  rng = np.random.default_rng(6)
  for _ in range(30):
    table = rng.choice([0, 0.25, 0.5, 0.75, 1], (3, 6))
    assert optimal_factors(table, 24) == optimal_factors(np.maximum.accumulate(table, axis=1), 24)


def test_optimal_factors_of_many_nodes():
  """Sizes that are used: the result fits, and no smaller budget does better."""
  rng = np.random.default_rng(4)
  table = np.sort(rng.uniform(0.4, 1, (16, 64)), axis=1)
  values = [_tokens(table, optimal_factors(table, num_nodes)) for num_nodes in (32, 64, 128, 256)]
  assert values == sorted(values)
  factors = optimal_factors(table, 256)
  assert TokenTree.prefix(factors).num_nodes == _nodes(factors) <= 256
