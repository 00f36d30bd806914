"""What commands need beside the core that `pip install` alone installs."""

from __future__ import annotations

import importlib.util
import sys


def need(extra: str, *packages: str) -> None:
  """Ends the process with one line and exit code 1 if a package is not installed.

  Args:
    extra: The extra that installs them.
    *packages: Their names in imports.
  """
  missing = [name for name in packages if importlib.util.find_spec(name) is None]
  if missing:
    sys.exit(f"error: this needs {', '.join(missing)}: pip install -e '.[{extra}]'")
