"""The compiler's reports about a program: memory, collectives and estimated time."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Mapping

import jax

from spectr_jax.aot.tpu_slices import Chip

_COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of memory that a program needs on one device.

  Attributes:
    arguments: Inputs.
    temporaries: Scratch memory at its peak.
    outputs: Outputs that do not reuse the memory of an input.
    code: The program itself.
  """

  arguments: int
  temporaries: int
  outputs: int
  code: int

  @classmethod
  def of(cls, compiled: jax.stages.Compiled) -> Memory:
    """Reads the compiler's memory analysis.

    Raises:
      ValueError: The backend has none.
    """
    found = compiled.memory_analysis()
    if found is None:
      raise ValueError('the backend does not report how much memory a program needs')
    return cls(
      arguments=found.argument_size_in_bytes,
      temporaries=found.temp_size_in_bytes,
      outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
      code=found.generated_code_size_in_bytes,
    )

  @property
  def total(self) -> int:
    """The sum of all four, in bytes."""
    return self.arguments + self.temporaries + self.outputs + self.code

  def lines(self, chip: Chip) -> list[str]:
    """Lines of a table of sizes, with the chip's free memory in the last one."""
    sizes = dataclasses.asdict(self) | {'total': self.total}
    return [f'{name:<12} {size / 2**20:12,.1f} MiB per device' for name, size in sizes.items()] + [
      f'{"free":<12} {(chip.memory - self.total) / 2**20:12,.1f} MiB of {chip.memory / 2**30:.0f} GiB'
    ]

  def check(self, chip: Chip) -> None:
    """Checks that the program fits into the chip's memory.

    Raises:
      ValueError: It does not fit.
    """
    if self.total > chip.memory:
      raise ValueError(f'does not fit: {self.total / 2**30:.1f} GiB of {chip.memory / 2**30:.0f}')


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """The compiler's report about a program; bytes and operations are per device.

  Attributes:
    devices: Number of devices of the mesh.
    memory: Bytes by use.
    chip: Published figures of the device.
    cycles: The compiler's estimate of a device's work in cycles, without transfers between devices.
    collectives: Number of operations that move data between devices, by kind.
    compile_seconds: Seconds to compile once.
  """

  devices: int
  memory: Memory
  chip: Chip
  cycles: float
  collectives: dict[str, int]
  compile_seconds: float

  @property
  def seconds(self) -> float:
    """Estimated time of the work, in seconds."""
    return self.cycles / self.chip.clock


def out_of_memory(error: Exception, advice: str) -> ValueError | None:
  """Turns a runtime error that reports too little device memory into a message for users.

  Args:
    error: A `jax.errors.JaxRuntimeError`.
    advice: The message's last part: a way to need less memory.

  Returns:
    The error to raise instead; None if `error` has another cause.
  """
  if 'RESOURCE_EXHAUSTED' not in str(error):
    return None
  reason = str(error).split('RESOURCE_EXHAUSTED: ')[-1].splitlines()[0][:200]
  return ValueError(f'does not fit ({reason}): {advice}')


def count_collectives(program: str) -> dict[str, int]:
  """Counts the operations that move data between devices, by kind, each once as in the program's text."""
  return {kind: n for kind in _COLLECTIVES if (n := program.count(f' {kind}(') + program.count(f' {kind}-start('))}


def estimate_cycles(
  program: str, trips: Mapping[str, int] = types.MappingProxyType({}), *, loop: str | None = None
) -> float:
  """Adds up the compiler's estimates of cycles over all operations, without transfers between devices.

  A conditional counts as its cheapest branch.

  Args:
    program: Text of a program compiled for TPU.
    trips: Numbers of iterations of the loops for which the compiler knows none, by the `jax.named_scope` directly
      around the loop; a loop without an entry has one iteration.
    loop: Scope of a loop in the main computation, of which one iteration is counted and nothing else; None to count
      the whole program.

  Returns:
    Cycles of one device.

  Raises:
    ValueError: The text has no main computation.
  """
  bodies: dict[str, list[str]] = {}
  entry = name = None
  for line in program.splitlines():
    if header := re.match(r'(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{$', line):
      name = header[2]
      entry = name if header[1] else entry
      bodies[name] = []
    elif name is not None:
      bodies[name].append(line)

  def is_in(line: str, scope: str) -> bool:
    path = re.search(r'op_name="([^"]*)"', line)
    # In `jit(f)/vmap(path)/while/body/search/while` the scope of the loop stands after the last `/body/`.
    return bool(path and re.search(rf'\b{scope}\b', path[1].split('/body/')[-1]))

  def iterations_of(line: str) -> int:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
      return int(known[1])
    return next((count for scope, count in trips.items() if is_in(line, scope)), 1)

  def body_of(line: str) -> str | None:
    found = re.search(r' while\(.*body=%?([\w.\-]+)', line)
    return found[1] if found else None

  @functools.cache
  def cycles_of(name: str) -> float:
    total = 0.0
    for line in bodies[name]:
      if cost := re.search(r'"estimated_cycles":"(\d+)"', line):
        total += int(cost[1])
      if inner := body_of(line):
        total += cycles_of(inner) * iterations_of(line)
      elif branches := re.search(r'branch_computations=\{([^}]*)\}', line):
        total += min(cycles_of(branch.strip().lstrip('%')) for branch in branches[1].split(','))
    return total

  if entry is None:
    raise ValueError('the text is not a compiled program: it has no computation marked ENTRY')
  if loop is None:
    return cycles_of(entry)
  return sum(cycles_of(body) for line in bodies[entry] if (body := body_of(line)) and is_in(line, loop))
