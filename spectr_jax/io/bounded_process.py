"""Processes for what files of strangers make us run: bounded in time and memory, and with nothing of this process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, cast

from spectr_jax.io.untrusted import one_line

_WORKER = pathlib.Path(__file__).with_name('bounded_worker.py')
# What Python itself may need, and the time zone.
_ENVIRONMENT = 'LD_LIBRARY_PATH', 'DYLD_LIBRARY_PATH', 'SYSTEMROOT', 'TZ', 'TZDIR'


class BoundedProcess:
  """A process that answers requests by the function `answer` of a script; `bounded_worker` is its program.

  The script imports some packages and the standard library alone. A request may take `seconds` by the clock, all of
  them `memory` bytes of address space, and an answer has at most `most` bytes. The process ends with this object.
  """

  def __init__(self, script: pathlib.Path, packages: Sequence[str], *, seconds: float, memory: int, most: int):
    self._seconds, self._most = seconds, most
    command = [sys.executable, '-I', '-S', str(_WORKER), str(memory), str(seconds), str(script)]
    try:
      self._process = subprocess.Popen(
        [*command, *dict.fromkeys(map(_folder, packages))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,  # an interrupt from the keyboard is not meant for it
      )
    except OSError as error:
      raise ValueError(f'its process cannot be started: {one_line(error)}') from error
    self.owner = os.getpid()
    self.stop = weakref.finalize(self, _stop, self._process, self.owner)

  def is_alive(self) -> bool:
    return self.stop.alive and self._process.poll() is None

  def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, a JSON object; ends the process and raises `ValueError` if there is none."""
    end = time.monotonic() + self._seconds
    # Only the end of the process interrupts reads and writes on every platform.
    timer = threading.Timer(self._seconds, self._process.kill)
    timer.daemon = True
    timer.start()
    try:
      return self._exchange(json.dumps(request).encode() + b'\n')
    except (OSError, EOFError, ValueError) as error:
      self.stop()
      if time.monotonic() >= end:
        raise ValueError(f'it takes longer than {self._seconds:g} seconds') from error
      raise ValueError(f'its process ended without an answer (exit code {self._process.returncode})') from error
    except BaseException:  # the answer to this request must not be read as that to the next
      self.stop()
      raise
    finally:
      timer.cancel()
      timer.join()
      if time.monotonic() >= end:
        self.stop()

  def _exchange(self, request: bytes) -> dict[str, Any]:
    to, back = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
    to.write(request)
    to.flush()
    line = back.readline(self._most)
    answer = json.loads(line) if line.endswith(b'\n') else None
    if type(answer) is not dict:
      raise EOFError
    return answer


def _folder(package: str) -> str:
  """The folder of a package, which the process cannot find without this one's settings."""
  spec = importlib.util.find_spec(package)
  if spec is None or spec.origin is None:
    raise ValueError(f'the package {package} is not installed')
  return str(pathlib.Path(spec.origin).absolute().parents[1])


def _stop(process: subprocess.Popen, owner: int) -> None:
  """Ends a process, or closes this end of it in a fork of the process that it belongs to."""
  if os.getpid() == owner:
    process.kill()
    process.wait()
  else:
    process.returncode = 0  # it is not for us to wait for it
  for file in (process.stdin, process.stdout):
    with contextlib.suppress(OSError):  # what was not written yet
      cast(BinaryIO, file).close()
