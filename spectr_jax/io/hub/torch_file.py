"""The tensors of a file that `torch.save` wrote, read without executing anything that the file holds.

Such a file is a zip archive. `data.pkl` is a pickle of the names, each with a call that rebuilds a tensor from a part
of a storage, and every storage is an entry of raw numbers.
"""

from __future__ import annotations

import math

import numpy as np
from etils import epath

from spectr_jax.io import foreign
from spectr_jax.io.hub.stored_zip import StoredZip
from spectr_jax.io.hub.torch_pickle import Misfit, Storage, Tensor, read_pickle

_LARGEST_PICKLE = 2**21  # bytes, of some 20,000 tensors
# Tensors may share numbers, as an embedding and an output head do. A few bytes must not become all memory by that.
_MOST_SHARED, _SMALL = 4, 2**24


class TorchFile:
  """The tensors of a file that `torch.save` wrote from a state dict, as `Tensors`.

  Args:
    path: The file, of the zip format that torch writes since version 1.6.

  Raises:
    ValueError: The file is damaged, of another format, or holds anything but tensors by name.
  """

  def __init__(self, path: epath.PathLike):
    self._path = epath.Path(path)
    self._archive = StoredZip(self._path)
    pickled = [name for name in self._archive.names() if name.endswith('/data.pkl')]
    if len(pickled) != 1:
      raise ValueError(f'{path} is damaged or not a file of torch.save: {len(pickled)} entries data.pkl, expected one')
    self._prefix = pickled[0].removesuffix('data.pkl')
    order = f'{self._prefix}byteorder'
    if order in self._archive.names() and self._read_all(order, limit=16) != b'little':
      raise ValueError(f'{path} holds big-endian numbers, which are not read')
    content = self._read_all(pickled[0], limit=_LARGEST_PICKLE)
    try:
      found = read_pickle(content)
    except ValueError as error:
      raise ValueError(f'{path} is not read: {error}') from error
    if type(found) is not dict:
      raise ValueError(f'{path} must hold tensors by name, got {type(found).__name__}')
    self._tensors: dict[str, Tensor] = found
    self._check()

  def _read_all(self, name: str, limit: int) -> bytes:
    size = self._archive.size(name)
    if size is not None and size > limit:
      shown = foreign.name_shown(name)
      raise ValueError(f'{self._path}: entry {shown} is larger than {limit:,} bytes, the most that it may have')
    return self._archive.read(name, 0, size or 0)

  def _check(self) -> None:
    """Compares the tensors with the entries of the archive."""
    num_bytes, stored = 0, set()
    for name, tensor in self._tensors.items():
      if type(tensor) is not Tensor:
        reason = f' that can be read: {tensor.reason}' if type(tensor) is Misfit else ''
        raise ValueError(f'{self._path}: {foreign.shown(name)} is not a tensor{reason}')
      storage = tensor.storage
      if self._archive.size(self._entry(storage)) != storage.size * storage.dtype.itemsize:
        shown = foreign.name_shown(name)
        raise ValueError(f'{self._path} is damaged: the numbers of {shown} are missing or of another size')
      num_bytes += math.prod(tensor.shape) * storage.dtype.itemsize
      stored.add((storage.key, storage.size * storage.dtype.itemsize))
    if num_bytes > _SMALL + _MOST_SHARED * sum(size for _, size in stored):
      raise ValueError(f'{self._path}: the tensors share too much: {num_bytes:,} bytes are more than the file has')

  def _entry(self, storage: Storage) -> str:
    return f'{self._prefix}data/{storage.key}'

  def names(self) -> set[str]:
    """The names of all tensors."""
    return set(self._tensors)

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    return self._tensors[name].shape

  def dtype(self, name: str) -> np.dtype:
    """The type of a tensor."""
    return self._tensors[name].storage.dtype

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor. From the first of its numbers in the file to the last, no others are read.

    Args:
      name: The tensor's name.
      index: A slice of step 1 for each dimension.

    Raises:
      ValueError: The numbers are damaged.
    """
    storage, offset, shape, strides = self._tensors[name]
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    shape = tuple(max(0, end - begin) for begin, end in ranges)
    if 0 in shape:
      return np.empty(shape, storage.dtype)
    size = storage.dtype.itemsize
    first = offset + sum(begin * stride for (begin, _), stride in zip(ranges, strides))
    count = 1 + sum((num - 1) * stride for num, stride in zip(shape, strides))
    content = self._archive.read(self._entry(storage), first * size, (first + count) * size)
    numbers = np.frombuffer(content, storage.dtype)
    return np.lib.stride_tricks.as_strided(numbers, shape, [stride * size for stride in strides], writeable=False)
