"""Draws the share of the optimum that every lossless method keeps, from the results of `distance_to_optimum`.

Command   python -m benchmarks.draw_shares --results=docs/distance_to_optimum.json --output=docs/figures
Writes    shares.csv, shares.md, shares.png and shares.svg, as `decode.reproduce` does for its figures
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags
from etils import epath

from benchmarks.distance_to_optimum import BOUNDS, NAMES, means
from common import command_line
from common.json_file import read_json
from common.output_files import OutputFiles
from decode.papers import plots
from decode.papers.exhibit import Results, Row
from decode.papers.figure import Figure, by_value, select

NAME = 'shares'
_SHADE = '#555555'  # of what is no method


def _draw(rows: Sequence[Row]):
  groups = by_value(rows, 'K')
  figure, axes = plots.panels(len(groups), width=3.2, height=4.0, sharey=True)
  temperatures = list(by_value(rows, 'temperature'))
  # The best at the first temperature with the most drafts stand on top; those of single drafts are among them.
  order = {name: max(row['K'] * 10 + row['share'] for row in own) for name, own in by_value(rows, 'of').items()}
  names = sorted((name for name in NAMES if name in order), key=order.__getitem__)
  names += [name for name in reversed(BOUNDS) if name in order]
  for each, (number, own) in zip(axes, groups.items()):
    each.axvline(1, color=plots.COLORS[plots.OPTIMUM], linewidth=1)
    for shift, temperature in zip((0.17, -0.17), temperatures):
      for row in select(own, temperature=temperature):
        color = plots.method_color(row['of']) if row['of'] in NAMES else _SHADE
        marker = 'o' if temperature == temperatures[0] else 's'
        place = names.index(row['of']) + shift
        sides = [[row['share'] - row['low']], [row['high'] - row['share']]]
        style = {'color': color, 'markerfacecolor': color if marker == 'o' else 'white', 'markersize': 4}
        each.errorbar([row['share']], [place], xerr=sides, fmt=marker, elinewidth=1, capsize=2, **style)
    plots.name_axes(each, x='share of the optimum', title=f'K = {number}, L = {own[0]["L"]}')
    each.set_yticks(range(len(names)), [BOUNDS.get(name, name) for name in names])
  for temperature, marker in zip(temperatures, 'os'):
    face = '#333333' if marker == 'o' else 'white'
    label = f'temperature {temperature:g}'
    axes[0].plot([], [], marker, color='#333333', markerfacecolor=face, markersize=4, label=label)
  plots.legend(figure, axes, title='bars: the lowest and highest of the tables')
  return figure


def _tell(rows: Sequence[Row]) -> str:
  parts = []
  for (temperature, number), own in by_value(rows, 'temperature', 'K').items():
    best = sorted((row for row in own if row['of'] in NAMES), key=lambda row: -row['share'])[:3]
    found = ', '.join(f'{row["of"]} {row["share"]:.3f}' for row in best)
    parts.append(f'temperature {temperature:g}, K = {number}: {found}')
  first = rows[0]
  return (
    'Tokens that lossless methods for independent candidates keep of K drafts, in units of what the best rule without'
    f' state keeps, means over {first["tables"]} tables cut from the distributions of the pretrained pair. The best'
    f' three, {"; ".join(parts)}. Drafts are sampled, with standard errors of at most'
    f' {max(row["error"] for row in rows):.3f} per table. greedy_block carries state from one round to the next,'
    ' so that one round may keep more than the optimum. Methods for one draft are in the first panel alone; gsd, ersd'
    ' and univer draw other candidates, for which this is not the optimum.'
  )


FIGURE = Figure(
  title='The share of the optimum that lossless methods keep of K drafts',
  measure=lambda *_: Results(),
  draw=_draw,
  tell=_tell,
  has_models=False,
)


if __name__ == '__main__':
  _RESULTS = flags.DEFINE_string('results', 'docs/distance_to_optimum.json', 'Results of `distance_to_optimum`.')
  _OUTPUT = flags.DEFINE_string('output', None, 'Directory for the files.', required=True)

  def main(argv):
    del argv
    plots.check_available()
    content = read_json(_RESULTS.value, 'the results', 'name a file that benchmarks.distance_to_optimum wrote')
    if not isinstance(content, dict) or not content.get('results'):
      raise ValueError(f'{_RESULTS.value} holds no results of benchmarks.distance_to_optimum')
    rows = means(content['results'])
    about = [f'{_RESULTS.value}: {json.dumps(content["run"]["flags"])[1:-1]}'.replace('"', '')]
    directory = epath.Path(_OUTPUT.value)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {f'{NAME}.{kind}': directory / f'{NAME}.{kind}' for kind in ('csv', 'md', 'png', 'svg')}
    with OutputFiles(**paths).apart_from({'results': [epath.Path(_RESULTS.value)]}) as files:
      contents = FIGURE.files(NAME, None, Results(rows), about)
      files.write_after(lambda: print(FIGURE.tell(rows)), **contents)

  command_line.run(main)
