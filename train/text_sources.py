"""Sources of training text. Each source yields documents in a fixed order and describes its content by hashes.

`stdlib` reads the standard library of the running Python and downloads nothing. `files` reads plain text. Their
documents are split into training and held-out text by content, so a document stays on its side of the split if the
source grows or is reordered. `lm1b` has its own held-out part.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import itertools
import math
import pathlib
import platform
import sysconfig
from collections.abc import Iterator
from typing import BinaryIO, Literal, Protocol

from etils import epath

from spectr_jax.io.foreign import open_file, open_unpacked
from train.lm1b import Lm1b

Part = Literal['train', 'held_out']


class Collection(Protocol):
  """A named collection of documents."""

  name: str

  def documents(self) -> Iterator[str]:
    """All documents, in the same order each time."""

  def describe(self) -> dict[str, str]:
    """The text's origin as a training log records it."""


class TextSource(Protocol):
  """A named collection of documents in two parts, training and held-out."""

  name: str

  def documents(self, part: Part) -> Iterator[str]:
    """The documents of a part, in the same order each time."""

  def describe(self) -> dict[str, str]:
    """The text's origin as a training log records it. Different texts have different descriptions."""


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
  """The contents of a `.txt`, `.gz` or `.bz2` file in parts that end where lines do.

  Files with other endings are read as plain text.

  Raises:
    ValueError: The file cannot be read, is not UTF-8, unpacks to more than 64 MiB and 16 times its size, or has a line
      of more than 128 MiB.
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
  """The contents of a file, as of `read_parts`, with `\\n` at the end of every line.

  Raises:
    ValueError: As for `read_parts`.
  """
  return ''.join(read_parts(path)).replace('\r\n', '\n').replace('\r', '\n')


def _matches(pattern: str) -> list[epath.Path]:
  """What a path or a glob names, or nothing."""
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
  """Plain-text files. A blank line ends a document.

  Attributes:
    patterns: Paths or globs, read in this order. The matches of a glob are sorted.
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


@dataclasses.dataclass(frozen=True)
class Stdlib:
  """Documentation, docstrings and source of the running Python's standard library."""

  name: str = 'stdlib'

  def documents(self) -> Iterator[str]:
    import pydoc_data.topics

    for _, text in sorted(pydoc_data.topics.topics.items()):
      yield text.strip()
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    skipped = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__', 'pydoc_data', 'lib2to3'}
    for path in sorted(root.rglob('*.py')):
      if skipped.intersection(path.relative_to(root).parts):
        continue
      try:
        source = path.read_text(encoding='utf-8')
        tree = ast.parse(source)
      except (UnicodeDecodeError, SyntaxError, ValueError):
        continue  # a few files hold deliberately odd encodings or templates
      for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
          docstring = ast.get_docstring(node)
          if docstring and len(docstring) >= 200:
            yield docstring
      if source.strip():
        yield source.strip()

  def describe(self) -> dict[str, str]:
    digest = hashlib.sha256()
    for document in self.documents():
      digest.update(document.encode() + b'\0')
    return {'stdlib/documents': digest.hexdigest(), 'stdlib/python': platform.python_version()}


def is_held_out(document: str, percent: float) -> bool:
  """Returns whether a document is held out, which the hash of its content decides.

  Args:
    document: The document's text.
    percent: The share of documents that are held out, in percent.
  """
  digest = hashlib.sha256(document.encode()).digest()
  return int.from_bytes(digest[:4], 'big') < percent / 100 * 2**32


@dataclasses.dataclass(frozen=True)
class SplitByContent:
  """A collection of which a share of the documents is held out.

  Attributes:
    collection: The documents.
    held_out_percent: The share, in percent.
  """

  collection: Collection
  held_out_percent: float

  @property
  def name(self) -> str:
    return self.collection.name

  def documents(self, part: Part) -> Iterator[str]:
    for document in self.collection.documents():
      if is_held_out(document, self.held_out_percent) == (part == 'held_out'):
        yield document

  def describe(self) -> dict[str, str]:
    return self.collection.describe() | {'held_out': f'{self.held_out_percent:g}% of documents, by content'}


def _files(config) -> TextSource:
  return SplitByContent(Files(tuple(filter(None, config.files.split(',')))), config.held_out_percent)


_SOURCES = {
  'stdlib': lambda config: SplitByContent(Stdlib(), config.held_out_percent),
  'files': _files,
  'lm1b': lambda config: Lm1b(config.data_dir),
}


def make_source(config) -> TextSource:
  """The source that `config.source` names.

  Raises:
    ValueError: The name is unknown.
  """
  if config.source not in _SOURCES:
    raise ValueError(f'unknown source {config.source!r}; allowed: {", ".join(sorted(_SOURCES))}')
  return _SOURCES[config.source](config)
