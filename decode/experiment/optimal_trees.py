"""Trees chosen from measured acceptance rates, by depth and number of children.

For methods that try every branch, chains are chosen from a bound on the tokens kept, which follows from both models'
distributions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from common.json_file import load_ours
from decode.experiment.distributions import target_texts, written_log_probs
from decode.experiment.settings import Setting, TreeSpec
from decode.experiment.workload import Workload
from spectr_jax import METHODS, Statistics, TokenTree, optimal_factors
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.program_memory import make_room
from spectr_jax.methods import Method, check_fit
from spectr_jax.sharding import fetch
from spectr_jax.theory import stateless_kept_bound

# A rate with fewer visits than this is too inaccurate and counts as not measured.
_FEWEST_VISITS = 50
_MAX_DEPTH = 24
_WIDTHS = (1, 2, 3, 4, 6, 8)
# Longer chains still gain where deeper branching trees do not: 2 x 32 is among the best trees of 64 nodes.
LONGEST_CHAIN = 32
# Relative loss accepted for shorter chains. The prediction is no more accurate than this.
TOLERANCE = 0.02
_NUM_CHAINS = (1, 2, 3, 4, 5, 6, 8, 12, 16)

Acceptance = list[list[float | None]]


def has_independent_children(method: Method) -> bool:
  """Tells whether a method's best tree is a prefix tree; else siblings differ, each with a rate."""
  return method.proposal_rule.are_exchangeable


def is_chosen_by_bound(method: Method) -> bool:
  """Tells whether `bound_kept` chooses a method's tree: those that try every branch come close to it."""
  return method.tries_every_branch and has_independent_children(method)


def rates_name(method: Method) -> str:
  """The name of a method's rates in files. The rates depend on the method and on its proposal rule."""
  rule = method.proposal_rule.name
  return method.name if rule == METHODS[method.name].proposal_rule.name else f'{method.name}, {rule}'


def calibration_trees(method: Method, budget: int) -> dict[int, TokenTree]:
  """The trees to measure on, by the number of children of a node, which is the same for all nodes but leaves.

  For i.i.d. children there is one tree per number of children, as deep as `budget` nodes allow. Otherwise there is one
  tree with two levels of eight children per node.
  """
  if not has_independent_children(method):
    return {_WIDTHS[-1]: TokenTree.prefix((_WIDTHS[-1],) * 2)}
  trees = {}
  for width in _WIDTHS:
    if width > budget or (method.max_drafts is not None and width > method.max_drafts):
      break
    factors = (width,)
    while len(factors) < _MAX_DEPTH and TokenTree.prefix((*factors, width)).num_nodes <= budget:
      factors = (*factors, width)
    trees[width] = TokenTree.prefix(factors)
  return trees


def _rates(counts: np.ndarray, visits: np.ndarray) -> list[float | None]:
  return [float(count / visit) if visit >= _FEWEST_VISITS else None for count, visit in zip(counts, visits)]


def measure_acceptance(method: Method, budget: int, measure: Callable[[TokenTree], Statistics]) -> Acceptance:
  """Acceptance by depth, from what `measure` counts on `calibration_trees`.

  For i.i.d. children, at `[d][k - 1]`, the share of positions at depth d + 1 that are accepted if nodes have k
  children. Otherwise, at `[d][i]`, the share of positions at depth d + 1 whose accepted node is child i. None for
  rates that were not measured often enough.
  """
  by_width = {width: measure(tree) for width, tree in calibration_trees(method, budget).items()}
  depth = max(statistics.visits.shape[1] for statistics in by_width.values())
  table: Acceptance = [[None] * max(by_width) for _ in range(depth)]
  for width, statistics in by_width.items():
    visits = np.asarray(statistics.visits).sum((0, 2))
    if has_independent_children(method):
      # A width measured less deeply than the others repeats its deepest rate.
      rates = _rates(np.asarray(statistics.accepts).sum((0, 2)), visits)
      last = None
      for row in range(depth):
        last = rates[row] if row < len(rates) and rates[row] is not None else last
        table[row][width - 1] = last
    else:
      children = np.asarray(statistics.accepted_child).sum(0)
      for row, counts in enumerate(children):
        table[row] = _rates(counts, np.full(len(counts), visits[row]))
  return table


def kept_bounds(tree: TokenTree, draft_log_probs: np.ndarray, target_log_probs: np.ndarray) -> np.ndarray:
  """`stateless_kept_bound` of a tree of depth L at every position of texts sampled from the target.

  `draft_log_probs` and `target_log_probs` are `[P, T]`, of each token given the ones before, NaN after the end of a
  text. Returns float64 `[P, T, L]`: at `[i, t, d]` the largest probability that a call before token t keeps it and the
  next d tokens. NaN if the text ends before.
  """
  length = tree.max_depth
  windows = [
    np.lib.stride_tricks.sliding_window_view(
      np.pad(values, ((0, 0), (0, length - 1)), constant_values=np.nan), length, axis=1
    )
    for values in (draft_log_probs, target_log_probs)
  ]
  is_missing = np.isnan(windows[1])
  # The value in place of a missing token influences only bounds that become NaN.
  bounds = stateless_kept_bound(tree, *(np.where(is_missing, 0, values) for values in windows))
  return np.where(is_missing, np.nan, bounds)


