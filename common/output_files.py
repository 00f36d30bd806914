"""Output files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os

from etils import epath


class OutputFiles:
  """Files that are written completely or not at all; an existing file stays until its replacement is complete.

  A context manager. Entering it checks that all files can be written, so that a long run does not fail at its end.

  Attributes:
    paths: Paths by flag, without flags that are None.
  """

  def __init__(self, **paths: epath.PathLike | None):
    # Links are resolved: renaming onto a link would replace the link and not its target.
    self.paths = {
      flag: epath.Path(path if '://' in str(path) else os.path.realpath(path))
      for flag, path in paths.items()
      if path is not None
    }

  def _unfinished(self, flag: str) -> epath.Path:
    path = self.paths[flag]
    return path.parent / f'{path.name}.unfinished'

  def __enter__(self) -> OutputFiles:
    if len(set(self.paths.values())) < len(self.paths):
      raise ValueError(f'{" and ".join(self.paths)} name the same file, {next(iter(self.paths.values()))}')
    try:
      for flag, path in self.paths.items():
        self._reserve(flag, path)
    except BaseException:
      self._clean()
      raise
    return self

  def _reserve(self, flag: str, path: epath.Path) -> None:
    is_local = '://' not in str(path)
    if is_local and not path.parent.is_dir():
      raise ValueError(f'{flag}: cannot write {path}: there is no directory {path.parent}')
    if path.is_dir() or (is_local and path.exists() and not os.path.isfile(path)):  # epath takes devices for files
      raise ValueError(f'{flag}: cannot write {path}: it exists and is not a regular file')
    try:
      self._unfinished(flag).write_text('')
    except Exception as error:  # remote file systems raise their own types
      raise ValueError(f'{flag}: cannot write {path}: {getattr(error, "strerror", None) or error}') from error

  def write(self, **contents: str | bytes) -> None:
    """Writes the content of every flag that has a path.

    Args:
      **contents: Text or bytes by flag; a flag without a path is ignored.
    """
    contents = {flag: content for flag, content in contents.items() if flag in self.paths}
    for flag, content in contents.items():
      self._unfinished(flag).write_bytes(content.encode() if isinstance(content, str) else content)
    for flag in contents:
      self._unfinished(flag).replace(self.paths[flag])

  def _clean(self) -> None:
    for flag in self.paths:
      with contextlib.suppress(Exception):
        self._unfinished(flag).unlink(missing_ok=True)

  def __exit__(self, *error) -> None:
    self._clean()
