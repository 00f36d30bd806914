"""Block efficiency, its interval and acceptance by position, against other routes."""

import numpy as np
import pytest

from decode.experiment import metrics


def test_ratios_and_acceptance_of_known_counts():
  assert metrics.ratio(np.array([10, 2]), np.array([2, 2])) == 3
  # Equal prompts have an interval without width, a single one has none, and what is compared with itself is equal.
  tokens = np.array([8, 16, 8])
  assert metrics.ratio_interval(tokens, tokens) == (1.0, 1.0)
  assert metrics.ratio_interval(tokens, tokens // 4) == (4.0, 4.0)
  assert metrics.ratio_interval(np.array([5]), np.array([2])) is None
  counts = np.array([5, 9, 7]), np.array([4, 4, 5])
  assert metrics.compare(counts, counts) == (1, 1, 1)
  assert metrics.comparison_text(counts, counts) == '1.000 (1.000 to 1.000)'
  assert metrics.ratio_text(np.array([5]), np.array([2])) == '2.50'
  texts = [metrics.text_of(1.0, interval) for interval in ((0.9, 1.1), (0.9, 1.5))]
  assert texts == ['1.00 ± 0.10', '1.00 (0.90 to 1.50)']
  shares = metrics.acceptance_by_position(np.array([[3, 1], [1, 1]]), np.array([4, 4]))
  assert shares == [0.5, 0.25]
  assert metrics.acceptance_by_position(np.zeros((2, 0)), np.array([4, 4])) == []
  tokens = np.array([3.0, 5.0, 4.0, 8.0])
  low, high = metrics.ratio_interval(tokens, np.full(4, 2))
  values = tokens / 2
  half = 3.182446 * values.std(ddof=1) / np.sqrt(4)
  np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], rtol=1e-6)


def test_interval_agrees_with_the_bootstrap():
  rng = np.random.default_rng(0)
  calls = rng.integers(10, 30, 200)
  tokens = calls + rng.binomial(3 * calls, 0.5)
  low, high = metrics.ratio_interval(tokens, calls)
  picks = rng.integers(0, 200, (4000, 200))
  ratios = tokens[picks].sum(1) / calls[picks].sum(1)
  # The bootstrap's own quantiles vary by a few percent of the width.
  np.testing.assert_allclose([low, high], np.quantile(ratios, [0.025, 0.975]), atol=0.1 * (high - low))


def test_comparison_agrees_with_the_bootstrap_and_is_paired():
  rng = np.random.default_rng(1)
  calls = rng.integers(10, 30, 200)
  easy = rng.uniform(0.2, 0.8, 200)  # what a prompt is like shows in both
  first = calls + rng.binomial(3 * calls, easy), calls
  second = calls + rng.binomial(2 * calls, easy), calls
  factor, low, high = metrics.compare(first, second)
  assert factor == metrics.ratio(*first) / metrics.ratio(*second)
  picks = rng.integers(0, 200, (4000, 200))
  sums = [x[picks].sum(1) for x in (*first, *second)]
  quantiles = np.quantile(sums[0] / sums[1] / (sums[2] / sums[3]), [0.025, 0.975])
  np.testing.assert_allclose([low, high], quantiles, atol=0.1 * (high - low))
  other = metrics.compare(first, tuple(x[rng.permutation(200)] for x in second))
  assert other[0] == factor
  assert other[2] - other[1] > 1.3 * (high - low)


@pytest.mark.parametrize('seeds', [1, 3])
def test_repeating_every_prompt_does_not_narrow_the_interval(seeds):
  tokens, calls = np.array([5, 9, 7]), np.array([4, 4, 5])
  np.testing.assert_allclose(
    metrics.ratio_interval(seeds * tokens, seeds * calls), metrics.ratio_interval(tokens, calls)
  )
