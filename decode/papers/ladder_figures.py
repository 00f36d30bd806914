"""A figure about whole runs: methods on their best trees of so many nodes, beside what any stateless rule can keep."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from decode.auto.calibrate import LONGEST_CHAIN, kept_bounds
from decode.experiment import metrics
from decode.experiment.laws import written_log_probs
from decode.experiment.options import DecodeOptions
from decode.experiment.run import measure
from decode.experiment.settings import Setting, TreeSpec
from decode.experiment.workload import Notify, Workload
from decode.papers import plots
from decode.papers.paper_figure import Figure, Row, by_value, column, select
from decode.papers.table import Request, Sizes
from spectr_jax import TokenTree, get_method

BOUND = 'any stateless rule'
BEST = 'race_traversal'
# Numbers of children by depth.
Factors = tuple[int, ...]


def _shape(*factors: int, depth: int) -> Factors:
  return factors + (1,) * (depth - len(factors))


_ALONE_16, _ALONE_32 = _shape(1, depth=16), _shape(1, depth=32)
# The best of small searches, and shapes beside them.
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
# What a method is where there is a single draft.
ALONE = {'spectr': 'speculative', 'race_block': 'block', 'traversal': 'block', 'race_traversal': 'block'}
_BOUND_CHAINS = (1, 2, 3, 4, 5, 6, 8)


def shape_name(tree: TokenTree) -> str:
  """`K x L` of chains; of other prefix trees what `--tree` takes."""
  if tree.is_chains:
    return f'{tree.num_children[0]} x {tree.max_depth}'
  # The first node of a depth is as good as any.
  factors = (tree.num_children[np.searchsorted(tree.depths, depth)] for depth in range(tree.max_depth))
  return f'prefix:{",".join(map(str, factors))}'


def _setting(name: str, factors: Factors) -> Setting:
  tree = TokenTree.prefix(factors)
  if tree.is_chains:
    return Setting(get_method(name), TreeSpec('chains'), factors[0], len(factors), tree)
  return Setting(get_method(name), TreeSpec('prefix', factors), 0, len(factors), tree)


def settings_of_grid(num_nodes: int) -> dict[str, list[Setting]]:
  """Of each method the settings whose trees have at most so many nodes, those of single drafts as `ALONE` says."""
  found = {name: [_setting(name, factors) for factors in shapes] for name, shapes in GRID.items()}
  found = {name: own + found.get(ALONE.get(name), []) for name, own in found.items()}
  return {name: [each for each in own if each.tree.num_nodes <= num_nodes] for name, own in found.items()}


def bound_trees(num_nodes: int) -> list[TokenTree]:
  """The trees of the grid with at most so many nodes, and the longest chains that have as few."""
  trees = [setting.tree for own in settings_of_grid(num_nodes).values() for setting in own]
  trees += [TokenTree.chains(k, min(num_nodes // k, LONGEST_CHAIN)) for k in _BOUND_CHAINS if k <= num_nodes]
  return list(dict.fromkeys(trees))


def fewest_calls(tree: TokenTree, draft_log_probs: np.ndarray, target_log_probs: np.ndarray) -> np.ndarray:
  """Of each text the calls that any stateless lossless rule takes for it at least, on average.

  Given that the text turns out to be x, a call before token s keeps at least d tokens with a chance of at most
  `kept_bounds`, whatever the calls before did. So what it keeps can be drawn together with a tau, distributed as the
  bound says, that is never smaller. Let V(s) be the fewest calls from s on, 0 at the end of the text:

      V(s) = 1 + E min over j up to tau of V(s + j + 1).

  The minimum chooses how many to keep by what is best for the rest of the text, which no rule knows. Tokens after the
  end of a text have no worth.

  Source: this library.

  Args:
    tree: The tree, of depth L.
    draft_log_probs: `[P, T]`, log p of each token of the texts given the ones before, NaN after the end of a text.
    target_log_probs: `[P, T]`, log q of the same tokens.

  Returns:
    float64 `[P]`, 0 for a text without tokens.
  """
  bounds = np.nan_to_num(kept_bounds(tree, draft_log_probs, target_log_probs))
  num_texts, num_tokens, length = bounds.shape
  is_there = ~np.isnan(target_log_probs)
  calls = np.zeros((num_texts, num_tokens + length + 1))
  for start in reversed(range(num_tokens)):
    at_least = np.pad(bounds[:, start], ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
    after = np.minimum.accumulate(calls[:, start + 1 : start + length + 2], axis=1)
    needed = 1 - (np.diff(at_least, axis=1) * after).sum(axis=1)
    calls[:, start] = np.where(is_there[:, start], needed, 0)
  return calls[:, 0]


def _bounds(workload: Workload, texts: Sequence[np.ndarray], trees: Sequence[TokenTree]) -> dict[TokenTree, tuple]:
  """By tree the most tokens per call that any stateless rule can have on such texts, and their interval over prompts.

  Args:
    workload: Models and prompts.
    texts: Of each run int32 `[prompts, max_new_tokens]`, -1 after the end of a row; drawn from the target's law.
    trees: The trees.
  """
  tokens = sum((each >= 0).sum(axis=1) for each in texts)
  calls = {tree: np.zeros(len(workload.prompts)) for tree in trees}
  for each in texts:
    log_probs = written_log_probs(workload, (workload.draft, workload.target), each)
    for tree, own in calls.items():
      own += fewest_calls(tree, *log_probs)
  return {tree: (metrics.ratio(tokens, own), metrics.ratio_interval(tokens, own)) for tree, own in calls.items()}


def _rows_of(method: str, num_nodes: int, found: dict[TokenTree, tuple]) -> list[Row]:
  """A row for each of a method's trees with at most so many nodes; `found` has tokens per call and their interval."""
  best = max(found, key=lambda tree: found[tree][0])
  rows = []
  for tree, (tokens, interval) in found.items():
    low, high = interval or (None, None)
    rows.append(
      {'method': method, 'nodes': num_nodes, 'shape': shape_name(tree), 'is best': int(tree == best)}
      | {'tokens per call': tokens, 'low': low, 'high': high}
    )
  return rows


