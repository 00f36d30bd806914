"""Plain-text files: named by paths or globs, read in parts, described by hashes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import BinaryIO

from etils import epath

from spectr_jax.io.untrusted import open_file, open_unpacked

# Text may unpack to so many times its file's size, or to so many bytes; archives that only pretend to hold text do to
# a thousand times and more.
_MOST_TIMES, _MOST_ANYWAY = 16, 2**26
_MOST_LINE = 2**27  # bytes


def _blocks(file: BinaryIO, limit: float) -> Iterator[bytes]:
  """The bytes of a file in parts that end where lines do."""
  waiting, size, number = [], 0, 1
  while block := file.read(2**20):
    size += len(block)
    if size > limit:
      raise ValueError(f'it unpacks to more than {limit:,} bytes, as no text does; unpack it yourself')
    end = block.rfind(b'\n') + 1
    waiting.append(block[:end] if end else block)
    if end:
      yield b''.join(waiting)
      number += sum(part.count(b'\n') for part in waiting)
      waiting = [block[end:]]
    elif sum(map(len, waiting)) > _MOST_LINE:
      raise ValueError(f'line {number} has more than {_MOST_LINE:,} bytes')
  yield b''.join(waiting)


def read_parts(path: epath.Path) -> Iterator[str]:
  """The contents of a `.gz`, `.bz2` or plain file in parts that end where lines do; a `ValueError` if it cannot be
  read, is not UTF-8, unpacks to more than 64 MiB and 16 times its size, or has a line of more than 128 MiB.
  """
  number = 1
  try:
    limit = max(_MOST_ANYWAY, _MOST_TIMES * path.stat().length) if path.suffix in ('.gz', '.bz2') else math.inf
    with open_unpacked(path) as file:
      for block in _blocks(file, limit):
        try:
          text = block.decode()
        except UnicodeDecodeError as error:
          line = number + block.count(b'\n', 0, error.start)
          raise ValueError(f'line {line} is not UTF-8: {error.reason}') from error
        number += block.count(b'\n')
        yield text
  except (OSError, ValueError) as error:
    raise ValueError(f'cannot read {path} as text: {str(error).removeprefix(f"cannot read {path}: ")}') from error


def read_text(path: epath.Path) -> str:
  r"""The contents of a file, as of `read_parts`, with `\n` at the end of every line."""
  return ''.join(read_parts(path)).replace('\r\n', '\n').replace('\r', '\n')


def _matches(pattern: str) -> list[epath.Path]:
  try:
    path = epath.Path(pattern)
    return [path] if path.exists() else _files_of_glob(path)
  except Exception as error:  # each kind of remote file system raises types of its own
    raise ValueError(f'cannot look for {pattern!r}: {error!r}') from error


def _files_of_glob(pattern: epath.Path) -> list[epath.Path]:
  """The files that a glob matches, sorted. Any part of the path may have wildcards."""
  parts = pattern.parts
  first = next((i for i, part in enumerate(parts) if set('*?[') & set(part)), len(parts))
  if first == len(parts):
    return []
  root = epath.Path(*parts[:first])
  return sorted(path for path in root.glob('/'.join(parts[first:])) if path.is_file()) if root.exists() else []


@dataclasses.dataclass(frozen=True)
class Files:
  """Plain-text files of paths or globs, in this order; the matches of a glob are sorted. A blank line ends a
  document.
  """

  patterns: tuple[str, ...]
  name: str = 'files'

  @functools.cached_property
  def paths(self) -> tuple[epath.Path, ...]:
    if not self.patterns:
      raise ValueError('source "files" needs config.files: comma-separated paths or globs of .txt, .gz or .bz2 files')
    paths = []
    for pattern in self.patterns:
      matches = _matches(pattern)
      if not matches:
        raise ValueError(f'no file matches {pattern!r}')
      paths.extend(matches)
    return tuple(paths)

  def documents(self) -> Iterator[str]:
    for path in self.paths:
      lines = []
      for line in itertools.chain.from_iterable(map(str.splitlines, read_parts(path))):
        if line.strip():
          lines.append(line)
        elif lines:
          yield '\n'.join(lines)
          lines = []
      if lines:
        yield '\n'.join(lines)

  def describe(self) -> dict[str, str]:
    hashes = {}
    for path in self.paths:
      # Names suffice in a log, unless two files share one.
      name = path.name if sum(other.name == path.name for other in self.paths) == 1 else str(path)
      with open_file(path) as file:
        hashes[f'files/{name}'] = hashlib.file_digest(file, 'sha256').hexdigest()
    return hashes
