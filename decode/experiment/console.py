"""What the commands print to: a console, and the progress of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rich import progress
from rich.console import Console

from common.printable import printable
from spectr_jax.auto.trial import Notify


def make_console(*, stderr: bool = False) -> Console:
  """A console without escape codes if NO_COLOR is set, and without line folding outside a terminal."""
  color_system = None if os.environ.get('NO_COLOR') else 'auto'
  return Console(stderr=stderr, color_system=color_system, highlight=False, emoji=False, markup=False)


@contextlib.contextmanager
def show_progress() -> Iterator[Notify]:
  """Yields a progress callback for `run_decode`: a bar in a terminal, else one line per activity; on stderr."""
  console = make_console(stderr=True)
  if not console.is_terminal:
    last = None

    def print_line(what, done, total):
      nonlocal last
      if what != last:
        with contextlib.suppress(OSError):  # a closed or full place for progress ends no run
          print(f'[{done}/{total}] {printable(what)}', file=sys.stderr, flush=True)
      last = what

    yield print_line
    return
  columns = (
    progress.TextColumn('{task.description}'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TimeElapsedColumn(),
  )
  with progress.Progress(*columns, console=console, transient=True) as bar:
    task = bar.add_task('loading', total=None)
    yield lambda what, done, total: bar.update(task, description=printable(what), completed=done, total=total)
