"""Figures about trees: tokens per call over the number of drafted tokens, expected, measured and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode import plots
from decode.experiment.run import measure
from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from decode.papers.exhibit import Figure, Request, Results
from decode.plots import Lines, Panel
from decode.study import Row, by_value, column, low_high
from spectr_jax import TokenTree, theory
from spectr_jax.auto.trial import Notify
from spectr_jax.methods import get_method

RACES = 'Speculative Decoding via Exponential Races'
METHODS = ('gsd', 'ersd')
BATCH, SEQUENCE, SPECINFER, OPTIMAL = STRATEGIES = 'batch', 'sequence', "SpecInfer's tree", 'optimal tree'
THEORY, MEASURED, BOUND = 'theory', 'measured', 'bound'
_TUNSTALL, _FEW, _FIXED = 'Theorem 4.1', 'Lemma 4.2, best s', 'Lemma 4.2, s = 10'
_NUM_REST = 10
_STYLES = {
  BATCH: {'color': '#E69F00', 'marker': 'o'},
  SEQUENCE: {'color': '#009E73', 'marker': 's'},
  SPECINFER: {'color': '#CC79A7', 'marker': '^'},
  OPTIMAL: {'color': '#0072B2', 'marker': 'D'},
  _TUNSTALL: {'color': '#555555', 'linestyle': ':'},
  _FEW: {'color': '#000000', 'linestyle': '--'},
  _FIXED: {'color': '#D55E00', 'linestyle': '-.'},
}


def specinfer_length(num_nodes: int) -> int:
  """L of the largest tree of SpecInfer, of 2 + 3 (L - 2) nodes, with at most `num_nodes`; below 3 there is none."""
  return (num_nodes - 2) // 3 + 2


def trees_of(strategy: str, num_nodes: Sequence[int], acceptance: np.ndarray) -> dict[int, TokenTree]:
  """A strategy's largest trees within limits `num_nodes`, by their number of nodes, for rates `[w]` of children."""
  trees = []
  for number in num_nodes:
    if strategy == BATCH:
      trees.append(TokenTree.chains(number, 1))
    elif strategy == SEQUENCE:
      trees.append(TokenTree.chains(1, number))
    elif strategy == OPTIMAL:
      trees.append(TokenTree.optimal(acceptance, number))
    elif specinfer_length(number) >= 3:
      trees.append(TokenTree.specinfer(specinfer_length(number)))
  return {tree.num_nodes: tree for tree in trees}


def with_marginals(rows: Sequence[Row]) -> list[Row]:
  """Rows of one line, ascending in N, with the gain per drafted token since the row before."""
  number, tokens, extended = 0, 1.0, []
  for row in rows:
    extended.append(row | {'marginal': (row['tokens'] - tokens) / (row['N'] - number)})
    number, tokens = row['N'], row['tokens']
  return extended


def theory_rows(method: str, num_nodes: Sequence[int], acceptance: np.ndarray) -> list[Row]:
  """Expected tokens per call of every strategy at numbers of drafted tokens, and their bounds, from rates `[w]`."""
  empty = {'method': method} | low_high(None)
  rows = []
  for strategy in STRATEGIES:
    trees = trees_of(strategy, num_nodes, acceptance)
    rows += with_marginals(
      [
        empty | {'line': strategy, 'kind': THEORY, 'N': number, 'tokens': theory.expected_tokens(tree, acceptance)}
        for number, tree in trees.items()
      ]
    )
  num_used = int(TokenTree.optimal(acceptance, max(num_nodes)).num_children.max())
  rest = max(1 - acceptance[:num_used].sum(), 0)
  fixed = np.concatenate([acceptance[:num_used], np.full(_NUM_REST, rest / _NUM_REST)])
  for line, bounds in (
    (_TUNSTALL, theory.tunstall_bound(acceptance, num_nodes)),
    (_FEW, theory.few_children_bound(acceptance, num_nodes)),
    (_FIXED, theory.tunstall_bound(fixed, num_nodes)),
  ):
    bound = [
      empty | {'line': line, 'kind': BOUND, 'N': number, 'tokens': float(value)}
      for number, value in zip(num_nodes, bounds)
    ]
    first, *others = with_marginals(bound)
    rows += [first | {'marginal': None}, *others]  # there is no bound for N = 0 to start from
  return rows


