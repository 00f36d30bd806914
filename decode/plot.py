"""Draws results of `decode.main`, or logs of training: `python -m decode.plot results.json --output=results.svg`.

A point of a result is a setting: its tokens per target call, and its speed relative to autoregressive decoding, or in
tokens per second where a file does not say how fast that is, with 95% intervals where the file has them. Settings of
the same name in several files stand in panels of their own, one for each file. Results may be JSON or CSV. Of logs of
training, `metrics.jsonl`, the losses and the shares of guesses kept are drawn. The data of a figure, `NAME.csv` as
`decode.reproduce --figure=NAME` writes it, gives that figure.
"""

from __future__ import annotations

import csv
import itertools
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from common import command_line
from common.json_file import read_json
from common.output_files import OutputFiles
from common.printable import printable
from decode import plots, study
from spectr_jax.io import untrusted

_KINDS = '.png', '.svg'
_MOST_FILES = 12
_ADVICE = 'name files that decode.main --output=FILE.json or FILE.csv wrote'
_LONGEST = 40  # characters of a name
_ROLES = 'target', 'draft'
_LOG_ADVICE = 'name files metrics.jsonl of a training'
_MOST_LOG = 2**27  # bytes
# Shares of guesses that the target keeps: of a model, and by depth of a head.
_SHARES = 'held_out_overlap', 'held_out_acceptance_'


def read_results(path: str) -> tuple[str, list[dict[str, Any]]]:
  """The models of a file of results, JSON or CSV of `decode.main --output`, and its points: settings over all seeds.

  A point has `method`, `shape`, `tokens_per_call`, `tokens_per_second`, `speedup`, and intervals `tokens_per_call_ci95`
  and `speedup_ci95`; the last three may be None. Of several seeds the ends are means of those of each seed, so that the
  interval is wide enough.
  """
  if pathlib.PurePath(path).suffix == '.csv':
    rows = _read_rows(path)
    models = {role: {'path': rows[0].get(role)} for role in _ROLES}
    content = {'results': [_unflattened(row) for row in rows], 'run': {'models': models}}
  else:
    content = read_json(path, 'the results', _ADVICE)
  try:
    return _names_of(content.get('run', {}).get('models', {})), _points_of(content['results'])
  except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
    raise ValueError(f'{path} holds no results ({type(error).__name__}: {error}); {_ADVICE}') from error


def _read_rows(path: str) -> list[dict[str, Any]]:
  """The rows of a CSV file, with numbers where texts read as such."""
  try:
    rows = study.from_csv(untrusted.read_text(path, untrusted.LARGE))
  except ValueError as error:
    raise ValueError(f'cannot read the results: {error}') from error
  except (csv.Error, TypeError) as error:  # a line has more or fewer cells than the first
    raise ValueError(f'{path} holds no table of results ({error}); {_ADVICE}') from error
  if not rows:
    raise ValueError(f'{path} holds no table of results; {_ADVICE}')
  return rows


def _unflattened(row: Mapping[str, Any]) -> dict[str, Any]:
  pairs = {name.removesuffix('_low'): name for name in row if name.endswith('_ci95_low')}
  return {**row, **{name: [row[low], row[f'{name}_high']] for name, low in pairs.items() if row[low] is not None}}


def _names_of(models: Mapping[str, Mapping[str, Any]]) -> str:
  """The names of models, as a run describes them, with their sizes; empty if it does not."""
  parts = []
  for role in _ROLES:
    model = models.get(role, {})
    if model.get('path') is not None:
      size = f' ({model["num_params"] / 1e6:.1f}M)' if model.get('num_params') else ''
      parts.append(f'{role} {printable(str(model["path"]))[-_LONGEST:]}{size}')
  return ', '.join(parts)


def _points_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  by_setting: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
  for result in results:
    by_setting.setdefault((printable(result['method'])[:_LONGEST], _shape_of(result)), []).append(result)
  if not by_setting:
    raise ValueError('there are none')
  return [_point(*setting, group) for setting, group in by_setting.items()]


def _shape_of(result: Mapping[str, Any]) -> str:
  if result.get('num_drafts'):
    return f'{result["num_drafts"]}x{result["draft_length"]}'
  return printable(result['tree'])[:30] if result.get('draft_length') else ''


