"""Pearson's test of counts against a known distribution, and the smallest bias that it detects reliably."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ChiSquare:
  """The result of Pearson's test of counts against a distribution.

  Attributes:
    statistic: The sum of (count - expected)^2 / expected.
    num_cells: Number of cells compared. Cells with an expected count below 10 are pooled into one.
    p_value: Probability of a statistic at least as large if the distribution is right; 0 if an impossible outcome
      occurred.
    num_samples: Sample size.
    pooled_mass: Total probability of the pooled cells.
  """

  statistic: float
  num_cells: int
  p_value: float
  num_samples: int
  pooled_mass: float = 0.0

  def detectable_bias(self, level: float = 1e-3, power: float = 0.95) -> float:
    """The total variation at which a bias of any shape fails the test with this sample size.

    A bias inside the pooled cell is invisible to the test. So the cell's mass is added to `detectable_bias` of the
    compared cells.

    Args:
      level: The test fails below this p-value.
      power: The least probability that the test fails.
    """
    return self.pooled_mass + detectable_bias(self.num_cells, self.num_samples, level=level, power=power)


def detectable_bias(num_cells: int, num_samples: int, *, level: float = 1e-3, power: float = 0.95) -> float:
  """The smallest total variation that a chi-square test detects with a given power.

  If samples come from pi + delta instead of pi, the statistic of a large sample is noncentral chi-square with
  noncentrality n sum(delta^2 / pi). By Cauchy-Schwarz (sum |delta|)^2 <= sum(delta^2 / pi) sum(pi), so a bias of total
  variation d = sum |delta| / 2 has noncentrality at least 4 n d^2, with equality where |delta| is proportional to pi.
  So every bias of total variation d or more is detected with at least the power that 4 n d^2 gives.

  Args:
    num_cells: Number of cells compared.
    num_samples: n.
    level: The test fails below this p-value.
    power: The least probability that the test fails.

  Returns:
    d, at most 1. It is also 1 if there is a single cell, which leaves nothing to compare.

  Raises:
    ValueError: `level` and `power` are not probabilities with level < power, or there are no samples.
  """
  if not 0 < level < power < 1 or num_samples < 1:
    raise ValueError(f'need 0 < level < power < 1 and samples, got {level}, {power} and {num_samples} samples')
  from scipy import optimize, stats

  degrees = num_cells - 1
  if degrees < 1:
    return 1.0
  critical = stats.chi2.isf(level, degrees)

  def excess(noncentrality):
    return stats.ncx2.sf(critical, degrees, noncentrality) - power

  noncentrality = optimize.root_scalar(excess, bracket=(1e-6, 100 + 10 * critical), method='brentq').root
  return min(1.0, float(np.sqrt(noncentrality / (4 * num_samples))))


def chi_square(counts: np.ndarray, law: np.ndarray) -> ChiSquare:
  """Tests counts against a distribution over the same cells.

  Args:
    counts: Counts of the outcomes, of any shape.
    law: Probabilities of the outcomes, of the same shape; normalized here.

  Raises:
    ValueError: The shapes differ, or there is nothing to compare.
  """
  from scipy import stats

  counts, law = np.asarray(counts, np.float64).reshape(-1), np.asarray(law, np.float64).reshape(-1)
  if counts.shape != law.shape or not counts.sum():
    raise ValueError(f'need samples, and one probability per cell; got {counts.shape}, {law.shape}, {counts.sum()}')
  num_samples = int(counts.sum())
  expected = num_samples * law / law.sum()
  if counts[expected == 0].any():
    return ChiSquare(np.inf, int(np.count_nonzero(expected)), 0.0, num_samples)
  is_rare = expected < 10
  pooled_mass = float(expected[is_rare].sum() / num_samples)
  counts = np.append(counts[~is_rare], counts[is_rare].sum())
  expected = np.append(expected[~is_rare], expected[is_rare].sum())
  counts, expected = counts[expected > 0], expected[expected > 0]
  statistic = float(((counts - expected) ** 2 / expected).sum())
  degrees = max(len(counts) - 1, 1)
  p_value = float(stats.chi2.sf(statistic, degrees))
  return ChiSquare(statistic, len(counts), p_value, num_samples, pooled_mass)
