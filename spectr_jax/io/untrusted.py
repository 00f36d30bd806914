"""Files that somebody else wrote: reads of bounded size, and JSON whose fields are checked where it is read.

Whatever such a file holds, reading it ends in a result or in a `ValueError` of one line that names the file. A reader
describes the fields that it uses once, as a mapping of names to `Kind`s, and may rely on them from then on:

  fields = {'hidden_size': whole(1, 2**20), 'hidden_act': TEXT, 'rope_theta': real(above=0)}
  config = read_object(folder / 'config.json', fields)
"""

from __future__ import annotations

import bz2
import collections
import contextlib
import dataclasses
import gzip
import json
import math
import os
import reprlib
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO, cast

from etils import epath

# JSON takes up to 25 times its size in memory.
SMALL = 2**22  # bytes, of configurations
LARGE = 2**24  # bytes, of lists of tensors
_MOST_NAMED = 3  # files of a folder, in a message
_REMOTE = ('gs', 's3', 'az')  # what etils.epath knows


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path names a file of another machine, such as `gs://...`."""
  return '://' in str(path)


def as_path(path: epath.PathLike) -> epath.Path:
  """A local path or one of a machine whose files are read; a `ValueError` for others, such as `hf://...`."""
  scheme, separator, _ = str(path).partition('://')
  if separator and scheme not in _REMOTE:
    known = ', '.join(f'{name}://' for name in _REMOTE)
    raise ValueError(f'{shown(str(path))} is not a path: remote ones begin with {known}')
  return epath.Path(path)


@contextlib.contextmanager
def reading(path: epath.PathLike) -> Iterator[None]:
  """Turns an error of the file system, or one of unpacking, into a `ValueError` that names the path."""
  try:
    yield
  except FileNotFoundError as error:
    raise ValueError(f'there is no file {path}') from error
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'cannot read {path}: {getattr(error, "strerror", None) or error}') from error
  except Exception as error:
    if not is_remote(path) or isinstance(error, ValueError):
      raise
    raise ValueError(f'cannot read {path}: {first_line(error)}') from error  # their types are of any kind


def open_file(path: epath.PathLike) -> BinaryIO:
  """Opens a regular file to read its bytes, or raises `ValueError`; does not wait for a pipe or touch a device."""
  path = as_path(path)
  with reading(path):
    if is_remote(path):
      return cast(BinaryIO, path.open('rb'))
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0) | getattr(os, 'O_BINARY', 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
      return os.fdopen(descriptor, 'rb')
    os.close(descriptor)
    raise ValueError(f'{path} is not a regular file')


@contextlib.contextmanager
def open_unpacked(path: epath.PathLike) -> Iterator[BinaryIO]:
  """The bytes of a file, unpacked where its name ends in `.gz` or `.bz2`, in a context in which damage raises
  `ValueError`. The reader bounds what it takes.
  """
  unpackers: dict[str, Any] = {'.gz': lambda file: gzip.GzipFile(fileobj=file), '.bz2': bz2.BZ2File}
  unpack = unpackers.get(as_path(path).suffix, contextlib.nullcontext)
  with open_file(path) as packed, reading(path), unpack(packed) as file:
    yield file


def read_bytes(path: epath.PathLike, limit: int = SMALL) -> bytes:
  """The content of a file of at most `limit` bytes, or a `ValueError`."""
  with open_file(path) as file, reading(path):
    content = file.read(limit + 1)
  if len(content) > limit:
    raise ValueError(f'{path} is larger than {limit:,} bytes, the most that such a file may have')
  return content


def read_text(path: epath.PathLike, limit: int = SMALL) -> str:
  """The content of a UTF-8 file of at most `limit` bytes, or a `ValueError`."""
  try:
    return read_bytes(path, limit).decode()
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is damaged: byte {error.start} is not UTF-8') from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    names = collections.Counter(name for name, _ in pairs)
    raise ValueError(f'{shown(names.most_common(1)[0][0])} is there twice')
  return values


def parse_json(text: str, where: str, *, is_read_again: bool = False) -> Any:
  """The value of a JSON text, which stands at `where`; a `ValueError` if it is damaged or nested too deeply.

  If another reader gets the text after its check, objects must not have a name twice: readers differ in which counts.
  """
  try:
    return json.loads(text, object_pairs_hook=_unique if is_read_again else None)
  except RecursionError as error:
    raise ValueError(f'{where} is damaged: it is nested too deeply') from error
  except ValueError as error:  # of the syntax, and of numbers with thousands of digits
    raise ValueError(f'{where} is damaged: {error}') from error


@dataclasses.dataclass(frozen=True)
class Kind:
  """What a field may hold, in words for messages; `is_valid` never raises."""

  words: str
  is_valid: Callable[[Any], bool]


def whole(least: int = 0, most: int = 2**31 - 1) -> Kind:
  """Whole numbers from `least` to `most`."""
  return Kind(f'a whole number from {least} to {most}', lambda x: type(x) is int and least <= x <= most)


def real(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf) -> Kind:
  """Finite numbers from `least` to `most`, and above `above`."""

  def is_valid(x):
    return type(x) in (int, float) and abs(x) < 1e300 and least <= x <= most and x > above

  bounds = (
    *([f'of at least {least:g}'] if least > -math.inf else []),
    *([f'above {above:g}'] if above > -math.inf else []),
    *([f'of at most {most:g}'] if most < math.inf else []),
  )
  return Kind(' '.join(['a finite number', ' and '.join(bounds)]).strip(), is_valid)


def one_of(*values: Any) -> Kind:
  """One of some values."""
  allowed = [(type(value), value) for value in values]
  return Kind(' or '.join(map(repr, values)), lambda x: any(type(x) is kind and x == value for kind, value in allowed))


def list_of(kind: Kind, most: int = 2**16) -> Kind:
  """Lists of at most `most` values of a kind."""
  return Kind(
    f'a list of at most {most}, each {kind.words}',
    lambda x: type(x) is list and len(x) <= most and all(map(kind.is_valid, x)),
  )


def object_of(fields: Mapping[str, Kind]) -> Kind:
  """Objects whose fields, where they are there and not null, are of a kind each; others may hold anything."""
  words = ', '.join(f'"{name}" {kind.words}' for name, kind in fields.items())
  return Kind(f'an object with {words}' if fields else 'an object', lambda x: _wrong_field(x, fields) is None)


def map_of(kind: Kind) -> Kind:
  """Objects all of whose values are of a kind."""
  return Kind(
    f'an object whose values are each {kind.words}', lambda x: type(x) is dict and all(map(kind.is_valid, x.values()))
  )


def either(*kinds: Kind) -> Kind:
  """What one of several kinds allows."""
  return Kind(' or '.join(kind.words for kind in kinds), lambda x: any(kind.is_valid(x) for kind in kinds))


def _is_text(x: Any) -> bool:
  try:
    return type(x) is str and bool(x.encode() or True)
  except UnicodeEncodeError:
    return False


TEXT = Kind('a text', _is_text)
FLAG = Kind('true or false', lambda x: type(x) is bool)
ANYTHING = Kind('anything', lambda x: True)


def _wrong_field(content: Any, fields: Mapping[str, Kind]) -> str | None:
  """The first field that is not of its kind, '' if the content is no object, None if all is right."""
  if type(content) is not dict:
    return ''
  wrong = (name for name, kind in fields.items() if content.get(name) is not None and not kind.is_valid(content[name]))
  return next(wrong, None)


def shown(value: Any) -> str:
  """A value as messages show it: at most eighty characters, whatever its size."""
  short = reprlib.Repr()
  short.maxstring = short.maxother = short.maxlong = 40
  text = short.repr(value)
  return text if len(text) <= 80 else f'{text[:77]}...'


def one_line(text: object, most: int = 300) -> str:
  """A text of somebody else for a message: in one line, printable, and cut after `most` characters."""
  line = ' '.join(str(text)[: 4 * most].split())
  line = ''.join(c if c.isprintable() else '\N{REPLACEMENT CHARACTER}' for c in line)
  return line if len(line) <= most else f'{line[: most - 3]}...'


def first_line(error: BaseException) -> str:
  """The first line of an error's message, or the name of its type."""
  return one_line((str(error).strip().splitlines() or [type(error).__name__])[0])


