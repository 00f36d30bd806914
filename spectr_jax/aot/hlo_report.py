"""What the compiler says about a program: memory, operations between devices, and the time that it expects."""

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
  """Bytes that a program needs on one device.

  Attributes:
    arguments: What goes in.
    temporaries: Scratch memory at its peak.
    outputs: What comes out and does not stand where something went in.
    code: The program itself.
  """

  arguments: int
  temporaries: int
  outputs: int
  code: int

  @classmethod
  def of(cls, compiled: jax.stages.Compiled) -> Memory:
    found = compiled.memory_analysis()
    return cls(
      arguments=found.argument_size_in_bytes,
      temporaries=found.temp_size_in_bytes,
      outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
      code=found.generated_code_size_in_bytes,
    )

  @property
  def total(self) -> int:
    return self.arguments + self.temporaries + self.outputs + self.code

  def lines(self, chip: Chip) -> list[str]:
    """A table, what is left of the chip's memory below it."""
    sizes = dataclasses.asdict(self) | {'total': self.total}
    return [f'{name:<12} {size / 2**20:12,.1f} MiB per device' for name, size in sizes.items()] + [
      f'{"free":<12} {(chip.memory - self.total) / 2**20:12,.1f} MiB of {chip.memory / 2**30:.0f} GiB'
    ]

  def check(self, chip: Chip) -> None:
    """Raises ValueError where it does not fit."""
    if self.total > chip.memory:
      raise ValueError(f'does not fit: {self.total / 2**30:.1f} GiB of {chip.memory / 2**30:.0f}')


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """What the compiler says about a program; bytes and operations are per device.

  Attributes:
    devices: Devices of the mesh.
    memory: Bytes.
    chip: What is published about the device.
    cycles: The compiler's estimate of a device's work, transfers between devices left out.
    collectives: How many operations of each kind move data between devices.
    compile_seconds: Time to compile once.
  """

  devices: int
  memory: Memory
  chip: Chip
  cycles: float
  collectives: dict[str, int]
  compile_seconds: float

  @property
  def seconds(self) -> float:
    """Estimated time of the work."""
    return self.cycles / self.chip.clock


def out_of_memory(error: jax.errors.JaxRuntimeError, advice: str) -> ValueError | None:
  """What to tell the user about an error that says that devices have too little memory; None for any other."""
  if 'RESOURCE_EXHAUSTED' not in str(error):
    return None
  reason = str(error).split('RESOURCE_EXHAUSTED: ')[-1].splitlines()[0][:200]
  return ValueError(f'does not fit ({reason}): {advice}')


def count_collectives(program: str) -> dict[str, int]:
  """How many operations of each kind move data between devices; each stands once in the program's text."""
  return {kind: n for kind in _COLLECTIVES if (n := program.count(f' {kind}(') + program.count(f' {kind}-start('))}


def estimate_cycles(
  program: str, trips: Mapping[str, int] = types.MappingProxyType({}), *, loop: str | None = None
) -> float:
  """The sum of the cycles that the compiler expects of every operation, transfers between devices left out.

  Args:
    program: Text of a program compiled for TPU.
    trips: How often loops turn whose number of turns the compiler does not know, by the `jax.named_scope` directly
      around them; others turn once. Of branches the cheapest counts.
    loop: Scope of a loop in the main computation: one turn of it is counted, and nothing else.
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
    # Such as `jit(f)/vmap(path)/while/body/search/while`: the scope of the loop within the last body.
    return bool(path and re.search(rf'\b{scope}\b', path[1].split('/body/')[-1]))

  def turns_of(line: str) -> int:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
      return int(known[1])
    return next((count for scope, count in trips.items() if is_in(line, scope)), 1)

  def body_of(line: str) -> str | None:
    found = re.search(r' while\(.*body=%?([\w.\-]+)', line)
    return found and found[1]

  @functools.cache
  def cycles_of(name: str) -> float:
    total = 0.0
    for line in bodies[name]:
      if cost := re.search(r'"estimated_cycles":"(\d+)"', line):
        total += int(cost[1])
      if inner := body_of(line):
        total += cycles_of(inner) * turns_of(line)
      elif branches := re.search(r'branch_computations=\{([^}]*)\}', line):
        total += min(cycles_of(branch.strip().lstrip('%')) for branch in branches[1].split(','))
    return total

  if loop is None:
    return cycles_of(entry)
  return sum(cycles_of(body) for line in bodies[entry] if (body := body_of(line)) and is_in(line, loop))
