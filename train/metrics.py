"""Training metrics as JSON lines and as TensorBoard events."""

from __future__ import annotations

import json

from etils import epath
from tensorboardX import SummaryWriter


class MetricWriter:
  """Appends metrics of a step to `WORKDIR/metrics.jsonl` and to event files beside it.

  On opening it removes the lines that an interrupted run may have left: lines of steps beyond `first_step` and an
  incomplete last line. It also removes final metrics, which are written again.

  Args:
    workdir: The run's directory.
    first_step: The step from which the run continues.
  """

  def __init__(self, workdir: epath.Path, first_step: int):
    self._path = workdir / 'metrics.jsonl'
    kept = []
    if self._path.exists():
      kept = [line for line in self._path.read_text().splitlines() if self._is_kept(line, first_step)]
    unfinished = workdir / 'metrics.jsonl.unfinished'
    unfinished.write_text(''.join(line + '\n' for line in kept))
    unfinished.replace(self._path)
    self._events = SummaryWriter(str(workdir), purge_step=first_step + 1)

  @staticmethod
  def _is_kept(line: str, first_step: int) -> bool:
    try:
      values = json.loads(line)
    except json.JSONDecodeError:
      return False
    return values['step'] <= first_step and not any(name.startswith('final_') for name in values)

  def write(self, step: int, values: dict[str, float]) -> None:
    """Appends the metrics of a step.

    Args:
      step: The step.
      values: Metrics by name.
    """
    with self._path.open('a') as stream:
      stream.write(json.dumps({'step': step, **values}) + '\n')
    for name, value in values.items():
      self._events.add_scalar(name, value, step)

  def close(self) -> None:
    self._events.close()
