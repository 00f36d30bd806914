"""Files and folders that appear complete or not at all, and outputs that one process at a time may write.

What is unfinished stands beside its target under a random name that is created, never opened: `.NAME.HEX.unfinished`.
A process that is killed may leave one behind, which nothing reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
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


def _extended(path: epath.Path, ending: str) -> epath.Path:
  """The hidden file beside a path with an ending; its name is not too long where that of the path is not."""
  name = path.name
  if len(os.fsencode(name)) > 200:
    name = f'{name[:40]}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}'
  return path.parent / f'.{name}.{ending}'


def _beside(path: epath.Path, state: str) -> epath.Path:
  return _extended(path, f'{secrets.token_hex(8)}.{state}')


@contextlib.contextmanager
def _writing(path: epath.Path) -> Iterator[None]:
  """Turns an error of the file system into a `ValueError` that names the path."""
  try:
    yield
  except OSError as error:
    raise ValueError(f'cannot write {path}: {error.strerror or error}') from error
  except Exception as error:
    if not is_remote(path) or isinstance(error, ValueError):
      raise
    raise ValueError(f'cannot write {path}: {error}') from error  # remote file systems raise their own types


@contextlib.contextmanager
def only_writer(path: epath.PathLike) -> Iterator[None]:
  """Keeps other processes from writing the same output while the context lasts; `ValueError` if one already does.

  The lock is the file `.NAME.lock` beside the output. The operating system releases it when its process ends, however
  that ends. File systems without locks, and remote ones, have none.
  """
  path = resolved(path)
  if is_remote(path) or fcntl is None:
    yield
    return
  place = _extended(path, 'lock')
  descriptor = _locked(place, path)
  try:
    yield
  finally:
    with contextlib.suppress(OSError):
      status = os.fstat(descriptor)
      if stat.S_ISREG(status.st_mode) and status.st_size == 0:  # as ours are
        os.unlink(place)
    os.close(descriptor)


def lock(descriptor: int, path: epath.PathLike) -> None:
  """Locks an open file until it is closed, where the file system can; `ValueError` if another process has locked it."""
  if fcntl is None:
    return
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise ValueError(f'{path} is being written by another process') from None
  except OSError as error:
    if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
      raise ValueError(f'cannot lock {path}: {error.strerror}') from error


def _locked(place: epath.Path, path: epath.Path) -> int:
  """A descriptor of the lock file at `place`, locked."""
  while True:
    try:
      descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
      raise ValueError(f'cannot write {path}: {place}: {error.strerror}') from error
    try:
      lock(descriptor, path)
    except ValueError:
      os.close(descriptor)
      raise
    # Its last owner may have removed it between the two calls.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(descriptor), os.stat(place, follow_symlinks=False)):
        return descriptor
    os.close(descriptor)


class NewFile:
  """A file that stands at `path` once `commit` is called; one that was there stays until then, and gives its mode.

  All methods but `discard` raise `ValueError` where something cannot be written, and then discard what is unfinished.
  """

  def __init__(self, path: epath.PathLike):
    self.path = resolved(path)
    self._unfinished = _beside(self.path, 'unfinished')
    self.file = self._open()

  def _open(self) -> BinaryIO:
    path = self.path
    with _writing(path):
      if is_remote(path):
        return cast(BinaryIO, self._unfinished.open('wb'))
      if not os.path.isdir(path.parent):
        raise ValueError(f'cannot write {path}: there is no directory {path.parent}')
      if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f'cannot write {path}: it exists and is not a regular file')
      descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
      if os.path.exists(path):
        os.chmod(self._unfinished, stat.S_IMODE(os.stat(path).st_mode))
      return os.fdopen(descriptor, 'wb')

  @contextlib.contextmanager
  def _wholly(self) -> Iterator[None]:
    """Discards what is unfinished where it cannot be written."""
    try:
      with _writing(self.path):
        yield
    except BaseException:
      self.discard()
      raise

  def write(self, content: bytes) -> None:
    """Writes more of the content."""
    with self._wholly():
      self.file.write(content)
      self.file.flush()

  def commit(self) -> None:
    """Puts the file in its place."""
    with self._wholly():
      if not is_remote(self.path):
        os.fsync(self.file.fileno())
      self.file.close()
      self._unfinished.replace(self.path)

  def discard(self) -> None:
    """Removes what is unfinished; does nothing after `commit`."""
    with contextlib.suppress(Exception):  # remote file systems raise their own types
      self.file.close()
    with contextlib.suppress(Exception):
      self._unfinished.unlink(missing_ok=True)


def write_file(path: epath.PathLike, content: bytes) -> None:
  """Writes a file completely or not at all; `ValueError` if it cannot be, and one that was there stays."""
  new = NewFile(path)
  new.write(content)
  new.commit()


def _files(folder: epath.Path) -> list[str]:
  """The relative paths of all files below a folder; links are files."""
  files, waiting = [], [folder]
  while waiting:
    for path in waiting.pop().iterdir():
      if path.is_dir() and (is_remote(path) or not os.path.islink(path)):
        waiting.append(path)
      else:
        files.append(str(path.relative_to(folder)))
  return sorted(files)


@contextlib.contextmanager
def new_folder(
  path: epath.PathLike, *, overwrite: bool, owned: Callable[[epath.Path], Collection[str]] = lambda folder: ()
) -> Iterator[epath.Path]:
  """A folder to write to, which stands at `path` once all is written; one that was there is replaced only then.

  `owned` gives the relative paths of the files in an existing folder that belong to what is replaced; others stay where
  they are. The path may be remote.

  Raises `ValueError` where there is a folder and `overwrite` is False, where something else stands at the path or under
  a name that the new folder has, or where the folder cannot be created.
  """
  path = resolved(path)
  if path.exists() and not overwrite:
    raise ValueError(f'{path} exists and is not overwritten')
  if path.exists() and not path.is_dir():
    raise ValueError(f'{path} exists and is not a folder')
  unfinished = _beside(path, 'unfinished')
  with _writing(path):
    unfinished.mkdir(parents=True)
  try:
    yield unfinished
    if path.exists():
      _keep_others(path, unfinished, _others(path, owned))
      _exchange(unfinished, path)
    else:
      unfinished.rename(path)
  finally:
    if unfinished.exists():
      unfinished.rmtree()


def check_new_folder(
  path: epath.PathLike, names: Collection[str], *, owned: Callable[[epath.Path], Collection[str]] = lambda folder: ()
) -> None:
  """Raises at once the `ValueError` that `new_folder` with `overwrite` would raise in the end, for files of these
  names.
  """
  path = resolved(path)
  is_there = path.exists() or (not is_remote(path) and os.path.lexists(path))
  if is_there and (not path.is_dir() or (not is_remote(path) and os.path.ismount(path))):
    raise ValueError(f'{path} exists and is not a folder that can be replaced')
  trial = _beside(path, 'unfinished')
  try:
    trial.mkdir(parents=True)
    trial.rmdir()
  except OSError as error:
    raise ValueError(f'cannot write {path}: {error.strerror or error}') from error
  if is_there:
    _check_kept(path, _others(path, owned), lambda name: name.split('/')[0] in names)


def _others(folder: epath.Path, owned: Callable[[epath.Path], Collection[str]]) -> list[str]:
  return sorted(set(_files(folder)) - set(owned(folder)))


def _check_kept(folder: epath.Path, others: list[str], is_taken: Callable[[str], bool]) -> None:
  taken = next(filter(is_taken, others), None)
  if taken is not None:
    raise ValueError(f'{folder / taken} is not replaced: it is no file of what is overwritten')


def _keep_others(old: epath.Path, new: epath.Path, others: list[str]) -> None:
  """Lets files of `old` stand in `new` as well."""
  _check_kept(old, others, lambda name: os.path.lexists(new / name) or (new / name).exists())
  for name in others:
    (new / name).parent.mkdir(parents=True, exist_ok=True)
    if is_remote(old):
      (old / name).copy(new / name)
      continue
    try:
      os.link(old / name, new / name, follow_symlinks=False)
    except OSError:  # file systems without hard links
      shutil.copy2(old / name, new / name, follow_symlinks=False)


def _exchange(one: epath.Path, other: epath.Path) -> None:
  """Lets two folders change places, in one step where the system can."""
  renameat2 = None if is_remote(one) else getattr(ctypes.CDLL(None), 'renameat2', None)
  here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
  if renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
    return
  replaced = _beside(other, 'replaced')
  other.rename(replaced)
  one.rename(other)
  replaced.rename(one)
