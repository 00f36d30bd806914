"""Cycles of Pallas kernels, from the schedules that the TPU compiler writes to files.

The text of a compiled program does not say what a kernel costs. But the compiler schedules a kernel instruction by
instruction, and can be told to write the schedules down: the bundles of instructions, of which a core issues one per
cycle, and the chains of dependent instructions in every basic block, with their latencies.
"""

from __future__ import annotations

import atexit
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
_BRANCH = re.compile(r'sbr\.rel \(!%(p\d+_p\d+)\) target = \$region(\d+)')
_BLOCK = re.compile(r'region(\d+) \{.*? parent=(-?\d+)\}')
_KERNEL = re.compile(r'%([\w.\-]+) = [^\n]*? custom-call\([^\n]*custom_call_target="tpu_custom_call"')
_LENGTH = re.compile(r'Length to end: (\d+)')
_slowest: Counter[str] = Counter()  # cycles of kernels so far, by their names without numbers


def schedule_cycles(bundles: str, chains: str) -> int:
  """Cycles of a kernel: for each loop's body, and what is in no loop, the larger of its bundles and its chains.

  Bodies count as often as their loops turn, branches as taken, and copies from memory as done. The loop over a kernel's
  grid has a turn or two in addition, in which it waits for the first and the last copy.

  Args:
    bundles: The schedule.
    chains: The chains of all basic blocks, which follow one another.

  Raises:
    ValueError: A loop has no constant limit.
  """
  num_bundles: Counter[int] = Counter()  # by loop, in the order of their heads; 0 is in none
  outer, limits, tests, loop_of_region = {0: 0}, {0: 1}, {}, {}
  inside = [0]
  for line in bundles.splitlines():
    if not (found := _BUNDLE.match(line)):
      continue
    if found[1] == 'LB':
      outer[len(outer)] = inside[-1]
      inside.append(len(outer) - 1)
    num_bundles[inside[-1]] += 1
    # A test may stand anywhere before its branch, which goes back to the first region of the loop.
    tests |= {name: int(limit) for name, limit in _LIMIT.findall(line)}
    if (branch := _BRANCH.search(line)) and branch[1] in tests and len(inside) > 1:
      loop_of_region[branch[2]] = inside[-1]
      limits[inside.pop()] = tests.pop(branch[1])
  if missing := outer.keys() - limits.keys():
    raise ValueError(f'{len(missing)} of the {len(outer) - 1} loops have no constant limit')

  blocks = [(_BLOCK.search(text), _LENGTH.search(text)) for text in chains.split('New basic block in region: ')[1:]]
  parents = {block[1]: block[2] for block, _ in blocks if block}
  length: Counter[int] = Counter()
  for block, longest in blocks:
    region = block[1] if block else None
    while region is not None and region not in loop_of_region:
      region = parents.get(region)
    # The first instruction of a chain has the longest way to its end.
    length[loop_of_region.get(region, 0)] += int(longest[1]) if longest else 0

  def turns(loop: int) -> int:
    return limits[loop] * (turns(outer[loop]) if loop else 1)

  return sum(turns(loop) * max(num_bundles[loop], length[loop]) for loop in outer)


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
  programs, get the cycles of the slowest kernel so far whose name is the same without its number.

  Args:
    text: The text of the program, which was compiled last.

  Raises:
    ValueError: There is no schedule of a kernel, or more than one.
  """
  files = list(write_schedules().iterdir())
  cycles: dict[str, int] = {}
  names = _KERNEL.findall(text)
  for name in names:
    own = [
      [path for path in files if re.fullmatch(rf'\d+-{re.escape(name)}-\d+-{kind}\.txt', path.name)]
      for kind in (_BUNDLES, _CHAINS)
    ]
    if max(map(len, own)) > 1:
      raise ValueError(f'there must be one schedule of the kernel {name}, found {len(own[0])}')
    if all(own):
      try:
        cycles[name] = schedule_cycles(*(paths[0].read_text() for paths in own))
      except ValueError as error:
        raise ValueError(f'the kernel {name} cannot be counted: {error}') from error
      _slowest[_stem(name)] = max(_slowest[_stem(name)], cycles[name])
  for path in files:
    path.unlink()
  if missing := [name for name in names if _stem(name) not in _slowest]:
    raise ValueError(f'there is no schedule of the kernel {missing[0]}')
  return {name: cycles.get(name, _slowest[_stem(name)]) for name in names}


def _stem(name: str) -> str:
  return re.sub(r'(\.\d+)+$', '', name)
