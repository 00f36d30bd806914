"""Commands of the project as processes of their own, for tests."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def start(module, *arguments, num_devices=1, wrapper=(), **env):
  """`python -m module` from the repository's root on that many virtual CPU devices, little optimised: a `Popen`."""
  xla_flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={num_devices}'
  env = {
    **os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags, 'PYTHONIOENCODING': 'utf-8',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true', **env,
  }  # fmt: skip
  return subprocess.Popen(
    [*wrapper, sys.executable, '-m', module, *map(str, arguments)],
    cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def start_two(module, *arguments, **options):
  """Two processes that find each other on loopback."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  together = f'--coordinator_address={address}', '--num_processes=2'
  return [start(module, *arguments, *together, f'--process_id={index}', **options) for index in range(2)]


def finish(process, timeout=300):
  """What a command printed that must succeed."""
  out, err = process.communicate(timeout=timeout)
  assert process.returncode == 0, err
  return out
