"""Figures of measured tables, as PNG; needs matplotlib, the extra `plots`."""

from __future__ import annotations

import dataclasses
import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from decode.papers import plots
from decode.papers.table import Panel, Row, Table, Value

# Parts of a round stand in for methods where these are stacked.
_COLORS = plots.COLORS | {'draft': '#E69F00', 'target': '#0072B2', 'verification': '#D55E00', 'rest': '#999999'}
_MARKERS = 'osD^vP*X<>'
_HATCHES = ('', '//', '..', 'xx', '--', '++', 'oo')


def _number(cell: Any) -> float:
  """NaN, which is not drawn, where there is nothing."""
  return cell.number if isinstance(cell, Value) else math.nan


def _errors(cells: Sequence[Any]) -> list[list[float]]:
  """How far below and above the error bars reach; NaN where that is not known."""
  ends = []
  for cell in cells:
    low, high = math.nan, math.nan
    if isinstance(cell, Value) and cell.spread is not None:
      low = high = cell.spread
    elif isinstance(cell, Value) and cell.interval is not None:
      low, high = cell.number - cell.interval[0], cell.interval[1] - cell.number
    ends.append((low, high))
  return [list(side) for side in zip(*ends)]


@dataclasses.dataclass(frozen=True)
class _Group:
  """Rows that are one line, or bars of one look.

  Attributes:
    name: What tells them apart from others.
    rows: The rows.
    color: Of their method, or their own where there is none.
    look: Number of what else tells them apart: marker, hatch.
  """

  name: str
  rows: list[Row]
  color: str
  look: int


def _groups(rows: Sequence[Row], panel: Panel) -> list[_Group]:
  """Rows by what tells them apart, columns that are the same everywhere left out of the name."""
  telling = [column for column in panel.by if len({str(row[column]) for row in rows}) > 1]
  by_key: dict[tuple, list[Row]] = {}
  for row in rows:
    # With and without the mark of what is not lossless on some trees: one method.
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
    groups.append(_Group(name, members, _COLORS.get(method.split()[0], plots.OTHER), look))
  return groups


def _draw_lines(axes, panel: Panel, rows: Sequence[Row]) -> None:
  [column] = panel.y
  for group in _groups(rows, panel):
    ordered = sorted(group.rows, key=lambda row: row[panel.x])
    xs, cells = [row[panel.x] for row in ordered], [row[column] for row in ordered]
    marker = _MARKERS[group.look % len(_MARKERS)]
    axes.errorbar(
      xs, list(map(_number, cells)), _errors(cells), color=group.color, marker=marker, markersize=4, capsize=2,
      linewidth=1, label=group.name,
    )  # fmt: skip
    printed = [(x, row[panel.paper]) for x, row in zip(xs, ordered) if panel.paper and row[panel.paper] is not None]
    if printed:
      points = [x for x, _ in printed], [_number(y) for _, y in printed]
      axes.plot(*points, color=group.color, marker='x', linestyle='--', linewidth=1)
  axes.set_xticks(sorted({row[panel.x] for row in rows}))


def _draw_bars(axes, panel: Panel, rows: Sequence[Row]) -> None:
  [column] = panel.y
  places = {x: place for place, x in enumerate(dict.fromkeys(row[panel.x] for row in rows))}
  groups = _groups(rows, panel)
  width = 0.8 / len(groups)
  for index, group in enumerate(groups):
    left = [places[row[panel.x]] + width * (index + 0.5) - 0.4 for row in group.rows]
    cells = [row[column] for row in group.rows]
    axes.bar(
      left, list(map(_number, cells)), width, yerr=_errors(cells), label=group.name, color=group.color,
      hatch=_HATCHES[group.look % len(_HATCHES)], edgecolor='white', linewidth=0.3, error_kw={'linewidth': 0.8},
    )  # fmt: skip
    printed = [
      (x, row[panel.paper]) for x, row in zip(left, group.rows) if panel.paper and row[panel.paper] is not None
    ]
    axes.plot([x for x, _ in printed], [_number(y) for _, y in printed], 'kx', markersize=4)
  axes.set_xticks(list(places.values()), list(places))


def _draw_stacks(axes, panel: Panel, rows: Sequence[Row]) -> None:
  stacks = [row for row in rows if isinstance(row[panel.y[0]], Value)]
  telling = [column for column in panel.by if len({str(row[column]) for row in stacks}) > 1]
  names = [', '.join([row[panel.x], *(f'{column}={row[column]}' for column in telling)]) for row in stacks]
  # What is below zero hangs left of the axis, as it cannot be stacked.
  ends = [0.0] * len(stacks)
  for part in panel.y:
    lengths = [_number(row[part]) for row in stacks]
    lefts = [end if length >= 0 else 0 for end, length in zip(ends, lengths)]
    axes.barh(names, lengths, left=lefts, label=part, color=_COLORS[part])
    ends = [end + max(length, 0) for end, length in zip(ends, lengths)]
  axes.invert_yaxis()


_DRAW = {'line': _draw_lines, 'bar': _draw_bars, 'stack': _draw_stacks}


def draw(table: Table, rows: Sequence[Row], footer: str) -> bytes:
  """A PNG of the table's panels: what is measured with its spread, and crosses where the paper prints a number."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(max(7, 5.5 * len(table.panels)), 5.5), dpi=120, layout='constrained')
  FigureCanvasAgg(figure)
  panels = figure.subplots(1, len(table.panels), squeeze=False)[0]
  for axes, panel in zip(panels, table.panels):
    shown = [row for row in rows if all(row.get(column) == value for column, value in panel.where.items())]
    if shown:
      _DRAW[panel.kind](axes, panel, shown)
    unit = ', seconds per prompt' if panel.kind == 'stack' else ''
    names = (panel.x, ', '.join(panel.y) + unit)
    axes.set(**dict(zip(('ylabel', 'xlabel') if panel.kind == 'stack' else ('xlabel', 'ylabel'), names)))
    axes.grid(alpha=0.3)
  title = 'crosses: the paper' if any(panel.paper for panel in table.panels) else None
  panels[-1].legend(fontsize=6, loc='center left', bbox_to_anchor=(1, 0.5), title=title, title_fontsize=6)
  width = int(16 * figure.get_figwidth())  # characters of this size
  for write, text, size in ((figure.suptitle, table.title, 9), (figure.supxlabel, footer, 6)):
    lines = '\n'.join(textwrap.wrap(text, width * 6 // size))
    write(lines, fontsize=size, parse_math=False)  # names of files may hold dollar signs
  content = io.BytesIO()
  figure.savefig(content, format='png')
  return content.getvalue()
