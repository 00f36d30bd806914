"""Searches for the best shape of a tree, given how often guesses are accepted."""

from __future__ import annotations

import heapq
import math
import operator
from typing import Any

import numpy as np

_NOTHING = 'nothing is ever accepted, so no tree is better than none'


def integer(name: str, value: Any) -> int:
  """`value` as an int, or a ValueError that calls it `name`."""
  try:
    return operator.index(value)
  except TypeError:
    raise ValueError(f'{name} must be an integer, got {value!r}') from None


def positive(name: str, value: Any) -> int:
  """`value` as an int of at least 1, or a ValueError that calls it `name`."""
  value = integer(name, value)
  if value < 1:
    raise ValueError(f'{name} must be at least 1, got {value}')
  return value


def _probabilities(name: str, values) -> np.ndarray:
  """float64 of the shape of `values`, which may hold NaN."""
  values = np.asarray(values, np.float64)
  wrong = values[(values < 0) | (values > 1)]
  if wrong.size:
    raise ValueError(f'{name} must be probabilities between 0 and 1, got {wrong[0]}')
  return values


def optimal_parents(acceptance: Any, num_nodes: int, max_depth: int | None) -> list[int]:
  """The parents of the best tree's nodes, in the order in which they are found; arguments of `TokenTree.optimal`."""
  num_nodes = positive('num_nodes', num_nodes)
  max_depth = num_nodes if max_depth is None else positive('max_depth', max_depth)
  table = _probabilities('acceptance', acceptance)
  if table.ndim not in (1, 2) or not table.size:
    raise ValueError(f'acceptance must have the shape [W] or [D, W] with entries, got {list(table.shape)}')
  if np.isnan(table).any():
    raise ValueError('acceptance must hold numbers only, got NaN')
  table = np.atleast_2d(table)
  if (total := table.sum(axis=1).max()) > 1 + 1e-6:
    raise ValueError(f'the acceptance of the children of a node must sum to at most 1, got {total}')
  table = np.minimum.accumulate(table, axis=1)
  # Costs, -log2 of the probabilities, are integers: a sum of floats depends on the order of its terms, and nodes that
  # reach the same probability by different paths would be told apart by rounding. They cannot underflow either.
  costs = [[round(-math.log2(a) * 2**52) for a in row if a > 0] for row in table.tolist()]

  parents, total_costs, depths, heap = [], [0], [0], []

  def offer(parent, child):
    depth = depths[parent]
    row = costs[min(depth, len(costs) - 1)]
    if depth < max_depth and child < len(row):
      heapq.heappush(heap, (total_costs[parent] + row[child], depth, child, parent))

  offer(0, 0)
  while heap and len(parents) < num_nodes:
    cost, depth, child, parent = heapq.heappop(heap)
    parents.append(parent)
    total_costs.append(cost)
    depths.append(depth + 1)
    # Only these two become possible, and neither can come before the node itself.
    offer(parent, child + 1)
    offer(len(parents), 0)
  if not parents:
    raise ValueError(_NOTHING)
  return parents


