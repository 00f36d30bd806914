"""Figures about rejections and bias: theory written out, simulations beside it, and over-acceptance on a tiny pair."""

import math

import numpy as np
import pytest
from exhibit_checks import CLOSE, measure_figure, measure_small

from decode.papers import rejection_figures
from decode.papers.figure import by_value, select
from spectr_jax import theory


def test_the_front_is_a_straight_line_that_nothing_crosses():
  rows = measure_figure('pareto_fig4')
  p, q = rejection_figures.pareto_probs()
  distance = 1 - np.minimum(p, q).sum()
  lines = by_value(rows, 'line')
  sums = {line: np.array([row['rejection'] + row['bias'] for row in own]) for line, own in lines.items()}
  np.testing.assert_allclose(sums['decoding_opt'], distance, atol=CLOSE)
  assert all(own.min() >= distance - CLOSE for own in sums.values())
  assert sums['decoding_uno'][0] > distance + 0.1
  # With the best law every random acceptance above min(1, q/p) is on the front, and covers it.
  best = [row for row in rows if row['line'].endswith('best distribution after a rejection')]
  on_front = [row['rejection'] for row in best if abs(row['rejection'] + row['bias'] - distance) < CLOSE]
  assert len(on_front) == len(best)
  assert min(on_front) < 0.3 * distance < 0.9 * distance < max(on_front)


@pytest.mark.slow
def test_what_is_simulated_agrees_with_what_is_expected():
  rows = measure_figure('batch_fig2', num_runs=300, num_drafts=(3,))
  chains = theory.random_chains(10, num_tokens=50)
  [simulated] = select(rows, panel='number of drafts', line='simulation')
  [expected] = select(rows, panel='number of drafts', line='theory', M=3)
  assert (simulated['M'], simulated['runs']) == (3, 300)
  error = (simulated['high'] - simulated['rejections']) / 1.96
  assert abs(simulated['rejections'] - expected['rejections']) < 4 * error < 2
  assert expected['rejections'] == pytest.approx(float(theory.expected_rejections(chains, 3)))
  p, q = chains.draft_probs, chains.target_probs
  # One draft: Theorem 1, the sum of expected total variations, written out.
  distances = np.abs(p - q).sum(-1) / 2
  law, total = np.full(7, 1 / 7), 0
  for step in range(50):
    total += law @ distances[step]
    law = law @ q[step]
  assert select(rows, panel='number of drafts', line='theory', M=1)[0]['rejections'] == pytest.approx(total)
  running = select(rows, panel='running average', line='simulation', M=3)
  widths = [row['high'] - row['low'] for row in running]
  assert widths[-1] < widths[0]


def test_running_averages():
  counts = np.array([3.0, 5, 4, 8])
  number, mean, half = rejection_figures._running(counts)[-1]
  assert (number, mean) == (4, 5)
  assert half == pytest.approx(1.959964 * counts.std(ddof=1) / 2)


def test_wins_count_half_where_nobody_wins():
  np.testing.assert_array_equal(rejection_figures._wins(np.array([1.0, 2, 3]), np.array([0.0, 2, 4])), [1, 0.5, 0])


def test_likelihood_is_that_of_the_targets_distributions(monkeypatch):
  laws = np.array([[[0.5, 0.5, 0], [0.25, 0.5, 0.25]]])
  monkeypatch.setattr(rejection_figures, 'written_distributions', lambda *_: [(np.array([0]), (laws,))])
  workload = type('Workload', (), {'target': None})
  tokens = np.array([[1, 2]])
  assert rejection_figures._log_likelihood(workload, tokens)[0] == pytest.approx(math.log(0.5) + math.log(0.25))
  assert rejection_figures._log_likelihood(workload, np.array([[1, -1]]))[0] == pytest.approx(math.log(0.5))


@pytest.mark.slow
def test_over_acceptance_is_measured(pair, prompt_file):
  rows = measure_small('opt_uno', pair, prompt_file)
  values = {(row['quantity'], row['method'], row['epsilon']): row['value'] for row in rows}
  assert values['bias', 'decoding_opt', 0] == pytest.approx(0, abs=CLOSE)
  assert values['bias', 'decoding_uno', 0] > 0.01
  for epsilon in (0, 0.5):
    total = values['bias', 'decoding_opt', epsilon] + values['rejection', 'both', epsilon]
    assert total == pytest.approx(values['rejection', 'both', 0])  # the front: it is the total variation
    assert values['bias', 'decoding_opt', epsilon] <= values['bias', 'decoding_uno', epsilon] + CLOSE
    assert 0 <= values['win rate', 'decoding_opt', epsilon] <= 1
    for method in ('decoding_opt', 'decoding_uno', 'autoregressive'):
      assert -math.log(320) * 2 < values['log-likelihood', method, epsilon] < 0
  # With so much over-acceptance nothing is rejected: both keep the same drafts, and nobody wins.
  assert values['rejection', 'both', 0.5] == pytest.approx(0, abs=CLOSE)
  assert values['win rate', 'decoding_opt', 0.5] == 0.5
