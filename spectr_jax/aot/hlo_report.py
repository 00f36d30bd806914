"""The compiler's report about a program: its memory, beside what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from spectr_jax.aot.cost import Cost, Program
from spectr_jax.aot.kernels import take_schedules
from spectr_jax.aot.tpu_slices import Chip, chip_of


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
    """The compiler's memory analysis; ValueError if the backend has none."""
    analysis = compiled.memory_analysis()
    if analysis is None:
      raise ValueError('the backend does not report how much memory a program needs')
    return cls(
      arguments=analysis.argument_size_in_bytes,
      temporaries=analysis.temp_size_in_bytes,
      outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
      code=analysis.generated_code_size_in_bytes,
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
    """Checks that the program fits into the chip's memory; ValueError if not."""
    if self.total > chip.memory:
      raise ValueError(f'does not fit: {self.total / 2**30:.1f} GiB of {chip.memory / 2**30:.0f}')


@dataclasses.dataclass(frozen=True)
class ProgramReport:
  """The compiler's report about a program; bytes and operations are per device.

  Attributes:
    devices: Number of devices of the mesh.
    memory: Bytes by use.
    chip: Published figures of the device.
    parts: What the program costs, by part; '' are operations outside of all.
    uncounted: Paths of the loops that count with one iteration, since nothing says how many there are.
    compile_seconds: Seconds to compile once.
  """

  devices: int
  memory: Memory
  chip: Chip
  parts: dict[str, Cost]
  uncounted: tuple[str, ...]
  compile_seconds: float

  @property
  def cost(self) -> Cost:
    """What the program costs, the sum over its parts."""
    return sum(self.parts.values(), Cost())

  def table(self, *before: str, after: Sequence[str] = ()) -> str:
    """The report as lines of text: memory, `before`, the parts with their sum, `after`, and the time to compile."""
    header = f'{"":<12} {"ms":>10} {"launches":>10} {"streamed":>13} {"transfers between devices"}'
    named = {name or 'rest': cost for name, cost in self.parts.items() if cost.seconds}
    lines = [
      f'{name:<12} {1e3 * cost.seconds:10.3f} {cost.launches:10,} {cost.memory_bytes / 2**20:9,.1f} MiB '
      + (', '.join(f'{n:,} {kind}' for kind, n in cost.collectives.items()) or 'none')
      for name, cost in (*named.items(), ('in all', self.cost))
    ]
    once = (f'{"counted once":<12} loop of unknown length {path}' for path in self.uncounted)
    last = f'{"compile":<12} {self.compile_seconds:12.1f} s'
    return '\n'.join([*self.memory.lines(self.chip), *before, header, *lines, *once, *after, last])

  def as_dict(self) -> dict[str, Any]:
    """The report for a file."""
    cost = self.cost
    own = {'seconds': cost.seconds, 'cycles': cost.cycles, 'collectives': cost.collectives, 'launches': cost.launches}
    return own | dataclasses.asdict(self)


def measure(
  compiled: jax.stages.Compiled,
  mesh: Mesh,
  compile_seconds: float,
  parts: Sequence[str] = (),
  *,
  loop: str | None = None,
  **options: Any,
) -> ProgramReport:
  """The report about the program compiled last, with options of `Program`; takes the schedules of its kernels."""
  text, chip = compiled.as_text() or '', chip_of(mesh.devices.flat[0])
  program = Program(text, chip, kernels=take_schedules(text), **options)
  costs = program.cost(parts, loop=loop)
  return ProgramReport(mesh.size, Memory.of(compiled), chip, costs, tuple(sorted(program.uncounted)), compile_seconds)


def out_of_memory(error: Exception, advice: str) -> ValueError | None:
  """The error to raise for one that reports too little device memory, with advice how to need less; None for others."""
  if 'RESOURCE_EXHAUSTED' not in str(error):
    return None
  reason = str(error).split('RESOURCE_EXHAUSTED: ')[-1].splitlines()[0][:200]
  return ValueError(f'does not fit ({reason}): {advice}')
