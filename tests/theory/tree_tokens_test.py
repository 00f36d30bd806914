"""Tokens of trees and Tunstall's bounds against all trees, symbols drawn, closed forms and the verifier enumerated."""

import itertools

import numpy as np
import pytest

from spectr_jax import METHODS, TokenTree
from spectr_jax.testing import constant_tables, expected_acceptance
from spectr_jax.theory import (
  acceptance_entropy,
  batch_improvement,
  expected_tokens,
  few_children_bound,
  total_variation,
  tunstall_bound,
)

EXACT = 1e-12


def _rates(seed, width=4, share=0.9):
  rng = np.random.default_rng(seed)
  rates = np.sort(rng.dirichlet(np.ones(width)))[::-1]
  return share * rates if seed % 2 else rates


def _all_trees(num_nodes):
  for parents in itertools.product(*(range(node) for node in range(1, num_nodes + 1))):
    if all(a <= b for a, b in itertools.pairwise(parents)):
      yield TokenTree(parents)


@pytest.mark.parametrize(
  ('tree', 'expected'),
  [
    (TokenTree(), 1),
    (TokenTree.chains(1, 4), (1 - 0.5**5) / 0.5),
    (TokenTree.prefix((3,)), 1.85),
    (TokenTree.prefix((4,)), 1.85),  # a fourth child has no rate
    (TokenTree.prefix((2, 2)), 1 + 0.75 + 0.75**2),
    # Two shared tokens, then three ways on.
    (TokenTree.specinfer(5), 1 + 0.5 + 0.25 + 0.25 * 0.85 * (1 + 0.5 + 0.25)),
  ],
)
def test_expected_tokens_of_shapes_with_a_closed_form(tree, expected):
  assert expected_tokens(tree, [0.5, 0.25, 0.1]) == pytest.approx(expected, abs=EXACT)
  # By depth, the last row for everything below.
  by_depth = np.array([[0.5, 0.25, 0.1], [0.2, 0.1, 0]])
  assert expected_tokens(TokenTree.chains(1, 3), by_depth) == pytest.approx(1 + 0.5 + 0.1 + 0.02, abs=EXACT)


@pytest.mark.parametrize('seed', range(3))
def test_expected_tokens_are_those_of_symbols_drawn(seed):
  rates, num_texts = _rates(seed), 100_000
  tree = TokenTree.optimal(rates, 9)
  symbols = np.random.default_rng(seed).choice(5, (num_texts, tree.max_depth + 1), p=[*rates, 1 - rates.sum()])
  node, tokens = np.zeros(num_texts, int), np.ones(num_texts)
  is_going = np.ones(num_texts, bool)
  for symbol in symbols.T:
    is_going &= symbol < tree.num_children[node]
    node = np.where(is_going, tree.first_child[node] + symbol, node)
    tokens += is_going
  assert abs(tokens.mean() - expected_tokens(tree, rates)) < 4.5 * tokens.std() / np.sqrt(num_texts)


@pytest.mark.parametrize(('seed', 'num_nodes', 'num_trees'), [(0, 3, 5), (1, 4, 14), (2, 5, 42), (3, 6, 132)])
def test_no_tree_exceeds_the_bounds(seed, num_nodes, num_trees):
  rates, trees = _rates(seed), list(_all_trees(num_nodes))
  assert len(trees) == num_trees  # a Catalan number
  best = max(expected_tokens(tree, rates) for tree in trees)
  assert expected_tokens(TokenTree.optimal(rates, num_nodes), rates) == pytest.approx(best, abs=EXACT)
  assert best <= few_children_bound(rates, num_nodes) + EXACT
  assert few_children_bound(rates, num_nodes) <= tunstall_bound(rates, num_nodes) + EXACT


