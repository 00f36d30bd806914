"""The progress bars of all commands: an activity, what is done of it, how long the command runs, and what is left."""

from __future__ import annotations

import datetime
import functools

import numpy as np
from rich import progress
from rich.console import Console
from rich.text import Text


class _Count(progress.MofNCompleteColumn):
  """`done/total`; nothing for an activity of one step, which would stand at 0/1."""

  def render(self, task: progress.Task) -> Text:
    return super().render(task) if task.total is not None else Text()


class TimeLeft:
  """About how long steps still take, from when their numbers changed.

  What comes before the first step is done, compiling above all, says nothing of the pace. Steps that end together, as
  those of a batch do, are one point of the line of least squares, whose slope is the pace.
  """

  def __init__(self):
    self._key, self._points, self._left = None, [], None

  def note(self, activity: str, done: int, total: int, now: float) -> None:
    """Takes what is done at a time in seconds; activities of one first word and one total share a pace."""
    key = activity.split(maxsplit=1)[:1], total
    if key != self._key or (self._points and done < self._points[-1][1]):
      self._key, self._points, self._left = key, [(now, done)], None
      self._first = done
    if done in (self._first, self._points[-1][1]):
      return
    if self._points[-1][1] == self._first:
      self._points = []
    if self._points and now - self._points[-1][0] < 0.01 * (now - self._points[0][0]) + 1e-3:
      self._points.pop()
    if len(self._points) > 256:  # of a long run every other point is enough
      self._points = self._points[::2]
    self._points.append((now, done))
    times, steps = (np.array(each, float) for each in zip(*self._points))
    times, steps = times - times.mean(), steps - steps.mean()
    self._left = (total - done) * float(times @ times / (times @ steps)) if len(times) > 1 else None

  def at(self, now: float) -> float | None:
    """Seconds that are left, or None where that is not known."""
    return None if self._left is None else max(0.0, self._left - (now - self._points[-1][0]))


class _Times(progress.ProgressColumn):
  """How long the bar has been there, and about how long the activity still takes, where that is known."""

  def __init__(self, start: float, left: TimeLeft):
    super().__init__()
    self._start, self._left = start, left

  def render(self, task: progress.Task) -> Text:
    text = f'{_shown(task.get_time() - self._start)} elapsed'
    left = None if task.finished else self._left.at(task.get_time())
    return Text(text if left is None else f'{text}, about {_shown(left)} left')


def _shown(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))


_text = functools.partial(progress.TextColumn, markup=False)


class ProgressBar(progress.Progress):
  """A bar of one activity after another; a context manager. Something in it always moves."""

  def __init__(self, console: Console, *, transient: bool = True, disable: bool = False):
    self._left = TimeLeft()
    columns = (
      _text('{task.description}'), progress.SpinnerColumn('line'), progress.BarColumn(), _Count(),
      _Times(console.get_time(), self._left), _text('{task.fields[detail]}'),
    )  # fmt: skip
    super().__init__(*columns, console=console, transient=transient, disable=disable)
    self._activity = 'loading'
    self._task = self.add_task('loading', total=None, detail='')

  def show(self, activity: str, done: int, total: int, detail: str = '') -> None:
    """Shows the steps of an activity, of which each has a pace of its own; with one step or none the bar moves to and
    fro. `detail` changes while the activity lasts.
    """
    self._left.note(activity, done, total, self.get_time())
    steps = {'total': total if total > 1 else None, 'completed': done if total > 1 else 0}
    if activity != self._activity:
      self._activity = activity
      self.reset(self._task, **steps)
    self.update(self._task, description=activity, detail=detail, **steps)
