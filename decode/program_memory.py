"""Keeps long grids within the memory maps of a process, of which programs for processors take many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_LIMIT, _TAKEN = '/proc/sys/vm/max_map_count', '/proc/self/maps'

T = TypeVar('T')


def _is_half_full() -> bool:
  try:
    with open(_LIMIT, 'rb') as limit, open(_TAKEN, 'rb') as taken:
      return sum(1 for _ in taken) > int(limit.read()) / 2
  except OSError:
    return False


def is_half_full(*, is_joint: bool = False) -> bool:
  """Whether half of the memory maps that Linux allows a process are taken; False on other systems.

  XLA takes a thousand for a loop that it compiles for a processor, and 65,530 are allowed by default. Where there are
  none left the process crashes.

  Args:
    is_joint: Whether several processes run the same programs together, and have to forget them together: then the
      answer is of the fullest.
  """
  own = _is_half_full()
  return bool(np.any(multihost_utils.process_allgather(np.array(own)))) if is_joint else own


def make_room(*, is_joint: bool = False) -> None:
  """Forgets all compiled programs if memory maps are half full; `is_joint` as for `is_half_full`."""
  if is_half_full(is_joint=is_joint):
    jax.clear_caches()


def in_groups(items: Sequence[T], compile_fn: Callable[[T], None], *, is_joint: bool = False) -> Iterator[list[T]]:
  """Compiles as many as the process can hold, gives these, forgets their programs and goes on.

  Args:
    items: What has programs.
    compile_fn: Compiles the programs of one.
    is_joint: As for `is_half_full`.
  """
  make_room(is_joint=is_joint)
  group: list[T] = []
  for item in items:
    if group and is_half_full(is_joint=is_joint):
      yield group
      jax.clear_caches()
      group = []
    compile_fn(item)
    group.append(item)
  if group:
    yield group


def describe_groups(groups: Sequence[Sequence[str]]) -> list[str]:
  """A line where not all were timed in turns; none otherwise."""
  if len(groups) < 2:
    return []
  return [
    f'Programs of all settings do not fit in one process: they were timed in {len(groups)} groups, one after another,'
    ' and in turns within a group only, so speeds of different groups compare less well. New groups begin with'
    f' {", ".join(group[0] for group in groups[1:])}.'
  ]
