"""How a command ends: bad input becomes one line and a non-zero exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app, flags, logging


def _fail(message: str, code: int = 1) -> None:
  print('error: ' + ' '.join(message.split()), file=sys.stderr)
  sys.exit(code)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    _fail(f'{error}; --help lists the flags')
  # Unless asked for, what libraries log while they start is no business of the user's.
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.ERROR
  return rest


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` under absl; bad input, which raises `ValueError` or `OSError`, ends it with one line and code 1."""

  def guarded(argv):
    if len(argv) > 1:
      _fail(f'unexpected argument {argv[1]!r}; options are given as --name=value')
    try:
      main(argv)
    except (ValueError, OSError, ImportError) as error:  # a remote path may need a package that is not there
      _fail(str(error))
    except KeyboardInterrupt:
      _fail('interrupted', 130)

  app.run(guarded, flags_parser=_parse_flags)
