"""Expected tokens per call of a tree, from acceptance rates, and upper bounds for all trees of its size."""

from __future__ import annotations

import numpy as np

from spectr_jax.theory.arguments import in_unit, whole_numbers
from spectr_jax.tree import TokenTree

# Candidate numbers of symbols that share the rest of the mass. Each gives a bound; the smallest bound is used.
_REST_SYMBOLS = np.unique(np.geomspace(1, 1e6, 300).round())
_SUM_TOLERANCE, _NOTHING = 1e-6, 1e-12


def _rates(acceptance, num_axes: tuple[int, ...]) -> np.ndarray:
  rates = np.asarray(acceptance, np.float64)
  if rates.ndim not in num_axes or not rates.size:
    shapes = ' or '.join({1: '[W]', 2: '[D, W]'}[axes] for axes in num_axes)
    raise ValueError(f'acceptance must have the shape {shapes} with entries, got {list(rates.shape)}')
  in_unit(rates, 'acceptance')
  if (total := rates.sum(axis=-1).max()) > 1 + _SUM_TOLERANCE:
    raise ValueError(f'the acceptance of the children of a node must sum to at most 1, got {total}')
  return rates


def expected_tokens(tree: TokenTree, acceptance) -> float:
  """Expected tokens per target call: 1 plus, for every node, the product of the acceptance rates along its path.

  It is exact if a child's acceptance depends only on its place among its siblings and on its depth. Real texts have
  stretches that are easy to guess, for which deep trees are better than this says.

  Source: "Speculative Decoding via Exponential Races", section 4, equation (4).

  Args:
    tree: The tree.
    acceptance: Rates as for `TokenTree.optimal`: `[W]`, the probability that a node's first, second, ... child is the
      accepted one, given that the node was accepted. Or `[D, W]`, one row per depth of the parent; the last row also
      holds for greater depths. Children beyond W are never accepted.

  Returns:
    A number of tokens, from 1 to L + 1.

  Raises:
    ValueError: `acceptance` has another shape, values outside [0, 1] or a row with a sum above 1.
  """
  table = np.atleast_2d(_rates(acceptance, (1, 2)))
  reach = np.ones(tree.num_nodes + 1)
  for node in range(1, tree.num_nodes + 1):
    parent = tree.parent_of[node]
    row, place = table[min(tree.depths[parent], len(table) - 1)], node - tree.first_child[parent]
    reach[node] = reach[parent] * row[place] if place < len(row) else 0
  return float(reach.sum())


def _information(probs) -> np.ndarray:
  """The information -a log2 a, and 0 for a = 0."""
  return -probs * np.log2(probs, out=np.zeros_like(probs), where=probs > 0)


def acceptance_entropy(acceptance) -> np.ndarray:
  """The entropy H(a), in bits, of the index of the accepted candidate; acceptance of none is one more outcome.

  It governs how many tokens large trees yield. If the candidates have the distribution p and one of them is always
  accepted, it is at least D(q || p). For, given that the i-th candidate is accepted, it has a distribution of at most
  p/a_i, so D(q || p) <= sum a_i log 1/a_i.

  Source: "Speculative Decoding via Exponential Races", equations (5) and (6).

  It is float64, in bits. `acceptance` `[W]` has the probability that the first, second, ... child is the accepted one,
  of a sum of at most 1; ValueError for other arguments.
  """
  rates = _rates(acceptance, (1,))
  return _information(np.append(rates, max(1 - rates.sum(), 0))).sum()


def tunstall_bound(acceptance, num_nodes) -> np.ndarray:
  """An upper bound on the mean tokens per call of any tree of N nodes: log2((N + 1)(A - 1) + 1) / H(a).

  The bound holds if the symbols, that is the indices of the accepted children, are independent draws from a. Follow the
  sequence of symbols until it leaves the tree. There are (N + 1)(A - 1) + 1 possible ends, and the end has the entropy
  of E[tokens] symbols.

  Source: "Speculative Decoding via Exponential Races", Theorem 4.1, whose trees are those of Tunstall's codes (1967).

  `acceptance` is that of `acceptance_entropy`; if the sum is below 1, the rest is one more symbol. `num_nodes` is N, an
  integer from 1 on or an array of them; ValueError for other arguments. The result is float64 of N's shape, in tokens;
  if H(a) is 0, it is N + 1, which no tree exceeds.
  """
  rates, numbers = _rates(acceptance, (1,)), whole_numbers(num_nodes, 'num_nodes')
  entropy = acceptance_entropy(rates)
  num_symbols = len(rates) + (1 - rates.sum() > _NOTHING)
  if entropy == 0:
    return numbers + 1.0
  return np.log2((numbers + 1) * (num_symbols - 1.0) + 1) / entropy


def few_children_bound(acceptance, num_nodes, num_rest=None) -> np.ndarray:
  """A tighter `tunstall_bound` for trees of N nodes whose nodes have no more children than those of the best tree.

  A tree whose nodes have at most m children yields the same number of tokens however the mass r = 1 - a_1 - ... - a_m
  is split. Let s symbols share it equally. Then log2((N + 1)(m + s - 1) + 1) / H(a_1, ..., a_m, r/s, ..., r/s) is a
  bound for every s from 1 on.

  Source: "Speculative Decoding via Exponential Races", Lemma 4.2; re-derived.

  Arguments and the result are those of `tunstall_bound`; the best tree of N nodes, `TokenTree.optimal`, gives m.
  `num_rest` is s, at least 1, or None for the smallest bound over many s from 1 to a million.
  """
  rates, numbers = _rates(acceptance, (1,)), whole_numbers(num_nodes, 'num_nodes')
  if num_rest is not None and not num_rest >= 1:
    raise ValueError(f'num_rest must be at least 1, got {num_rest}')
  shares = _REST_SYMBOLS if num_rest is None else np.array([float(num_rest)])
  bounds = []
  for number in numbers.flat:
    num_used = int(TokenTree.optimal(rates, int(number)).num_children.max())
    used = rates[:num_used]
    rest = 1 - used.sum()
    if rest <= _NOTHING:
      bounds.append(tunstall_bound(used, number))
      continue
    entropy = _information(used).sum() + shares * _information(rest / shares)
    bounds.append(np.min(np.log2((number + 1) * (num_used + shares - 1) + 1) / entropy))
  return np.array(bounds).reshape(numbers.shape)
