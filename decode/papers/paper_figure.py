"""A figure of a paper: rows that are computed, a picture that is drawn from them, and what it shows."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decode.experiment.workload import Notify, portable
from decode.papers import plots, table
from decode.papers.table import Request, Sizes

Row = dict[str, int | float | str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """A figure of a paper. Computing, drawing and telling are apart, so that a picture can be drawn again from its CSV.

  Attributes:
    title: What is drawn, and of which figure of which paper.
    compute: Gives the rows; all have the same columns.
    draw: Draws them, as a figure of matplotlib.
    tell: A paragraph on what they show.
    sizes: How much is computed by default.
    has_models: Whether it is about a pair of models.
  """

  title: str
  compute: Callable[[Request, Notify], list[Row]]
  draw: Callable[[Sequence[Row]], Any]
  tell: Callable[[Sequence[Row]], str]
  sizes: Sizes = Sizes()
  has_models: bool = False

  @property
  def is_random(self) -> bool:
    """Whether anything is drawn at random, so that a seed matters."""
    return bool(self.sizes.num_prompts or self.sizes.num_runs)

  @property
  def has_prompts(self) -> bool:
    return bool(self.sizes.num_prompts)

  def run(self, request: Request, notify: Notify) -> list[Row]:
    """Computes the rows, after checking whatever can be checked before.

    Raises:
      ValueError: A model or the file of prompts is no good.
    """
    if self.has_models:
      _ = request.draft
      table.check(request)
    return self.compute(request, notify)

  def to_png(self, rows: Sequence[Row]) -> bytes:
    """The picture."""
    return plots.to_png(self.draw(rows), title=self.title)

  def to_markdown(self, name: str, rows: Sequence[Row], about: Sequence[str]) -> str:
    """The picture with what it shows, and how it came about."""
    lines = [f'- {line}' for line in about]
    return '\n'.join([f'# {self.title}', '', f'![{name}]({name}.png)', '', self.tell(rows), '', *lines]) + '\n'


def describe(figure: Figure, request: Request) -> list[str]:
  """What the rows were computed on."""
  lines = []
  if figure.has_models:
    lines.append(f'target {portable(request.target)}, draft {portable(request.draft)}, temperature 1')
  for path in request.prompts.values() if figure.has_prompts else ():
    lines.append(f'prompts: the first of {path or "pretrained/prompts.jsonl"}')
  used = [
    f'{name} {",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else value}'
    for name, value in request.sizes.used.items()
  ]
  if figure.is_random:
    used.append(f'seed {request.seed}')
  return [*lines, *([', '.join(used)] if used else [])]


def to_csv(rows: Sequence[Row]) -> str:
  """A header and a line for each row; floats with all their digits, nothing where there is no value."""
  stream = io.StringIO()
  writer = csv.DictWriter(stream, list(rows[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  return stream.getvalue()


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


def column(rows: Sequence[Row], name: str, **where: Any) -> list:
  """One column of the rows that have these values."""
  return [row[name] for row in select(rows, **where)]


def select(rows: Sequence[Row], **where: Any) -> list[Row]:
  """The rows that have these values."""
  return [row for row in rows if all(row[name] == value for name, value in where.items())]


def by_value(rows: Sequence[Mapping[str, Any]], name: str) -> dict[Any, list]:
  """Rows by what they have in a column, in the order in which the values come."""
  groups: dict[Any, list] = {}
  for row in rows:
    groups.setdefault(row[name], []).append(row)
  return groups
