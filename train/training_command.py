"""The common part of `train.main` and `train.head`: flags, joining other processes, and the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import jax
from absl import flags
from etils import epath
from ml_collections import config_flags

from common import processes
from spectr_jax.sharding import is_primary
from train import config_flag
from train.run import Outcome
from train.step import out_of_memory

CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment, a file of configs/.', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'Data, checkpoints, metrics and the trained network go here.')
ALLOW_FALLBACK = flags.DEFINE_bool(
  'allow_fallback',
  False,
  'If the newest checkpoint is damaged, move it to WORKDIR/damaged_checkpoints and continue from the one before it.',
)


def run(
  train: Callable[[], Outcome | None],
  *required: str,
  examples: Sequence[str],
  next_flags: Callable[[epath.Path], list[str]],
  example: str = 'configs/base.py',
) -> None:
  """Runs a command that trains; errors of users, the devices' lack of memory among them, are one line and exit code 1.
  `train` returns None if there was nothing to train, `required` flags are needed beside `config` and `workdir`, and
  `next_flags` are those with which `decode.main` takes the folder of what was trained.
  """

  def main():
    processes.initialize()
    try:
      outcome = train()
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
      known = out_of_memory(error) if isinstance(error, jax.errors.JaxRuntimeError) else error
      if known is None:
        raise
      processes.fail(known)
    if outcome is None or not is_primary():
      return
    if outcome.held_out is None:
      print(f'terminated: saved at step {outcome.step}; the same command continues from there')
    else:
      print('held-out ' + ', '.join(f'{name} {value:.4f}' for name, value in outcome.held_out.items()))
      command = shlex.join(['python', '-m', 'decode.main', *next_flags(outcome.folder)])
      print(f'written to {outcome.folder}; try it: {command}')

  flags.mark_flags_as_required(['config', 'workdir', *required])
  config_flag.run(main, examples, example=example)