def _measure_acceptance(workload: Workload, method: str, width: int) -> np.ndarray:
  """`[width]`: the share of positions at which the first, second, ... of `width` candidates is accepted."""
  setting = Setting(get_method(method), tree=TokenTree.chains(width, 1))
  keys = workload.keys(workload.seeds[0])
  accepted, visits = np.zeros(width), 0
  for rows in workload.batches:
    statistics = workload.generate(setting, keys, rows, statistics=True).statistics
    own = slice(0, len(np.unique(rows)))
    accepted += np.asarray(statistics.accepted_child)[own, 0].sum(axis=0)
    visits += np.asarray(statistics.visits)[own, 0].sum()
  return accepted / visits


def _measure(request: Request, notify: Notify) -> Results:
  workload = Workload.load(request.decode_options())
  num_nodes = sorted(set(request.sizes['num_nodes']))
  rows = []
  for method in METHODS:
    notify(f'{method}: acceptance of {num_nodes[-1]} candidates', 0, 1)
    acceptance = _measure_acceptance(workload, method, num_nodes[-1])
    if not acceptance[0]:
      raise ValueError(f'{method}: the first candidate was never accepted; decode more prompts or tokens')
    rows += theory_rows(method, range(1, num_nodes[-1] + 1), acceptance)
    strategies = {name: trees_of(name, num_nodes, acceptance) for name in STRATEGIES}
    every = dict.fromkeys(tree for trees in strategies.values() for tree in trees.values())
    settings = {tree: Setting(get_method(method), tree=tree, draft_length=tree.max_depth) for tree in every}
    run = measure(workload, list(settings.values()), notify)
    for line, trees in strategies.items():
      measured = []
      for number, tree in trees.items():
        summary = run.summarize(settings[tree])
        row = {'method': method} | low_high(summary['block_efficiency_ci95'])
        measured.append(row | {'line': line, 'kind': MEASURED, 'N': number, 'tokens': summary['block_efficiency']})
      rows += with_marginals(measured)
  return Results(rows)


def _draw(rows: Sequence[Row], *, y: str, name: str, lines: Sequence[str], **more: Any):
  """A panel for each method; of what is measured points, of theory and bounds lines."""

  def of(line: str) -> Lines:
    look = dict(_STYLES[line])
    points = {'marker': look.pop('marker', ''), 'linestyle': '', 'markersize': 5}
    style = lambda kind: look | (points if kind == MEASURED else {'marker': ''})  # noqa: E731
    return Lines(x='N', y=y, where={'line': line}, by='kind', label=f'{line}, {{}}', style=style)

  names = {'each': 'method', 'x': 'drafted tokens N', 'y': name, 'title': '{}'}
  panel = Panel(lines=tuple(map(of, lines)), more=more, **names)
  title = 'bars: 95% over prompts' if y == 'tokens' else ''
  return plots.draw([panel], rows, title=title, sharey=True, width=3.6, height=3.6)


def _between(rows: Sequence[Row]) -> list[Row]:
  """Rows with N moved to the middle of the drafted tokens that their marginal covers, without intervals."""
  before = [0, *column(rows, 'N')[:-1]]
  return [row | {'N': (row['N'] + start + 1) / 2, 'low': None} for row, start in zip(rows, before)]


def _draw_tokens(rows: Sequence[Row]):
  highest = max(row['tokens'] for row in rows if row['kind'] != BOUND)
  lines = (*STRATEGIES, _TUNSTALL, _FEW)
  return _draw(rows, y='tokens', name='tokens per target call', lines=lines, ylim=(1, 1.5 * highest))


def _draw_marginals(rows: Sequence[Row]):
  lowest = min(row['marginal'] for row in rows if row['line'] == OPTIMAL and row['kind'] == THEORY)
  moved = [
    row
    for (*_, kind), own in by_value(rows, 'method', 'line', 'kind').items()
    for row in (own if kind == BOUND else _between(own))
  ]
  name = 'tokens per call gained by one more drafted token'
  return _draw(moved, y='marginal', name=name, lines=(*STRATEGIES, _FIXED), yscale='log', ylim=(lowest / 5, 2))


_SIZES = dict(num_prompts=32, num_seeds=1, max_new_tokens=48, batch_size=32, num_nodes=(2, 8, 32))

FIGURES = {
  'ersd_fig3': Figure(
    title=f'{RACES}, Figure 3: tokens per call over drafted tokens',
    measure=_measure,
    draw=_draw_tokens,
    sizes=_SIZES,
  ),
  'ersd_fig4': Figure(
    title=f'{RACES}, Figure 4: what one more drafted token adds',
    measure=_measure,
    draw=_draw_marginals,
    sizes=_SIZES,
  ),
}
