"""Pictures of rows: what is drawn is a specification, and a method has the same color and marker in all of them."""

from __future__ import annotations

import dataclasses
import io
import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from decode.study import Row, Value, by_value, column, select


def check_available() -> None:
  """Raises `ValueError` if matplotlib is not installed."""
  try:
    import matplotlib  # noqa: F401
  except ImportError as error:
    raise ValueError(f"figures need matplotlib ({error}): pip install -e '.[plots]'") from error


OPTIMUM = 'optimum'

# A method looks the same wherever it is drawn. The first colors are those of Okabe and Ito; the others were chosen to
# stay apart from all with any kind of color blindness.
_LOOKS = {
  'autoregressive': ('#555555', 'h'), 'speculative': ('#E69F00', 'o'), 'block': ('#56B4E9', 's'),
  'spectr': ('#009E73', 'D'), 'greedy_block': ('#8C6D00', '^'), 'spectr_gbv': ('#CC79A7', 'v'),
  'race_block': ('#0072B2', 'P'), 'race': ('#4D004B', 'X'), 'specinfer': ('#DDCC77', '*'), 'batch': ('#661100', '<'),
  'gsd': ('#B2182B', '>'), 'ersd': ('#332288', 'p'), 'traversal': ('#8FC9AE', 'd'), 'univer': ('#6688FF', (6, 1, 0)),
  'ratio_block': ('#00692D', (3, 1, 0)), 'race_layers': ('#FF2D4B', (8, 1, 0)),
  'race_traversal': ('#9000F8', (4, 1, 0)), 'decoding_opt': ('#1A9850', 'H'), 'decoding_uno': ('#C5B0D5', '8'),
  OPTIMUM: ('#000000', '.'),
}  # fmt: skip
COLORS = {name: color for name, (color, _) in _LOOKS.items()}
MARKERS = {name: marker for name, (_, marker) in _LOOKS.items()}
# For lines and bars that stand for no method.
PLAIN_MARKERS = 'osD^vP*X<>'
SHADES = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#D55E00', '#56B4E9', '#8C6D00', '#555555')
THEORY, OTHER = '#D55E00', '#999999'
_TEXT_SIZE = 8

Style = Mapping[str, Any]


def method_color(name: str) -> str:
  """The color of the method that a label starts with, as `#RRGGBB`; gray if it starts with no method."""
  return COLORS.get(name.split()[0], OTHER)


def style_of(name: str) -> dict[str, Any]:
  """Color and marker of the method that a label starts with; a gray circle if it starts with no method."""
  return {'color': method_color(name), 'marker': MARKERS.get(name.split()[0], 'o')}


def scale_of(values: Iterable[Hashable]) -> dict[Hashable, dict[str, Any]]:
  """A color and a marker for each value of a quantity, from dark to light in their order."""
  from matplotlib import colormaps

  values = list(dict.fromkeys(values))
  places = [0.85 * index / max(len(values) - 1, 1) for index in range(len(values))]
  return {
    value: {'color': colormaps['viridis'](place), 'marker': PLAIN_MARKERS[index % len(PLAIN_MARKERS)]}
    for index, (value, place) in enumerate(zip(values, places))
  }


