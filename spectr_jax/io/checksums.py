"""Checksums of the files of a folder, and of arrays."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from spectr_jax.io.untrusted import is_remote, open_file

_CHUNK = 2**20  # bytes that are read at a time
_MAX_FILES = 10**5


def _entries(folder: epath.Path) -> Iterator[tuple[epath.Path, bool]]:
  """What a folder holds, and whether it is a folder."""
  if is_remote(folder):
    yield from ((path, path.is_dir()) for path in folder.iterdir())
    return
  with os.scandir(folder) as entries:
    for entry in entries:
      path = folder / entry.name
      mode = entry.stat(follow_symlinks=False).st_mode
      if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        what = 'a symbolic link' if stat.S_ISLNK(mode) else 'not a regular file'
        raise ValueError(f'{path} is {what}')
      yield path, stat.S_ISDIR(mode)


def files_below(folder: epath.PathLike) -> list[str]:
  """The relative paths of all files below a folder, in alphabetical order. Nothing is opened.

  Raises `ValueError` if there is no such folder, it or something below is a link, a pipe or a device, or the files are
  very many.
  """
  folder = epath.Path(folder)
  if not is_remote(folder) and os.path.islink(folder):
    raise ValueError(f'{folder} is a symbolic link')
  files, waiting = [], [folder]
  try:
    while waiting:
      for path, is_folder in _entries(waiting.pop()):
        (waiting if is_folder else files).append(path)
        if len(files) + len(waiting) > _MAX_FILES:
          raise ValueError(f'{folder} holds more than {_MAX_FILES:,} files')
  except OSError as error:
    raise ValueError(f'cannot read {folder}: {error.strerror or error}') from error
  return sorted(path.relative_to(folder).as_posix() for path in files)


def file_hash(path: epath.PathLike, begin: int = 0, size: int = sys.maxsize) -> str:
  """The SHA-256 of a regular file, or of at most `size` bytes of it; `ValueError` if it cannot be read."""
  digest = hashlib.sha256()
  with open_file(path) as file:
    try:
      file.seek(begin)
      while size and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
    except OSError as error:
      raise ValueError(f'cannot read {path}: {error.strerror or error}') from error
  return digest.hexdigest()


def content_hash(tree: Any) -> str:
  """The first 16 hexadecimal digits of a SHA-256 of the arrays of a tree: their paths, types, shapes and numbers."""
  digest = hashlib.sha256()
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    digest.update(f'{jax.tree_util.keystr(keys)} {array.dtype.name} {array.shape}\0'.encode())
    if array.size:
      digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()[:16]
