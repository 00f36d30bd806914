"""What the processor can do that runs the program."""

from __future__ import annotations

import functools
import pathlib

_CPU_INFO = pathlib.Path('/proc/cpuinfo')


@functools.cache
def multiplies_bfloat16() -> bool:
  """Whether this processor has units for products of bfloat16 matrices (AMX), as far as Linux says so."""
  try:
    return 'amx_bf16' in _CPU_INFO.read_text()
  except OSError:
    return False
