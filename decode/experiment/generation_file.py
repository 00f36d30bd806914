"""A file of continuations that grows as they finish, and that a later run can resume."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

# Fields that files of earlier versions lack, and what their continuations are.
_DEFAULTS = {'sample': 0, 'min_p': 0.0, 'stop': [], 'chat': False, 'system': None}


def part_path(path: str | os.PathLike, index: int, count: int) -> pathlib.Path:
  """The file of one process: `path` itself for a single one, else `name-00000-of-00002.jsonl` beside it.

  Args:
    path: The file of the whole run.
    index: Index of the process.
    count: Number of processes.
  """
  path = pathlib.Path(path)
  return path if count == 1 else path.with_name(f'{path.stem}-{index:05}-of-{count:05}{path.suffix}')


def write_index(path: str | os.PathLike, count: int) -> None:
  """Writes `name.index.json`, which names the parts of `path`.

  Args:
    path: The file of the whole run.
    count: Number of processes.

  Raises:
    ValueError: An index with another number of parts exists, so that their continuations would be decoded again; or the
      index cannot be written.
  """
  path = pathlib.Path(path)
  index = path.with_name(f'{path.stem}.index.json')
  content = {'parts': [part_path(path, part, count).name for part in range(count)]}
  try:
    if index.exists() and (found := json.loads(index.read_text())) != content:
      raise ValueError(f'generations: {index} is of {len(found["parts"])} parts, and this run has {count} processes')
    unfinished = index.with_name(f'{index.name}.unfinished')
    unfinished.write_text(json.dumps(content, indent=2) + '\n')
    unfinished.replace(index)
  except OSError as error:
    raise ValueError(f'generations: cannot write {index}: {error.strerror}') from error
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise ValueError(f'generations: {index} is no index of parts; move it away') from error


class GenerationFile:
  """A file with a JSON object per line, appended one by one. An incomplete last line is ignored.

  Attributes:
    done: Seed, prompt index and sample of every continuation in the file.
  """

  def __init__(
    self, path: str | os.PathLike, settings: dict[str, Any], *, resume: bool, prompts: Mapping[int, str] | None = None
  ):
    """Opens the file, and with `resume` reads its continuations.

    Args:
      path: A local file.
      settings: Values that every line must have, so that no file mixes settings.
      resume: Whether the file may already have continuations.
      prompts: Texts of the prompts by index, which the file's continuations must match; None to skip this check.

    Raises:
      ValueError: The file has continuations without `resume`, holds something else, or cannot be written; the message
        says why.
    """
    self._path, self._settings, self._prompts = pathlib.Path(path), settings, prompts or {}
    self.done: set[tuple[int, int, int]] = set()
    if '://' in str(path):
      raise ValueError(f'generations: {path} must be a local file, to be appended to')
    try:
      self._file = open(self._path, 'a+b')  # noqa: SIM115 - closed by __exit__
    except OSError as error:
      raise ValueError(f'generations: cannot write {path}: {error.strerror}') from error
    try:
      self._read(resume)
    except BaseException:
      self._file.close()
      raise

  def _read(self, resume: bool) -> None:
    self._file.seek(0)
    self._end = 0
    for number, line in enumerate(self._file, start=1):
      if not resume:
        raise ValueError(f'generations: {self._path} has continuations; --resume goes on with them')
      if not line.endswith(b'\n'):
        break  # incomplete because the run ended
      try:
        entry = _DEFAULTS | json.loads(line)
        place = entry['seed'], entry['index'], entry['sample']
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'generations: {self._path}, line {number}: no continuation of this command') from error
      for name, value in self._settings.items():
        if entry.get(name) != value:
          raise ValueError(
            f'generations: {self._path}, line {number}, has {name} {entry.get(name)!r}, and this run {value!r}'
          )
      if (wanted := self._prompts.get(entry['index'])) is not None and entry.get('prompt') != wanted:
        raise ValueError(
          f'generations: {self._path}, line {number}, continues another prompt than number {entry["index"]} of this'
          f' run: {str(entry.get("prompt"))[:40]!r}, not {wanted[:40]!r}'
        )
      self.done.add(place)
      self._end += len(line)
    self._file.truncate(self._end)

  def append(self, entry: dict[str, Any]) -> None:
    """Writes a continuation.

    Raises:
      ValueError: The continuation cannot be written. Earlier ones are complete.
    """
    line = json.dumps(self._settings | entry, ensure_ascii=False).encode() + b'\n'
    try:
      self._file.write(line)
      self._file.flush()
    except OSError as error:
      self._give_up()
      raise ValueError(
        f'generations: cannot write {self._path}: {error.strerror}; it has {len(self.done)} continuations, all whole'
      ) from error
    self._end += len(line)
    self.done.add((entry['seed'], entry['index'], entry['sample']))

  def _give_up(self) -> None:
    """Closes the file and removes an incomplete last line."""
    with contextlib.suppress(OSError):
      self._file.close()  # tries once more to write the buffered rest
    os.truncate(self._path, self._end)

  def __enter__(self) -> GenerationFile:
    return self

  def __exit__(self, *error) -> None:
    self._file.close()
