"""Named tensors of which parts can be read: the protocol, and the safetensors files of a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from etils import epath

_DTYPES = {
  'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16,
  'I64': np.int64, 'I32': np.int32, 'BOOL': np.bool_,
}  # fmt: skip


class Tensors(Protocol):
  """Named tensors."""

  def names(self) -> set[str]:
    """The names of all tensors."""
    ...

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    ...

  def dtype(self, name: str) -> np.dtype:
    """The type in which `read` returns a tensor."""
    ...

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor, without reading the rest where the format allows it.

    Args:
      name: The tensor's name.
      index: A slice of step 1 for each dimension.
    """
    ...


def check_tensors(
  tensors: Tensors,
  wanted: Mapping[str, tuple[int, ...]],
  is_ignored: Callable[[str], bool],
  *,
  integers: Collection[str] = (),
) -> None:
  """Checks that a checkpoint has the tensors of a model and no others.

  Args:
    tensors: The checkpoint.
    wanted: Shapes by name.
    is_ignored: Whether a tensor that is not wanted may be there.
    integers: Names of those that hold integers; all others hold floating point numbers.

  Raises:
    ValueError: A tensor is missing, surplus, of another shape, or of another kind of numbers.
  """
  names = tensors.names()
  missing = sorted(wanted.keys() - names)
  if missing:
    raise ValueError(f'the checkpoint lacks {len(missing)} tensors, the first of them {missing[0]}')
  surplus = sorted(name for name in names - wanted.keys() if not is_ignored(name))
  if surplus:
    raise ValueError(f'the checkpoint has {len(surplus)} tensors too many, the first of them {surplus[0]}')
  for name, shape in wanted.items():
    if tensors.shape(name) != shape:
      raise ValueError(f'tensor {name} must have shape {shape}, got {tensors.shape(name)}')
    kind, numbers = (np.integer, 'integers') if name in integers else (np.floating, 'floating point numbers')
    if not jnp.issubdtype(tensors.dtype(name), kind):
      raise ValueError(f'tensor {name} must hold {numbers}, got {tensors.dtype(name)}')


class SafetensorsFolder:
  """The tensors of a folder: of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

  Files are mapped to memory, so that only what is used is read.

  Args:
    folder: The folder.
    file_name: The file of all tensors where there is no index.

  Raises:
    ValueError: A file is missing or damaged.
  """

  def __init__(self, folder: epath.PathLike, file_name: str = 'model.safetensors'):
    folder = epath.Path(folder)
    index = folder / 'model.safetensors.index.json'
    if index.exists():
      wanted = _read_index(index)
    elif (folder / file_name).exists():
      wanted = {file_name: None}
    else:
      raise ValueError(f'no weights in {folder}: expected {file_name} or {index.name}')
    self._files = {}
    for file_name, names in wanted.items():
      file = _open(folder / file_name)
      absent = sorted(set(names or ()) - set(file.keys()))
      if absent:
        raise ValueError(f'{folder / file_name} has no tensor {absent[0]}, which {index.name} names')
      self._files |= dict.fromkeys(names or file.keys(), file)

  def names(self) -> set[str]:
    """The names of all tensors."""
    return set(self._files)

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape of a tensor."""
    return tuple(self._files[name].get_slice(name).get_shape())

  def dtype(self, name: str) -> np.dtype:
    """The type of a tensor.

    Raises:
      ValueError: It is not known.
    """
    found = self._files[name].get_slice(name).get_dtype()
    if found not in _DTYPES:
      raise ValueError(f'tensor {name} is of type {found}; known are {", ".join(_DTYPES)}')
    return np.dtype(_DTYPES[found])

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor.

    Args:
      name: The tensor's name.
      index: A slice of step 1 for each dimension.
    """
    return self._files[name].get_slice(name)[index]


def _read_index(path: epath.Path) -> dict[str, list[str]]:
  """The names of tensors by file."""
  by_file = {}
  try:
    for name, file_name in json.loads(path.read_text())['weight_map'].items():
      by_file.setdefault(file_name, []).append(name)
  except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
    raise ValueError(f'{path} is damaged or not an index of tensors: {error!r}') from error
  return by_file


def _open(path: epath.Path):
  if not path.exists():
    raise ValueError(f'{path} is missing')
  try:
    return safetensors.safe_open(path, framework='numpy').__enter__()
  except safetensors.SafetensorError as error:
    raise ValueError(f'{path} is damaged: {error}') from error
