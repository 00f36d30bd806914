"""Zip archives whose entries are not compressed, as `torch.save` writes them; nothing that they say is trusted."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from etils import epath

from spectr_jax.io import foreign

_END = struct.Struct('<4s4H2LH')  # the record at the end of the file
_END64_PLACE = struct.Struct('<4sLQL')  # before it, where there are numbers of 64 bits
_END64 = struct.Struct('<4sQ2H2L4Q')
_ENTRY = struct.Struct('<4s6H3L5H2L')  # in the directory
_HEADER = struct.Struct('<4s5H3L2H')  # before the data of an entry
_LONGEST_COMMENT = 2**16 - 1
_DIRECTORY_LIMIT = 2**24  # bytes
_IS_ENCRYPTED = 0x2041  # bits of the flags
_CHUNK = 2**20  # bytes read together for a checksum


class _Entry(NamedTuple):
  """An entry of the directory.

  Attributes:
    header: Where its header begins.
    size: Bytes of its data.
    end: Where the data end at the latest.
    checksum: The CRC-32 of the data.
    fault: Why it is not read, or ''.
  """

  header: int
  size: int
  end: int
  checksum: int
  fault: str


class StoredZip:
  """The entries of a zip archive, of which parts can be read.

  Args:
    path: The file.

  Raises:
    ValueError: The file is missing, damaged or no such archive; or two entries have the same name or bytes in common.
  """

  def __init__(self, path: epath.PathLike):
    self._path, self._file = path, foreign.open_file(path)
    self._checked: dict[str, int] = {}  # where the data begin, once they have been compared with the checksum
    try:
      self._entries = self._read_directory()
    except (ValueError, OSError) as error:
      self._file.close()
      raise ValueError(f'{path} is damaged or not a file of torch.save: {error}') from error

  def names(self) -> list[str]:
    """The names of all entries."""
    return list(self._entries)

  def size(self, name: str) -> int | None:
    """The size of an entry that can be read, in bytes; None if there is none."""
    entry = self._entries.get(name)
    return None if entry is None or entry.fault else entry.size

  def read(self, name: str, begin: int, end: int) -> bytes:
    """Some bytes of an entry, whose checksum is compared the first time.

    Args:
      name: The entry.
      begin, end: The range of bytes, within its size.

    Raises:
      ValueError: The entry cannot be read or is damaged.
    """
    try:
      start = self._begin(name)
      return self._bytes(start + begin, end - begin)
    except (ValueError, OSError) as error:
      raise ValueError(f'{self._path} is damaged: {error}') from error

  def _bytes(self, at: int, size: int) -> bytes:
    self._file.seek(at)
    found = self._file.read(size)
    if len(found) != size:
      raise ValueError(f'it ends before byte {at + size}')
    return found

  def _begin(self, name: str) -> int:
    """Where the data of an entry begin; they are compared with the checksum."""
    if name in self._checked:
      return self._checked[name]
    entry = self._entries[name]
    if entry.fault:
      raise ValueError(f'entry {foreign.name_shown(name)} {entry.fault}')
    magic, _, flags, method, _, _, _, _, _, name_size, extra_size = _HEADER.unpack(
      self._bytes(entry.header, _HEADER.size)
    )
    begin = entry.header + _HEADER.size + name_size + extra_size
    found = self._bytes(entry.header + _HEADER.size, name_size)
    is_right = magic == b'PK\3\4' and found == name.encode() and method == 0 and not flags & _IS_ENCRYPTED
    if not is_right or begin + entry.size > entry.end:
      raise ValueError(f'entry {foreign.name_shown(name)} is not where the directory of the archive has it')
    checksum = 0
    for at in range(begin, begin + entry.size, _CHUNK):
      checksum = zlib.crc32(self._bytes(at, min(_CHUNK, begin + entry.size - at)), checksum)
    if checksum != entry.checksum:
      raise ValueError(f'Bad CRC-32 of entry {foreign.name_shown(name)}')
    self._checked[name] = begin
    return begin

  def _read_directory(self) -> dict[str, _Entry]:
    begin, size, num_entries = self._find_directory()
    if size > _DIRECTORY_LIMIT:
      raise ValueError(f'a directory of {size:,} bytes; at most {_DIRECTORY_LIMIT:,} are read')
    content, at, found = self._bytes(begin, size), 0, []
    while at < size:
      entry, name, at = _parse_entry(content, at)
      found.append((entry, name))
    if len(found) != num_entries:
      raise ValueError(f'a directory of {len(found)} entries, expected {num_entries}')
    found.sort(key=lambda pair: pair[0].header)
    entries, ends = {}, [*(entry.header for entry, _ in found[1:]), begin]
    for (entry, name), end in zip(found, ends):
      if name in entries:
        raise ValueError(f'two entries {foreign.name_shown(name)}')
      if entry.header + _HEADER.size + len(name.encode()) + entry.size > end:
        raise ValueError(f'entry {foreign.name_shown(name)} is larger than its place')
      entries[name] = entry._replace(end=end)
    return entries

  def _find_directory(self) -> tuple[int, int, int]:
    """Where the directory begins, its size and the number of its entries."""
    file_size = self._file.seek(0, 2)
    tail_size = min(file_size, _END.size + _LONGEST_COMMENT)
    tail = self._bytes(file_size - tail_size, tail_size)
    at = tail.rfind(b'PK\5\6')
    if at < 0 or len(tail) < at + _END.size:
      raise ValueError('it is not a zip archive')
    _, disk, _, _, num_entries, size, begin, comment_size = _END.unpack_from(tail, at)
    if at + _END.size + comment_size != len(tail) or disk not in (0, 0xFFFF):
      raise ValueError('it is not one whole zip archive')
    limit = file_size - tail_size + at
    if num_entries == 0xFFFF or 0xFFFFFFFF in (size, begin):
      place = limit - _END64_PLACE.size
      magic, _, end64, _ = _END64_PLACE.unpack(self._bytes(max(0, place), _END64_PLACE.size))
      if magic != b'PK\6\7' or end64 > place - _END64.size:
        raise ValueError('the record of its directory is missing')
      magic, *_, num_entries, size, begin = _END64.unpack(self._bytes(end64, _END64.size))
      if magic != b'PK\6\6':
        raise ValueError('the record of its directory is missing')
      limit = end64
    if begin + size > limit:
      raise ValueError('its directory is not within the file')
    return begin, size, num_entries


def _parse_entry(content: bytes, at: int) -> tuple[_Entry, str, int]:
  """The entry of a directory at a byte, its name, and where the next begins."""
  if at + _ENTRY.size > len(content):
    raise ValueError('its directory ends within an entry')
  fields = _ENTRY.unpack_from(content, at)
  magic, _, _, flags, method, _, _, checksum, stored_size, size, name_size, extra_size, comment_size, *_, header = (
    fields
  )
  at += _ENTRY.size
  end = at + name_size + extra_size + comment_size
  if magic != b'PK\1\2' or end > len(content):
    raise ValueError('its directory has an entry that is none')
  name, extra = content[at : at + name_size], content[at + name_size : at + name_size + extra_size]
  wide = iter(_wide_numbers(extra))
  size, stored_size, header = (next(wide, x) if x == 0xFFFFFFFF else x for x in (size, stored_size, header))
  fault = 'is compressed' if method else 'is encrypted' if flags & _IS_ENCRYPTED else ''
  if not fault and size != stored_size:
    fault = 'has two sizes'
  try:
    text = name.decode()
  except UnicodeDecodeError:
    raise ValueError('an entry whose name is not UTF-8') from None
  return _Entry(header, stored_size, 0, checksum, fault), text, end


def _wide_numbers(extra: bytes) -> tuple[int, ...]:
  """The numbers of 64 bits in an entry's extra fields."""
  at = 0
  while at + 4 <= len(extra):
    kind, size = struct.unpack_from('<2H', extra, at)
    at += 4
    if kind == 1:
      count = min(size, len(extra) - at) // 8
      return struct.unpack_from(f'<{count}Q', extra, at)
    at += size
  return ()
