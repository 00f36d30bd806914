"""The tensors of a file that `torch.save` wrote, read without executing anything that the file holds.

Such a file is a zip archive. `data.pkl` is a pickle of the names, each with a call that rebuilds a tensor from a part
of a storage, and every storage is an entry of raw numbers. A pickle may call any function that it can name. Here it can
name three things, none of which does more than keep what it is given, and all else is refused.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

_STORAGES = {
  'DoubleStorage': np.float64, 'FloatStorage': np.float32, 'HalfStorage': np.float16,
  'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32, 'BoolStorage': np.bool_,
}  # fmt: skip


class _Storage(NamedTuple):
  """Raw numbers in the archive: their type by torch's name, the entry's key, and how many they are."""

  kind: Any
  key: Any
  size: Any


class _Tensor(NamedTuple):
  """A part of a storage, as a pickle describes it."""

  storage: Any
  offset: Any
  shape: Any
  strides: Any


class _Rebuild:
  """In place of the function that rebuilds a tensor; a pickle can neither call anything through it nor change it."""

  __slots__ = ()

  def __call__(self, storage, offset, shape, strides, *_):
    return _Tensor(storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
  """Reads dicts of tensors and nothing else."""

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ('collections', 'OrderedDict'):
      return collections.OrderedDict
    if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
      return _Rebuild()
    if module == 'torch' and name in _STORAGES:
      return name
    raise pickle.UnpicklingError(f'it names {module}.{name}, which a file of tensors does not need')

  def persistent_load(self, pid: Any) -> _Storage:
    tag, kind, key, _, size = pid
    if tag != 'storage':
      raise pickle.UnpicklingError(f'it refers to {tag!r}, which is not a storage')
    return _Storage(kind, key, size)


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _fits(tensor: Any) -> bool:
  """Whether a description is of a tensor within its storage."""
  if type(tensor) is not _Tensor or type(tensor.storage) is not _Storage:
    return False
  kind, key, size = tensor.storage
  shape, strides = tensor.shape, tensor.strides
  if type(kind) is not str or type(key) is not str or type(shape) is not tuple or type(strides) is not tuple:
    return False
  if not all(map(_is_count, (size, tensor.offset, *shape, *strides))) or len(shape) != len(strides):
    return False
  last = tensor.offset + sum((num - 1) * stride for num, stride in zip(shape, strides))
  return 0 in shape or last < size


class TorchFile:
  """The tensors of a file that `torch.save` wrote from a state dict, as `Tensors`.

  Args:
    path: The file, of the zip format that torch writes since version 1.6.

  Raises:
    ValueError: The file is damaged, of another format, or holds anything but tensors by name.
  """

  def __init__(self, path: epath.PathLike):
    self._path = epath.Path(path)
    try:
      self._archive = zipfile.ZipFile(self._path.open('rb'))
      entries = {entry.filename: entry for entry in self._archive.infolist()}
      (pickled,) = [name for name in entries if name.endswith('/data.pkl')]
      self._prefix = pickled.removesuffix('data.pkl')
      order = self._archive.read(f'{self._prefix}byteorder') if f'{self._prefix}byteorder' in entries else b'little'
      content = self._archive.read(pickled)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
      raise ValueError(f'{self._path} is damaged or not a file of torch.save: {_line(error)}') from error
    if order != b'little':
      raise ValueError(f'{self._path} holds big-endian numbers, which are not read')
    try:
      found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
      raise ValueError(f'{self._path} is not read: {_line(error)}') from error
    if not isinstance(found, dict):
      raise ValueError(f'{self._path} must hold tensors by name, got {type(found).__name__}')
    for name, tensor in found.items():
      if type(name) is not str or not _fits(tensor):
        raise ValueError(f'{self._path}: {str(name)[:80]!r} is not a tensor')
      entry = entries.get(self._entry(tensor.storage))
      size = tensor.storage.size * np.dtype(_STORAGES[tensor.storage.kind]).itemsize
      if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != size:
        raise ValueError(f'{self._path} is damaged: the numbers of {name} are missing or of another size')
    self._tensors: dict[str, _Tensor] = dict(found)

  def _entry(self, storage: _Storage) -> str:
    return f'{self._prefix}data/{storage.key}'

  def names(self) -> set[str]:
    """The names of all tensors."""
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    return self._tensors[name].shape

  def dtype(self, name: str) -> np.dtype:
    """The type of a tensor."""
    return np.dtype(_STORAGES[self._tensors[name].storage.kind])

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor.

    Args:
      name: The tensor's name.
      index: A slice of step 1 for each dimension.

    Raises:
      ValueError: The numbers are damaged.
    """
    tensor, dtype = self._tensors[name], self.dtype(name)
    try:
      numbers = np.frombuffer(self._archive.read(self._entry(tensor.storage)), dtype)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
      raise ValueError(f'{self._path} is damaged: {_line(error)}') from error
    if 0 in tensor.shape:
      return np.empty(tensor.shape, dtype)[index]
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides, writeable=False)[index]


def _line(error: Exception) -> str:
  """The first line of an error."""
  return (str(error) or type(error).__name__).splitlines()[0]