def test_bounds_hold_over_many_nodes_and_any_rest():
  numbers = np.array([1, 2, 3, 5, 8, 16, 33, 64, 128, 300])
  for seed in range(4):
    rates = _rates(seed, width=8)
    yields = np.array([expected_tokens(TokenTree.optimal(rates, int(n)), rates) for n in numbers])
    best = few_children_bound(rates, numbers)
    assert (yields <= best + EXACT).all()
    assert (best <= tunstall_bound(rates, numbers) + EXACT).all()
    for num_rest in (1, 2, 7, 1000):
      bound = few_children_bound(rates, numbers, num_rest)
      assert (best <= bound + 1e-3).all()
      assert (yields <= bound + EXACT).all()
  # With few nodes a long tail of symbols makes the plain bound loose.
  tail = np.concatenate([[0.7], np.full(1000, 0.3 / 1000)])
  assert few_children_bound(tail, 4) < 0.95 * tunstall_bound(tail, 4)


@pytest.mark.parametrize(('num_symbols', 'depth'), [(2, 1), (2, 4), (3, 3), (5, 2)])
def test_complete_trees_of_equal_symbols_attain_the_bound(num_symbols, depth):
  """All leaves are equally likely: the inequality of entropies is one of equality."""
  rates = np.full(num_symbols, 1 / num_symbols)
  tree = TokenTree.prefix((num_symbols,) * (depth - 1)) if depth > 1 else TokenTree()
  assert expected_tokens(tree, rates) == pytest.approx(depth, abs=EXACT)
  if depth > 1:
    assert tunstall_bound(rates, tree.num_nodes) == pytest.approx(depth, abs=EXACT)


def test_entropy_governs_large_trees():
  """E[tokens] H(a) / log2 N tends to 1, slowly: by the leaves of a Tunstall code differing by a factor at most."""
  rates = np.array([0.6, 0.25, 0.1, 0.05])
  ratios = [
    expected_tokens(TokenTree.optimal(rates, n), rates) * acceptance_entropy(rates) / np.log2(n) for n in (100, 10_000)
  ]
  assert abs(ratios[1] - 1) < abs(ratios[0] - 1)
  assert ratios[1] == pytest.approx(1, abs=0.12)


def test_entropy_in_bits():
  assert acceptance_entropy([0.25] * 4) == pytest.approx(2, abs=EXACT)
  assert acceptance_entropy([0.5, 0.25]) == pytest.approx(1.5, abs=EXACT)  # the rest is an outcome
  assert acceptance_entropy([1.0, 0.0]) == 0
  np.testing.assert_array_equal(tunstall_bound([1.0], [1, 5]), [2, 6])
  np.testing.assert_array_equal(few_children_bound([1.0], [1, 5]), [2, 6])


def test_entropy_is_at_least_the_divergence():
  """Of the index that recursive rejection accepts, where one is accepted in the end: p covers q."""
  rng = np.random.default_rng(0)
  for concentration in (0.5, 2):
    p, q = rng.dirichlet(np.full(5, concentration), (2, 6)) + 0.02
    p, q = p / p.sum(axis=-1, keepdims=True), q / q.sum(axis=-1, keepdims=True)
    accepted = 1 - total_variation(p, q) + batch_improvement(p, q, np.arange(1, 300))
    for row, least in zip(np.diff(accepted, axis=0, prepend=0).T, (q * np.log2(q / p)).sum(axis=-1)):
      assert row.sum() > 0.99
      assert least < acceptance_entropy(row) < least + 2 * np.log2(least + 1) + 2


@pytest.mark.slow
def test_tokens_are_those_of_the_verifier():
  """Laws that depend on nothing: the rates of a node's children give any tree's tokens, all drafts enumerated."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])
  gsd, tables = METHODS['gsd'], constant_tables(p, q, max_length=4)
  rates = np.diff([expected_acceptance(gsd, TokenTree.prefix((n,)), tables)[0] for n in (1, 2)], prepend=0)
  for parents in ((0, 0, 1), (0, 0, 1, 2, 2)):
    tree = TokenTree(parents)
    found = 1 + expected_acceptance(gsd, tree, tables).sum()
    assert found == pytest.approx(expected_tokens(tree, rates), abs=EXACT)