def _compute(request: Request, notify: Notify) -> list[Row]:
  sizes = request.sizes
  budgets = sorted(set(sizes.num_nodes))
  needed = min(budgets)
  if missing := [name for name, own in settings_of_grid(needed).items() if not own]:
    raise ValueError(f'num_nodes: no tree of at most {needed} nodes is measured of {", ".join(missing)}')
  [path] = request.prompts.values()
  workload = Workload.load(
    DecodeOptions(
      target=request.target, draft=request.draft, dtype=request.dtype, seed=request.seed, prompts=path, skip_long=True,
      num_prompts=sizes.num_prompts, num_seeds=sizes.num_seeds, max_new_tokens=sizes.max_new_tokens,
      batch_size=sizes.batch_size,
    )
  )  # fmt: skip
  every = dict.fromkeys(setting for own in settings_of_grid(budgets[-1]).values() for setting in own)
  run = measure(workload, list(every), notify)
  summaries = {setting: run.summarize(setting) for setting in every}
  rows = []
  for name in GRID:
    for number in budgets:
      own = {setting.tree: summaries[setting] for setting in settings_of_grid(number)[name]}
      rows += _rows_of(name, number, {tree: (each.block_efficiency, each.interval) for tree, each in own.items()})
  notify('the bound on what was decoded', 0, 1)
  own = settings_of_grid(budgets[-1])[BEST]
  texts = [found.tokens for found in run.measurements if found.setting in own]
  bounds = _bounds(workload, texts, list(dict.fromkeys(tree for number in budgets for tree in bound_trees(number))))
  for number in budgets:
    rows += _rows_of(BOUND, number, {tree: bounds[tree] for tree in bound_trees(number)})
  return rows


def _draw(rows: Sequence[Row]):
  figure, [axes] = plots.panels(1, width=5.2, height=4.2)
  for method, own in by_value(select(rows, **{'is best': 1}), 'method').items():
    if method == BOUND:
      style = {'color': plots.THEORY, 'linestyle': '--', 'label': f'{BOUND} (bound)'}
    else:
      style = plots.style_of(method) | {'markersize': 6, 'label': method}
    plots.draw_line(axes, own, x='nodes', y='tokens per call', **style)
  plots.name_axes(axes, x='nodes of the tree, at most', y='tokens per target call', ylim=(1, None))
  plots.number_ticks(axes, column(rows, 'nodes'))
  plots.legend(figure, axes, title='bars: 95% over prompts')
  return figure


def _short(shape: str) -> str:
  return re.sub(r'(,1){3,}$', ',1,...,1', shape)


def _tell(rows: Sequence[Row]) -> str:
  best = {(row['method'], row['nodes']): row for row in select(rows, **{'is best': 1})}
  most = max(column(rows, 'nodes'))
  methods = [name for name in dict.fromkeys(column(rows, 'method')) if name != BOUND]
  each = ', '.join(
    f'{name} {best[name, most]["tokens per call"]:.2f} on {_short(best[name, most]["shape"])}' for name in methods
  )
  own = best[BEST, most]['tokens per call']
  ratios = ', '.join(
    f'{own / best[name, most]["tokens per call"]:.2f} times that of {name}' for name in methods if name != BEST
  )
  bound = best[BOUND, most]
  reached = ', '.join(
    f'{best[BEST, number]["tokens per call"] / row["tokens per call"]:.0%} at {number}'
    for (method, number), row in best.items()
    if method == BOUND
  )
  return (
    'Tokens per target call over the nodes that a tree may have, each method on the best of a few shapes. With'
    f' {most} nodes: {each}. The yield of {BEST} is {ratios}. The largest bound of these trees and other chains is'
    f' {bound["tokens per call"]:.2f}, on {_short(bound["shape"])}: on none of them has a lossless rule that carries'
    ' nothing over from one call to the next more on average. It follows from the laws of both models along the texts'
    f' that were decoded on the trees of {BEST}, which have the law of the target. {BEST} reaches {reached} nodes.'
    ' Single drafts are decoded once: with one, spectr is speculative, and race_block, traversal and race_traversal are'
    ' block. Intervals are over prompts. All methods share these, so that differences are surer than they look; but'
    ' each has decoded texts of its own, some of which are harder to guess than others.'
  )


FIGURES = {
  'ladder': Figure(
    title='Tokens per call over the nodes of the tree, and the most that any stateless rule can have',
    compute=_compute,
    draw=_draw,
    tell=_tell,
    sizes=Sizes(num_prompts=32, num_seeds=1, max_new_tokens=96, batch_size=32, num_nodes=(16, 32, 64)),
    has_models=True,
  )
}
