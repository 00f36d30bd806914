"""The arrays of a checkpoint in Orbax's layout, read without trust in what it says of them.

Such a folder is a database of the format OCDBT, which has for every array its description and its numbers in chunks, in
the format Zarr. Both are read by TensorStore, as Orbax does, but nothing is sized by a description before it has been
compared with what is wanted. Orbax's own descriptions beside the database are not needed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from spectr_jax.io import untrusted

_ERRORS = (ValueError, OSError, IndexError, KeyError, NotImplementedError, RuntimeError)  # TensorStore's
_DESCRIPTION = '/.zarray'
_MOST_CHUNKS = 2**10  # of an array, which is saved as one


class StoredParams:
  """The arrays of a folder that Orbax wrote, by their paths in the tree, joined by dots."""

  def __init__(self, folder: epath.Path):
    self._folder = folder
    base = f'{folder}/' if untrusted.is_remote(folder) else {'driver': 'file', 'path': f'{os.path.abspath(folder)}/'}
    self._store: dict[str, Any] = {'driver': 'ocdbt', 'base': base}
    self._context = ts.Context()  # of its own, so that no other reading's cache is asked
    try:
      keys = ts.KvStore.open(self._store, context=self._context).result().list().result()
      names = [key.decode() for key in keys]
    except _ERRORS as error:
      raise self._fault(error) from error
    self.names = {name.removesuffix(_DESCRIPTION) for name in names if name.endswith(_DESCRIPTION)}

  def read(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> dict[str, np.ndarray]:
    for problem, names in (('lacks', shapes.keys() - self.names), ('has surplus', self.names - shapes.keys())):
      if names:
        first = untrusted.name_shown(min(names))
        raise ValueError(f'{self._folder} {problem} parameters: {len(names)} of them, the first {first}')
    stores = {name: {'driver': 'zarr', 'kvstore': {**self._store, 'path': f'{name}/'}} for name in shapes}
    options = {'open': True, 'read': True, 'context': self._context}
    arrays = self._results({name: ts.open(store, **options) for name, store in stores.items()})
    for name, array in arrays.items():
      problem = _problem(array, shapes[name], dtype)
      if problem:
        raise ValueError(f'{self._folder}: parameter {name} {problem}')
    return self._results({name: array.read() for name, array in arrays.items()})

  def _results(self, futures: Mapping[str, ts.Future]) -> dict[str, Any]:
    try:
      return {name: future.result() for name, future in futures.items()}
    except _ERRORS as error:
      raise self._fault(error) from error

  def _fault(self, error: Exception) -> ValueError:
    reason = re.split(r' \[(?:source|tensorstore)', untrusted.first_line(error))[0]  # what follows is not of the file
    return ValueError(f'{self._folder} is damaged: {reason}')


def _problem(array: ts.TensorStore, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
  """Why an array is not read, or None."""
  if array.shape != shape or array.dtype.numpy_dtype != dtype:
    stored = untrusted.name_shown(f'{array.dtype.name} of shape {array.shape}')
    return f'is {stored}, expected {dtype} of shape {shape}'
  chunk = tuple(size or 0 for size in array.chunk_layout.read_chunk.shape or ())
  # A chunk takes all its memory, whatever the part of it that is used.
  if len(chunk) != len(shape) or not all(0 < size <= whole for size, whole in zip(chunk, shape)):
    return f'of shape {shape} has chunks of shape {untrusted.shown(chunk)}'
  if math.prod(-(-whole // size) for size, whole in zip(chunk, shape)) > _MOST_CHUNKS:
    return f'of shape {shape} has too many chunks, each of shape {chunk}'
  codec = {} if array.codec is None else array.codec.to_json()
  if (codec.get('compressor') or {}).get('id') != 'zstd' or codec.get('filters'):
    return 'is compressed in an unknown way'
  return None
