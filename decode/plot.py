"""Draws results of `decode.main`, or logs of training: `python -m decode.plot results.json --output=results.svg`.

A point of a result is a setting: its tokens per target call, and its speed relative to autoregressive decoding, or in
tokens per second where a file does not say how fast that is. Settings of the same name in several files stand in panels
of their own, one for each file. Of logs of training, `metrics.jsonl`, the losses and the shares of guesses kept are
drawn.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from common import command_line
from common.json_file import read_json
from common.output_files import OutputFiles
from common.printable import printable
from decode import training_curves
from decode.papers import plots

_KINDS = '.png', '.svg'
_MOST_RESULTS, _MOST_FILES = 10_000, 12
_ADVICE = 'name files that decode.main --output=FILE.json wrote'
_NUMBERS = 'tokens', 'target_calls', 'tokens_per_second'


def read_points(path: str) -> list[dict[str, Any]]:
  """The settings of a file of results, over all seeds: `method`, `shape`, `tokens_per_call`, `tokens_per_second` and
  `speedup`, which may be None.

  Args:
    path: What `decode.main --output` wrote, as JSON.

  Raises:
    ValueError: The file holds something else; the message says what is wrong.
  """
  content = read_json(path, 'the results', _ADVICE)
  results = content.get('results') if isinstance(content, dict) else None
  if not isinstance(results, list) or not 1 <= len(results) <= _MOST_RESULTS:
    raise ValueError(f'{path} holds no results; {_ADVICE}')
  by_setting: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for number, result in enumerate(results, 1):
    if not isinstance(result, dict) or not all(_is_positive(result.get(name)) for name in _NUMBERS):
      raise ValueError(f'{path}: result {number} lacks {", ".join(_NUMBERS)}; {_ADVICE}')
    if not isinstance(result.get('method'), str):
      raise ValueError(f'{path}: result {number} names no method; {_ADVICE}')
    by_setting.setdefault((printable(result['method'])[:40], _shape_of(result)), []).append(result)
  return [_point(*setting, found) for setting, found in by_setting.items()]


def _is_positive(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _shape_of(result: Mapping[str, Any]) -> str:
  drafts, length = result.get('num_drafts'), result.get('draft_length')
  if _is_positive(drafts):
    return f'{drafts}x{length}'
  return printable(str(result.get('tree', '')))[:30] if _is_positive(length) else ''


def _point(method: str, shape: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  tokens = sum(result['tokens'] for result in found)
  speeds = [result.get('speedup') for result in found]
  return {
    'method': method,
    'shape': shape,
    'tokens_per_call': tokens / sum(result['target_calls'] for result in found),
    'tokens_per_second': tokens / sum(result['tokens'] / result['tokens_per_second'] for result in found),
    'speedup': sum(speeds) / len(speeds) if all(map(_is_positive, speeds)) else None,
  }


def draw(files: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], kind: str) -> bytes:
  """A picture of points, in a panel for each file.

  Args:
    files: Title and points of each, as from `read_points`.
    kind: `png` or `svg`.
  """
  figure, axes = plots.panels(len(files), width=4.2)
  for (title, own), panel in zip(files, axes):
    speed = 'speedup' if all(point['speedup'] is not None for point in own) else 'tokens_per_second'
    plots.draw_lines(panel, own, x='tokens_per_call', y=speed, by='method', linestyle='')
    for point in own:
      place = point['tokens_per_call'], point[speed]
      panel.annotate(point['shape'], place, textcoords='offset points', xytext=(4, 3), fontsize=6, parse_math=False)
    right, top = (max(point[name] for point in own) for name in ('tokens_per_call', speed))
    limits = {'xlim': (0.9, 1.08 * right), 'ylim': (0, 1.12 * top)}
    name = 'speed relative to autoregressive' if speed == 'speedup' else 'tokens/s'
    plots.name_axes(panel, x='tokens per target call', y=name, title=title if len(files) > 1 else '', **limits)
  plots.legend(figure, axes)
  return plots.to_image(figure, title='Speed over tokens per call', kind=kind)


def picture_of(paths: Sequence[str], kind: str) -> bytes:
  """A picture of files, all of them results or all of them logs of training, whose names end in `.jsonl`.

  Args:
    paths: The files.
    kind: `png` or `svg`.

  Raises:
    ValueError: A file holds something else, or there are files of both kinds.
  """
  are_logs = {pathlib.PurePath(path).suffix == '.jsonl' for path in paths}
  if len(are_logs) > 1:
    raise ValueError(f'results, .json, and logs of training, .jsonl, are not drawn together; {_ADVICE}')
  if are_logs == {True}:
    return training_curves.draw([(training_curves.name_of(p), training_curves.read_steps(p)) for p in paths], kind)
  return draw([(printable(pathlib.PurePath(path).stem)[:40], read_points(path)) for path in paths], kind)


if __name__ == '__main__':
  _OUTPUT = flags.DEFINE_string('output', None, f'The picture, {" or ".join(_KINDS)}.', required=True)

  def main(argv):
    paths = argv[1:]
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
    ],
    files='FILE',
  )
