"""Commands of the project as processes of their own, for tests."""

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import unittest.mock
import warnings

import jax

ROOT = pathlib.Path(__file__).parents[1]
# They define no flags and compute nothing, so JAX has started no threads when commands are forked.
_IMPORTED_FIRST = (
  'decode.experiment.run', 'decode.experiment.report', 'decode.papers.exhibits', 'train.train',
  'ml_collections.config_flags',
)  # fmt: skip


def _environment(**env):
  defaults = {'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true', 'PYTHONIOENCODING': 'utf-8'}
  return {**defaults, 'PYTHONPATH': str(ROOT), **env}


def start(module, *arguments, cwd=ROOT, num_devices=1, wrapper=(), stdin=None, stderr=subprocess.PIPE, **env):
  """The `Popen` of `python -m module` on virtual CPU devices; `wrapper` is a command with arguments that runs it."""
  xla_flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={num_devices}'
  return subprocess.Popen(
    [*wrapper, sys.executable, '-m', module, *map(str, arguments)],
    cwd=cwd, env=os.environ | _environment(XLA_FLAGS=xla_flags, **env), text=True,
    stdin=stdin, stdout=subprocess.PIPE, stderr=stderr,
  )  # fmt: skip


def start_two(module, *arguments, **options):
  """Two processes that find each other on loopback."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  together = f'--coordinator_address={address}', '--num_processes=2'
  return [start(module, *arguments, *together, f'--process_id={index}', **options) for index in range(2)]


def finish(process, timeout=300):
  """Waits for a command that must succeed, and returns what it printed."""
  out, err = process.communicate(timeout=timeout)
  assert process.returncode == 0, err
  return out


@functools.cache
def _fork_server():
  """Makes processes from one that has imported JAX and what else takes long."""
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload([*_IMPORTED_FIRST])
  with unittest.mock.patch.dict(os.environ, _environment()):
    multiprocessing.forkserver.ensure_running()
  return context


def become(module, arguments, cwd, env):
  """Gives a forked process the arguments, directory and environment of a command."""
  os.environ.update(env)
  for name, value in env.items():
    if name.startswith('JAX_'):  # JAX has read its environment
      jax.config.update(name.lower(), value)
  os.chdir(cwd)
  sys.path.insert(0, str(cwd))
  sys.argv = [module, *arguments]


def _run_forked(module, arguments, cwd, env, paths):
  for descriptor, path in zip((1, 2), paths):
    os.dup2(os.open(path, os.O_WRONLY), descriptor)
  become(module, arguments, cwd, env)
  with warnings.catch_warnings():
    # It has been imported here and not in a process of its own.
    warnings.filterwarnings('ignore', message='.* found in sys.modules', category=RuntimeWarning)
    runpy.run_module(module, run_name='__main__', alter_sys=True)


def run(module, *arguments, cwd=ROOT, num_devices=1, timeout=300, **env):
  """The `CompletedProcess` of a command, forked from a process that has imported JAX, which saves most of its time.

  What a test asserts of the start or the end of a process needs `start`.
  """
  env['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={num_devices}'
  with tempfile.TemporaryDirectory() as directory:
    paths = [pathlib.Path(directory) / name for name in ('stdout', 'stderr')]
    for path in paths:
      path.touch()
    arguments = [*map(str, arguments)]
    process = _fork_server().Process(target=_run_forked, args=(module, arguments, cwd, env, paths))
    process.start()
    process.join(timeout)
    if process.is_alive():
      process.kill()
      raise subprocess.TimeoutExpired([module, *arguments], timeout)
    outputs = [path.read_text(encoding='utf-8') for path in paths]
  return subprocess.CompletedProcess([module, *arguments], process.exitcode, *outputs)


def succeed(module, *arguments, **options):
  """Runs a command that must succeed, as `run` does, and returns what it printed."""
  ran = run(module, *arguments, **options)
  assert ran.returncode == 0, ran.stderr
  return ran.stdout


def printed(out):
  """The module and the arguments of the one command that another command printed."""
  (line,) = re.findall(r'\bpython -m (.*)$', out, re.MULTILINE)
  module, *arguments = shlex.split(line)
  return module, *arguments


def refuse(module, *arguments, **options):
  """Runs a command that must print nothing but one line that says what is wrong, and returns that line."""
  ran = run(module, *arguments, **options)
  assert ran.returncode == 1, ran
  assert ran.stdout == ''
  (line,) = ran.stderr.splitlines()
  assert line.startswith('error: ')
  return line
