"""Keeps long grids within the memory maps of a process, of which programs for processors take many."""

from __future__ import annotations

import collections
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


def in_groups(
  items: Sequence[T], compile_fn: Callable[[T], None], *, baseline: T | None = None, is_joint: bool = False
) -> Iterator[list[T]]:
  """Compiles as many as the process can hold, gives these, forgets their programs and goes on.

  Args:
    items: What has programs.
    compile_fn: Compiles the programs of one.
    baseline: One of them that is the first of every group, for the others to be compared with; None for none.
    is_joint: As for `is_half_full`.
  """
  make_room(is_joint=is_joint)
  common = [] if baseline is None else [baseline]
  left = collections.deque(item for item in items if item != baseline)
  is_first = True
  while left or (is_first and common):
    if not is_first:
      jax.clear_caches()
    is_first, group = False, []
    for item in common:
      compile_fn(item)
      group.append(item)
    while left and (len(group) == len(common) or not is_half_full(is_joint=is_joint)):
      compile_fn(left[0])
      group.append(left.popleft())
    yield group


def describe_groups(groups: Sequence[Sequence[str]]) -> list[str]:
  """A line where not all were timed in turns; none otherwise."""
  if len(groups) < 2:
    return []
  first, *others = groups
  has_baseline = all(group[0] == first[0] for group in others)
  says = f' with {first[0]} in each, to which speed-ups refer;' if has_baseline else ''
  return [
    f'Programs of all settings do not fit in one process: they were timed in {len(groups)} groups, one after another,'
    f'{says} tokens/s of different groups compare less well. New groups begin with'
    f' {", ".join(group[has_baseline] for group in others)}.'
  ]
