"""Figures about trees: expected tokens against sums written out, and measured trees of a tiny pair."""

import numpy as np
import pytest
from exhibit_checks import CLOSE, SMALL_FIGURES, check_figure, measure_small, request_of

from decode.papers import tree_figures
from decode.papers.exhibits import FIGURES
from decode.papers.figure import by_value, select


def test_tokens_of_trees_against_sums():
  acceptance = np.array([0.6, 0.2, 0.05, 0.05])
  numbers = range(1, 13)
  rows = tree_figures.theory_rows('gsd', numbers, acceptance)
  for row in select(rows, line='batch'):
    assert row['tokens'] == pytest.approx(1 + acceptance[: row['N']].sum())
  for row in select(rows, line='sequence'):
    assert row['tokens'] == pytest.approx(sum(0.6**depth for depth in range(row['N'] + 1)))
    assert row['marginal'] == pytest.approx(0.6 ** row['N'])
  for row in select(rows, line="SpecInfer's tree"):
    length = (row['N'] - 2) // 3 + 2
    below = 0.6**2 * 0.85 * sum(0.6**depth for depth in range(length - 2))  # three branches, each a chain
    assert row['tokens'] == pytest.approx(1 + 0.6 + 0.36 + below)
  assert {row['N'] for row in select(rows, line="SpecInfer's tree")} == {5, 8, 11}
  best = {row['N']: row['tokens'] for row in select(rows, line='optimal tree')}
  assert list(best) == list(numbers)
  for row in rows:
    if row['kind'] == 'theory':
      assert row['tokens'] <= best[row['N']] + CLOSE
    else:
      assert row['tokens'] >= best[row['N']] - CLOSE
  marginals = [row['marginal'] for row in select(rows, line='optimal tree')]
  assert marginals == sorted(marginals, reverse=True)


def test_slopes_are_between_what_was_measured():
  rows = tree_figures.with_marginals([{'N': 2, 'tokens': 2.0}, {'N': 6, 'tokens': 3.0}])
  assert [row['marginal'] for row in rows] == [0.5, 0.25]
  # Tokens 1 and 2, then 3 to 6.
  assert [row['N'] for row in tree_figures._between(rows)] == [1.5, 4.5]


@pytest.mark.slow
def test_trees_are_measured(pair, prompt_file, monkeypatch):
  assert tree_figures.METHODS == ('gsd', 'ersd')
  monkeypatch.setattr(tree_figures, 'METHODS', ('gsd',))
  rows = measure_small('ersd_fig3', pair, prompt_file)
  # Both figures show the same rows.
  assert FIGURES['ersd_fig4'].measure is FIGURES['ersd_fig3'].measure
  check_figure('ersd_fig4', request_of('ersd_fig4', pair, prompt_file, **SMALL_FIGURES['ersd_fig4']), rows)
  own = select(rows, kind='measured')
  by_line = {line: [row['N'] for row in found] for line, found in by_value(own, 'line').items()}
  assert by_line == {'batch': [5], 'sequence': [5], "SpecInfer's tree": [5], 'optimal tree': [5]}
  deepest = {'batch': 1, 'sequence': 5, "SpecInfer's tree": 3, 'optimal tree': 5}
  assert all(1 <= row['tokens'] <= 1 + deepest[row['line']] for row in own)
  # A batch's theory is what was counted in a batch of five: both were decoded with the same keys.
  [expected] = select(rows, kind='theory', line='batch', N=5)
  assert select(own, line='batch')[0]['tokens'] == pytest.approx(expected['tokens'], abs=0.3)
