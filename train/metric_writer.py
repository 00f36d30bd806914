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

from spectr_jax.io.new_files import write_file

LOG = 'metrics.jsonl'  # below WORKDIR
_FLUSH_SECONDS = 60


def _lines(path: epath.Path, last_step: int) -> bytes:
  """The lines of a log up to a step, without final metrics; a `ValueError` if it is damaged."""
  kept = []
  try:
    for line in path.read_bytes().splitlines(keepends=True):
      if line.endswith(b'\n'):  # else a process was killed while it wrote this one, the last
        values = json.loads(line)
        if values['step'] <= last_step and not any(name.startswith('final_') for name in values):
          kept.append(line)
  except (ValueError, LookupError, TypeError, OSError) as error:
    raise ValueError(f'{path} is not the log of a training: move it to another place') from error
  return b''.join(kept)


class MetricWriter:
  """Appends metrics of a step to `WORKDIR/metrics.jsonl` and to event files beside it.

  It first removes the lines that an interrupted run may have left: those of steps beyond `first_step`, from which the
  run continues, an incomplete last line, and final metrics, which are written again. A `ValueError` if a file cannot be
  written, or the log is damaged.
  """

  def __init__(self, workdir: epath.Path, first_step: int):
    self._path = workdir / LOG
    write_file(self._path, _lines(self._path, first_step) if self._path.exists() else b'')
    self._flushed = time.monotonic()
    with self._writing():
      # Written by this thread: errors of TensorBoardX's own would be lost. No other file has this name.
      self._events = EventsWriter(os.path.join(str(workdir), 'events'), f'.{secrets.token_hex(4)}')
      # Events of steps from this one on, of a run that was interrupted, are not shown.
      for begin in ({'file_version': 'brain.Event:2'}, {'session_log': SessionLog(status=SessionLog.START)}):
        self._events.write_event(Event(step=first_step + 1, **begin))

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