def name_shown(name: str) -> str:
  """A name that a file gives, for a message: without quotes if it is short and printable."""
  return name if len(name) <= 80 and name.isprintable() else shown(name)


def gguf_files(folder: epath.PathLike) -> str:
  """Words that end in `; ` and say which GGUF files a folder has, for a message; empty if it has none."""
  try:
    names = sorted(path.name for path in epath.Path(folder).glob('*.gguf'))
  except OSError:
    return ''
  shown_paths = [name_shown(str(epath.Path(folder) / name)) for name in names[:_MOST_NAMED]]
  others = [f'{len(names) - _MOST_NAMED:,} more'] if len(names) > _MOST_NAMED else []
  return f'give the name of the .gguf file in it, {" or ".join(shown_paths + others)}; ' if names else ''


@contextlib.contextmanager
def named(path: epath.PathLike) -> Iterator[None]:
  """Puts a path in front of the message of a `ValueError` that does not name it."""
  try:
    yield
  except ValueError as error:
    if str(path) in str(error):
      raise
    raise ValueError(f'{path}: {error}') from error


def check_object(
  content: Any, fields: Mapping[str, Kind], where: str, required: Collection[str] = ()
) -> dict[str, Any]:
  """Checks that a value is an object whose fields are of their kinds, and raises `ValueError` otherwise.

  Fields without a kind may hold anything. Null counts as a field that is not there; those that are required must be.
  """
  name = _wrong_field(content, fields)
  if name is not None and type(content) is not dict:
    raise ValueError(f'{where} must hold an object, got {shown(content)}')
  if name is not None:
    raise ValueError(f'{where}: {name} must be {fields[name].words}, got {shown(content[name])}')
  missing = [name for name in required if content.get(name) is None]
  if missing:
    raise ValueError(f'{where} is damaged: it has no {missing[0]}')
  return content


def read_object(
  path: epath.PathLike, fields: Mapping[str, Kind], limit: int = SMALL, required: Collection[str] = ()
) -> dict[str, Any]:
  """The object of a JSON file of at most `limit` bytes, with its fields checked by `check_object`."""
  return check_object(parse_json(read_text(path, limit), str(path)), fields, str(path), required)
