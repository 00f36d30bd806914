"""Figures of the papers: rows of plain numbers as CSV, a picture drawn from them, and a paragraph on what it shows."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from decode.experiment import metrics
from decode.experiment.records import csv_of
from decode.experiment.workload import portable
from decode.papers import plots
from decode.papers.exhibit import Exhibit, Request, Results, Row, describe_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure(Exhibit):
  """A figure of a paper."""

  kind = 'figure'
  data_format = 'csv'

  draw: Callable[[Sequence[Row]], Any]  # the rows, as a figure of matplotlib
  tell: Callable[[Sequence[Row]], str]  # a paragraph on what they show

  def describe(self, request: Request, results: Results) -> list[str]:
    """Models, prompts and sizes of the rows; no line for what a figure has none of."""
    del results
    lines = []
    if self.has_models:
      lines.append(f'target {portable(request.target)}, draft {portable(request.draft)}, temperature 1')
    lines += [f'prompts: the first of {path or "pretrained/prompts.jsonl"}' for path in request.prompts.values()]
    sizes = describe_sizes(request.sizes.used)
    if self.is_random:
      sizes.append(f'seed {request.seed}')
    return [*lines, *([', '.join(sizes)] if sizes else [])]

  def show(self, console: Console, rows: Sequence[Row], about: Sequence[str]) -> None:
    for line in (self.title, '', self.tell(rows), '', *about):
      console.print(line, soft_wrap=True)

  def to_data(self, name: str, request: Request, results: Results, about: Sequence[str]) -> str:
    del name, request, about
    return csv_of(results.rows)

  def to_markdown(self, name: str, rows: Sequence[Row], about: Sequence[str]) -> str:
    """The picture, the paragraph, and the lines of `describe` as a list."""
    lines = [f'- {line}' for line in about]
    return '\n'.join([f'# {self.title}', '', f'![{name}]({name}.svg)', '', self.tell(rows), '', *lines]) + '\n'

  def to_image(self, rows: Sequence[Row], about: Sequence[str] = (), *, kind: str = 'png') -> bytes:
    del about
    return plots.to_image(self.draw(rows), title=self.title, kind=kind)


def _parse(text: str) -> int | float | str | None:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text or None


def from_csv(text: str) -> list[Row]:
  """The rows that `csv_of` wrote; a text that reads as a number becomes one."""
  return [{name: _parse(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


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
