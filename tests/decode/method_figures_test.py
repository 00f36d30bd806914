"""Figures about whole runs: the shapes that are decoded, and runs of a tiny pair beside a bound worked out here."""

import numpy as np
import pytest
from exhibit_checks import check_figure, measure_small, request_of

from decode.experiment.distributions import written_distributions
from decode.experiment.options import DecodeOptions
from decode.experiment.run import measure
from decode.experiment.workload import Workload
from decode.papers import method_figures
from decode.papers.exhibits import FIGURES
from decode.papers.figure import by_value, select
from spectr_jax import METHODS, TokenTree


def test_a_ladder_has_trees_of_every_size():
  budgets = FIGURES['ladder'].sizes.num_nodes
  grids = [method_figures.settings_of_grid(number) for number in budgets]
  assert [max(each.tree.num_nodes for own in grid.values() for each in own) for grid in grids] == list(budgets)
  for grid, larger in zip(grids, grids[1:]):
    assert all(
      grid[name] and set(grid[name]) < set(larger[name]) for name in ('spectr', 'race_block', 'race_traversal')
    )
  alone = {name: [str(each) for each in own if each.tree.is_chain] for name, own in grids[0].items()}
  single = {'speculative': ['speculative K=1 L=16'], 'block': ['block K=1 L=16']}
  assert alone == {name: single['speculative' if name in ('speculative', 'spectr') else 'block'] for name in grids[0]}
  trees = {each.tree for own in grids[1].values() for each in own}
  assert trees < set(method_figures.bound_trees(32))
  assert TokenTree.chains(5, 6) in method_figures.bound_trees(32)
  assert all(tree.num_nodes <= 32 for tree in method_figures.bound_trees(32))
  assert max(tree.max_depth for tree in method_figures.bound_trees(64)) == 32
  request = request_of('ladder', num_nodes=(64, 15))
  with pytest.raises(ValueError, match='no tree of at most 15 nodes is measured of speculative, spectr, '):
    FIGURES['ladder'].measure(request, None)


def test_shapes_have_names():
  names = {
    '1 x 3': TokenTree.chains(1, 3), '4 x 1': TokenTree.chains(4, 1), '3 x 2': TokenTree.prefix((3, 1)),
    'prefix:3,2,1': TokenTree.prefix((3, 2, 1)), 'prefix:1,2': TokenTree.prefix((1, 2)),
  }  # fmt: skip
  assert {method_figures.shape_name(tree): tree for tree in names.values()} == names


def test_a_ladder_tells_the_best_shapes_and_their_ratios():
  measured = {'speculative': 2.0, 'spectr': 2.5, 'block': 3.0, 'race_traversal': 6.0, method_figures.BOUND: 8.0}
  wide, long = TokenTree.chains(8, 1), TokenTree.prefix((2, 2, 1, 1, 1, 1, 1))
  rows = []
  for number in (16, 64):
    for method, tokens in measured.items():
      tokens *= number / 64
      found = {wide: (0.9 * tokens, None), long: (tokens, (tokens - 0.1, tokens + 0.1))}
      rows += method_figures._rows_of(method, number, found)
  assert [row['is best'] for row in rows] == [0, 1] * (len(rows) // 2)
  assert rows[0]['low'] is None
  rows = check_figure('ladder', request_of('ladder'), rows)
  paragraph = FIGURES['ladder'].tell(rows)
  assert 'With 64 nodes: speculative 2.00 on prefix:2,2,1,...,1, spectr 2.50' in paragraph
  assert 'is 3.00 times that of speculative, 2.40 times that of spectr, 2.00 times that of block.' in paragraph
  assert 'is 8.00, on prefix:2,2,1,...,1: on none of them' in paragraph
  assert 'reaches 75% at 16, 75% at 64 nodes' in paragraph


@pytest.mark.slow
def test_methods_are_measured(pair, prompt_file, monkeypatch):
  every = {name for name, method in METHODS.items() if method.max_drafts != 0}
  assert set(method_figures.DRAFTING) == every - {'decoding_opt', 'decoding_uno'}
  monkeypatch.setattr(method_figures, 'DRAFTING', ('speculative', 'spectr', 'spectr_gbv'))
  rows = measure_small('methods', pair, prompt_file)
  found = {(row['method'], row['K']) for row in rows}
  assert found == {('speculative', 1), ('spectr', 2), ('spectr_gbv (not lossless)', 2)}
  assert all(1 <= row['block efficiency'] <= 3 and row['low'] <= row['block efficiency'] <= row['high'] for row in rows)


@pytest.mark.slow
def test_a_ladder_is_measured(monkeypatch, pair, prompt_file):
  grid = {'speculative': ((1, 1),), 'block': ((1, 1),), 'race_traversal': ((2, 1),)}
  monkeypatch.setattr(method_figures, 'GRID', grid)
  runs = []
  monkeypatch.setattr(method_figures, 'measure', lambda *what: runs.append(measure(*what)) or runs[-1])
  rows = measure_small('ladder', pair, prompt_file)
  shapes = {key: [row['shape'] for row in own] for key, own in _by_method_and_nodes(rows).items()}
  assert {key: own for key, own in shapes.items() if key[0] != method_figures.BOUND} == {
    ('speculative', 2): ['1 x 2'],
    ('speculative', 4): ['1 x 2'],
    ('block', 2): ['1 x 2'],
    ('block', 4): ['1 x 2'],
    ('race_traversal', 2): ['1 x 2'],
    ('race_traversal', 4): ['2 x 2', '1 x 2'],
  }
  assert shapes[method_figures.BOUND, 2] == ['1 x 2', '2 x 1']
  assert shapes[method_figures.BOUND, 4] == ['1 x 2', '2 x 2', '1 x 4', '3 x 1', '4 x 1']
  for own in _by_method_and_nodes(rows).values():
    [best] = select(own, **{'is best': 1})
    assert best['tokens per call'] == max(row['tokens per call'] for row in own)
  for row in rows:
    assert 1 <= row['tokens per call'] <= 5
    assert row['low'] <= row['tokens per call'] <= row['high']
  # What is decoded once stands wherever it belongs, and a larger budget has what a smaller one has.
  alone = [
    row['tokens per call'] for row in select(rows, shape='1 x 2') if row['method'] in ('block', 'race_traversal')
  ]
  assert len(alone) == 4
  assert len(set(alone)) == 1
  # The bound of two drafts of one token, from the laws along what was decoded with block and race_traversal.
  workload = Workload.load(
    DecodeOptions(**pair, method=('block',), prompts=str(prompt_file), batch_size=2, max_new_tokens=6)
  )
  num_tokens, num_calls = 0, 0.0
  for found in runs[0].measurements[1:]:
    calls, texts = np.zeros((3, 8)), found.tokens
    for numbers, (p, q) in written_distributions(workload, (workload.draft, workload.target), texts):
      for own, text in enumerate(numbers):
        for place in reversed(range(found.lengths[text])):
          p_own, q_own = (float(law[own, place, texts[text, place]]) for law in (p, q))
          kept, (after, later) = min(1, (1 - (1 - p_own) ** 2) / q_own), calls[text, place + 1 : place + 3]
          calls[text, place] = 1 + (1 - kept) * after + kept * min(after, later)
    num_tokens += found.lengths.sum()
    num_calls += calls[:, 0].sum()
  [row] = select(rows, method=method_figures.BOUND, nodes=2, shape='2 x 1')
  assert row['tokens per call'] == pytest.approx(num_tokens / num_calls, rel=1e-5)


def _by_method_and_nodes(rows):
  return by_value([row | {'key': (row['method'], row['nodes'])} for row in rows], 'key')
