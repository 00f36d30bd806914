"""Cycles of Pallas kernels, from the schedules that the TPU compiler writes to files.

The text of a compiled program does not say what a kernel costs. But the compiler schedules a kernel instruction by
instruction, and can be told to write the schedules down: the bundles of instructions, of which a core issues one per
cycle, and the chains of dependent instructions in every basic block, with their latencies.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import tempfile
from collections import Counter

_ARGUMENTS = 'LIBTPU_INIT_ARGS'  # the compiler reads them once, when it is loaded
_BUNDLES, _CHAINS = 'final_bundles', 'critical-path'
# An address and the mark of a control target, `LB` for the head of a loop.
_BUNDLE = re.compile(r'\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:')
_LIMIT = re.compile(r'%(p\d+_p\d+) = scmp\.\w+\.s32\.totalorder (?:\(%\w+\), )?%\w+, (\d+) /\* loop exit test \*/')
_BRANCH = re.compile(r'sbr\.rel \((!?)%(p\d+_p\d+)\) target = \$region(\d+)')
# The steps of a grid are turns of a loop, which has more turns: a step runs where the turn is between two bounds.
_BOUND = re.compile(r'%(p\d+_p\d+) = scmp\.(ge|lt)\.s32\.totalorder %(s\d+)_\w+, (\d+)')
_BETWEEN = re.compile(r'%(p\d+_p\d+) = pnand %(p\d+_p\d+), %(p\d+_p\d+)')
_BLOCK = re.compile(r'region(\d+) \{.*? parent=(-?\d+)\}')
_KERNEL = re.compile(r'%([\w.\-]+) = ([^\n]*?) custom-call\([^\n]*custom_call_target="tpu_custom_call"')
_RAGGED = 'ragged-dot'
_LENGTH = re.compile(r'Length to end: (\d+)')
_slowest: Counter[tuple[str, str]] = Counter()  # cycles of kernels so far, by their kinds


@dataclasses.dataclass
class _Loop:
  """A loop of a kernel, the steps of its grid, or what is in none of them."""

  outer: _Loop | None = None
  turns: int = 0  # of its body in a turn of `outer`; 0 if that is not known
  region: str = ''  # that its body begins with, by its number
  end: str = ''  # the region behind it, if it is the steps of a grid
  num_bundles: int = 0  # of its body, without those of loops in it
  length: int = 0  # cycles of its body's chains, likewise

  @property
  def cycles(self) -> int:
    turns, loop = 1, self
    while loop is not None:
      turns, loop = turns * loop.turns, loop.outer
    return turns * max(self.num_bundles, self.length)


def schedule_cycles(bundles: str, chains: str) -> int:
  """Cycles of a kernel: for each loop's body, and what is in no loop, the larger of its bundles and its basic blocks'
  chains.

  Bodies count as often as their loops turn, the steps of a grid as often as there are steps, other branches as taken,
  and copies from memory as done; ValueError if a loop has no constant limit.
  """
  loops = _read_loops(bundles)
  if missing := sum(not loop.turns for loop in loops):
    raise ValueError(f'{missing} of the {len(loops) - 1} loops have no constant limit')
  loop_of_region = {loop.region: loop for loop in loops}
  blocks = [(_BLOCK.search(text), _LENGTH.search(text)) for text in chains.split('New basic block in region: ')[1:]]
  parents = {block[1]: block[2] for block, _ in blocks if block}
  for block, longest in blocks:
    region = block[1] if block else ''
    while region and region not in loop_of_region:
      region = parents.get(region, '')
    # The first instruction of a chain has the longest way to its end.
    loop_of_region[region].length += int(longest[1]) if longest else 0
  return sum(loop.cycles for loop in loops)


def _read_loops(bundles: str) -> list[_Loop]:
  """The loops of a schedule in the order of their heads, and first what is in none."""
  inside = _Loop(turns=1)
  loops = [inside]
  limits, bounds, steps = {}, {}, {}  # by the names of tests

  def enter(**attributes):
    loops.append(_Loop(**attributes))
    return loops[-1]

  for line in bundles.splitlines():
    if not (bundle := _BUNDLE.match(line)):
      continue
    if inside.end and re.search(rf'Start\S* (?:empty )?region {inside.end}\b', line):
      inside = loops[1]
    if bundle[1] == 'LB':
      inside = enter(outer=inside)
    inside.num_bundles += 1
    # A test may stand anywhere before its branch.
    limits |= {name: int(limit) for name, limit in _LIMIT.findall(line)}
    bounds |= {name: (kind, turn, int(bound)) for name, kind, turn, bound in _BOUND.findall(line)}
    for name, *both in _BETWEEN.findall(line):
      (_, turn, first), (kind, other, last) = sorted(bounds.get(each, ('', '', 0)) for each in both)
      if turn and turn == other and kind == 'lt':
        steps[name] = last - first
    if not (branch := _BRANCH.search(line)):
      continue
    is_inverted, test, region = branch.groups()
    if is_inverted and test in limits and inside.outer:  # back to the first region of the loop
      inside.turns, inside.region = limits.pop(test), region
      inside = inside.outer
    elif not is_inverted and test in steps and loops[1:] == [inside]:
      # To the region behind the steps of the grid, whose loop is the first one. They count by themselves, not per turn.
      inside = enter(outer=loops[0], turns=steps[test], region=str(int(region) - 1), end=region)
  return loops


@functools.cache
def write_schedules() -> pathlib.Path:
  """Tells the compiler to write its schedules, and returns their folder. It must not have been loaded yet."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='tpu_schedules_'))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  own = (
    f'--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^({_BUNDLES}|{_CHAINS})$'
  )
  os.environ[_ARGUMENTS] = f'{os.environ.get(_ARGUMENTS, "")} {own}'.strip()
  return folder


def take_schedules(text: str) -> dict[str, int]:
  """The cycles of a program's kernels by the names of their operations; removes the schedules of all programs.

  A process of the compiler schedules equal kernels once, under the name of one of them. The others, also those of later
  programs, get the cycles of the slowest kernel so far of the same name without its number and the same results. `text`
  is the program compiled last; ValueError if a kernel has no schedule, or more than one. XLA's kernels of `ragged_dot`
  turn as often as experts have rows, which no schedule says: they have 0, so that the time of their bytes counts.
  """
  files = list(write_schedules().iterdir())
  cycles: dict[str, int] = {}
  kinds = {
    name: (re.sub(r'(\.\d+)+$', '', name), re.sub(r'\{.*?\}', '', shape)) for name, shape in _KERNEL.findall(text)
  }
  for name, kind in kinds.items():
    own = [
      [path for path in files if re.fullmatch(rf'\d+-{re.escape(name)}-\d+-{part}\.txt', path.name)]
      for part in (_BUNDLES, _CHAINS)
    ]
    if max(map(len, own)) > 1:
      raise ValueError(f'there must be one schedule of the kernel {name}, found {len(own[0])}')
    if all(own):
      try:
        cycles[name] = schedule_cycles(*(paths[0].read_text() for paths in own))
      except ValueError as error:
        if not name.startswith(_RAGGED):
          raise ValueError(f'the kernel {name} cannot be counted: {error}') from error
        cycles[name] = 0
      _slowest[kind] = max(_slowest[kind], cycles[name])
  for path in files:
    path.unlink()
  if missing := [name for name, kind in kinds.items() if kind not in _slowest]:
    raise ValueError(f'there is no schedule of the kernel {missing[0]}')
  return {name: cycles.get(name, _slowest[kind]) for name, kind in kinds.items()}
