"""A file of continuations that grows as they finish, and that a later run can resume."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any

from decode.experiment.records import OPTIONS
from spectr_jax.io.new_files import lock, only_writer, resolved, write_file
from spectr_jax.io.untrusted import (
  ANYTHING,
  NOTHING,
  TEXT,
  Kind,
  check_object,
  either,
  list_of,
  one_of,
  parse_json,
  read_object,
  real,
  shown,
  whole,
)

_LONGEST = 2**24  # bytes of a line; JSON takes up to 25 times its size in memory
_TOKENS = Kind('a list of ids', lambda x: type(x) is list and {*map(type, x)} <= {int} and min(x, default=0) >= 0)
_LOGPROBS = list_of(either(NOTHING, real()), 2**24)
# What every line has beside its settings.
_FIELDS = {
  'seed': whole(0, 2**32 - 1), 'index': whole(), 'sample': whole(), 'id': ANYTHING, 'prompt': TEXT, 'tokens': _TOKENS,
  'text': TEXT, 'target_calls': whole(), 'finish_reason': one_of('stop', 'eos', 'length'),
}  # fmt: skip


def part_path(path: str | os.PathLike, index: int, count: int) -> pathlib.Path:
  """The file of one process: `path` itself for a single one, else `name-00000-of-00002.jsonl` beside it."""
  path = pathlib.Path(path)
  return path if count == 1 else path.with_name(f'{path.stem}-{index:05}-of-{count:05}{path.suffix}')


def index_path(path: str | os.PathLike) -> pathlib.Path:
  """The index of the parts of `path`, `name.index.json` beside it."""
  path = pathlib.Path(path)
  return path.with_name(f'{path.stem}.index.json')


def check_parts(path: str | os.PathLike, count: int) -> None:
  """Refuses continuations of another number of processes, which would be decoded again."""
  path, index = pathlib.Path(path), index_path(path)
  try:
    names = read_object(index, {'parts': list_of(TEXT)}).get('parts') if index.exists() else _part_names(path, count)
  except ValueError:
    names = None
  if names is None and count > 1:
    raise ValueError(f'generations: {index} is no index of parts; move it away')
  if names is not None and names != _part_names(path, count):
    raise ValueError(f'generations: {index} is of {len(names)} parts, and this run has {count} processes')
  if count > 1 and path.exists() and path.stat().st_size:
    raise ValueError(f'generations: {path} is of one process, and this run has {count} processes')


def write_index(path: str | os.PathLike, count: int) -> None:
  """Writes the index that names the parts of `path`, if there are several; see `check_parts`."""
  check_parts(path, count)
  index = index_path(path)
  if count > 1 and not index.exists():
    try:
      write_file(index, (json.dumps({'parts': _part_names(path, count)}, indent=2) + '\n').encode())
    except ValueError as error:
      raise ValueError(f'generations: {error}') from error


def _part_names(path: str | os.PathLike, count: int) -> list[str]:
  return [part_path(path, part, count).name for part in range(count)]


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
    self.path = pathlib.Path(path)
    self.done: set[tuple[int, int, int]] = set()
    self._is_local = '://' not in str(path)
    self._resume, self._file, self._end = resume, None, 0
    self._closed = contextlib.ExitStack()

  def __enter__(self) -> GenerationFile:
    """Locks the file, and opens it if it is there; refuses content without `resume`."""
    if not self._is_local:
      raise ValueError(f'generations: {self.path} must be a local file, to be appended to')
    with self._closed as undone:
      try:
        undone.enter_context(only_writer(self.path))
      except ValueError as error:
        raise ValueError(f'generations: {error}') from error
      if os.path.exists(self.path):
        self._open(undone)
        if os.fstat(self._file).st_size and not self._resume:
          raise ValueError(f'generations: {self.path} has continuations; --resume goes on with them')
      self._closed = undone.pop_all()
    return self

  def _open(self, closed: contextlib.ExitStack, flags: int = 0) -> None:
    path = resolved(self.path)
    try:
      # Without O_NONBLOCK, opening a pipe might wait.
      flags |= os.O_RDWR | os.O_APPEND | getattr(os, 'O_NONBLOCK', 0) | getattr(os, 'O_BINARY', 0)
      self._file = os.open(path, flags, 0o666)
      closed.callback(os.close, self._file)
      if not stat.S_ISREG(os.fstat(self._file).st_mode):
        raise ValueError(f'cannot write {self.path}: it exists and is not a regular file')
      lock(self._file, self.path)  # it may have other names
    except OSError as error:
      raise ValueError(f'generations: cannot write {self.path}: {error.strerror}') from error
    except ValueError as error:
      raise ValueError(f'generations: {error}') from error

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
    if self._file is None:
      self._open(self._closed, os.O_CREAT | os.O_EXCL)
    self._settings = dict(settings)
    begin = json.dumps(self._settings, ensure_ascii=False).encode()[:-1] + b', '
    with os.fdopen(os.dup(self._file), 'rb') as file:
      for number in itertools.count(1):
        line, where = file.readline(_LONGEST + 1), f'generations: {self.path}, line {number}'
        if len(line) > _LONGEST:
          raise ValueError(f'{where}: no continuation of this command: it has more than {_LONGEST:,} bytes')
        if not line.endswith(b'\n'):
          break
        place = self._check(line, where, prompts)
        if place[1] % num_processes != process:
          raise ValueError(f'{where}, continues number {place[1]}, which is not of part {process} of {num_processes}')
        if place in self.done:
          raise ValueError(f'{where}, has seed, index and sample of an earlier line: {", ".join(map(str, place))}')
        self.done.add(place)
        self._end += len(line)
    if line and not (begin.startswith(line) or line.startswith(begin)):
      raise ValueError(f"{where}: it is incomplete and does not begin as this run's lines do; nothing was changed")
    if line:
      os.ftruncate(self._file, self._end)

  def _check(self, line: bytes, where: str, prompts: Mapping[int, Mapping[str, Any]]) -> tuple[int, int, int]:
    """Checks that a line is of this run; returns seed, index and sample."""
    try:
      entry = check_object(parse_json(line.decode(), 'the line'), _FIELDS, 'the line')
      missing = [name for name in _FIELDS if entry.get(name) is None]
      if missing:
        raise ValueError(f'it has no {missing[0]}')
    except ValueError as error:
      raise ValueError(f'{where}: no continuation of this command: {error}') from error
    if differences := _differences(entry, self._settings):
      free = ', '.join([*OPTIONS['free'], 'rounds_at_a_time'])
      raise ValueError(f'{where}, has {"; ".join(differences[:4])}; only these may change: {free}')
    logprobs = entry.get('logprobs', [])
    num_logprobs = len(entry['tokens']) if self._settings.get('run', {}).get('logprobs') else 0
    if not _LOGPROBS.is_valid(logprobs) or len(logprobs) != num_logprobs:
      raise ValueError(f'{where}: no continuation of this command: its logprobs are not {num_logprobs} numbers')
    if wanted := prompts.get(entry['index']):
      for name, value in wanted.items():
        if not _is_same(entry.get(name), value):
          raise ValueError(
            f'{where}, continues another prompt than number {entry["index"]} of this run: {name}'
            f' {shown(entry.get(name))}, not {shown(value)}'
          )
    return entry['seed'], entry['index'], entry['sample']

  def append(self, entry: Mapping[str, Any]) -> None:
    """Writes what a continuation has beside the settings; where that fails, earlier ones are complete."""
    line = json.dumps(self._settings | dict(entry), ensure_ascii=False).encode() + b'\n'
    num_written = 0
    try:
      while num_written < len(line):
        num_written += os.write(self._file, memoryview(line)[num_written:])
    except OSError as error:
      with contextlib.suppress(OSError):
        if num_written and os.fstat(self._file).st_size == self._end + num_written:
          os.ftruncate(self._file, self._end)
      raise ValueError(
        f'generations: cannot write {self.path}: {error.strerror}; it has {len(self.done)} continuations, all whole'
      ) from error
    self._end += len(line)
    self.done.add((entry['seed'], entry['index'], entry['sample']))

  def __exit__(self, *error) -> None:
    self._closed.close()
