"""The tensors of a file that `torch.save` wrote, read without executing anything that the file holds.

Such a file is a zip archive. `data.pkl` is a pickle of the names, each with a call that rebuilds a tensor from a part
of a storage, and every storage is an entry of raw numbers.

A pickle is a program that may call whatever it names and replace attributes of what it makes. Python's own machine runs
it here, but knows only the instructions that torch writes for tensors by name. What it can name are functions of this
module, which make plain dicts and descriptions of tensors.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
from etils import epath

from spectr_jax.io import untrusted
from spectr_jax.io.hub.tensors import Tensors, check_shape

_LARGEST_PICKLE = 2**21  # bytes, of some 20,000 tensors
_LARGEST_READ = 2**24  # bytes, of the archive's directory; entries are read in smaller parts
# Tensors may share numbers, as an embedding and an output head do. A few bytes must not become all memory by that.
_MOST_SHARED, _SMALL = 4, 2**24
_DTYPES = {
  'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16,
  'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32, 'BoolStorage': np.bool_,
}  # fmt: skip


class _Storage(NamedTuple):
  """Raw numbers in the archive: their type, the entry's key, and how many they are."""

  dtype: np.dtype
  key: str
  size: int


class _Tensor(NamedTuple):
  """A part of a storage; offset and strides count numbers."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, _has_gradient: Any, _hooks: Any, *others: Any):
  """In place of `torch._utils._rebuild_tensor_v2`; `others` say how the numbers differ from those of the storage."""
  if any(others) or type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
    raise ValueError('a tensor is described in an unknown way')
  if not all(map(_is_count, (offset, *shape, *strides))) or len(shape) != len(strides):
    raise ValueError('a tensor is described in an unknown way')
  check_shape(shape)
  strides = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides))
  last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
  if 0 not in shape and last >= storage.size:
    raise ValueError(f'a tensor is not within its storage of {untrusted.shown(storage.size)} numbers')
  return _Tensor(storage, offset, shape, strides)


def _parameter(tensor: Any, _has_gradient: Any, _hooks: Any) -> Any:
  """In place of `torch._utils._rebuild_parameter`."""
  return tensor


def _ordered_dict() -> dict[str, Any]:
  """In place of `collections.OrderedDict`."""
  return {}


_NAMES = {
  'collections.OrderedDict': _ordered_dict,
  'torch._utils._rebuild_tensor_v2': _tensor,
  'torch._utils._rebuild_parameter': _parameter,
  **{f'torch.{name}': np.dtype(dtype) for name, dtype in _DTYPES.items()},
}
_INSTRUCTIONS = (
  'PROTO', 'FRAME', 'STOP', 'MARK', 'EMPTY_DICT', 'EMPTY_LIST', 'EMPTY_TUPLE', 'NONE', 'NEWTRUE', 'NEWFALSE',
  'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8', 'BININT', 'BININT1', 'BININT2', 'LONG1', 'BINFLOAT', 'TUPLE',
  'TUPLE1', 'TUPLE2', 'TUPLE3', 'APPEND', 'APPENDS', 'BINGET', 'LONG_BINGET', 'BINPUT', 'LONG_BINPUT', 'MEMOIZE',
  'GLOBAL', 'STACK_GLOBAL', 'REDUCE', 'BINPERSID',
)  # fmt: skip


class _Dispatch(dict[int, Any]):
  """What the machine does, by instruction."""

  def __missing__(self, code: int) -> Any:
    raise ValueError(f'it holds the instruction {bytes([code])!r}, which a file of tensors does not need')


# The class in Python, since that in C does not let instructions be chosen.
class _Machine(pickle._Unpickler):
  """Runs a pickle of tensors by name."""

  dispatch = _Dispatch(
    (code, pickle._Unpickler.dispatch[code]) for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS)
  )

  def find_class(self, module: str, name: str) -> Any:
    text = f'{module}.{name}'
    if text not in _NAMES:
      raise ValueError(f'it names {untrusted.name_shown(text)}, which a file of tensors does not need')
    return _NAMES[text]

  def persistent_load(self, pid: Any) -> _Storage:
    kind, dtype, key, _, size = pid
    if kind != 'storage' or not isinstance(dtype, np.dtype) or type(key) is not str or not _is_count(size):
      raise ValueError('it refers to something that is not a storage')
    return _Storage(dtype, key, size)

  def _set(self: Any, values: list[Any]) -> None:
    target = self.stack[-1]
    if type(target) is not dict or set(map(type, values[::2])) - {str}:
      raise ValueError('it holds something other than dicts with texts as keys')
    for key, value in zip(values[::2], values[1::2], strict=True):
      if key in target:
        raise ValueError(f'it holds {untrusted.shown(key)} twice')
      target[key] = value

  def _set_item(self: Any) -> None:
    value, key = self.stack.pop(), self.stack.pop()
    self._set([key, value])

  def _set_items(self: Any) -> None:
    self._set(self.pop_mark())

  def _build(self: Any) -> None:
    # The versions of a module's parts, which torch attaches to its tensors.
    state = self.stack.pop()
    if type(self.stack[-1]) is not dict or type(state) is not dict or state.keys() != {'_metadata'}:
      raise ValueError('it changes an object, which a file of tensors does not need')

  dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items, pickle.BUILD[0]: _build}


class _BoundedReader(io.BufferedReader):
  """A file of which a header cannot ask for all memory."""

  def read(self, size: int | None = -1, /) -> bytes:
    if size is not None and size > _LARGEST_READ:
      raise ValueError(f'a directory of {size:,} bytes; at most {_LARGEST_READ:,} are read')
    return super().read(size)


class TorchFile(Tensors):
  """The tensors of a state dict that `torch.save` wrote; `ValueError` if the file is damaged or holds anything else."""

  def __init__(self, path: epath.PathLike):
    self._path = epath.Path(path)
    self._last: tuple[_Storage | None, np.ndarray] = None, np.empty(0)
    file = cast(io.BufferedReader, untrusted.open_file(path))
    with self._reading():
      self._archive = zipfile.ZipFile(_BoundedReader(file.detach()))
      entries = self._archive.infolist()
      pickled = [entry.filename for entry in entries if entry.filename.endswith('/data.pkl')]
      if len(pickled) != 1 or len({entry.filename for entry in entries}) < len(entries):
        raise ValueError(f'{len(pickled)} entries data.pkl, expected one, and every name once')
      self._prefix = pickled[0].removesuffix('data.pkl')
      self._sizes = {entry.filename: self._size(entry) for entry in entries}
      if self._sizes[pickled[0]] > _LARGEST_PICKLE:
        raise ValueError(f'{pickled[0]} is larger than {_LARGEST_PICKLE:,} bytes, the most that it may have')
      order = f'{self._prefix}byteorder'
      if order in self._sizes and (self._sizes[order] > 16 or self._archive.read(order) != b'little'):
        raise ValueError('big-endian numbers are not read')
      self._tensors = self._checked(_Machine(io.BytesIO(self._archive.read(pickled[0]))).load())

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    """Makes whatever goes wrong one line that names the file."""
    try:
      yield
    except Exception as error:  # what `zipfile` and `pickle` raise for a damaged file
      raise ValueError(f'{self._path} is damaged or not a file of torch.save: {untrusted.first_line(error)}') from error

  def _size(self, entry: zipfile.ZipInfo) -> int:
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
      raise ValueError(f'entry {untrusted.name_shown(entry.filename)} is compressed or encrypted')
    return entry.file_size

  def _checked(self, content: Any) -> dict[str, _Tensor]:
    """The tensors by name, compared with the entries of the archive."""
    if type(content) is not dict:
      raise ValueError(f'it must hold tensors by name, got {type(content).__name__}')
    num_bytes, stored = 0, {}
    for name, tensor in content.items():
      if type(tensor) is not _Tensor:
        raise ValueError(f'{untrusted.shown(name)} is not a tensor')
      size = tensor.storage.size * tensor.storage.dtype.itemsize
      if self._sizes.get(self._entry(tensor.storage)) != size:
        raise ValueError(f'the numbers of {untrusted.name_shown(name)} are missing or of another size')
      num_bytes += math.prod(tensor.shape) * tensor.storage.dtype.itemsize
      stored[tensor.storage.key] = size
    if num_bytes > _SMALL + _MOST_SHARED * sum(stored.values()):
      raise ValueError(f'the tensors share too much: {num_bytes:,} bytes are more than the file has')
    return content

  def _entry(self, storage: _Storage) -> str:
    return f'{self._prefix}data/{storage.key}'

  def names(self) -> set[str]:
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors[name].shape

  def dtype(self, name: str) -> np.dtype:
    return self._tensors[name].storage.dtype

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor, whose storage is read as a whole and kept until another one is."""
    storage, offset, shape, strides = self._tensors[name]
    if 0 in shape:
      return np.empty(shape, storage.dtype)[index]
    if self._last[0] != storage:
      with self._reading():
        numbers = np.frombuffer(self._archive.read(self._entry(storage)), storage.dtype)
      self._last = storage, numbers
    numbers = self._last[1][offset:]
    strides = [stride * storage.dtype.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)[index]
