"""Compiled programs are kept where they should be, and are found again."""

import os
import pathlib
import subprocess
import sys
import unittest.mock

import jax
import pytest

from spectr_jax.io import compilation_cache

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

# A program that takes longer to compile than what is not worth keeping.
_PROGRAM = """
import sys, jax, jax.numpy as jnp
import spectr_jax
jax.config.update('jax_platforms', 'cpu')
jnp.ones(3).sum().block_until_ready()  # JAX looks for a cache when it compiles its first program
if sys.argv[1:] == ['load_model']:
  try:
    spectr_jax.load_model('nowhere')
  except ValueError:
    pass
else:
  spectr_jax.cache_programs(*sys.argv[1:])
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
def f(x):
  for i in range(60):
    x = jnp.sin(x @ x + i) / jnp.linalg.norm(x)
  return x
jax.jit(f)(jnp.ones((8, 8))).block_until_ready()
print(sum('cache_hits' in name for name in events))
"""


def _hits(*arguments, **env):
  """Runs the program and returns how many compiled ones it found."""
  own = {k: v for k, v in os.environ.items() if not k.startswith(('JAX_', 'XLA_'))}  # compiled as users compile it
  env, command = {'PYTHONPATH': str(_REPOSITORY), **own, **env}, [sys.executable, '-c', _PROGRAM, *arguments]
  ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
  assert ran.returncode == 0, ran.stderr
  return int(ran.stdout)


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
  """In a directory that is named, or by default in the user's cache; nowhere if nothing shall be kept."""
  directory = str(tmp_path / 'compiled')
  assert _hits(directory) == 0
  assert _hits(directory) >= 1
  home = {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
  assert _hits('', **home) == 0
  assert _hits(JAX_ENABLE_COMPILATION_CACHE='false', **home) == 0
  assert _hits('load_model', JAX_ENABLE_COMPILATION_CACHE='false', **home) == 0
  assert _hits('load_model', JAX_COMPILATION_CACHE_DIR=directory, **home) >= 1
  assert not (tmp_path / 'cache').exists()
  assert _hits(**home) == 0
  assert os.listdir(tmp_path / 'cache' / 'spectr_jax') == [compilation_cache._machine()]
  assert _hits(**home) >= 1
  assert _hits('load_model', **home) >= 1


@pytest.fixture
def updates(monkeypatch):
  """What is set, instead of setting it, where JAX has no directory yet."""
  updates, before, update = {}, jax.config.jax_compilation_cache_dir, jax.config.update
  update('jax_compilation_cache_dir', None)
  monkeypatch.setattr(jax.config, 'update', updates.__setitem__)
  yield updates
  update('jax_compilation_cache_dir', before)


def test_what_cannot_be_written(tmp_path, monkeypatch, updates, capsys):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path))  # which has precedence over the default
  compilation_cache.cache_programs()
  file = tmp_path / 'file'
  file.write_text('')
  with pytest.raises(ValueError, match='programs cannot be kept: cannot write .*file/below'):
    compilation_cache.cache_programs(str(file / 'below'))
  assert updates == {}
  # Where nothing was asked for, a line is enough.
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(file))
  compilation_cache.cache_programs()
  assert updates == {'jax_enable_compilation_cache': False}
  assert 'compiled programs are not kept' in capsys.readouterr().err


def test_files_of_others_stay(tmp_path, updates):
  (tmp_path / 'victim').write_text('mine')
  (tmp_path / 'writable').symlink_to(tmp_path / 'victim')
  before = (tmp_path / 'victim').stat().st_mtime_ns
  compilation_cache.cache_programs(str(tmp_path))
  assert updates['jax_compilation_cache_dir'] == str(tmp_path)
  assert (tmp_path / 'victim').stat().st_mtime_ns == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['victim', 'writable']


def test_a_user_without_a_home(monkeypatch, updates, capsys):
  for name in ('JAX_COMPILATION_CACHE_DIR', 'XDG_CACHE_HOME'):
    monkeypatch.delenv(name, raising=False)
  home = unittest.mock.Mock(side_effect=RuntimeError('Could not determine home directory.'))
  monkeypatch.setattr(compilation_cache.pathlib.Path, 'home', home)
  compilation_cache.cache_programs()
  assert updates == {'jax_enable_compilation_cache': False}
  assert capsys.readouterr().err == 'compiled programs are not kept: Could not determine home directory.\n'
