"""Figures of measured tables, as PNG; needs matplotlib, the extra `plots`."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from decode.tables import Panel, Row, Table, Value


def check_available() -> None:
  """Raises `ValueError` if figures cannot be drawn."""
  try:
    import matplotlib  # noqa: F401
  except ImportError as error:
    raise ValueError(f"figures need matplotlib ({error}): pip install -e '.[plots]'") from error


def _number(cell: Any) -> float | None:
  return cell.number if isinstance(cell, Value) else cell


def _spread(cell: Any) -> float:
  return (cell.spread or 0.0) if isinstance(cell, Value) else 0.0


def _groups(rows: Sequence[Row], by: Sequence[str]) -> dict[str, list[Row]]:
  """Rows by what tells them apart, columns that are the same everywhere left out of the name."""
  telling = [column for column in by if len({str(row[column]) for row in rows}) > 1]
  groups: dict[str, list[Row]] = {}
  for row in rows:
    name = ', '.join(str(row[c]) if isinstance(row[c], str) else f'{c}={row[c]}' for c in telling)
    groups.setdefault(name or 'measured', []).append(row)
  return groups


def _draw_lines(axes, panel: Panel, rows: Sequence[Row]) -> None:
  [column] = panel.y
  for place, (name, group) in enumerate(_groups(rows, panel.by).items()):
    color = f'C{place % 10}'
    points = [(row[panel.x], row[column]) for row in group if row[column] is not None]
    axes.errorbar(
      [x for x, _ in points], [_number(y) for _, y in points], [_spread(y) for _, y in points],
      color=color, marker='o', markersize=3, capsize=2, label=name,
    )  # fmt: skip
    printed = [(row[panel.x], row[panel.paper]) for row in group if panel.paper and row[panel.paper] is not None]
    if printed:
      axes.plot([x for x, _ in printed], [_number(y) for _, y in printed], color=color, marker='x', linestyle='--')
  axes.set_xticks(sorted({row[panel.x] for row in rows}))


def _draw_bars(axes, panel: Panel, rows: Sequence[Row]) -> None:
  [column] = panel.y
  places = {x: place for place, x in enumerate(dict.fromkeys(row[panel.x] for row in rows))}
  groups = _groups(rows, panel.by)
  width = 0.8 / len(groups)
  for index, (name, group) in enumerate(groups.items()):
    left = [places[row[panel.x]] + width * (index + 0.5) - 0.4 for row in group]
    heights = [_number(row[column]) for row in group]
    axes.bar(left, heights, width, yerr=[_spread(row[column]) for row in group], label=name, color=f'C{index % 10}')
    printed = [(x, row[panel.paper]) for x, row in zip(left, group) if panel.paper and row[panel.paper] is not None]
    axes.plot([x for x, _ in printed], [_number(y) for _, y in printed], 'kx', markersize=4)
  axes.set_xticks(list(places.values()), list(places))


def _draw_stacks(axes, panel: Panel, rows: Sequence[Row]) -> None:
  stacks = [row for row in rows if isinstance(row[panel.y[0]], Value)]
  names = [' '.join(f'{row[c]}' for c in (*panel.by, panel.x)) for row in stacks]
  # What is below zero hangs below the axis, as it cannot be stacked.
  bottoms = [0.0] * len(stacks)
  for part in panel.y:
    heights = [_number(row[part]) for row in stacks]
    axes.barh(names, heights, left=[b if h >= 0 else 0 for b, h in zip(bottoms, heights)], label=part)
    bottoms = [b + max(h, 0) for b, h in zip(bottoms, heights)]
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
  figure.suptitle('\n'.join(textwrap.wrap(table.title, width * 2 // 3)), fontsize=9)
  figure.supxlabel('\n'.join(textwrap.wrap(footer, width)), fontsize=6)
  content = io.BytesIO()
  figure.savefig(content, format='png')
  return content.getvalue()
