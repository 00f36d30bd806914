"""Named tensors of which parts can be read: the protocol, and the safetensors files of a folder."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from etils import epath

from spectr_jax.io import untrusted

_DTYPES = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16,
  'F8_E4M3': ml_dtypes.float8_e4m3fn, 'I64': np.int64, 'I32': np.int32, 'U8': np.uint8, 'BOOL': np.bool_,
}  # fmt: skip
_MOST_AXES = 8
_MOST_NUMBERS = 2**48
_MOST_OF_EXPERTS = 2**20  # tensors that those of all experts are made into
_MOST_AT_ONCE = 2**22  # numbers compared together
_INDEX = 'model.safetensors.index.json'


class Tensors(Protocol):
  """Named tensors."""

  def names(self) -> set[str]:
    """The names of all tensors."""
    ...

  def shape(self, name: str) -> tuple[int, ...]: ...

  def dtype(self, name: str) -> np.dtype:
    """The type in which `read` returns a tensor."""
    ...

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor, by slices of step 1, without reading the rest where the format allows it."""
    ...


def check_number(num: int) -> None:
  """Checks how many tensors those of all experts become."""
  if num > _MOST_OF_EXPERTS:
    raise ValueError(f'more than {_MOST_OF_EXPERTS:,} tensors of experts')


def check_shape(shape: tuple[int, ...]) -> None:
  """Checks that an array can have a shape that a file gives; sizes of 0 bound no other."""
  if len(shape) > _MOST_AXES:
    raise ValueError(f'it has {len(shape)} axes; at most {_MOST_AXES} are read')
  if math.prod(max(1, size) for size in shape) > _MOST_NUMBERS:
    raise ValueError(f'its shape {untrusted.shown(shape)} has too many numbers')


def check_tensors(
  tensors: Tensors,
  wanted: Mapping[str, tuple[int, ...]],
  is_ignored: Callable[[str], bool],
  *,
  integers: Collection[str] = (),
) -> None:
  """Checks that a checkpoint has tensors of the wanted shapes, and no others but those that are ignored.

  All hold floating point numbers but those named in `integers`.
  """
  names = tensors.names()
  missing = sorted(wanted.keys() - names)
  if missing:
    raise ValueError(f'the checkpoint lacks {len(missing)} tensors, the first of them {missing[0]}')
  surplus = sorted(name for name in names - wanted.keys() if not is_ignored(name))
  if surplus:
    first = untrusted.name_shown(surplus[0])
    raise ValueError(f'the checkpoint has {len(surplus)} tensors too many, the first of them {first}')
  for name, shape in wanted.items():
    if tensors.shape(name) != shape:
      raise ValueError(f'tensor {name} must have shape {shape}, got {tensors.shape(name)}')
    kind, numbers = (np.integer, 'integers') if name in integers else (np.floating, 'floating point numbers')
    if not jnp.issubdtype(tensors.dtype(name), kind):
      raise ValueError(f'tensor {name} must hold {numbers}, got {tensors.dtype(name)}')
    if kind is np.floating and tensors.dtype(name).itemsize == 1:
      raise ValueError(f'tensor {name} is of {tensors.dtype(name)} without scales that the configuration announces')


