"""Trains a head for a target: `python -m train.head --config=configs/head.py --target=MODEL --workdir=DIR`.

The target writes the text (`train.head_data`), so nothing but the target is needed. Several processes run as those of
`train.main` do.
"""

import jax
from absl import flags
from etils import epath
from ml_collections import config_flags

from common import processes
from spectr_jax.sharding import is_primary
from train import config_flag
from train.head_training import HeadTraining
from train.step import out_of_memory

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment, a file of configs/.', lock_config=True)
_TARGET = flags.DEFINE_string('target', None, 'Model that the head is for: a folder, a .gguf file or ORG/NAME.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Text, checkpoints, metrics and the trained head go here.')
_ALLOW_FALLBACK = flags.DEFINE_bool('allow_fallback', False, 'Continue from an older checkpoint if need be.')


def main(argv):
  del argv
  processes.initialize()
  try:
    run()
  except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
    known = out_of_memory(error) if isinstance(error, jax.errors.JaxRuntimeError) else error
    if known is None:
      raise
    processes.fail(known)


def run():
  training = HeadTraining(
    _CONFIG.value, _TARGET.value, epath.Path(_WORKDIR.value), allow_fallback=_ALLOW_FALLBACK.value
  )
  outcome = training.run()
  if not is_primary():
    return
  if outcome.held_out is None:
    print(f'terminated: saved at step {outcome.step}; the same command continues from there')
  else:
    print('held-out ' + ', '.join(f'{name} {value:.4f}' for name, value in outcome.held_out.items()))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'target', 'workdir'])
  config_flag.run(main)
