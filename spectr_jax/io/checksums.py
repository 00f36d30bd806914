"""Checksums of files and of arrays."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import jax
import numpy as np
from etils import epath

from spectr_jax.io.untrusted import open_file, reading

_CHUNK = 2**20  # bytes that are read at a time


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
