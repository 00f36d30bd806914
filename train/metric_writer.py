"""Training metrics as JSON lines and as TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from spectr_jax.io import untrusted
from spectr_jax.io.new_files import NewFile

_BEGINNING = b'{"step": '
_MAX_LINE = 2**20  # bytes
_STEP = untrusted.whole(0, 2**63)
_FLUSH_SECONDS = 60


def _lines(path: epath.Path) -> Iterator[tuple[bytes, int, bool]]:
  """The lines of a log, the step of each, and whether it is a final one, without an incomplete last line; a
  `ValueError` if a line is not of a log.
  """
  with untrusted.open_file(path) as file:
    for number in range(1, 2**62):
      try:
        line = file.readline(_MAX_LINE)
      except OSError as error:
        raise ValueError(f'cannot read {path}: {error.strerror or error}') from error
      if not line:
        return
      try:
        if not line.startswith(_BEGINNING[: len(line)]):
          raise ValueError('no step')
        if not line.endswith(b'\n'):
          if len(line) < _MAX_LINE:
            return  # a process was killed while it wrote this line
          raise ValueError('too long')
        values = untrusted.check_object(untrusted.parse_json(line.decode(), 'it'), {'step': _STEP}, 'it')
        yield line, values['step'], any(name.startswith('final_') for name in values)
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'line {number} of {path} is not of a training log: move the file to another place') from error


class MetricWriter:
  """Appends metrics of a step to `WORKDIR/metrics.jsonl` and to event files beside it.

  It first removes the lines that an interrupted run may have left: those of steps beyond `first_step`, from which the
  run continues, an incomplete last line, and final metrics, which are written again. A `ValueError` if a file cannot be
  written, or the log is none.
  """

  def __init__(self, workdir: epath.Path, first_step: int):
    self._path = workdir / 'metrics.jsonl'
    kept = NewFile(self._path)
    try:
      if self._path.exists():
        for line, step, is_final in _lines(self._path):
          if step <= first_step and not is_final:
            kept.write(line)
      kept.commit()
    finally:
      kept.discard()
    self._flushed = time.monotonic()
    with self._writing():
      # Written by this thread: errors of TensorBoardX's own would be lost. No other file has this name.
      self._events = EventsWriter(os.path.join(str(workdir), 'events'), f'.{secrets.token_hex(4)}')
      # Events of steps from this one on, of a run that was interrupted, are not shown.
      for begin in ({'file_version': 'brain.Event:2'}, {'session_log': SessionLog(status=SessionLog.START)}):
        self._events.write_event(Event(step=first_step + 1, **begin))

  @staticmethod
  def check(workdir: epath.Path, *, is_ours: bool) -> None:
    """Refuses a log that is none of training, or that no run has written (`is_ours`), with a `ValueError`."""
    path = workdir / 'metrics.jsonl'
    if not path.exists() and (untrusted.is_remote(path) or not os.path.lexists(path)):
      return
    if not is_ours:
      raise ValueError(f'{path} is there before the first training in {workdir}: move it to another place')
    for _ in _lines(path):
      pass

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      path = error.filename or self._path
      raise ValueError(f'cannot write {path}: {error.strerror or error}; checkpoints and the model are kept') from error

  def write(self, step: int, values: dict[str, Any]) -> None:
    with self._writing():
      with self._path.open('a') as stream:
        stream.write(json.dumps({'step': step, **values}) + '\n')
      for name, value in values.items():
        self._events.write_event(Event(step=step, wall_time=time.time(), summary=scalar(name, value)))
      if time.monotonic() - self._flushed > _FLUSH_SECONDS:
        self._events.flush()
        self._flushed = time.monotonic()

  def close(self) -> None:
    with self._writing():
      self._events.close()
