"""Compiled programs that one run of the tests hands on to the next, which then compiles only what has changed.

A run works in a directory of its own. It begins with links to all programs that are kept, and adds what it compiles. If
all its tests pass, every program in it is whole, since no process that wrote there was killed; they are kept by links
again, so that no reader ever finds half a file.
"""

import contextlib
import os
import pathlib
import tempfile
import time

from common import compilation_cache

# The files of JAX's cache: a program, and when it was last used in nanoseconds since 1970, little-endian.
_PROGRAM, _USED = '-cache', '-atime'
_MOST_BYTES = 2**30


def directory() -> pathlib.Path:
  """The directory of this user on this kind of CPU; the names of the files hold all else that programs depend on."""
  machine = compilation_cache._machine()
  path = pathlib.Path(tempfile.gettempdir()) / f'spectr_jax_kept_programs_{os.getuid()}_{machine}'
  path.mkdir(mode=0o700, exist_ok=True)
  if path.stat().st_uid != os.getuid():  # programs of others would be run
    raise PermissionError(f'{path} belongs to another user: delete it, or set TMPDIR to another directory')
  return path


def _last_use(program: pathlib.Path) -> pathlib.Path:
  return program.with_name(program.name.removesuffix(_PROGRAM) + _USED)


def take_over(kept: pathlib.Path, own: pathlib.Path) -> int:
  """Gives a run all kept programs.

  Args:
    kept: The directory of kept programs.
    own: The empty directory of the run.

  Returns:
    The time in nanoseconds that all of them have as their last use.
  """
  start = time.time_ns()
  for program in kept.glob(f'*{_PROGRAM}'):
    with contextlib.suppress(FileNotFoundError):  # another run has just dropped it
      os.link(program, own / program.name)
      _last_use(own / program.name).write_bytes(start.to_bytes(8, 'little'))
  return start


def keep(own: pathlib.Path, kept: pathlib.Path, start: int, most_bytes: int = _MOST_BYTES) -> None:
  """Keeps the programs that a run has compiled or used, and drops those that have not been used for longest.

  Args:
    own: The directory of the run.
    kept: The directory of kept programs.
    start: What `take_over` returned.
    most_bytes: Limit of all kept programs together.
  """
  for used in own.glob(f'*{_USED}'):  # JAX writes it after the program
    program = used.with_name(used.name.removesuffix(_USED) + _PROGRAM)
    if int.from_bytes(used.read_bytes(), 'little') > start:
      with contextlib.suppress(FileExistsError):
        os.link(program, kept / program.name)
      os.utime(kept / program.name)
  programs = sorted(((each.stat(), each) for each in kept.glob(f'*{_PROGRAM}')), key=lambda found: -found[0].st_mtime)
  for stat, program in programs:
    most_bytes -= stat.st_size
    if most_bytes < 0:
      program.unlink(missing_ok=True)
