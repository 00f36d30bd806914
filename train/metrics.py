"""Training metrics as JSON lines and as TensorBoard events."""

from __future__ import annotations

import json

from etils import epath
from tensorboardX import SummaryWriter


class MetricWriter:
  """Appends metrics of a step to `WORKDIR/metrics.jsonl` and to event files beside it.

  Lines of steps beyond `first_step`, which an interrupted run may have left, are removed on opening.
  """

  def __init__(self, workdir: epath.Path, first_step: int):
    self._path = workdir / 'metrics.jsonl'
    kept = []
    if self._path.exists():
      kept = [line for line in self._path.read_text().splitlines() if json.loads(line)['step'] <= first_step]
    self._path.write_text(''.join(line + '\n' for line in kept))
    self._events = SummaryWriter(str(workdir), purge_step=first_step + 1)

  def write(self, step: int, values: dict[str, float]) -> None:
    with self._path.open('a') as stream:
      stream.write(json.dumps({'step': step, **values}) + '\n')
    for name, value in values.items():
      self._events.add_scalar(name, value, step)

  def close(self) -> None:
    self._events.close()