def _point(method: str, shape: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  tokens, speeds = sum(result['tokens'] for result in results), [result.get('speedup') for result in results]
  return {
    'method': method,
    'shape': shape,
    'tokens_per_call': tokens / sum(result['target_calls'] for result in results),
    'tokens_per_call_ci95': _interval([result.get('block_efficiency_ci95') for result in results]),
    'tokens_per_second': tokens / sum(result['tokens'] / result['tokens_per_second'] for result in results),
    'speedup': None if None in speeds else sum(speeds) / len(speeds),
    'speedup_ci95': _interval([result.get('speedup_ci95') for result in results]),
  }


def _interval(intervals: Sequence[list[float] | None]) -> tuple[float, float] | None:
  """The means of the ends of intervals; None if any of them is missing."""
  if not all(intervals):
    return None
  low, high = (sum(ends) / len(ends) for ends in zip(*filter(None, intervals)))
  return low, high


def _with_bars(point: Mapping[str, Any], y: str) -> dict[str, Any]:
  """A point with the columns of its intervals, as `plots.draw_line` reads them."""
  (left, right), (low, high) = (
    point.get(f'{name}_ci95') or (None, None) for name in ('tokens_per_call', y)
  )  # fmt: skip
  return {**point, 'left': left, 'right': right, 'low': low, 'high': high}


def draw(
  files: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], kind: str, models: Sequence[str] | None = None
) -> bytes:
  """A picture, `png` or `svg`, of files, each a title and points as from `read_results`, in a panel of its own."""
  models = ['' for _ in files] if models is None else models
  is_shared = len(set(models)) == 1
  drawn, axes = plots.panels_of(len(files), width=4.2)
  for (title, own), names, panel in zip(files, models, axes):
    speed = 'speedup' if all(point['speedup'] is not None for point in own) else 'tokens_per_second'
    own = [_with_bars(point, speed) for point in own]
    lines = plots.Lines(x='tokens_per_call', y=speed, by='method', more={'linestyle': ''})
    plots.draw_lines(panel, lines, own)
    for point in own:
      place = point['tokens_per_call'], point[speed]
      panel.annotate(point['shape'], place, textcoords='offset points', xytext=(4, 3), fontsize=6, parse_math=False)
    right = max(point['right'] or point['tokens_per_call'] for point in own)
    top = max(min(point['high'] or 0, 2 * point[speed]) or point[speed] for point in own)
    limits = {'xlim': (0.9, 1.08 * right), 'ylim': (0, 1.12 * top)}
    name = 'speed relative to autoregressive' if speed == 'speedup' else 'tokens/s'
    lines = [*([title] if len(files) > 1 else []), *([] if is_shared or not names else textwrap.wrap(names, 60))]
    plots.name_axes(panel, x='tokens per target call', y=name, title='\n'.join(lines), **limits)
    panel.title.set_parse_math(False)
  has_bars = any(point.get('tokens_per_call_ci95') for _, own in files for point in own)
  plots.legend(drawn, axes, title='bars: 95%' if has_bars else '')
  of_models = f': {models[0]}' if is_shared and models[0] else ''
  return plots.to_image(drawn, title=f'Speed over tokens per call{of_models}', kind=kind)


def _draw_figure(path: str, kind: str) -> bytes | None:
  """The picture of a figure of `decode.reproduce` from its data; None if the file holds results."""
  rows = _read_rows(path)
  if 'target_calls' in rows[0]:
    return None
  from decode.papers.exhibits import FIGURES

  stem = pathlib.PurePath(path).stem
  name = next((name for name in sorted(FIGURES, key=len, reverse=True) if stem.startswith(name)), None)
  if name is None:
    raise ValueError(
      f'{path} holds neither results nor the data of a figure, which is in a file of its name: {", ".join(FIGURES)};'
      f' {_ADVICE}'
    )
  try:
    return FIGURES[name].to_image(rows, kind=kind)
  except (LookupError, TypeError, ValueError, ArithmeticError) as error:
    raise ValueError(f'{path} is not the data of the figure {name} ({type(error).__name__}: {error})') from error


def read_steps(path: str) -> list[dict[str, float]]:
  """The metrics of the steps of a log of at most 128 MiB: `step`, and of the others those that are finite numbers.

  An incomplete last line, as of a run that was killed, is left out. A file without steps or a loss is a `ValueError`.
  """
  lines = untrusted.read_text(path, _MOST_LOG).split('\n')[:-1]
  try:
    every = [untrusted.parse_json(line, f'line {number} of {path}').items() for number, line in enumerate(lines, 1)]
    steps = [{name: x for name, x in metrics if type(x) in (int, float) and abs(x) < 1e300} for metrics in every]
  except (AttributeError, ValueError) as error:
    raise ValueError(f'{path} is not of a training ({error}); {_LOG_ADVICE}') from error
  if not any('train_loss' in metrics for metrics in steps) or not all('step' in metrics for metrics in steps):
    raise ValueError(f'{path} holds no loss, or lines without a step; {_LOG_ADVICE}')
  return steps


