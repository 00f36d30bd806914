"""A study: cells that are measured, kept as rows that a later run goes on with, and shown as a table or a picture.

A row is a dictionary of plain values and `Value`s by column. Rows are all that a study keeps: tables are made here and
pictures by `decode.plots`, again at any time. Commands that decode, reproduce and measure share this form.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from rich import box
from rich.table import Table

from common.output_files import OutputFiles
from decode.experiment import metrics
from spectr_jax.io.untrusted import LARGE, map_of, object_of, read_object

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Value:
  """A measured or published number, with the half width behind its ±, or an interval whose ends are not equally far."""

  number: float
  spread: float | None = None
  interval: tuple[float, float] | None = None

  @classmethod
  def of(cls, mean: float, interval: tuple[float, float] | None) -> Value:
    """A mean with its interval, as ± where it is symmetric."""
    spread = metrics.half_width(mean, interval)
    return cls(mean, spread, interval=interval if spread is None else None)

  def __str__(self):
    digits = 2 if abs(self.number) >= 1 or not self.number else 1 - math.floor(math.log10(abs(self.number)))
    if self.spread is not None:
      return f'{self.number:.{digits}f} ± {self.spread:.{digits}f}'
    return metrics.text_of(self.number, self.interval, digits)


def study(
  cells: Mapping[str, Callable[[], Row]],
  show: Callable[[str, Row], None],
  *,
  output: epath.PathLike,
  run: Mapping[str, Any],
  inputs: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Row]:
  """Measures the cells that the output lacks and shows all, in turn; returns their rows.

  The output is JSON, `{"run", "results"}`, with the rows by cell. It is written after every cell, so that a study that
  was ended goes on with the same command. A cell that ends with a `RuntimeError`, such as too little memory, does not
  stop the others.

  Args:
    cells: What measures each row, by name.
    show: Called with the name and the row of every cell.
    output: The file of the rows, which may be there from before.
    run: What all rows share, as JSON values.
    inputs: Files that the output must not be, by flag.

  Raises:
    ValueError: The output is of another run, or the measurement of some cells failed.
  """
  path, failed = epath.Path(output), 0
  kept = read_object(path, {'run': object_of({}), 'results': map_of(object_of({}))}, LARGE) if path.exists() else {}
  if kept and kept.get('run') != run:
    raise ValueError(f'{path} holds results of another machine or of other flags: {kept.get("run")}')
  rows = kept.get('results') or {}
  with OutputFiles(output=output).apart_from(inputs or {}) as files:
    for name, measure in cells.items():
      if name not in rows:
        try:
          rows[name] = measure()
        except RuntimeError as error:
          failed += 1
          print(f'{name}: FAILED, {str(error).splitlines()[0]}', flush=True)
          continue
        files.write(output=json.dumps({'run': run, 'results': rows}, indent=2) + '\n')
      show(name, rows[name])
  if failed:
    raise ValueError(f'{failed} measurements failed')
  return rows


# Rows as files.


def to_csv(rows: Sequence[Row]) -> str:
  """A header and a line for each row; floats with all their digits, an empty cell for None."""
  text = io.StringIO()
  writer = csv.DictWriter(text, rows[0], lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()


def _parse(text: str) -> int | float | str | None:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text or None


def from_csv(text: str) -> list[Row]:
  """The rows that `to_csv` wrote; a text that reads as a number becomes one."""
  return [{name: _parse(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


def to_plain(rows: Sequence[Row]) -> list[Row]:
  """The rows as JSON values, a `Value` as `{"number", "spread", "interval"}`."""

  def plain(cell):
    return dataclasses.asdict(cell) if isinstance(cell, Value) else cell

  return [{column: plain(cell) for column, cell in row.items()} for row in rows]


# Rows as tables.


def _text_of(cell: Any) -> str:
  return '-' if cell is None else f'{cell:.4g}' if isinstance(cell, float) else str(cell)


def table(rows: Sequence[Row], *, right: Sequence[str] = (), whole: Sequence[str] = (), gap: int = 2) -> Table:
  """The rows as a table for a console. Columns `right` are aligned so, and so are numbers; `whole` ones never fold."""
  shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, gap - 1))
  for name in rows[0]:
    is_left = name not in right and any(isinstance(row[name], str) for row in rows)
    justify = 'left' if is_left else 'right'
    shown.add_column(name.replace(': ', ':\n'), justify=justify, no_wrap=name in whole)
  for row in rows:
    shown.add_row(*map(_text_of, row.values()))
  return shown


def markdown(rows: Sequence[Row]) -> str:
  """The rows as a table in Markdown."""
  body = [list(rows[0]), ['---'] * len(rows[0]), *([_text_of(cell) for cell in row.values()] for row in rows)]
  return ''.join(f'| {" | ".join(cells)} |\n' for cells in body)


def lasts(rows: Sequence[Row]) -> list[Row]:
  """The last row of each combination of texts, without columns that are empty there: what long lines come to."""
  last = {tuple(cell for cell in row.values() if isinstance(cell, str)): row for row in rows}
  names = [name for name in rows[0] if any(row[name] is not None for row in last.values())]
  return [{name: row[name] for name in names} for row in last.values()]


# Parts of rows.


def low_high(interval: tuple[float, float] | None) -> Row:
  """Columns `low` and `high` of an interval, None where there is none."""
  low, high = interval or (None, None)
  return {'low': low, 'high': high}


def ratio_columns(sums: np.ndarray, counts: np.ndarray) -> Row:
  """Columns `value`, the ratio of two totals over prompts, and `low` and `high`, its 95% interval."""
  return {'value': metrics.ratio(sums, counts)} | low_high(metrics.ratio_interval(sums, counts))


def select(rows: Sequence[Row], **where: Any) -> list[Row]:
  """The rows that have the given values, by column."""
  return [row for row in rows if all(row[name] == value for name, value in where.items())]


def column(rows: Sequence[Row], name: str, **where: Any) -> list:
  """One column of the rows that have the given values."""
  return [row[name] for row in select(rows, **where)]


def by_value(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[Any, list]:
  """Rows by their value in a column, or by those in several, values in the order of the rows."""
  groups: dict[Any, list] = {}
  for row in rows:
    groups.setdefault(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names), []).append(row)
  return groups
