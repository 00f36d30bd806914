"""The header of a GGUF file: its metadata, and where each tensor stands.

The package `gguf` has a reader as well. It makes several arrays for every string, which takes seconds for a vocabulary,
and it reads beyond the end of a truncated file.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import Any

import numpy as np

_MAGIC = b'GGUF'
_VERSIONS = (2, 3)
_STRING, _ARRAY, _FLOAT32, _BOOL = 8, 9, 6, 7
# Little-endian codes of `struct` and NumPy by the number that a file has for a type.
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', _FLOAT32: 'f', _BOOL: '?', 10: 'Q', 11: 'q', 12: 'd'}
_DEFAULT_ALIGNMENT = 32  # bytes


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor's entry in the header.

  Attributes:
    shape: Its shape, the axis that is contiguous in memory last.
    type_id: The number of its type, a `gguf.GGMLQuantizationType` if it is a known one.
    offset: Bytes from the beginning of the file to its data.
  """

  shape: tuple[int, ...]
  type_id: int
  offset: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
  """What stands before the data of a GGUF file.

  Attributes:
    path: The file.
    metadata: Numbers, strings and lists by key.
    tensors: The tensors by the names that llama.cpp has for them.
    data: uint8 `[bytes]`, the file, mapped into memory.
  """

  path: str
  metadata: dict[str, Any]
  tensors: dict[str, StoredTensor]
  data: np.ndarray

  def required(self, key: str) -> Any:
    """A value of the metadata.

    Raises:
      ValueError: There is none.
    """
    if key not in self.metadata:
      raise ValueError(f'{self.path}: the metadata has no {key}')
    return self.metadata[key]


class _Cursor:
  """Reads one value after the other."""

  def __init__(self, data: np.ndarray, position: int):
    self._data = data.data
    self.position = position

  def bytes(self, count: int) -> memoryview:
    end = self.position + count
    if end > len(self._data):
      raise EOFError
    found = self._data[self.position : end]
    self.position = end
    return found

  def scalar(self, code: str) -> Any:
    return struct.unpack(f'<{code}', self.bytes(struct.calcsize(f'<{code}')))[0]

  def string(self) -> str:
    return str(self.bytes(self.scalar('Q')), 'utf-8')

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
    if type_id not in _SCALARS:
      return [self.value(type_id) for _ in range(length)]
    dtype = np.dtype(_SCALARS[type_id]).newbyteorder('<')
    return np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
  """Reads the header of a GGUF file.

  Raises:
    ValueError: The file is missing, not a GGUF file, of an unknown version, truncated or damaged.
  """
  path = os.fspath(path)
  if not os.path.isfile(path):
    raise ValueError(f'no file at {path}: expected a GGUF file')
  if os.path.getsize(path) < len(_MAGIC):
    raise ValueError(f'{path} is not a GGUF file')
  data = np.asarray(np.memmap(path, np.uint8, mode='r'))
  if data[: len(_MAGIC)].tobytes() != _MAGIC:
    raise ValueError(f'{path} is not a GGUF file')
  try:
    metadata, tensors = _parse(_Cursor(data, len(_MAGIC)))
  except EOFError:
    raise ValueError(f'{path} is truncated: its header is longer than the {len(data)} bytes of the file') from None
  except ValueError as error:
    raise ValueError(f'{path} is not a readable GGUF file: {error}') from error
  if metadata.get('split.count', 1) != 1:
    raise ValueError(f'{path} is one of {metadata["split.count"]} files: merge them with llama-gguf-split --merge')
  return GgufHeader(path, metadata, tensors, data)


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
  version = cursor.scalar('I')
  if version not in _VERSIONS:
    problem = f'version {version}' if version & 0xFFFF else 'big-endian numbers'
    raise ValueError(f'{problem}; versions 2 and 3 with little-endian numbers are read')
  num_tensors, num_values = cursor.scalar('Q'), cursor.scalar('Q')
  metadata = {}
  for _ in range(num_values):
    key = cursor.string()
    metadata[key] = cursor.value(cursor.scalar('I'))
  tensors = {}
  for _ in range(num_tensors):
    name = cursor.string()
    shape = tuple(reversed([cursor.scalar('Q') for _ in range(cursor.scalar('I'))]))
    tensors[name] = StoredTensor(shape, type_id=cursor.scalar('I'), offset=cursor.scalar('Q'))
  alignment = metadata.get('general.alignment', _DEFAULT_ALIGNMENT)
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(f'general.alignment must be a positive number, got {alignment!r}')
  start = -(-cursor.position // alignment) * alignment
  return metadata, {name: dataclasses.replace(x, offset=start + x.offset) for name, x in tensors.items()}
