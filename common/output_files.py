"""Output files of commands: checked before a long run, written completely or not at all."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from etils import epath

from spectr_jax.io.new_files import check_writable, is_same_file, new_file, resolved


def check_apart(
  outputs: Mapping[str, epath.PathLike | None], inputs: Mapping[str, Iterable[epath.PathLike]] | None = None
) -> None:
  """Refuses an output that is another output, an input, or a file in a folder that is one, also through symbolic and
  hard links, with a `ValueError` that names both flags. Inputs need not exist.
  """
  given = [(flag, path) for flag, path in outputs.items() if path is not None]
  for (one, path), (other, second) in itertools.combinations(given, 2):
    if is_same_file(path, second):
      raise ValueError(f'{one} and {other} name the same file, {path}')
  for (flag, path), (name, read) in itertools.product(given, (inputs or {}).items()):
    for place in read:
      if is_same_file(path, place):
        raise ValueError(f'{flag} would overwrite {path}, which {name} reads')
      if resolved(place) in resolved(path).parents:
        raise ValueError(f'{flag} would write {path} into {place}, which {name} reads')


class OutputFiles:
  """Files that are written completely or not at all; an existing file stays until its replacement is complete.

  A context manager: entering it checks that all files can be written, so that a long run does not fail at its end.
  `paths` are those behind symbolic links, by flag.
  """

  def __init__(self, **paths: epath.PathLike | None):
    self.paths = {flag: resolved(path) for flag, path in paths.items() if path is not None}

  def apart_from(self, inputs: Mapping[str, Iterable[epath.PathLike]]) -> OutputFiles:
    """Checks by `check_apart` that the files are not among the inputs, and returns itself."""
    check_apart(self.paths, inputs)
    return self

  def __enter__(self) -> OutputFiles:
    check_apart(self.paths)
    for flag, path in self.paths.items():
      with _named(flag):
        check_writable(path)
    return self

  def write(self, **contents: str | bytes) -> None:
    """Writes text or bytes by flag, ignoring flags without a path; if one cannot be written that is a `ValueError`, and
    none is replaced.
    """
    with contextlib.ExitStack() as unfinished:
      for flag, content in contents.items():
        if flag in self.paths:
          unfinished.enter_context(_named(flag))
          file = unfinished.enter_context(new_file(self.paths[flag]))
          file.write(content.encode() if isinstance(content, str) else content)
          file.flush()

  def write_after(self, show: Callable[[], None], **contents: str | bytes) -> None:
    """Prints and then writes: a full disk loses nothing that is printed, and a closed pipe nothing that is written."""
    try:
      show()
    finally:
      self.write(**contents)

  def __exit__(self, *error) -> None:
    pass


@contextlib.contextmanager
def _named(flag: str) -> Iterator[None]:
  """Names the flag in front of what is wrong with its file."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{flag}: {error}') from error
