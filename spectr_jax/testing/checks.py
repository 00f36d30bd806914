"""Comparisons of a method with what it must be: their results, the level that they share, and their table."""

from __future__ import annotations

import dataclasses
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

from spectr_jax.testing.chi_square import ChiSquare

LEVEL = 1e-3  # of all comparisons of a proof together
POWER = 0.95

# Called with the current activity, the steps done and the steps in total.
Notify: TypeAlias = Callable[[str, int, int], None]


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
  """The smallest p-value of several tests as one comparison.

  Args:
    part, compared: As in `Check`.
    results: The tests.
    level: The level that they share. By default half of the whole, since two parts of a proof can fail by chance.

  Raises:
    ValueError: There are too few samples to compare anything.
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
