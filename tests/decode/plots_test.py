"""Looks of methods: distinct for everyone, and the same wherever a method is drawn."""

import itertools
import pathlib

import numpy as np
import pytest

from decode import plots
from decode.papers.exhibits import FIGURES
from decode.study import from_csv
from spectr_jax import METHODS
from spectr_jax.methods import FURTHER_METHODS

_FIGURES = pathlib.Path(__file__).parents[2] / 'docs' / 'figures'


def _linear(color):
  channels = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
  return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# Linear RGB as seen without the cones for red or green (Machado et al. 2009).
_SEEN = {
  'all cones': np.eye(3),
  'no red': np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
  'no green': np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}


def _lab(linear):
  to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
  xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1, 1.089])
  x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
  return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize('eyes', _SEEN)
def test_methods_look_different_to_everyone(eyes):
  assert set(plots.COLORS) == {*METHODS, *FURTHER_METHODS, plots.OPTIMUM}
  assert len(set(plots.MARKERS.values())) == len(plots.MARKERS)
  seen = {name: _lab(_SEEN[eyes] @ _linear(color)) for name, color in plots.COLORS.items()}
  distances = {pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
  # Two and a half is where a difference begins to be seen side by side.
  assert min(distances.values()) > 10, min(distances, key=distances.get)


def test_a_method_that_is_not_lossless_keeps_its_look():
  assert plots.style_of('spectr_gbv (not lossless)') == plots.style_of('spectr_gbv')


@pytest.mark.parametrize('name', ['ladder', 'methods', 'batch_fig2', 'spectr_fig5'])
def test_a_legend_takes_no_width_from_its_panels(name):
  figure = FIGURES[name].draw(from_csv((_FIGURES / f'{name}.csv').read_text()))
  figure.canvas.draw()
  (legend,) = figure.legends
  box, whole = legend.get_window_extent(), figure.bbox
  places = [axes.get_window_extent() for axes in figure.axes]
  assert max(place.x1 for place in places) - min(place.x0 for place in places) > 0.87 * whole.width
  assert whole.x0 <= box.x0 < box.x1 <= whole.x1
  assert whole.y0 <= box.y0 < box.y1 < min(place.y0 for place in places)
  assert places[0].height > 0.5 * whole.height
