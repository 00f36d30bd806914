"""Checksums of the files of a folder, and of arrays."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from typing import Any

import jax
import numpy as np
from etils import epath

from spectr_jax.io.untrusted import is_remote, open_file, reading

_CHUNK = 2**20  # bytes that are read at a time
_MAX_FILES = 10**5


def _is_folder(path: epath.Path) -> bool:
  """Whether a path is a folder; `ValueError` if it is neither that nor a regular file."""
  if is_remote(path):
    return path.is_dir()
  mode = os.lstat(path).st_mode
  if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
    what = 'a symbolic link' if stat.S_ISLNK(mode) else 'not a regular file'
    raise ValueError(f'{path} is {what}')
  return stat.S_ISDIR(mode)


def files_below(folder: epath.PathLike) -> list[str]:
  """The relative paths of all files below a folder, in alphabetical order. Nothing is opened.

  Raises `ValueError` if there is no such folder, it or something below is a link, a pipe or a device, or the files are
  very many.
  """
  folder = epath.Path(folder)
  files, waiting = [], [folder]
  with reading(folder):
    _is_folder(folder)
    while waiting:
      for path in waiting.pop().iterdir():
        (waiting if _is_folder(path) else files).append(path)
        if len(files) + len(waiting) > _MAX_FILES:
          raise ValueError(f'{folder} holds more than {_MAX_FILES:,} files')
  return sorted(path.relative_to(folder).as_posix() for path in files)


def file_hash(path: epath.PathLike, begin: int = 0, size: int = sys.maxsize) -> str:
  """The SHA-256 of a regular file, or of at most `size` bytes of it; `ValueError` if it cannot be read."""
  digest = hashlib.sha256()
  with open_file(path) as file, reading(path):
    file.seek(begin)
    while size and (chunk := file.read(min(size, _CHUNK))):
      digest.update(chunk)
      size -= len(chunk)
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
