"""What a program compiled for TPU costs, by a replay of its schedule.

The text of a compiled program lists its operations in the order in which a device runs them, with the compiler's
estimate of the cycles of most. It has none for transfers: of weights and caches from memory, which run beside the
operations, and between devices. A replay adds them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Collection, Mapping, Sequence

from spectr_jax.aot.tpu_slices import Chip

# Beside the time of the bytes. Nothing that is known here says what it is on a chip.
COLLECTIVE_SECONDS = 3e-6
# What the compiler's estimate gives the smallest of other operations.
_LAUNCH_CYCLES = 1817
_BEGUN, _ENDED = 'AsyncCollectiveStart', 'AsyncCollectiveDone'
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')


@dataclasses.dataclass(frozen=True)
class Cost:
  """What operations cost one device.

  Attributes:
    seconds: Time of the replay, with waits for transfers.
    cycles: The compiler's estimate of the work, without transfers.
    launches: Operations that the compiler gives cycles for, each as often as its loop turns.
    memory_bytes: Bytes that are copied between memory and the chip ahead of the operation that needs them. What an
      operation reads itself is part of its cycles.
    collectives: How many transfers between devices there are, by kind, each as often as its loop turns.
    collective_bytes: Bytes of their results.
  """

  seconds: float = 0.0
  cycles: float = 0.0
  launches: int = 0
  memory_bytes: int = 0
  collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
  collective_bytes: int = 0

  def __add__(self, other: Cost) -> Cost:
    return self.plus(other)

  def plus(self, other: Cost, count: int = 1) -> Cost:
    """The cost of this and `count` times another."""
    kinds = [kind for kind in COLLECTIVES if kind in self.collectives or kind in other.collectives]
    return Cost(
      self.seconds + count * other.seconds,
      self.cycles + count * other.cycles,
      self.launches + count * other.launches,
      self.memory_bytes + count * other.memory_bytes,
      {kind: self.collectives.get(kind, 0) + count * other.collectives.get(kind, 0) for kind in kinds},
      self.collective_bytes + count * other.collective_bytes,
    )


@dataclasses.dataclass(frozen=True)
class _Operation:
  """One line of a computation; `line` is its text, `shape` that of its result."""

  name: str
  shape: str
  kind: str
  line: str

  @functools.cached_property
  def operands(self) -> list[str]:
    inside = self.line.split(f' {self.kind}(', 1)[1]
    return re.findall(r'%([\w.\-]+)', inside[: inside.find(')')])

  @functools.cached_property
  def path(self) -> str:
    name = re.search(r'op_name="([^"]*)"', self.line)
    return name[1] if name else ''

  @functools.cached_property
  def channel(self) -> str:
    """The number that all operations of a transfer between devices share."""
    number = re.search(r'\bchannel_id=(\d+)', self.line)
    return number[1] if number else ''

  @property
  def is_kernel(self) -> bool:
    """Whether this is a Pallas kernel."""
    return self.kind == 'custom-call' and 'custom_call_target="tpu_custom_call"' in self.line

  def attribute(self, name: str) -> str | None:
    """The computation that an attribute names."""
    attribute = re.search(rf'\b{name}=%?([\w.\-]+)', self.line)
    return attribute[1] if attribute else None

  def is_in(self, scope: str) -> bool:
    # In `jit(f)/vmap(path)/while/body/search/while` the scope of the loop stands after the last `/body/`.
    return bool(re.search(rf'\b{scope}\b', self.path.split('/body/')[-1]))


_OPERATION = re.compile(r'\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(')
_PLACE = re.compile(r' get-tuple-element\([^)]*\), index=(\d+)')
_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{$')


def _largest(sizes: Sequence[int]) -> int:
  return max(sizes, default=0)


def _sizes(shape: str) -> list[int]:
  """Bytes of each array of a shape."""
  arrays = re.findall(r'\b([a-z]+)(\d*)\w*\[([\d,]*)\]', shape)
  return [math.prod(map(int, filter(None, sides.split(',')))) * (int(bits or 8) // 8) for _, bits, sides in arrays]


class Program:
  """The text of a compiled program, to be replayed.

  Args:
    text: The text, as `compiled.as_text()` returns it.
    chip: Figures of the device.
    collective_seconds: Time of a transfer between devices beside that of its bytes, in seconds.
    trips: Numbers of iterations of the loops for which the text has none, by the `jax.named_scope` directly around the
      loop. A loop that counts from 0 to a constant has that number; one of which nothing is known has one iteration,
      and its path is in `uncounted`.
    dearest: Scopes in which a conditional counts as its dearest branch; elsewhere it is the cheapest one.
    kernels: Cycles of Pallas kernels by the names of their operations, see `kernels.take_schedules`; a launch is added.

  Attributes:
    uncounted: Paths of the loops that were replayed once because nothing says how often they turn.

  Raises:
    ValueError: The text has no main computation.
  """

  def __init__(
    self,
    text: str,
    chip: Chip,
    *,
    collective_seconds: float = COLLECTIVE_SECONDS,
    trips: Mapping[str, int] = types.MappingProxyType({}),
    dearest: Collection[str] = (),
    kernels: Mapping[str, int] = types.MappingProxyType({}),
  ):
    self._chip, self._latency, self._trips, self._dearest = chip, collective_seconds, trips, dearest
    self._kernels = kernels
    self.uncounted: set[str] = set()
    self._operations: dict[str, list[_Operation]] = {}
    entry = name = None
    for line in text.splitlines():
      if header := _COMPUTATION.match(line):
        name = header[2]
        entry = name if header[1] else entry
        self._operations[name] = []
      elif name is not None and (matched := _OPERATION.match(line)):
        self._operations[name].append(_Operation(matched[1], matched[2], matched[3], line))
    if entry is None:
      raise ValueError('the text is not a compiled program: it has no computation marked ENTRY')
    self._entry = entry
    self._shapes = {each.name: each.shape for body in self._operations.values() for each in body}
    self._replayed: dict[tuple[str, Sequence[str], str], dict[str, Cost]] = {}

  def cost(self, parts: Sequence[str] = (), *, loop: str | None = None) -> dict[str, Cost]:
    """What the program costs, by part that costs anything, and under '' outside of all parts.

    An operation belongs to the first scope of `parts` on its path; one that the compiler made up, without a path,
    belongs to the part of the operation before it.

    Args:
      parts: Names of `jax.named_scope`s.
      loop: Scope of a loop in the main computation, of which one iteration is counted and nothing else; None to count
        the whole program.
    """
    parts = tuple(parts)
    costs: dict[str, Cost] = {}
    if loop is None:
      _merge(costs, self._replay(self._entry, parts, ''))
    else:
      for operation in self._operations[self._entry]:
        if operation.kind == 'while' and operation.is_in(loop) and (body := operation.attribute('body')):
          _merge(costs, self._replay(body, parts, ''))
    return {part: costs[part] for part in (*parts, '') if part in costs}

  def total(self, *, loop: str | None = None) -> Cost:
    """What the program costs, or an iteration of the loop of a scope, see `cost`."""
    return sum(self.cost(loop=loop).values(), Cost())

  def _replay(self, computation: str, parts: tuple[str, ...], part: str) -> dict[str, Cost]:
    """The cost by part of a computation that is called by an operation of `part`."""
    key = computation, parts, part
    if key not in self._replayed:
      self._replayed[key] = self._schedule(computation, parts, part)
    return self._replayed[key]

  def _schedule(self, computation: str, parts: tuple[str, ...], part: str) -> dict[str, Cost]:
    clock, costs = 0.0, {}
    free = {'memory': 0.0, 'links': 0.0}  # when the unit has ended its transfers
    ends: dict[str, float] = {}  # when the transfer of this name ends

    def spend(cost: Cost) -> None:
      _merge(costs, {part: cost})

    def transfer(name: str, kind: str, size: int) -> None:
      # A sum goes around the axis twice, once to be added up and once to be sent to all.
      seconds = self._latency + (2 if kind == 'all-reduce' else 1) * size / self._chip.link_bandwidth
      free['links'] = ends[name] = max(clock, free['links']) + seconds
      spend(Cost(collectives={kind: 1}, collective_bytes=size))

    def wait(name: str) -> None:
      nonlocal clock
      end = ends.get(name, clock)
      spend(Cost(seconds=max(0.0, end - clock)))
      clock = max(clock, end)

    for operation in self._operations[computation]:
      if parts and operation.path:
        # Whatever a part calls stands behind its name.
        named = re.search(rf'\b({"|".join(parts)})\b', operation.path)
        part = named[1] if named else part
      kind = operation.kind.removesuffix('-start').removesuffix('-done')
      fused, mark = self._fused_transfer(operation)
      if operation.kind.endswith('-done') and operation.operands:
        wait(operation.operands[0])
      elif kind in COLLECTIVES:
        # One that has only begun has its operands in its shape as well.
        is_whole = kind == operation.kind
        transfer(operation.name, kind, (sum if is_whole else _largest)(_sizes(operation.shape)))
        if is_whole:
          wait(operation.name)
      elif fused and mark == _BEGUN:
        transfer(fused.channel, fused.kind, sum(_sizes(fused.shape)))
      elif fused:
        wait(fused.channel)
      elif operation.kind in ('copy-start', 'slice-start'):
        size = min(_sizes(operation.shape)[:2], default=0)
        is_inside = operation.shape.count('S(1)')
        moved = size if is_inside == 1 else 0 if is_inside else 2 * size  # from memory to memory it passes twice
        free['memory'] = ends[operation.name] = max(clock, free['memory']) + moved / self._chip.memory_bandwidth
        spend(Cost(memory_bytes=moved))
      elif cycles := self._cycles(operation):
        seconds = cycles / self._chip.clock
        if operation.is_kernel:  # beside its work it copies what is not on the chip
          seconds = max(seconds, self._streamed(operation) / self._chip.memory_bandwidth)
        spend(Cost(seconds, cycles, 1))
        clock += seconds
      if inner := self._called(operation, parts, part):
        _merge(costs, inner)
        clock += sum(cost.seconds for cost in inner.values())
    return costs

  def _fused_transfer(self, operation: _Operation) -> tuple[_Operation | None, str]:
    """The transfer between devices that a fusion begins or ends, and which of both; its steps are in other fusions."""
    if operation.kind == 'fusion' and (called := self._operations.get(operation.attribute('calls') or '')):
      mark = next((mark for each in called for mark in (_BEGUN, _ENDED) if f'"{mark}"' in each.line), '')
      if mark:
        return next(each for each in called if each.kind in COLLECTIVES), mark
    return None, ''

  def _cycles(self, operation: _Operation) -> int:
    if operation.is_kernel:
      if operation.name not in self._kernels:
        raise ValueError(f'nothing is known of the cycles of the kernel {operation.name}')
      return _LAUNCH_CYCLES + self._kernels[operation.name]
    if estimate := re.search(r'"estimated_cycles":"(\d+)"', operation.line):
      return int(estimate[1])
    # Of gathers and scatters with code of their own the compiler says nothing; they are launches at least.
    return _LAUNCH_CYCLES if operation.kind == 'fusion' and 'kind=kCustom' in operation.line else 0

  def _streamed(self, kernel: _Operation) -> int:
    """Bytes of a kernel's operands and results that are in memory."""
    shapes = [self._shapes.get(name, '') for name in kernel.operands] + kernel.shape.strip('()').split(', ')
    return sum(sum(_sizes(shape)) for shape in shapes if 'S(' not in shape)

  def _called(self, operation: _Operation, parts: tuple[str, ...], part: str) -> dict[str, Cost]:
    """The cost by part of what an operation calls."""
    if operation.kind == 'while' and (body := operation.attribute('body')):
      trips = self._iterations(operation)
      return {name: Cost().plus(cost, trips) for name, cost in self._replay(body, parts, part).items()}
    if branches := re.search(r'branch_computations=\{([^}]*)\}', operation.line):
      of_branches = [self._replay(name.strip().lstrip('%'), parts, part) for name in branches[1].split(',')]
      is_dear = any(re.search(rf'\b{scope}\b', operation.path) for scope in self._dearest)
      return (max if is_dear else min)(of_branches, key=lambda costs: sum(cost.seconds for cost in costs.values()))
    return {}

  def _iterations(self, loop: _Operation) -> int:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
      return int(known[1])
    condition = loop.attribute('condition')
    if condition in self._operations and (limit := self._limit(condition, {})):
      return -(-limit[1] // self._step(loop.attribute('body') or '', limit[0]))
    for scope, count in self._trips.items():
      if loop.is_in(scope):
        return count
    self.uncounted.add(loop.path)
    return 1

  def _limit(self, computation: str, arguments: Mapping[int, int]) -> tuple[int | None, int] | None:
    """Where a loop's state has its counter, if known, and the constant it is compared with; it begins at 0."""
    constants: dict[str, int] = {}
    places: dict[str, int] = {}
    for operation in self._operations[computation]:
      if (value := _constant(operation)) is not None:
        constants[operation.name] = value
      elif place := _PLACE.search(operation.line):
        places[operation.name] = int(place[1])
      elif operation.kind == 'parameter' and (number := re.search(r' parameter\((\d+)\)', operation.line)):
        if int(number[1]) in arguments:
          constants[operation.name] = arguments[int(number[1])]
      elif operation.kind == 'compare' and 'direction=LT' in operation.line:
        counter, *limit = operation.operands
        if counter not in constants and limit and limit[0] in constants:
          return places.get(counter), constants[limit[0]]
      elif called := operation.attribute('calls'):
        given = {i: constants[name] for i, name in enumerate(operation.operands) if name in constants}
        if called in self._operations and (limit := self._limit(called, given)):
          counters = [places[name] for name in operation.operands if name in places]
          return (counters[0] if len(counters) == 1 else limit[0]), limit[1]
    return None

  def _step(self, body: str, place: int | None) -> int:
    """What a turn of a loop adds to its counter, which is at a place of the loop's state; 1 if it is not known."""
    operations = {each.name: each for each in self._operations.get(body, ())}
    root = next((each for each in operations.values() if each.line.lstrip().startswith('ROOT')), None)
    if place is None or root is None or root.kind != 'tuple':
      return 1
    step, name = 0, root.operands[place]
    while (added := operations.get(name)) and added.kind == 'add':
      terms = [operations.get(each) for each in added.operands]
      known = [value for each in terms if each and (value := _constant(each)) is not None]
      step, name = step + sum(known), next((each.name for each in terms if each and _constant(each) is None), '')
    return step or 1


def _constant(operation: _Operation) -> int | None:
  """The value of a constant number."""
  constant = re.search(r'[su]32\[\]\S* constant\((\d+)\)', operation.line)
  return int(constant[1]) if constant else None


def _merge(costs: dict[str, Cost], more: Mapping[str, Cost]) -> None:
  for part, cost in more.items():
    costs[part] = costs.get(part, Cost()) + cost
