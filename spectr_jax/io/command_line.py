"""How a command ends: bad input becomes one line and a non-zero exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` under absl; a `ValueError` or `OSError` from it is printed as one line and exits with code 1."""

  def guarded(argv):
    if len(argv) > 1:
      sys.exit(f'error: unexpected argument {argv[1]!r}; options are given as --name=value')
    try:
      main(argv)
    except (ValueError, OSError) as error:
      sys.exit('error: ' + ' '.join(str(error).split()))

  app.run(guarded)