def bound_kept(draft_log_probs: np.ndarray, target_log_probs: np.ndarray) -> Acceptance:
  """Bounds on the tokens of chains that any stateless lossless rule keeps, from texts sampled from the target.

  No rule decodes for this. The mean is over all positions of the texts, `[P, T]` as for `kept_bounds`. Tokens after the
  end of a text count as not kept, since a run with this limit loses them, and longer drafts lose more. Returns at
  `[d][k - 1]` the largest probability that a call keeps at least d + 1 tokens of k chains; None for values of k that
  are not computed, and if there are too few positions.
  """
  depth = min(LONGEST_CHAIN, draft_log_probs.shape[1])
  num_places = np.full(depth, np.isfinite(target_log_probs).sum())
  table: Acceptance = [[None] * _NUM_CHAINS[-1] for _ in range(depth)]
  for number in _NUM_CHAINS:
    bounds = kept_bounds(TokenTree.chains(number, depth), draft_log_probs, target_log_probs)
    for row, rate in zip(table, _rates(np.nansum(bounds, axis=(0, 1)), num_places)):
      row[number - 1] = rate
  return table


def choose_tree(setting: Setting, acceptance: Acceptance) -> Setting:
  """The setting with the best tree of its budget, by rates from `measure_acceptance` or `bound_kept`."""
  try:
    tree, shape = _best_tree(setting.method, setting.budget, acceptance)
  except ValueError as error:
    raise ValueError(f'{setting}: {error}') from error
  check_fit(setting.method, tree)
  label = f'{setting.label} = {shape}'
  return dataclasses.replace(setting, tree=tree, draft_length=tree.max_depth, label=label, budget=None)


def _best_tree(method: Method, budget: int, acceptance: Acceptance) -> tuple[TokenTree, str]:
  """A method's best tree of at most `budget` nodes, and its shape as text."""
  rates = np.array([[math.nan if rate is None else rate for rate in row] for row in acceptance], float)
  if np.isnan(rates[0]).all():
    raise ValueError('too few positions visited to measure acceptance; decode more prompts or tokens')
  if is_chosen_by_bound(method):
    tree = TokenTree.optimal_chains(rates, budget, tolerance=TOLERANCE)
    return tree, str(TreeSpec('prefix', (int(tree.num_children[0]), *[1] * (tree.max_depth - 1))))
  if has_independent_children(method):
    # Below this depth nothing is measured or worth a sequential step of the draft.
    rates = np.concatenate([rates, np.repeat(rates[-1:], max(_MAX_DEPTH - len(rates), 0), 0), np.zeros_like(rates[:1])])
    factors = optimal_factors(rates, budget)
    if not factors:
      raise ValueError('nothing is ever accepted, so no tree is better than none')
    return TokenTree.prefix(factors), str(TreeSpec('prefix', factors))
  tree = TokenTree.optimal(rates[~np.isnan(rates).any(axis=1)], budget, max_depth=_MAX_DEPTH)
  return tree, f'{",".join(map(str, np.bincount(tree.depths)[1:]))} nodes by depth'


@dataclasses.dataclass(frozen=True)
class _Results:
  acceptance: dict[str, Acceptance]


def read_acceptance(path: epath.PathLike) -> dict[str, Acceptance]:
  """Acceptance rates by method, read from a file that `decode.main --output` wrote after measuring them."""
  wanted = 'expected JSON with rates under "acceptance", by method, as --output writes after measuring them'
  rates = load_ours(path, _Results, 'acceptance', wanted).acceptance
  if not rates or any(len({len(row) for row in table}) != 1 or not table[0] for table in rates.values()):
    raise ValueError(f'{path}: {wanted}')
  return rates


def choose_trees(
  workload: Workload, settings: list[Setting], given: dict[str, Acceptance] | None, notify: Notify
) -> tuple[list[Setting], dict[str, Acceptance]]:
  """The settings with `optimal` trees chosen, and the rates by method that they were chosen from.

  Rates that are not `given`, see `read_acceptance`, are measured, or bounded, on the prompts, with a seed that the
  options do not use. A `ValueError` says that given rates lack a method, or determine no tree.
  """
  options = workload.options
  budgets: dict[Method, int] = {}
  for setting in settings:
    if setting.budget is not None:
      budgets[setting.method] = max(budgets.get(setting.method, 0), setting.budget)
  if not budgets:
    return settings, {}
  acceptance: dict[str, Acceptance] = {}
  seed = (workload.seeds[-1] + 1) % 2**32
  keys = workload.keys(seed)
  for method, budget in budgets.items():

    def measure(tree: TokenTree, method=method) -> Statistics:
      notify(f'{method.name}: measuring acceptance on a tree of {tree.num_nodes} nodes', 0, len(settings))
      setting = Setting(method, tree=tree)
      runs = [workload.generate(setting, keys, rows, statistics=True) for rows in workload.batches]
      every = [fetch(run.statistics) for run in runs]
      return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(workload.prompts)], *every)

    name = rates_name(method)
    make_room(is_joint=workload.is_joint)
    if given is None and is_chosen_by_bound(method):
      notify(f"{method.name}: bounding what is kept of chains, on the target's own texts", 0, len(settings))
      texts = target_texts(workload, seed)
      acceptance[name] = bound_kept(*written_log_probs(workload, (workload.draft, workload.target), texts))
    elif given is None:
      acceptance[name] = measure_acceptance(method, budget, measure)
    elif name in given:
      acceptance[name] = given[name]
    else:
      raise ValueError(f'{options.methods.acceptance} has no acceptance of {name}; it has {"; ".join(given)}')
  chosen = [
    setting if setting.budget is None else choose_tree(setting, acceptance[rates_name(setting.method)])
    for setting in settings
  ]
  return chosen, acceptance
