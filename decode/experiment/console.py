"""The console that commands print to, and the progress of a run."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from common.printable import printable
from common.progress_bar import ProgressBar, TimeLeft
from spectr_jax.auto.trial import Notify

_SECONDS_BETWEEN_LINES = 30


def make_console(*, stderr: bool = False) -> Console:
  """A console without escape codes if NO_COLOR is set, and without line folding outside a terminal."""
  color_system = None if os.environ.get('NO_COLOR') else 'auto'
  return Console(stderr=stderr, color_system=color_system, highlight=False, emoji=False, markup=False)


class _Lines:
  """Progress as lines on stderr: one for each activity, and while it lasts one every half minute, with what is left."""

  def __init__(self):
    self._activity, self._said, self._left = None, 0.0, TimeLeft()

  def __call__(self, what: str, done: int, total: int) -> None:
    activity, now = what.partition(';')[0], time.monotonic()
    self._left.note(activity, done, total, now)
    if activity != self._activity:
      self._activity = activity
    elif now - self._said < _SECONDS_BETWEEN_LINES:
      return
    seconds = self._left.at(now) if done < total else None
    left = '' if seconds is None else f', about {datetime.timedelta(seconds=round(seconds))} left'
    self._said = now
    with contextlib.suppress(OSError):  # a closed or full place for progress ends no run
      print(f'[{done}/{total}] {printable(what)}{left}', file=sys.stderr, flush=True)


_KINDS = 'loading', 'compiling', 'decoding', 'timing', 'measuring', 'profiling'


class _Spent:
  """The seconds that kinds of activities took: loading is what comes before the first one."""

  def __init__(self):
    self._seconds, self._kind, self._since = collections.Counter(), 'loading', time.monotonic()

  def begin(self, activity: str) -> None:
    now = time.monotonic()
    self._seconds[self._kind] += now - self._since
    self._kind, self._since = next((kind for kind in _KINDS if kind in activity), 'other'), now

  @property
  def has_models(self) -> bool:
    return 'compiling' in self._seconds

  def __str__(self) -> str:
    parts = [f'{kind} {seconds:.1f}' for kind, seconds in self._seconds.items() if seconds >= 0.05]
    return f'{sum(self._seconds.values()):.1f} s: {", ".join(parts)}'


@contextlib.contextmanager
def show_progress() -> Iterator[Notify]:
  """Yields a progress callback on stderr: a bar in a terminal, else lines, and at the end what took how long.

  The callback takes the current activity, what is done, and the total. What stands behind a semicolon in the activity,
  such as a speed, is a detail that changes while it lasts.
  """
  spent = _Spent()
  with _progress() as show:

    def notify(what: str, done: int, total: int) -> None:
      spent.begin(what.partition(';')[0])
      show(what, done, total)

    yield notify
  spent.begin('')
  if spent.has_models:
    with contextlib.suppress(OSError):
      print(spent, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Notify]:
  console = make_console(stderr=True)
  if not console.is_terminal:
    yield _Lines()
    return
  with ProgressBar(console) as bar:

    def show(what: str, done: int, total: int) -> None:
      activity, _, detail = printable(what).partition(';')
      bar.show(activity, done, total, detail.strip())

    yield show
