"""The header of a GGUF file: its metadata, and where each tensor stands.

The package `gguf` has a reader as well. It makes several arrays for every string, which takes seconds for a vocabulary,
and it reads beyond the end of a truncated file.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from typing import Any

import numpy as np

from spectr_jax.io import untrusted

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_STRING, _ARRAY, _FLOAT32, _BOOL = 8, 9, 6, 7
# Little-endian codes of `struct` and NumPy by the number that a file has for a type.
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', _FLOAT32: 'f', _BOOL: '?', 10: 'Q', 11: 'q', 12: 'd'}
_LENGTH = struct.Struct('<Q')  # of a string
_DEFAULT_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 2**16  # bytes
# The largest vocabularies have some 16 MB and a million words, merges and scores.
_LARGEST_HEADER = 2**26  # bytes
_MOST_ITEMS = 2**22  # of all arrays
_MOST_AXES = 4


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor's entry in the header."""

  shape: tuple[int, ...]  # the axis that is contiguous in memory last
  type_id: int  # a `gguf.GGMLQuantizationType` if it is a known one
  offset: int  # bytes from the beginning of the file


@dataclasses.dataclass(frozen=True)
class GgufHeader:
  """What stands before the data of a GGUF file."""

  path: str
  metadata: dict[str, Any]
  tensors: dict[str, StoredTensor]  # by llama.cpp's names
  data: np.ndarray  # uint8 `[bytes]`, the file mapped into memory
  mapping: mmap.mmap | None = None  # what `data` is in; None for an array in memory

  def forget(self) -> None:
    """Gives back the memory of what was read of `data`; what is read again comes from the file."""
    if self.mapping is not None and hasattr(mmap, 'MADV_DONTNEED'):
      self.mapping.madvise(mmap.MADV_DONTNEED)

  def required(self, key: str) -> Any:
    if key not in self.metadata:
      raise ValueError(f'{self.path}: the metadata has no {key}')
    return self.metadata[key]


class _Cursor:
  """Reads one value after the other."""

  def __init__(self, data: np.ndarray, position: int):
    self._data = data[:_LARGEST_HEADER].data
    self.position = position
    self._num_items = 0

  def bytes(self, count: int) -> memoryview:
    end = self.position + count
    if end > len(self._data):
      raise EOFError
    part = self._data[self.position : end]
    self.position = end
    return part

  def scalar(self, code: str) -> Any:
    return struct.unpack(f'<{code}', self.bytes(struct.calcsize(f'<{code}')))[0]

  def strings(self, count: int) -> list[str]:
    texts, at, end = [], self.position, len(self._data)
    for _ in range(count):
      if at + 8 > end:
        raise EOFError
      (size,) = _LENGTH.unpack_from(self._data, at)
      at += 8 + size
      if at > end:
        raise EOFError
      texts.append(str(self._data[at - size : at], 'utf-8'))
    self.position = at
    return texts

  def string(self) -> str:
    return self.strings(1)[0]

  def value(self, type_id: int) -> Any:
    if type_id == _STRING:
      return self.string()
    if type_id == _ARRAY:
      return self._array()
    if type_id not in _SCALARS:
      raise ValueError(f'unknown type {type_id} of a value')
    value = self.scalar(_SCALARS[type_id])
    # 1e-5 is meant, not 9.999999747378752e-06.
    return float(str(np.float32(value))) if type_id == _FLOAT32 else value

  def _array(self) -> list[Any]:
    type_id, length = self.scalar('I'), self.scalar('Q')
    self._num_items += length
    if self._num_items > _MOST_ITEMS:
      raise ValueError(f'arrays of {self._num_items:,} values together; at most {_MOST_ITEMS:,} are read')
    if type_id == _STRING:
      return self.strings(length)
    if type_id not in _SCALARS:
      raise ValueError(f'unknown type {type_id} of the values of an array')
    dtype = np.dtype(_SCALARS[type_id]).newbyteorder('<')
    return np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
  """Reads the header of a GGUF file."""
  path = os.fspath(path)
  if not os.path.isfile(path):
    raise ValueError(f'no file at {path}: expected a GGUF file')
  with untrusted.open_file(path) as file:
    if file.read(len(_MAGIC)) != _MAGIC:
      raise ValueError(f'{path} is not a GGUF file')
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  data = np.frombuffer(mapping, np.uint8)
  try:
    metadata, tensors = _parse(_Cursor(data, len(_MAGIC)))
  except EOFError:
    if len(data) > _LARGEST_HEADER:
      raise ValueError(f'{path} is damaged: its header is longer than {_LARGEST_HEADER:,} bytes') from None
    raise ValueError(f'{path} is truncated: its header is longer than the {len(data)} bytes of the file') from None
  except ValueError as error:
    raise ValueError(f'{path} is not a readable GGUF file: {untrusted.first_line(error)}') from error
  num_files = metadata.get('split.count', 1)
  if type(num_files) is not int or num_files != 1:
    raise ValueError(f'{path} is one of {untrusted.shown(num_files)} files: merge them with llama-gguf-split --merge')
  return GgufHeader(path, metadata, tensors, data, mapping)


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
  version = cursor.scalar('I')
  if version not in _VERSIONS:
    problem = f'version {version}' if version & 0xFFFF else 'big-endian numbers'
    raise ValueError(f'{problem}; versions 2 and 3 with little-endian numbers are read')
  num_tensors, num_values = cursor.scalar('Q'), cursor.scalar('Q')
  metadata: dict[str, Any] = {}
  for _ in range(num_values):
    key = cursor.string()
    if key in metadata:
      raise ValueError(f'the metadata has {untrusted.name_shown(key)} twice')
    metadata[key] = cursor.value(cursor.scalar('I'))
  tensors: dict[str, StoredTensor] = {}
  for _ in range(num_tensors):
    name = cursor.string()
    if name in tensors:
      raise ValueError(f'tensor {untrusted.name_shown(name)} is there twice')
    tensors[name] = _tensor(name, cursor)
  alignment = metadata.get('general.alignment', _DEFAULT_ALIGNMENT)
  if type(alignment) is not int or alignment < 1:
    raise ValueError(f'general.alignment must be a positive number, got {untrusted.shown(alignment)}')
  if alignment & (alignment - 1) or alignment > _LARGEST_ALIGNMENT:
    raise ValueError(f'general.alignment must be a power of 2 up to {_LARGEST_ALIGNMENT}, got {alignment}')
  start = -(-cursor.position // alignment) * alignment
  for name, tensor in tensors.items():
    if tensor.offset % alignment:
      raise ValueError(f'tensor {untrusted.name_shown(name)} does not begin at a multiple of {alignment} bytes')
    tensors[name] = dataclasses.replace(tensor, offset=start + tensor.offset)
  return metadata, tensors


def _tensor(name: str, cursor: _Cursor) -> StoredTensor:
  num_axes = cursor.scalar('I')
  if num_axes > _MOST_AXES:
    raise ValueError(f'tensor {untrusted.name_shown(name)} has {num_axes} axes; at most {_MOST_AXES} are read')
  shape = tuple(reversed([cursor.scalar('Q') for _ in range(num_axes)]))
  if 0 in shape:
    raise ValueError(f'tensor {untrusted.name_shown(name)} of shape {shape} has no numbers')
  return StoredTensor(shape, type_id=cursor.scalar('I'), offset=cursor.scalar('Q'))
