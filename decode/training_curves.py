"""Curves of training runs, from the logs that `train.main` and `train.head` write to `WORKDIR/metrics.jsonl`."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from common.printable import printable
from decode.papers import plots
from spectr_jax.io import untrusted

_ADVICE = 'name files metrics.jsonl of a training'
_MOST_BYTES, _MOST_LINE = 2**27, 2**20
# Shares of guesses that the target keeps: of a model, and by depth of a head.
_SHARES = 'held_out_overlap', 'held_out_acceptance_'


def read_steps(path: str) -> list[dict[str, float]]:
  """The metrics of the steps of a log of at most 128 MiB: `step`, and of the others those that are finite numbers.

  An incomplete last line, as of a run that was killed, is left out.

  Raises:
    ValueError: The file holds something else, or no loss; the message says what is wrong.
  """
  steps, size = [], 0
  with untrusted.open_file(path) as file:
    while line := file.readline(_MOST_LINE):
      size += len(line)
      if size > _MOST_BYTES:
        raise ValueError(f'{path} is larger than {_MOST_BYTES:,} bytes; {_ADVICE}')
      if not line.endswith(b'\n') and len(line) < _MOST_LINE:
        break
      steps.append(_metrics_of(line, f'line {len(steps) + 1} of {path}'))
  if not any('train_loss' in metrics for metrics in steps):
    raise ValueError(f'{path} holds no loss; {_ADVICE}')
  return steps


def _metrics_of(line: bytes, where: str) -> dict[str, float]:
  try:
    metrics = untrusted.parse_json(line.decode(), where)
  except ValueError as error:
    raise ValueError(f'{where} is not of a training log; {_ADVICE}') from error
  if not isinstance(metrics, dict) or not _is_number(metrics.get('step')):
    raise ValueError(f'{where} has no step; {_ADVICE}')
  return {name: value for name, value in metrics.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and not math.isnan(value)


def name_of(path: str) -> str:
  """The name of a run: that of its log, or of the folder of a log that is called `metrics.jsonl`."""
  path = pathlib.PurePath(path)
  return printable(path.parent.name if path.stem == 'metrics' and path.parent.name else path.stem)[:40]


def draw(runs: Sequence[tuple[str, Sequence[Mapping[str, float]]]], kind: str) -> bytes:
  """A picture, `png` or `svg`, of the steps of runs by name.

  It shows the losses, and where they were evaluated the shares of guesses that the target keeps.
  """
  shares = {name for _, steps in runs for metrics in steps for name in metrics if name.startswith(_SHARES)}
  figure, axes = plots.panels(1 + bool(shares), width=4.2)
  for (name, steps), color in zip(runs, _colors(len(runs))):
    _draw(axes[0], steps, 'train_loss', f'{name}, training', color=color)
    _draw(axes[0], steps, 'held_out_loss', f'{name}, held out', color=color, linestyle='--', marker='o')
    for share, marker in zip(sorted(shares), plots.PLAIN_MARKERS):
      label = share.removeprefix('held_out_').replace('_', ' ')
      _draw(axes[1], steps, share, f'{name}, {label}', color=color, marker=marker)
  plots.name_axes(axes[0], x='step', y='loss, nats per token')
  if shares:
    plots.name_axes(axes[1], x='step', y='share of guesses kept', ylim=(0, 1))
  plots.legend(figure, axes)
  return plots.to_image(figure, title='Training', kind=kind)


def _colors(number: int) -> list[str]:
  return [plots.SHADES[index % len(plots.SHADES)] for index in range(number)]


def _draw(axes, steps, metric: str, label: str, **style: Any) -> None:
  if any(metric in metrics for metrics in steps):
    rows = [{'step': metrics['step'], metric: metrics.get(metric)} for metrics in steps]
    plots.draw_line(axes, rows, x='step', y=metric, label=label, **style)
