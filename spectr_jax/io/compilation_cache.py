"""`cache_programs`: compiled programs are kept on disk, and later processes reuse them."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import sys

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

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


def cache_programs(directory: str | os.PathLike | None = None) -> None:
  """Lets JAX keep compiled programs between runs, at most 1 GiB; the least recently used are deleted first.

  `load_model` calls it without a directory, and so do commands. Then it changes nothing where JAX has a directory
  already, by `JAX_COMPILATION_CACHE_DIR` or its own configuration, or where `JAX_ENABLE_COMPILATION_CACHE=false`, or a
  former call with `''`, turns the cache off.

  Args:
    directory: The directory; '' for no cache, None for `spectr_jax` in the user's cache directory.

  Raises:
    ValueError: The given directory cannot be written. For the user's, a line on stderr is enough.
  """
  if directory is None:
    has_directory = (
      jax.config.values['jax_compilation_cache_dir'] is not None or 'JAX_COMPILATION_CACHE_DIR' in os.environ
    )
    if has_directory or not jax.config.values['jax_enable_compilation_cache']:
      return
  if directory == '':
    jax.config.update('jax_enable_compilation_cache', False)
    return
  try:
    path = epath.Path(directory or _default())
    path.mkdir(parents=True, exist_ok=True)
    check_writable(path / 'writable')
  except Exception as error:  # remote file systems raise their own types
    if directory is None:
      print(f'compiled programs are not kept: {error}', file=sys.stderr)
      jax.config.update('jax_enable_compilation_cache', False)
      return
    raise ValueError(f'compiled programs cannot be kept: cannot write {directory}: {error}') from error
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_compilation_cache_max_size', 2**30)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  compilation_cache.reset_cache()  # JAX looks for a directory once, when it compiles its first program
