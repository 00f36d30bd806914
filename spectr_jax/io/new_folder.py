"""Folders that are written as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from etils import epath


@contextlib.contextmanager
def new_folder(path: epath.PathLike, *, overwrite: bool) -> Iterator[epath.Path]:
  """A folder to write to, which stands at `path` once all is written; one that was there is deleted only then.

  Args:
    path: The folder, may be remote.
    overwrite: Whether there may be one already.

  Raises:
    ValueError: There is one, and `overwrite` is False.
  """
  path = epath.Path(path)
  if path.exists() and not overwrite:
    raise ValueError(f'{path} exists and is not overwritten')
  unfinished, replaced = (path.parent / f'{path.name}.{state}' for state in ('unfinished', 'replaced'))
  if unfinished.exists():
    unfinished.rmtree()
  unfinished.mkdir(parents=True)
  yield unfinished
  if replaced.exists():
    replaced.rmtree()
  if path.exists():
    path.rename(replaced)
  unfinished.rename(path)
  if replaced.exists():
    replaced.rmtree()