def row_ranges(num_rows: int, row_size: int) -> Iterator[slice]:
  """Ranges of rows that are read and compared together."""
  step = max(1, _MOST_AT_ONCE // max(row_size, 1))
  return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def are_equal(tensors: Tensors, name: str, others: Tensors, other: str, *, dtype: Any = None) -> bool:
  """Whether two tensors hold the same numbers once they are rounded to `dtype`; reads some rows at a time."""
  shape = tensors.shape(name)
  if others.shape(other) != shape:
    return False
  for rows in row_ranges(shape[0] if shape else 1, math.prod(shape[1:])):
    part = (rows, *(slice(0, size) for size in shape[1:]))[: len(shape)]
    first, second = tensors.read(name, part), others.read(other, part)
    if dtype is not None:
      first, second = first.astype(dtype, copy=False), second.astype(dtype, copy=False)
    if not np.array_equal(first, second):
      return False
  return True


class SafetensorsFolder(Tensors):
  """The tensors of a folder: of its one file, or of those that `model.safetensors.index.json` names.

  As in Transformers the one file counts where there are both, and so does all that the files of an index hold. Files
  are mapped to memory. One that is missing or damaged raises `ValueError`, as do two that hold different numbers by the
  same name.
  """

  def __init__(self, folder: epath.PathLike, file_name: str = 'model.safetensors'):
    folder = epath.Path(folder)
    if (folder / file_name).exists():
      wanted: dict[str, list[str]] = {file_name: []}
    elif (folder / _INDEX).exists():
      wanted = read_index(folder / _INDEX)
    else:
      raise ValueError(f'no weights in {folder}: {untrusted.gguf_files(folder)}expected {file_name} or {_INDEX}')
    self._files: dict[str, tuple[epath.Path, Any]] = {}
    self._begins: dict[epath.Path, dict[str, int]] = {}  # where tensors begin in a file
    for name_of_file, listed in wanted.items():
      path = folder / name_of_file
      file, names = _open(path)
      if absent := sorted(set(listed) - names):
        raise ValueError(f'{path} has no tensor {untrusted.name_shown(absent[0])}, which {_INDEX} names')
      before, self._files = copy.copy(self), self._files | dict.fromkeys(names, (path, file))
      for name in sorted(before.names() & names):
        if not are_equal(before, name, self, name):
          shown = untrusted.name_shown(name)
          raise ValueError(f'{before._files[name][0]} and {path} hold different numbers as tensor {shown}')

  def names(self) -> set[str]:
    return set(self._files)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._files[name][1].get_slice(name).get_shape())

  def dtype(self, name: str) -> np.dtype:
    kind = self._files[name][1].get_slice(name).get_dtype()
    if kind not in _DTYPES:
      raise self._fault(name, f'is of type {kind}; known are {", ".join(_DTYPES)}')
    return np.dtype(_DTYPES[kind])

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    stored = self._files[name][1].get_slice(name)
    shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, stored.get_shape(), strict=True))
    if 0 in shape:  # the library has no empty parts
      return np.empty(shape, self.dtype(name))
    try:
      return self._bytes(name)[index].view(self.dtype(name)) if stored.get_dtype() == 'F8_E4M3' else stored[index]
    except (safetensors.SafetensorError, OSError) as error:
      raise self._fault(name, f'is not read: {untrusted.first_line(error)}') from error

  def _bytes(self, name: str) -> np.ndarray:
    """The bytes of a tensor whose type the library cannot give to NumPy, mapped to memory."""
    path = self._files[name][0]
    if path not in self._begins:
      with untrusted.open_file(path) as file:
        size = int.from_bytes(file.read(8), 'little')
        header = untrusted.parse_json(file.read(size).decode(), str(path))  # which the library has checked
      header.pop('__metadata__', None)
      self._begins[path] = {name: 8 + size + entry['data_offsets'][0] for name, entry in header.items()}
    return np.memmap(path, np.uint8, 'r', self._begins[path][name], self.shape(name))

  def _fault(self, name: str, problem: str) -> ValueError:
    return ValueError(f'{self._files[name][0]}: tensor {untrusted.name_shown(name)} {problem}')


def read_index(path: epath.Path) -> dict[str, list[str]]:
  """The names of tensors by the files that `model.safetensors.index.json` names."""
  content = untrusted.parse_json(untrusted.read_text(path, untrusted.LARGE), str(path), is_read_again=True)
  untrusted.check_object(content, {'weight_map': untrusted.map_of(untrusted.TEXT)}, str(path), ('weight_map',))
  by_file: dict[str, list[str]] = {}
  for name, file_name in content['weight_map'].items():
    # A name of a file beside the index, and nothing else.
    is_plain = file_name.isprintable() and not {'/', '\\'} & set(file_name) and 0 < len(file_name) < 256
    if not is_plain or file_name in ('.', '..'):
      raise ValueError(f'{path} names {untrusted.shown(file_name)}, which is not a file beside it')
    by_file.setdefault(file_name, []).append(name)
  return by_file


def _open(path: epath.Path) -> tuple[Any, set[str]]:
  if not path.exists():
    raise ValueError(f'{path} is missing')
  with untrusted.open_file(path) as file:
    # The library reads headers of 100 MB, which take more than ten times that in memory.
    header_size = int.from_bytes(file.read(8), 'little')
  if header_size > untrusted.LARGE:
    raise ValueError(f'{path} is damaged: a header of {header_size:,} bytes; at most {untrusted.LARGE:,} are read')
  try:
    file = safetensors.safe_open(path, framework='numpy').__enter__()
    names = set(file.keys())
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(f'{path} is damaged: {untrusted.first_line(error)}') from error
  for name, shape in shapes.items():
    with untrusted.named(f'{path}: tensor {untrusted.name_shown(name)}'):
      check_shape(shape)
  return file, names
