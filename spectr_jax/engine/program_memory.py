"""Limit on the memory maps of a process, of which compiled CPU programs take many, for long grids of settings."""

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
  """Tells whether this process uses half of the memory maps that Linux allows it; False on other systems.

  XLA uses a thousand for a loop that it compiles for CPU. The default limit is 65,530, and beyond it the process
  crashes. With `is_joint` it is True in all processes if it is in one, so that they forget programs together.
  """
  own = _is_half_full()
  return bool(np.any(multihost_utils.process_allgather(np.array(own)))) if is_joint else own


def make_room(*, is_joint: bool = False) -> None:
  """Forgets all compiled programs if half of the memory maps are used; `is_joint` as for `is_half_full`."""
  if is_half_full(is_joint=is_joint):
    jax.clear_caches()


def in_groups(
  items: Sequence[T], compile_fn: Callable[[T], None], *, baseline: T | None = None, is_joint: bool = False
) -> Iterator[list[T]]:
  """Yields groups of items whose compiled programs fit into the process, and forgets those of the group before.

  The baseline, one of the items, becomes the first of every group, so that the others can be compared with it.
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
  """A line for the report if not all settings, named by group, were timed together; no line otherwise."""
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