def bare_panels(
  number: int, *, figsize: tuple[float, float], dpi: int, rows: int = 1, sharey: bool = False
) -> tuple[Any, list[Any]]:
  """A figure without a display, of a width and height in inches, and its panels row by row, `number` in each row."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=figsize, dpi=dpi, layout='constrained')
  FigureCanvasAgg(figure)
  return figure, list(figure.subplots(rows, number, squeeze=False, sharey=sharey).flat)


def panels_of(
  number: int, *, rows: int = 1, width: float = 3.4, height: float = 3.1, sharey: bool = False
) -> tuple[Any, list[Any]]:
  """A figure and its panels row by row, with a grid, each of a size in inches; `legend` makes room for itself."""
  figsize = width * number, height * rows
  figure, axes = bare_panels(number, figsize=figsize, dpi=110, rows=rows, sharey=sharey)
  for each in axes:
    each.grid(alpha=0.3)
    each.tick_params(labelsize=_TEXT_SIZE)
  return figure, axes


def name_axes(axes, *, x: str, y: str = '', title: str = '', **more) -> None:
  """Labels the axes of a panel; further arguments are those of `Axes.set`."""
  axes.set_title(title, fontsize=_TEXT_SIZE + 1)
  axes.set_xlabel(x, fontsize=_TEXT_SIZE)
  axes.set_ylabel(y, fontsize=_TEXT_SIZE)
  axes.set(**more)


def number_ticks(axes, values: Iterable[float]) -> None:
  """Makes the horizontal axis logarithmic, with plain numbers as ticks: of more than six only powers of 2."""
  values = sorted(set(values))
  axes.set_xscale('log', base=2)
  shown = [value for value in values if math.log2(value).is_integer()] if len(values) > 6 else values
  axes.set_xticks(shown, [f'{value:g}' for value in shown])
  axes.minorticks_off()


def draw_line(axes, rows: Sequence[Mapping[str, Any]], *, x: str, y: str, label: str, band: bool = False, **style):
  """Draws one line through the rows, ordered by column `x`, with intervals from `low` to `high` where rows have them.

  Intervals of `x` are from `left` to `right`. Rows whose `y` is None are left out. With `band` intervals are one band
  instead of bars. The style is that of `Axes.plot`.
  """
  rows = sorted((row for row in rows if row[y] is not None), key=lambda row: row[x])
  xs, ys = [row[x] for row in rows], [row[y] for row in rows]
  style = {'markersize': 4, 'linewidth': 1.2} | style
  axes.plot(xs, ys, label=label, **style)
  bars = {'fmt': 'none', 'ecolor': style.get('color'), 'elinewidth': 1, 'capsize': 2}
  for row in rows:
    if row.get('left') is not None:
      sides = [[max(row[x] - row['left'], 0)], [max(row['right'] - row[x], 0)]]
      axes.errorbar([row[x]], [row[y]], xerr=sides, **bars)
  known = [row for row in rows if row.get('low') is not None]
  if not known:
    return
  xs, ys, lows, highs = zip(*((row[x], row[y], row['low'], row['high']) for row in known))
  if band:
    axes.fill_between(xs, lows, highs, color=style.get('color'), alpha=0.25, linewidth=0)
    return
  errors = [[y - low for y, low in zip(ys, lows)], [high - y for y, high in zip(ys, highs)]]
  axes.errorbar(xs, ys, errors, **bars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
  """Lines through rows, one for each value of the column `by`."""

  x: str
  y: str
  by: str | None = None
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values that a row must have
  label: str = '{}'  # of a value of `by`
  style: Callable[[Any], Style] | None = style_of  # of a value of `by`; None for shades in the order of the values
  more: Style = dataclasses.field(default_factory=dict)  # of all lines
  are_apart: bool = False  # whether `x` is moved a little by line, so that intervals do not cover each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  lines: tuple[Lines, ...]
  each: str | None = None  # a panel for every value of this column, which `{}` of the title stands for
  where: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # values that a row must have
  x: str = ''  # what the axes are called
  y: str = ''
  title: str = ''
  are_ticks_numbers: bool = True  # see `number_ticks`
  more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `Axes.set`
  finish: Callable[[Any], None] = lambda axes: None  # called with the axes


def draw_lines(axes, lines: Lines, rows: Sequence[Row], names: Mapping[Any, str] | None = None) -> None:
  names = names or {}
  groups = by_value(select(rows, **lines.where), lines.by) if lines.by else {None: select(rows, **lines.where)}
  style = lines.style or scale_of(groups).get
  for place, (value, own) in enumerate(groups.items()):
    if lines.are_apart:
      own = [row | {lines.x: row[lines.x] * 1.03 ** (place - len(groups) / 2)} for row in own]
    look = (dict(style(value)) if lines.by else {}) | lines.more
    draw_line(axes, own, x=lines.x, y=lines.y, label=lines.label.format(names.get(value, value)), **look)


def draw(
  panels: Sequence[Panel],
  rows: Sequence[Row],
  *,
  names: Mapping[Any, str] | None = None,
  title: str = '',
  sharey: bool = False,
  **size: float,
):
  """The rows as a figure of matplotlib, with one legend under a title; with `sharey` the first panel names the axis.

  `names` are what values of `Panel.each` and `Lines.by` are called, `size` the width and height of a panel.
  """
  names, parts = names or {}, []
  for panel in panels:
    own = select(rows, **panel.where)
    parts += [(panel, *part) for part in (by_value(own, panel.each) if panel.each else {None: own}).items()]
  figure, every = panels_of(len(parts), sharey=sharey, **size)
  for axes, (panel, value, own) in zip(every, parts):
    y = panel.y if axes is every[0] or not sharey else ''
    name_axes(axes, x=panel.x, y=y, title=panel.title.format(names.get(value, value)))
    if value in COLORS:
      axes.title.set_color(COLORS[value])
    for lines in panel.lines:
      draw_lines(axes, lines, own, names)
    if panel.are_ticks_numbers:
      number_ticks(axes, column(own, panel.lines[0].x))
    axes.set(**panel.more)
    panel.finish(axes)
  legend(figure, every, title=title)
  return figure


def legend(figure, axes, *, title: str = '') -> None:
  """Puts one legend below all panels, with every name once: beside them it would leave them little of a narrow page."""
  entries = {}
  for each in axes if isinstance(axes, list) else [axes]:
    handles, labels = each.get_legend_handles_labels()
    entries |= {label: handle for handle, label in zip(handles, labels) if label not in entries}
  width = 0.7 + 0.007 * _TEXT_SIZE * max(map(len, entries), default=0)  # inches of an entry, with its line and margins
  columns = max(1, min(len(entries), int(figure.get_figwidth() / width)))
  lines = -(-len(entries) // columns) + bool(title)
  figure.set_figheight(figure.get_figheight() + 0.021 * _TEXT_SIZE * lines + 0.15)
  text = {'fontsize': _TEXT_SIZE, 'title': title, 'title_fontsize': _TEXT_SIZE}
  figure.legend(entries.values(), entries, loc='outside lower center', ncols=columns, **text)


def to_image(figure, *, title: str, kind: str) -> bytes:
  """The figure under a title, as `png` or `svg`."""
  width = int(figure.get_figwidth() * 13)
  figure.suptitle('\n'.join(textwrap.wrap(title, width)), fontsize=_TEXT_SIZE + 2, parse_math=False)
  return save(figure, kind)


# Browsers invert a picture for readers who prefer dark pages, and turn its hues back.
_DARK = '@media (prefers-color-scheme: dark) { #figure_1 { filter: invert(0.92) hue-rotate(180deg); } }'


def save(figure, kind: str) -> bytes:
  """The figure as `png` or `svg`, the same bytes every time; as SVG for light and dark pages."""
  from matplotlib import rc_context

  content = io.BytesIO()
  if kind == 'png':
    figure.savefig(content, format=kind, metadata={'Software': None})
    return content.getvalue()
  with rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'spectr_jax'}):
    figure.savefig(content, format=kind, metadata={'Date': None})
  return content.getvalue().replace(b'</style>', f'{_DARK}</style>'.encode(), 1)


# Pictures of tables.

# Where the parts of a round are stacked, they take the place of methods.
_PART_COLORS = {'draft': '#E69F00', 'target': '#0072B2', 'verification': '#D55E00', 'rest': '#999999'}
_HATCHES = ('', '//', '..', 'xx', '--', '++', 'oo')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bars:
  """Measured values with their errors, and crosses where a paper prints a number."""

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


def _telling_columns(rows: Sequence[Row], panel: Bars) -> list[str]:
  """The columns of `panel.by` in which rows differ."""
  return [column for column in panel.by if len({str(row[column]) for row in rows}) > 1]


@dataclasses.dataclass(frozen=True)
class _Group:
  """Rows that are one line, or bars of one look."""

  name: str
  rows: list[Row]
  color: str  # the method's, or a shade
  look: int  # index of the marker or hatch


def _groups(rows: Sequence[Row], panel: Bars) -> list[_Group]:
  """Rows by the columns that tell them apart. Columns with one value everywhere are left out of the names."""
  telling = _telling_columns(rows, panel)
  by_key: dict[tuple, list[Row]] = {}
  for row in rows:
    # With and without the mark of not being lossless, which depends on the tree, it is one method.
    key = (row[column].split()[0] if column == 'method' else row[column] for column in telling)
    by_key.setdefault(tuple(key), []).append(row)
  looks: dict[tuple, int] = {}
  groups, num_shades = [], len(SHADES)
  for place, (key, members) in enumerate(by_key.items()):
    parts = dict(zip(telling, key))
    if 'method' in parts:
      parts['method'] = max((row['method'] for row in members), key=len)
    name = ', '.join(value if isinstance(value, str) else f'{column}={value}' for column, value in parts.items())
    method = parts.pop('method', None)
    if method is None:
      groups.append(_Group(name or 'measured', members, SHADES[place % num_shades], place // num_shades))
      continue
    look = looks.setdefault(tuple(parts.values()), len(looks))
    groups.append(_Group(name, members, method_color(method), look))
  return groups


def _draw_errors(axes, panel: Bars, rows: Sequence[Row]) -> None:
  for group in _groups(rows, panel):
    ordered = sorted(group.rows, key=lambda row: row[panel.x])
    xs, cells = [row[panel.x] for row in ordered], [row[panel.column] for row in ordered]
    marker = PLAIN_MARKERS[group.look % len(PLAIN_MARKERS)]
    axes.errorbar(
      xs, list(map(_number, cells)), _errors(cells), color=group.color, marker=marker, markersize=4, capsize=2,
      linewidth=1, label=group.name,
    )  # fmt: skip
    xs, ys = _published_points(panel, xs, ordered)
    if xs:
      axes.plot(xs, ys, color=group.color, marker='x', linestyle='--', linewidth=1)
  axes.set_xticks(sorted({row[panel.x] for row in rows}))


def _draw_bars(axes, panel: Bars, rows: Sequence[Row]) -> None:
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


def _published_points(panel: Bars, xs: Sequence[float], rows: Sequence[Row]) -> tuple[list, list]:
  """Coordinates of the rows that have a published value; none if the panel shows none."""
  points = [(x, row[panel.paper].number) for x, row in zip(xs, rows) if panel.paper and row[panel.paper] is not None]
  return [x for x, _ in points], [y for _, y in points]


def _draw_stacks(axes, panel: Bars, rows: Sequence[Row]) -> None:
  stacks = [row for row in rows if isinstance(row[panel.y[0]], Value)]
  telling = _telling_columns(stacks, panel)
  names = [', '.join([row[panel.x], *(f'{column}={row[column]}' for column in telling)]) for row in stacks]
  # A part below zero cannot be stacked, so it extends left of the axis.
  ends = [0.0] * len(stacks)
  for part in panel.y:
    lengths = [_number(row[part]) for row in stacks]
    lefts = [end if length >= 0 else 0 for end, length in zip(ends, lengths)]
    axes.barh(names, lengths, left=lefts, label=part, color=_PART_COLORS[part])
    ends = [end + max(length, 0) for end, length in zip(ends, lengths)]
  axes.invert_yaxis()


_DRAW = {'line': _draw_errors, 'bar': _draw_bars, 'stack': _draw_stacks}


def draw_bars(panels: Sequence[Bars], rows: Sequence[Row], *, title: str, footer: str, kind: str = 'png') -> bytes:
  """A picture of the panels, side by side, between a title and a footer, as `png` or `svg`."""
  figure, axes = bare_panels(len(panels), figsize=(max(7, 5.5 * len(panels)), 5.5), dpi=120)
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
  return save(figure, kind)
