"""What commands need beside the core that `pip install` alone installs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

_lacks: list[str] = []


def is_help_asked_for(arguments: Sequence[str]) -> bool:
  return any(argument in ('-h', '-help', '--help') for argument in arguments)


def lacks() -> list[str]:
  """Lines that say what is not installed and was needed so far."""
  return list(_lacks)


def need(extra: str, *packages: str) -> None:
  """Ends the process with one line and exit code 1 if a package, as imports name it, is not installed; `--help`
  goes on.
  """
  missing = [name for name in packages if importlib.util.find_spec(name) is None]
  if not missing:
    return
  line = f"this needs {', '.join(missing)}: pip install -e '.[{extra}]'"
  if not is_help_asked_for(sys.argv[1:]):
    sys.exit(f'error: {line}')
  from common import stand_ins

  _lacks.append(line)
  stand_ins.install()
