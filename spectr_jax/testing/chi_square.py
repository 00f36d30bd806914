"""Counts against a known law: Pearson's test, and the smallest bias that it is sure to detect."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ChiSquare:
  """Pearson's test of counts against a law.

  Attributes:
    statistic: Sum of (count - expected)^2 / expected.
    num_cells: Cells compared; those expecting fewer than 10 are pooled into one.
    p_value: Chance of a statistic at least as large if the law is right; 0 if something impossible was seen.
    num_samples: Sample size.
    pooled_mass: Probability of the cells that are pooled.
  """

  statistic: float
  num_cells: int
  p_value: float
  num_samples: int
  pooled_mass: float = 0.0

  def detectable_bias(self, level: float = 1e-3, power: float = 0.95) -> float:
    """The total variation from which on a sample of this size fails the test, whatever the bias looks like.

    A bias inside the pooled cell cannot be seen, so its mass is added to `detectable_bias` of the cells compared.
    """
    return self.pooled_mass + detectable_bias(self.num_cells, self.num_samples, level=level, power=power)


def detectable_bias(num_cells: int, num_samples: int, *, level: float = 1e-3, power: float = 0.95) -> float:
  """The smallest total variation that a chi-square test is sure to detect.

  If samples come from pi + delta instead of pi, the statistic is, for large samples, noncentral chi-square with
  noncentrality n sum(delta^2 / pi). By Cauchy-Schwarz (sum |delta|)^2 <= sum(delta^2 / pi) sum(pi), so a bias of total
  variation d = sum |delta| / 2 has noncentrality at least 4 n d^2, with equality where |delta| is proportional to pi.
  So every bias of total variation d or more is detected with at least the power that 4 n d^2 gives.

  Args:
    num_cells: Cells compared.
    num_samples: n.
    level: The test fails below this p-value.
    power: Chance to fail, at least.

  Returns:
    d, not above 1; also 1 if a single cell leaves nothing to compare.

  Raises:
    ValueError: Level or power is not a probability with level < power, or there are no samples.
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
  """Tests counts against probabilities of the same shape.

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
