"""The progress bars of all commands: an activity, what is done of it, how long the command runs, and what is left."""

from __future__ import annotations

import datetime
import functools

from rich import progress
from rich.console import Console
from rich.text import Text


class _Count(progress.MofNCompleteColumn):
  """`done/total`; nothing for an activity of one step, which would stand at 0/1."""

  def render(self, task: progress.Task) -> Text:
    return super().render(task) if task.total is not None else Text()


class _Times(progress.ProgressColumn):
  """How long the bar has been there, and about how long the activity still takes, where that is known."""

  def __init__(self, start: float):
    super().__init__()
    self._start = start

  def render(self, task: progress.Task) -> Text:
    text = f'{_shown(task.get_time() - self._start)} elapsed'
    left = None if task.finished else task.time_remaining
    return Text(text if left is None else f'{text}, about {_shown(left)} left')


def _shown(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))


_text = functools.partial(progress.TextColumn, markup=False)


class ProgressBar(progress.Progress):
  """A bar of one activity after another; a context manager. Something in it always moves."""

  def __init__(self, console: Console, *, transient: bool = True, disable: bool = False):
    columns = (
      _text('{task.description}'), progress.SpinnerColumn('line'), progress.BarColumn(), _Count(),
      _Times(console.get_time()), _text('{task.fields[detail]}'),
    )  # fmt: skip
    super().__init__(*columns, console=console, transient=transient, disable=disable)
    self._activity = 'loading'
    self._task = self.add_task('loading', total=None, detail='')

  def show(self, activity: str, done: int, total: int, detail: str = '') -> None:
    """Shows the steps of an activity, of which each has a pace of its own; with one step or none the bar moves to and
    fro. `detail` changes while the activity lasts.
    """
    steps = {'total': total if total > 1 else None, 'completed': done if total > 1 else 0}
    if activity != self._activity:
      self._activity = activity
      self.reset(self._task, **steps)
    self.update(self._task, description=activity, detail=detail, **steps)
