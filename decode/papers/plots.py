"""Drawing that all pictures share: a color and a marker for each method, panels, lines with intervals, legends."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any


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


def panels(
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


def draw_lines(
  axes, rows: Sequence[Mapping[str, Any]], *, x: str, y: str, by: str, style: Callable[[Any], Style] = style_of, **more
) -> None:
  """Draws a line for each value of the column `by`, in the order of the rows, in its `style`; see `draw_line`."""
  for value in dict.fromkeys(row[by] for row in rows):
    own = [row for row in rows if row[by] == value]
    draw_line(axes, own, x=x, y=y, label=str(value), **(dict(style(value)) | more))


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
