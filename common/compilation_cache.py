"""Compilation cache on disk, so that a command reuses the programs that an earlier one compiled."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import sys

import jax
from etils import epath

from spectr_jax.io.new_files import check_writable


def _machine() -> str:
  """A name that is equal for CPUs that can run each other's programs, since machines may share a home directory."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = [platform.processor(), platform.system()]
  features = sorted({line for line in lines if line.startswith(('flags', 'Features', 'model name'))} or lines)
  return f'{platform.machine()}-{hashlib.sha256(chr(10).join(features).encode()).hexdigest()[:8]}'


def _default() -> pathlib.Path:
  """The directory of this machine in the user's cache.

  Raises:
    RuntimeError: The user has no home.
  """
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'spectr_jax' / _machine()


def keep_compiled(directory: str | None) -> None:
  """Lets JAX keep compiled programs between runs, at most 1 GiB; the least recently used are deleted first.

  Args:
    directory: The directory; '' for no cache, None for `JAX_COMPILATION_CACHE_DIR` or else the user's cache directory.

  Raises:
    ValueError: The given directory cannot be written.
  """
  if directory is None and 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  if directory == '':
    jax.config.update('jax_enable_compilation_cache', False)
    return
  try:
    path = epath.Path(directory or _default())
    path.mkdir(parents=True, exist_ok=True)
    check_writable(path / 'writable')
  except Exception as error:  # remote file systems raise their own types
    if directory is None:  # the default; a warning is enough
      print(f'compiled programs are not kept: {error}', file=sys.stderr)
      jax.config.update('jax_enable_compilation_cache', False)
      return
    raise ValueError(f'compilation_cache_dir: cannot write {directory}: {error}') from error
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_compilation_cache_max_size', 2**30)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