def optimal_chain_sizes(kept: Any, num_nodes: int, max_depth: int | None, *, tolerance: float) -> tuple[int, int]:
  """K and L of the best chains; arguments of `TokenTree.optimal_chains`."""
  num_nodes = positive('num_nodes', num_nodes)
  max_depth = num_nodes if max_depth is None else positive('max_depth', max_depth)
  table = _probabilities('kept', kept)
  if table.ndim != 2 or not table.size:
    raise ValueError(f'kept must have the shape [D, W] with entries, got {list(table.shape)}')
  table = table[:, :num_nodes]
  if np.isnan(table[0]).all():
    raise ValueError(f'kept must hold a number in its first row for at most {num_nodes} chains, got only NaN')
  if not 0 <= tolerance < 1:
    raise ValueError(f'tolerance must be from 0 to below 1, got {tolerance}')
  shapes = []
  for num_drafts, column in enumerate(table.T, start=1):
    best, tokens = (0.0, 0, num_drafts), 0.0
    for length, chance in enumerate(column[: min(num_nodes // num_drafts, max_depth)], start=1):
      if math.isnan(chance):
        break
      tokens += chance
      best = min(best, (-tokens, num_drafts * length, num_drafts))
    shapes.append(best)
  most, used, num_drafts = min(shapes)
  if not used:
    raise ValueError(_NOTHING)
  if tolerance:
    enough = [each for each in shapes if each[1] and 1 - each[0] >= (1 - tolerance) * (1 - most)]
    _, used, num_drafts = min(enough, key=lambda each: (each[1] // each[2], each))
  return num_drafts, used // num_drafts


def optimal_factors(acceptance: Any, num_nodes: int) -> tuple[int, ...]:
  """The factors of the best prefix tree: the search for methods whose siblings are i.i.d. and so exchangeable.

  With a_d(k) the probability that the position below depth d is accepted when it has k candidates and depth d was
  accepted, factors (k_1, ..., k_L) have k_1 + k_1 k_2 + ... nodes and yield a_0(k_1) + a_0(k_1) a_1(k_2) + ... tokens.
  That is what the search maximises, exactly up to rounding in float64. A verifier that pools the children of equal
  siblings has more candidates than the factor says; those are not counted.

  What follows a factor depends only on the depth and on the number of nodes left below each single node, so all pairs
  of the two are solved from the bottom up: O(D N min(N, W)) steps.

  Args:
    acceptance: `[D, W]`: a_d(n) at `[d, n - 1]`, as measured; the last row also holds for everything below. More
      candidates are never worse, so an entry counts as the largest up to its place in the row. NaN, for what was not
      measured, counts the same way, as 0 if no measured entry is before it; such a factor is never chosen. A row of
      NaN is replaced by the row above it.
    num_nodes: The most nodes the tree may have, at least 1.

  Returns:
    The factors, at most W each, as `TokenTree.prefix` takes them. Among equally good ones those with the fewest nodes,
    then the lexicographically smallest; empty if nothing is ever accepted.

  Raises:
    ValueError: `acceptance` has another shape, values outside [0, 1], or no number in its first row; or `num_nodes` is
      below 1.
  """
  num_nodes = positive('num_nodes', num_nodes)
  table = _probabilities('acceptance', acceptance)
  if table.ndim != 2 or not table.size:
    raise ValueError(f'acceptance must have the shape [D, W] with entries, got {list(table.shape)}')
  if np.isnan(table[0]).all():
    raise ValueError('acceptance must hold at least one measured number in its first row, got only NaN')
  rows = []
  for row in table[:num_nodes]:  # no path is longer
    # That an entry counts as the largest up to its place takes no running maximum: fewer children with the same chance
    # leave more nodes to each, so the earlier entry wins anyway, whatever not larger number stands in the later place.
    rows.append(rows[-1] if np.isnan(row).all() else np.nan_to_num(row).tolist())

  # plan[m]: the best (-tokens, nodes, factor) below one node at the row's depth with m nodes to spend. Giving it k
  # children leaves m // k - 1 nodes to each of them.
  plans = []
  for row in reversed(rows):
    plan = [(0.0, 0, 0)]
    below = plans[-1] if plans else plan
    for budget in range(1, num_nodes + 1):
      best = plan[0]
      for factor, chance in enumerate(row[:budget], start=1):
        loss, nodes, _ = below[budget // factor - 1]
        best = min(best, (chance * (loss - 1), factor * (1 + nodes), factor))
      plan.append(best)
    plans.append(plan)

  factors, budget = [], num_nodes
  while factor := plans[max(len(plans) - 1 - len(factors), 0)][budget][2]:
    factors.append(factor)
    budget = budget // factor - 1
  return tuple(factors)
