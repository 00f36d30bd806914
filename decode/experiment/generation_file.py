"""A file of continuations that grows as they finish, and that a later run can resume."""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from common.json_file import typed
from decode.experiment.exports import OPTIONS
from spectr_jax.io.new_files import check_writable, lock, resolved, writing
from spectr_jax.io.untrusted import is_remote, parse_json, shown


@dataclasses.dataclass(frozen=True)
class _Place:
  seed: int
  index: int  # of the prompt
  sample: int


def part_path(path: str | os.PathLike, index: int, count: int) -> pathlib.Path:
  """The file of one process: `path` itself for a single one, else `name-00000-of-00002.jsonl` beside it."""
  path = pathlib.Path(path)
  return path if count == 1 else path.with_name(f'{path.stem}-{index:05}-of-{count:05}{path.suffix}')


def check_parts(path: str | os.PathLike, count: int) -> None:
  """Refuses continuations of another number of processes, which would be decoded again."""
  path, digits = pathlib.Path(path), 5 * '[0-9]'
  others = path.parent.glob(f'{glob.escape(path.stem)}-{digits}-of-{digits}{glob.escape(path.suffix)}')
  for other in {path, *others} - {part_path(path, part, count) for part in range(count)}:
    if other.exists() and other.stat().st_size:
      raise ValueError(f'generations: {other} is of another number of processes, and this run has {count}')


def _is_same(one: Any, other: Any) -> bool:
  """Tells whether two JSON values are equal; true and 1 are not."""
  return one == other and isinstance(one, bool) == isinstance(other, bool)


def _differences(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
  """The differences of the fields that are wanted, those of `run` one by one."""
  differences = []
  for name, value in wanted.items():
    if name == 'run' and isinstance(written.get(name), dict):
      # What only the other run has, such as a constraint, this one has not.
      differences += _differences(written[name], dict.fromkeys(written[name]) | value)
    elif not _is_same(written.get(name), value):
      differences.append(f'{name} {shown(written.get(name))}, and this run {shown(value)}')
  return differences


class GenerationFile:
  """A file with a JSON object per line, appended one by one, that one process at a time may have.

  Every line begins with the settings of its run. A file is ours if all of its lines do; nothing is cut of any other.
  The last line may be incomplete, since a run may end at any moment, and is then cut.

  A context manager: entering it refuses at once what cannot be appended to, and `begin` reads what is there. `done` has
  seed, prompt index and sample of every continuation in the file.
  """

  def __init__(self, path: str | os.PathLike, *, resume: bool):
    self.path, self._resume = pathlib.Path(path), resume
    self._is_remote = is_remote(path)
    self.done: set[tuple[int, int, int]] = set()

  def __enter__(self) -> GenerationFile:
    """Opens and locks the file; refuses content without `resume`."""
    try:
      if self._is_remote:
        raise ValueError(f'{self.path} must be a local file, to be appended to')
      check_writable(self.path)
      with writing(self.path):
        self._file = open(resolved(self.path), 'a+b', buffering=0)
      lock(self._file.fileno(), self.path)
      if not os.fstat(self._file.fileno()).st_nlink:  # another process has just removed it
        raise ValueError(f'{self.path} is being written by another process')
      if os.path.getsize(self.path) and not self._resume:
        raise ValueError(f'{self.path} has continuations; --resume goes on with them')
    except ValueError as error:
      raise ValueError(f'generations: {error}') from error
    return self

  def begin(
    self,
    settings: Mapping[str, Any],
    prompts: Mapping[int, Mapping[str, Any]],
    *,
    process: int = 0,
    num_processes: int = 1,
  ) -> None:
    """Reads the continuations that are there, and cuts an incomplete one; nothing of what is not this run's.

    Every line has the `settings`, so that no file mixes runs, and says of its prompt what `prompts` have by index.
    """
    self._settings = dict(settings)
    begin, end = json.dumps(self._settings, ensure_ascii=False).encode()[:-1] + b', ', 0
    with open(self.path, 'rb') as file:
      for number, line in enumerate(file, 1):
        where = f'generations: {self.path}, line {number}'
        if not line.endswith(b'\n'):
          if not (begin.startswith(line) or line.startswith(begin)):
            raise ValueError(
              f"{where}: it is incomplete and does not begin as this run's lines do; nothing was changed"
            )
          self._file.truncate(end)
          break
        place = self._check(line, where, prompts)
        if place[1] % num_processes != process:
          raise ValueError(f'{where}, continues number {place[1]}, which is not of part {process} of {num_processes}')
        if place in self.done:
          raise ValueError(f'{where}, has seed, index and sample of an earlier line: {", ".join(map(str, place))}')
        self.done.add(place)
        end += len(line)

  def _check(self, line: bytes, where: str, prompts: Mapping[int, Mapping[str, Any]]) -> tuple[int, int, int]:
    """Checks that a line is of this run; returns seed, index and sample."""
    try:
      entry = parse_json(line.decode(), 'the line')
      place = typed(_Place, entry)
    except (ValueError, TypeError) as error:
      raise ValueError(f'{where}: no continuation of this command ({error})') from error
    if differences := _differences(entry, self._settings):
      free = ', '.join([*OPTIONS['free'], 'rounds_at_a_time'])
      raise ValueError(f'{where}, has {"; ".join(differences[:4])}; only these may change: {free}')
    for name, value in prompts.get(place.index, {}).items():
      if not _is_same(entry.get(name), value):
        raise ValueError(
          f'{where}, continues another prompt than number {place.index} of this run: {name}'
          f' {shown(entry.get(name))}, not {shown(value)}'
        )
    return dataclasses.astuple(place)

  def append(self, entry: Mapping[str, Any]) -> None:
    """Writes what a continuation has beside the settings; where that fails, earlier ones are complete."""
    line, size = json.dumps(self._settings | dict(entry), ensure_ascii=False).encode() + b'\n', 0
    try:
      while size < len(line):
        size += self._file.write(line[size:])
    except OSError as error:
      self._file.truncate(os.fstat(self._file.fileno()).st_size - size)
      raise ValueError(
        f'generations: cannot write {self.path}: {error.strerror}; it has {len(self.done)} continuations, all whole'
      ) from error
    self.done.add((entry['seed'], entry['index'], entry['sample']))

  def __exit__(self, kind: type[BaseException] | None, *error) -> None:
    if kind and not os.fstat(self._file.fileno()).st_size:
      os.unlink(resolved(self.path))
    self._file.close()
