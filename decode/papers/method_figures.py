"""Figures about whole runs: all methods over K and L, and methods on their best trees beside a bound for any rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from decode import plots
from decode.experiment import metrics
from decode.experiment.distributions import written_log_probs
from decode.experiment.optimal_trees import LONGEST_CHAIN, kept_bounds
from decode.experiment.run import measure, run_decode
from decode.experiment.settings import Setting, TreeSpec, shape_name
from decode.experiment.workload import Workload
from decode.papers.exhibit import Figure, Request, Results, setting_columns
from decode.plots import Lines, Panel
from decode.study import Row, low_high
from spectr_jax import METHODS, TokenTree, theory
from spectr_jax.auto.trial import Notify
from spectr_jax.methods import FURTHER_METHODS, get_method

# All methods over K and L.

# The methods that draft, without those that over-accept, which have a figure of their own.
DRAFTING = tuple(
  name
  for name, method in (METHODS | FURTHER_METHODS).items()
  if method.max_drafts != 0 and name not in ('decoding_opt', 'decoding_uno')
)


def _compute_methods(request: Request, notify: Notify) -> Results:
  run = run_decode(request.decode_options(method=DRAFTING), notify)
  return Results(
    [
      setting_columns(summary['setting'])
      | {'block efficiency': summary['block_efficiency']}
      | low_high(summary['block_efficiency_ci95'])
      for summary in map(run.summarize, run.settings)
    ]
  )


# The ladder: methods on their best trees of at most so many nodes.

BOUND = 'any stateless rule'
BEST = 'race_traversal'
# Numbers of children by depth.
Factors = tuple[int, ...]


def _shape(*factors: int, depth: int) -> Factors:
  """Factors of a prefix tree that goes on in chains down to `depth`."""
  return factors + (1,) * (depth - len(factors))


_ALONE_16, _ALONE_32 = _shape(1, depth=16), _shape(1, depth=32)
# Shapes to decode, by method: the best of small searches, and some beside them.
GRID: dict[str, tuple[Factors, ...]] = {
  'speculative': (_ALONE_16, _ALONE_32),
  'spectr': (
    _shape(2, depth=8), _shape(4, depth=4), _shape(4, depth=8), _shape(2, 2, depth=8), _shape(8, depth=8),
    _shape(3, 2, depth=11),
  ),
  'block': (_ALONE_16, _ALONE_32),
  'race_block': (
    _shape(2, depth=8), _shape(2, depth=16), _shape(2, 2, depth=8), _shape(2, depth=32), _shape(2, 2, depth=16),
  ),
  'traversal': (
    _shape(2, depth=8), _shape(2, depth=16), _shape(4, depth=8), _shape(4, depth=16), _shape(2, 2, depth=16),
  ),
  'race_traversal': (
    _shape(2, depth=8), _shape(2, depth=16), _shape(3, depth=10), _shape(4, depth=16), _shape(3, depth=21),
  ),
}  # fmt: skip
# With a single draft a method equals this one, and is not decoded again.
ALONE = {'spectr': 'speculative', 'race_block': 'block', 'traversal': 'block', 'race_traversal': 'block'}
_BOUND_CHAINS = (1, 2, 3, 4, 5, 6, 8)


def factors_of(tree: TokenTree) -> Factors:
  """The numbers of children by depth of a prefix tree: all nodes of a depth have as many as the first one."""
  return tuple(int(tree.num_children[np.searchsorted(tree.depths, depth)]) for depth in range(tree.max_depth))


def _setting(name: str, factors: Factors) -> Setting:
  tree = TokenTree.prefix(factors)
  if tree.is_chains:
    return Setting.of_chains(get_method(name), factors[0], len(factors))
  return Setting(get_method(name), 0, len(factors), tree, label=str(TreeSpec('prefix', factors)))


def settings_of_grid(num_nodes: int) -> dict[str, list[Setting]]:
  """Settings of each method whose trees have at most `num_nodes` nodes; those of single drafts come from `ALONE`."""
  settings = {name: [_setting(name, factors) for factors in shapes] for name, shapes in GRID.items()}
  settings = {name: own + settings.get(ALONE.get(name), []) for name, own in settings.items()}
  return {name: [each for each in own if each.tree.num_nodes <= num_nodes] for name, own in settings.items()}


def bound_trees(num_nodes: int) -> list[TokenTree]:
  """Trees to bound: those of the grid with at most `num_nodes` nodes, and for some K the longest chains."""
  trees = [setting.tree for own in settings_of_grid(num_nodes).values() for setting in own]
  trees += [TokenTree.chains(k, min(num_nodes // k, LONGEST_CHAIN)) for k in _BOUND_CHAINS if k <= num_nodes]
  return list(dict.fromkeys(trees))


def _bounds(workload: Workload, texts: Sequence[np.ndarray], trees: Sequence[TokenTree]) -> dict[TokenTree, tuple]:
  """The most tokens per call of any stateless rule on such texts, with the interval over prompts, by tree.

  Texts are int32 `[prompts, max_new_tokens]` of each run, -1 after the end of a row; drawn from the target.
  """
  tokens = sum((each >= 0).sum(axis=1) for each in texts)
  calls = {tree: np.zeros(len(workload.prompts)) for tree in trees}
  for each in texts:
    log_probs = written_log_probs(workload, (workload.draft, workload.target), each)
    for tree, own in calls.items():
      own += theory.stateless_fewest_calls(kept_bounds(tree, *log_probs))
  return {tree: (metrics.ratio(tokens, own), metrics.ratio_interval(tokens, own)) for tree, own in calls.items()}


def _rows_of(method: str, num_nodes: int, yields: dict[TokenTree, tuple]) -> list[Row]:
  """A row for each tree of a method, or of `BOUND`, with tokens per call and their interval by tree."""
  best = max(yields, key=lambda tree: yields[tree][0])
  return [
    {'method': method, 'nodes': num_nodes, 'shape': shape_name(factors_of(tree)), 'is best': int(tree == best)}
    | {'tokens per call': tokens}
    | low_high(interval)
    for tree, (tokens, interval) in yields.items()
  ]


def _compute_ladder(request: Request, notify: Notify) -> Results:
  budgets = sorted(set(request.sizes['num_nodes']))
  needed = min(budgets)
  if missing := [name for name, own in settings_of_grid(needed).items() if not own]:
    raise ValueError(f'num_nodes: no tree of at most {needed} nodes is measured of {", ".join(missing)}')
  workload = Workload.load(request.decode_options())
  every = dict.fromkeys(setting for own in settings_of_grid(budgets[-1]).values() for setting in own)
  run = measure(workload, list(every), notify)
  summaries = {setting: run.summarize(setting) for setting in every}
  rows = []
  for name in GRID:
    for number in budgets:
      own = {setting.tree: summaries[setting] for setting in settings_of_grid(number)[name]}
      values = ('block_efficiency', 'block_efficiency_ci95')
      rows += _rows_of(name, number, {tree: tuple(each[value] for value in values) for tree, each in own.items()})
  notify('the bound on what was decoded', 0, 1)
  own = settings_of_grid(budgets[-1])[BEST]
  texts = [measurement.tokens for measurement in run.measurements if measurement.setting in own]
  bounds = _bounds(workload, texts, list(dict.fromkeys(tree for number in budgets for tree in bound_trees(number))))
  for number in budgets:
    rows += _rows_of(BOUND, number, {tree: bounds[tree] for tree in bound_trees(number)})
  return Results(rows)


def _ladder_style(name: str) -> dict[str, Any]:
  if name == BOUND:
    return {'color': plots.THEORY, 'linestyle': '--', 'marker': ''}
  return plots.style_of(name) | {'markersize': 6}


_METHODS_PANEL = Panel(
  each='L', x='drafts K', y='block efficiency (tokens per target call)', title='drafts of L = {} tokens',
  lines=(Lines(x='K', y='block efficiency', by='method', are_apart=True, more={'markersize': 5}),),
)  # fmt: skip
_LADDER_PANEL = Panel(
  where={'is best': 1}, x='nodes of the tree, at most', y='tokens per target call', more={'ylim': (1, None)},
  lines=(Lines(x='nodes', y='tokens per call', by='method', style=_ladder_style),),
)  # fmt: skip
_BARS = 'bars: 95% over prompts'

FIGURES = {
  'methods': Figure(
    title='Block efficiency of all methods over K and L',
    measure=_compute_methods,
    draw=functools.partial(plots.draw, [_METHODS_PANEL], title=_BARS, width=4.0, height=4.2, sharey=True),
    sizes=dict(num_prompts=32, num_seeds=1, max_new_tokens=48, batch_size=32, num_drafts=(2, 8), draft_length=(4, 8)),
  ),
  'ladder': Figure(
    title='Tokens per call over the nodes of the tree, and the most that any stateless rule can have',
    measure=_compute_ladder,
    draw=functools.partial(
      plots.draw, [_LADDER_PANEL], names={BOUND: f'{BOUND} (bound)'}, title=_BARS, width=5.2, height=4.2
    ),
    sizes=dict(num_prompts=32, num_seeds=1, max_new_tokens=96, batch_size=32, num_nodes=(16, 32, 64)),
  ),
}
