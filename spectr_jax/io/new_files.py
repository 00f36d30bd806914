"""Files and folders that appear complete or not at all: a crash at any moment leaves the old one or the new one.

What is unfinished stands beside its target under a random name, `.NAME.HEX.unfinished`. A process that is killed may
leave one behind, which nothing reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from typing import BinaryIO, cast

from etils import epath

from spectr_jax.io.untrusted import is_remote

try:
  import fcntl
except ImportError:  # not a POSIX system
  fcntl = None


def resolved(path: epath.PathLike) -> epath.Path:
  """The path behind symbolic links: renaming onto a link would replace the link and not its target."""
  return epath.Path(path if is_remote(path) else os.path.realpath(path))


def is_same_file(one: epath.PathLike, other: epath.PathLike) -> bool:
  """Whether two paths name one file, through symbolic or hard links too; it need not exist."""
  if resolved(one) == resolved(other):
    return True
  with contextlib.suppress(OSError):
    return not is_remote(one) and not is_remote(other) and os.path.samefile(one, other)
  return False


def _beside(path: epath.Path) -> epath.Path:
  """A new hidden path beside another one; its name is not too long where that of the path is not."""
  return path.parent / f'.{path.name[:50]}.{secrets.token_hex(8)}.unfinished'


@contextlib.contextmanager
def writing(path: epath.PathLike) -> Iterator[None]:
  """Turns an error of the file system into a `ValueError` that names the path."""
  try:
    yield
  except OSError as error:
    raise ValueError(f'cannot write {path}: {error.strerror or error}') from error
  except Exception as error:
    if not is_remote(path) or isinstance(error, ValueError):
      raise
    raise ValueError(f'cannot write {path}: {error}') from error  # remote file systems raise their own types


def lock(descriptor: int, path: epath.PathLike) -> None:
  """Locks an open file or folder until it is closed, where the file system can; `ValueError` if another process has
  locked it.
  """
  if fcntl is None:
    return
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise ValueError(f'{path} is being written by another process') from None
  except OSError as error:
    if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF):
      raise ValueError(f'cannot lock {path}: {error.strerror}') from error


@contextlib.contextmanager
def only_writer(folder: epath.PathLike) -> Iterator[None]:
  """Keeps other processes out of a folder while the context lasts; `ValueError` if one is in it already.

  The operating system releases the lock when its process ends, however that ends. File systems without locks, and
  remote ones, have none.
  """
  if is_remote(folder):
    yield
    return
  with writing(folder):
    descriptor = os.open(folder, os.O_RDONLY)
  try:
    lock(descriptor, folder)
    yield
  finally:
    os.close(descriptor)


def _check_place(path: epath.Path) -> None:
  if is_remote(path):
    return
  if not os.path.isdir(path.parent):
    raise ValueError(f'cannot write {path}: there is no directory {path.parent}')
  if os.path.lexists(path) and not os.path.isfile(path):
    raise ValueError(f'cannot write {path}: it exists and is not a regular file')


def check_writable(path: epath.PathLike) -> None:
  """Raises at once the `ValueError` of a file that could not be written."""
  path = resolved(path)
  with writing(path):
    _check_place(path)
    trial = _beside(path)
    trial.touch()
    trial.unlink()


@contextlib.contextmanager
def new_file(path: epath.PathLike) -> Iterator[BinaryIO]:
  """A file to write to, which stands at `path` once the context ends without an error; one that was there stays until
  then, and gives its mode. A `ValueError` says why it cannot be written.
  """
  path = resolved(path)
  _check_place(path)
  unfinished = _beside(path)
  with writing(path):
    try:
      with cast(BinaryIO, unfinished.open('wb')) as file:
        yield file
        file.flush()
        if not is_remote(path):
          os.fsync(file.fileno())
          if path.exists():
            os.chmod(unfinished, stat.S_IMODE(os.stat(path).st_mode))
      unfinished.replace(path)
    except BaseException:
      with contextlib.suppress(Exception):  # remote file systems raise their own types
        unfinished.unlink(missing_ok=True)
      raise


def write_file(path: epath.PathLike, content: bytes) -> None:
  """Writes a file completely or not at all; `ValueError` if it cannot be, and one that was there stays."""
  with new_file(path) as file:
    file.write(content)


@contextlib.contextmanager
def new_folder(path: epath.PathLike, *, overwrite: bool, owned: Collection[str] = ()) -> Iterator[epath.Path]:
  """A folder to write to, which stands at `path` once all is written; one that was there is replaced only then.

  `owned` are all names of files that are written; others in an existing folder stay where they are. The path may be
  remote.

  Raises `ValueError` where there is a folder and `overwrite` is False, where something else stands at the path, or
  where the folder cannot be created.
  """
  path = resolved(path)
  if path.exists() and not overwrite:
    raise ValueError(f'{path} exists and is not overwritten')
  if path.exists() and not path.is_dir():
    raise ValueError(f'{path} exists and is not a folder')
  unfinished = _beside(path)
  with writing(path):
    unfinished.mkdir(parents=True)
  try:
    yield unfinished
    if path.exists():
      for entry in path.iterdir():
        if entry.name not in owned:
          _copy(entry, unfinished / entry.name)
      _exchange(unfinished, path)
    else:
      unfinished.rename(path)
  finally:
    if unfinished.exists():
      unfinished.rmtree()


def check_new_folder(path: epath.PathLike) -> None:
  """Raises at once the `ValueError` that `new_folder` with `overwrite` would raise in the end."""
  path = resolved(path)
  is_there = path.exists() if is_remote(path) else os.path.lexists(path)
  if is_there and (not path.is_dir() or (not is_remote(path) and os.path.ismount(path))):
    raise ValueError(f'{path} exists and is not a folder that can be replaced')
  trial = _beside(path)
  with writing(path):
    trial.mkdir(parents=True)
    trial.rmdir()


def _copy(source: epath.Path, target: epath.Path) -> None:
  if is_remote(source) and not source.is_dir():
    source.copy(target)
  elif not is_remote(source) and (os.path.islink(source) or not source.is_dir()):
    shutil.copy2(source, target, follow_symlinks=False)
  else:
    target.mkdir()
    for entry in source.iterdir():
      _copy(entry, target / entry.name)


def _exchange(one: epath.Path, other: epath.Path) -> None:
  """Lets two folders change places, in one step where the system can."""
  renameat2 = None if is_remote(one) else getattr(ctypes.CDLL(None), 'renameat2', None)
  here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
  if renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
    return
  replaced = _beside(other)
  other.rename(replaced)
  one.rename(other)
  replaced.rename(one)
