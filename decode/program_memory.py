"""Keeps long grids within the memory maps of a process, of which programs for processors take many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_LIMIT, _TAKEN = '/proc/sys/vm/max_map_count', '/proc/self/maps'

T = TypeVar('T')


def is_half_full() -> bool:
  """Whether half of the memory maps that Linux allows a process are taken, by any process; False on other systems.

  XLA takes a thousand for a loop that it compiles for a processor, and 65,530 are allowed by default. Where there are
  none left the process crashes.
  """
  own = _is_half_full()
  # What one process of several does the others have to do as well.
  return own if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(own))))


def _is_half_full() -> bool:
  try:
    with open(_LIMIT, 'rb') as limit, open(_TAKEN, 'rb') as taken:
      return sum(1 for _ in taken) > int(limit.read()) / 2
  except OSError:
    return False


def in_groups(items: Iterable[T], compile_fn: Callable[[T], None]) -> Iterator[list[T]]:
  """Compiles as many as the process can hold, gives these, forgets their programs and goes on.

  Args:
    items: What has programs.
    compile_fn: Compiles the programs of one.
  """
  if is_half_full():
    jax.clear_caches()
  group: list[T] = []
  for item in items:
    if group and is_half_full():
      yield group
      jax.clear_caches()
      group = []
    compile_fn(item)
    group.append(item)
  if group:
    yield group
