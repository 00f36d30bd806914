"""What was perhaps meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
  """The part of a message that names the closest allowed name, `, did you mean X?`; empty if none is close."""
  close = difflib.get_close_matches(str(name)[:100].lower(), list(allowed), n=1, cutoff=0.7)
  return f', did you mean {close[0]}?' if close else ''
