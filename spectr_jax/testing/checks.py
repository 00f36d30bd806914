"""Comparisons of a method with what it must be: Pearson's test, results, the level that they share, and their table."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

LEVEL = 1e-3  # of all comparisons of a proof together
POWER = 0.95

# Called with the current activity, the steps done and the steps in total.
Notify: TypeAlias = Callable[[str, int, int], None]


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
    """The total variation at which a bias of any shape fails the test with this sample size; see `detectable_bias`.

    A bias inside the pooled cell is invisible to the test. So the cell's mass is added to that of the compared cells.
    """
    return self.pooled_mass + detectable_bias(self.num_cells, self.num_samples, level=level, power=power)


def detectable_bias(num_cells: int, num_samples: int, *, level: float = 1e-3, power: float = 0.95) -> float:
  """The smallest total variation that a chi-square test detects with a given power.

  If samples come from pi + delta instead of pi, the statistic of a large sample is noncentral chi-square with
  noncentrality n sum(delta^2 / pi). By Cauchy-Schwarz (sum |delta|)^2 <= sum(delta^2 / pi) sum(pi), so a bias of total
  variation d = sum |delta| / 2 has noncentrality at least 4 n d^2, with equality where |delta| is proportional to pi.
  So every bias of total variation d or more is detected with at least the power that 4 n d^2 gives.

  The test fails below the p-value `level`. d is at most 1, also for a single cell, which leaves nothing to compare.
  ValueError unless `level` and `power` are probabilities with level < power, and there are samples.
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

  `counts` and `law`, which is normalized here, have one shape, any, and something to compare, else ValueError.
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


@dataclasses.dataclass(frozen=True)
class Check:
  """One comparison and its result.

  Attributes:
    part: `exact`, `sampling` or `engine`.
    compared: The tree, and the joint distribution or tokens that were compared.
    measure: The quantity measured: `error`, the largest difference between two joint distributions; `differing tokens`
      or `differing texts`; or `p-value`.
    value: The measured value.
    limit: The largest error or number of differing tokens, or the smallest p-value, that passes.
    num_samples: Rows drawn, or 0 if all outcomes were enumerated.
    detectable_bias: The smallest bias for which the check fails with probability `POWER`. It is a total variation for
      `p-value`, a difference in the probability of one text for `error`, and the share of rows that differ for
      `differing tokens`.
  """

  part: str
  compared: str
  measure: str
  value: float
  limit: float
  num_samples: int
  detectable_bias: float

  @property
  def is_passed(self) -> bool:
    return bool(self.value >= self.limit if self.measure == 'p-value' else self.value <= self.limit)


def table_of(checks: Sequence[Check]) -> str:
  """A table of comparisons, one a line."""
  rows = [('part', 'compared', 'result', 'limit', 'rows', 'detects', '')]
  for check in checks:
    is_count = check.measure.startswith('differing')
    rows.append(
      (
        check.part,
        check.compared,
        f'{check.measure} {check.value:.0f}' if is_count else f'{check.measure} {check.value:.2g}',
        f'{check.limit:.2g}',
        f'{check.num_samples:,}' if check.num_samples else 'all',
        f'{check.detectable_bias:.2g}',
        'pass' if check.is_passed else 'FAIL',
      )
    )
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
  lines.insert(1, '─' * max(map(len, lines)))
  return '\n'.join(lines)


def worst_of(part: str, compared: str, results: Sequence[ChiSquare], level: float = LEVEL / 2) -> Check:
  """The smallest p-value of several tests as one comparison; ValueError if there are too few samples.

  They share `level`, by default half of a proof's, since two of its parts can fail by chance.
  """
  level /= len(results)
  worst = min(results, key=lambda result: result.p_value)
  if min(result.num_cells for result in results) < 2:
    raise ValueError(f'{compared}: too few samples to compare anything')
  detected = max(result.detectable_bias(level, POWER) for result in results)
  return Check(part, compared, 'p-value', worst.p_value, level, sum(r.num_samples for r in results), detected)


def _where(error: BaseException) -> str:
  """The text ' (file:line)' of the deepest frame outside this library, else of the deepest frame in it, else ''."""
  foreign = tuple(sysconfig.get_paths()[name] for name in ('stdlib', 'purelib', 'platlib'))
  testing = str(pathlib.Path(__file__).parent)
  package = str(pathlib.Path(__file__).parents[1])
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if not frame.filename.startswith((*foreign, '<')) and not frame.filename.startswith(testing)
  ]
  outside = [frame for frame in frames if not frame.filename.startswith(package)]
  for frame in (outside or frames)[-1:]:
    return f' ({frame.filename}:{frame.lineno})'
  return ''


def describe_error(error: BaseException) -> str:
  """An exception in one line: its type, the first line of its message, and where it was raised."""
  lines = str(error).strip().splitlines()
  return f'{type(error).__name__}{": " + lines[0] if lines else ""}{_where(error)}'
