"""Programs of several processes: joining them, and ending all of them when one fails."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax
from absl import flags

from common import command_line, help_text

_ADDRESS = flags.DEFINE_string('coordinator_address', None, 'HOST:PORT of process 0, of several that work together.')
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'How many processes work together.', lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of them this is, from 0.', lower_bound=0)
help_text.in_group('Machine', _ADDRESS, _NUM_PROCESSES, _PROCESS_ID)


def _has_tpu() -> bool:
  """Tells whether this machine has TPU chips that JAX would use, without initializing them."""
  is_wanted = os.environ.get('JAX_PLATFORMS', 'tpu').split(',')[0] in ('', 'tpu')
  has_chips = bool(glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
  return is_wanted and has_chips and importlib.util.find_spec('libtpu') is not None


def initialize() -> None:
  """Joins the other processes, given by flags or by a TPU pod; does nothing if there are none.

  Call it before anything else asks JAX for devices.

  Raises:
    ValueError: Some of the flags are missing, or the processes cannot join.
  """
  given = {
    'coordinator_address': _ADDRESS.value, 'num_processes': _NUM_PROCESSES.value, 'process_id': _PROCESS_ID.value,
  }  # fmt: skip
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == len(given):
    if not _has_tpu():
      return
    given = {}
  elif missing:
    raise ValueError(f'of several processes each needs all of {", ".join(given)}; missing: {", ".join(missing)}')
  elif not given['process_id'] < given['num_processes']:
    raise ValueError(f'process_id must be below num_processes, got {given["process_id"]} of {given["num_processes"]}')
  # The program handles SIGTERM itself.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(**given)
  except Exception as error:  # depends on the cluster
    flag_names = ', '.join(f'--{name}' for name in ('coordinator_address', 'num_processes', 'process_id'))
    raise ValueError(f'the processes did not come together, see {flag_names}: {error}') from error


def fail(error: BaseException) -> NoReturn:
  """Ends this process with one line, or the traceback of a fault, and exit code 1, without waiting for anything.

  An orderly exit would wait for the other processes, which wait for this one, and for work in background threads.
  """
  try:
    message = command_line.message_of(error)
    if message is None:
      traceback.print_exception(error)
    else:
      command_line.print_error(message)
    sys.stdout.flush()
  finally:  # also where nothing can be printed
    os._exit(1)


def run_together(work: Callable[[], None]) -> None:
  """Joins the other processes, if there are any, and does the work; a failure in one of them ends all.

  Args:
    work: The work. What it raises is raised where there is only this process, and else ends this process by `fail`.
  """
  initialize()
  try:
    work()
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:  # a panic of the tokenizers is no Exception
    if jax.process_count() == 1:
      raise
    fail(error)
