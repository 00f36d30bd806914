"""Trains a model: `python -m train.main --config=configs/NAME.py --workdir=DIR`.

With several processes each runs this command: those of a TPU pod find each other, others are told with
`--coordinator_address`, `--num_processes` and `--process_id`.
"""

import jax
from absl import flags
from ml_collections import config_flags

from common import processes
from spectr_jax.sharding import is_primary
from train import config_flag, plan
from train.step import out_of_memory
from train.train import check_config, make_config_mesh, train

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment, a file of configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Checkpoints, metrics and the trained model go here.')
_ALLOW_FALLBACK = flags.DEFINE_bool('allow_fallback', False, 'Continue from an older checkpoint if need be.')
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print mesh, shardings and bytes per device, and train nothing.')


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
  if _DRY_RUN.value:
    if is_primary():
      print(plan.describe(_CONFIG.value, check_config(_CONFIG.value), make_config_mesh(_CONFIG.value)))
    return
  outcome = train(_CONFIG.value, _WORKDIR.value, allow_fallback=_ALLOW_FALLBACK.value)
  if not is_primary():
    return
  if outcome.held_out is None:
    print(f'terminated: saved at step {outcome.step}; the same command continues from there')
  else:
    print('held-out ' + ', '.join(f'{name} {value:.4f}' for name, value in outcome.held_out.items()))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  config_flag.run(main)
