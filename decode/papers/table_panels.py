"""The picture of a table: measured values with their errors, and crosses where the paper prints a number."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from decode.papers import plots
from decode.papers.exhibit import Row, Value

# Where the parts of a round are stacked, they take the place of methods.
_COLORS = plots.COLORS | {'draft': '#E69F00', 'target': '#0072B2', 'verification': '#D55E00', 'rest': '#999999'}
_HATCHES = ('', '//', '..', 'xx', '--', '++', 'oo')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  x: str  # column of the horizontal axis
  y: tuple[str, ...]  # columns that are drawn; several only of a `stack`
  by: tuple[str, ...] = ()  # columns that tell lines or bars apart: `method` by color, the others by look
  paper: str | None = None  # column of published values
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values that a row must have
  kind: str = 'line'  # `line`, `bar` or `stack`

  @property
  def column(self) -> str:
    [column] = self.y
    return column


def _number(cell: Any) -> float:
  """The number of a cell, or NaN, which is not drawn."""
  return cell.number if isinstance(cell, Value) else math.nan


def _errors(cells: Sequence[Any]) -> list[list[float]]:
  """Lengths of the error bars below and above the values; NaN where they are not known."""
  ends = []
  for cell in cells:
    low, high = math.nan, math.nan
    if isinstance(cell, Value) and cell.spread is not None:
      low = high = cell.spread
    elif isinstance(cell, Value) and cell.interval is not None:
      low, high = cell.number - cell.interval[0], cell.interval[1] - cell.number
    ends.append((low, high))
  return [list(side) for side in zip(*ends)]


def _telling_columns(rows: Sequence[Row], panel: Panel) -> list[str]:
  """The columns of `panel.by` in which rows differ."""
  return [column for column in panel.by if len({str(row[column]) for row in rows}) > 1]


@dataclasses.dataclass(frozen=True)
class _Group:
  """Rows that are one line, or bars of one look."""

  name: str
  rows: list[Row]
  color: str  # the method's, or a shade
  look: int  # index of the marker or hatch


def _groups(rows: Sequence[Row], panel: Panel) -> list[_Group]:
  """Rows by the columns that tell them apart. Columns with one value everywhere are left out of the names."""
  telling = _telling_columns(rows, panel)
  by_key: dict[tuple, list[Row]] = {}
  for row in rows:
    # With and without the mark of not being lossless, which depends on the tree, it is one method.
    key = (row[column].split()[0] if column == 'method' else row[column] for column in telling)
    by_key.setdefault(tuple(key), []).append(row)
  looks: dict[tuple, int] = {}
  groups, num_shades = [], len(plots.SHADES)
  for place, (key, members) in enumerate(by_key.items()):
    parts = dict(zip(telling, key))
    if 'method' in parts:
      parts['method'] = max((row['method'] for row in members), key=len)
    name = ', '.join(value if isinstance(value, str) else f'{column}={value}' for column, value in parts.items())
    method = parts.pop('method', None)
    if method is None:
      groups.append(_Group(name or 'measured', members, plots.SHADES[place % num_shades], place // num_shades))
      continue
    look = looks.setdefault(tuple(parts.values()), len(looks))
    groups.append(_Group(name, members, plots.method_color(method), look))
  return groups


def _draw_lines(axes, panel: Panel, rows: Sequence[Row]) -> None:
  for group in _groups(rows, panel):
    ordered = sorted(group.rows, key=lambda row: row[panel.x])
    xs, cells = [row[panel.x] for row in ordered], [row[panel.column] for row in ordered]
    marker = plots.PLAIN_MARKERS[group.look % len(plots.PLAIN_MARKERS)]
    axes.errorbar(
      xs, list(map(_number, cells)), _errors(cells), color=group.color, marker=marker, markersize=4, capsize=2,
      linewidth=1, label=group.name,
    )  # fmt: skip
    xs, ys = _published_points(panel, xs, ordered)
    if xs:
      axes.plot(xs, ys, color=group.color, marker='x', linestyle='--', linewidth=1)
  axes.set_xticks(sorted({row[panel.x] for row in rows}))


def _draw_bars(axes, panel: Panel, rows: Sequence[Row]) -> None:
  places = {x: place for place, x in enumerate(dict.fromkeys(row[panel.x] for row in rows))}
  groups = _groups(rows, panel)
  width = 0.8 / len(groups)
  for index, group in enumerate(groups):
    left = [places[row[panel.x]] + width * (index + 0.5) - 0.4 for row in group.rows]
    cells = [row[panel.column] for row in group.rows]
    axes.bar(
      left, list(map(_number, cells)), width, yerr=_errors(cells), label=group.name, color=group.color,
      hatch=_HATCHES[group.look % len(_HATCHES)], edgecolor='white', linewidth=0.3, error_kw={'linewidth': 0.8},
    )  # fmt: skip
    axes.plot(*_published_points(panel, left, group.rows), 'kx', markersize=4)
  labels = [textwrap.fill(str(x), 12, break_long_words=False) for x in places]
  axes.set_xticks(list(places.values()), labels, fontsize=min(10, 40 / len(places)))


def _published_points(panel: Panel, xs: Sequence[float], rows: Sequence[Row]) -> tuple[list, list]:
  """Coordinates of the rows that have a published value; none if the panel shows none."""
  points = [(x, row[panel.paper].number) for x, row in zip(xs, rows) if panel.paper and row[panel.paper] is not None]
  return [x for x, _ in points], [y for _, y in points]


def _draw_stacks(axes, panel: Panel, rows: Sequence[Row]) -> None:
  stacks = [row for row in rows if isinstance(row[panel.y[0]], Value)]
  telling = _telling_columns(stacks, panel)
  names = [', '.join([row[panel.x], *(f'{column}={row[column]}' for column in telling)]) for row in stacks]
  # A part below zero cannot be stacked, so it extends left of the axis.
  ends = [0.0] * len(stacks)
  for part in panel.y:
    lengths = [_number(row[part]) for row in stacks]
    lefts = [end if length >= 0 else 0 for end, length in zip(ends, lengths)]
    axes.barh(names, lengths, left=lefts, label=part, color=_COLORS[part])
    ends = [end + max(length, 0) for end, length in zip(ends, lengths)]
  axes.invert_yaxis()


_DRAW = {'line': _draw_lines, 'bar': _draw_bars, 'stack': _draw_stacks}


def draw(panels: Sequence[Panel], rows: Sequence[Row], *, title: str, footer: str, kind: str = 'png') -> bytes:
  """A picture of the panels, side by side, between a title and a footer, as `png` or `svg`."""
  figure, axes = plots.bare_panels(len(panels), figsize=(max(7, 5.5 * len(panels)), 5.5), dpi=120)
  for each, panel in zip(axes, panels):
    shown = [row for row in rows if all(row.get(column) == value for column, value in panel.where.items())]
    if shown:
      _DRAW[panel.kind](each, panel, shown)
    if panel.kind == 'stack':
      each.set(ylabel=panel.x, xlabel=f'{", ".join(panel.y)}, seconds per prompt')
    else:
      each.set(xlabel=panel.x, ylabel=', '.join(panel.y))
    each.grid(alpha=0.3)
  crosses = 'crosses: the paper' if any(panel.paper for panel in panels) else None
  axes[-1].legend(fontsize=6, loc='center left', bbox_to_anchor=(1, 0.5), title=crosses, title_fontsize=6)
  width = int(16 * figure.get_figwidth())  # characters of size 6
  for write, text, size in ((figure.suptitle, title, 9), (figure.supxlabel, footer, 6)):
    lines = '\n'.join(textwrap.wrap(text, width * 6 // size))
    write(lines, fontsize=size, parse_math=False)  # file names may hold dollar signs
  return plots.save(figure, kind)