def name_of(path: str) -> str:
  """The name of a run: that of its log, or of the folder of a log that is called `metrics.jsonl`."""
  path = pathlib.PurePath(path)
  return printable(path.parent.name if path.stem == 'metrics' and path.parent.name else path.stem)[:_LONGEST]


def draw_curves(runs: Sequence[tuple[str, Sequence[Mapping[str, float]]]], kind: str) -> bytes:
  """A picture, `png` or `svg`, of the losses of runs by name, and of the shares of guesses that the target keeps."""
  shares = {name for _, steps in runs for metrics in steps for name in metrics if name.startswith(_SHARES)}
  drawn, axes = plots.panels_of(1 + bool(shares), width=4.2)
  for (name, steps), color in zip(runs, itertools.cycle(plots.SHADES)):
    _draw_metric(axes[0], steps, 'train_loss', f'{name}, training', color=color)
    _draw_metric(axes[0], steps, 'held_out_loss', f'{name}, held out', color=color, linestyle='--', marker='o')
    for share, marker in zip(sorted(shares), plots.PLAIN_MARKERS):
      label = share.removeprefix('held_out_').replace('_', ' ')
      _draw_metric(axes[1], steps, share, f'{name}, {label}', color=color, marker=marker)
  plots.name_axes(axes[0], x='step', y='loss, nats per token')
  if shares:
    plots.name_axes(axes[1], x='step', y='share of guesses kept', ylim=(0, 1))
  plots.legend(drawn, axes)
  return plots.to_image(drawn, title='Training', kind=kind)


def _draw_metric(axes, steps, metric: str, label: str, **style: Any) -> None:
  if any(metric in metrics for metrics in steps):
    rows = [{'step': metrics['step'], metric: metrics.get(metric)} for metrics in steps]
    plots.draw_line(axes, rows, x='step', y=metric, label=label, **style)


def picture_of(paths: Sequence[str], kind: str) -> bytes:
  """A picture, `png` or `svg`, of results, or of logs of training (`.jsonl`), or of the data of one figure."""
  are_logs = {pathlib.PurePath(path).suffix == '.jsonl' for path in paths}
  if len(are_logs) > 1:
    raise ValueError(f'results, .json or .csv, and logs of training, .jsonl, are not drawn together; {_ADVICE}')
  if are_logs == {True}:
    return draw_curves([(name_of(path), read_steps(path)) for path in paths], kind)
  for path in paths:
    if pathlib.PurePath(path).suffix == '.csv' and (picture := _draw_figure(path, kind)) is not None:
      if len(paths) > 1:
        raise ValueError(f'{path} is the data of a figure, which is drawn alone')
      return picture
  results = [read_results(path) for path in paths]
  titles = [printable(pathlib.PurePath(path).stem)[:_LONGEST] for path in paths]
  return draw([(title, points) for title, (_, points) in zip(titles, results)], kind, [models for models, _ in results])


if __name__ == '__main__':
  _OUTPUT = flags.DEFINE_string('output', None, f'The picture, {" or ".join(_KINDS)}.', required=True)

  def main(*paths):
    if not 1 <= len(paths) <= _MOST_FILES:
      raise ValueError(f'from 1 to {_MOST_FILES} files, {len(paths)} were given; {_ADVICE}')
    kind = pathlib.PurePath(_OUTPUT.value).suffix
    if kind not in _KINDS:
      raise ValueError(f'output must end in {" or ".join(_KINDS)}, got {_OUTPUT.value}')
    plots.check_available()
    with OutputFiles(output=_OUTPUT.value).apart_from({'results': paths}) as files:
      files.write(output=picture_of(paths, kind.removeprefix('.')))

  command_line.run(
    main,
    [
      'results.json --output=results.svg',
      'cpu.json gpu.json --output=both.png',
      'a/metrics.jsonl b/metrics.jsonl --output=curves.svg',
      'docs/figures/ladder.csv --output=ladder.png',
    ],
    files='FILE',
  )
