"""Trains a model: `python -m train.main --config=configs/NAME.py --workdir=DIR`.

With several processes each runs this command: those of a TPU pod find each other, others are told with
`--coordinator_address`, `--num_processes` and `--process_id`.
"""

from absl import flags

from spectr_jax.sharding import is_primary
from train import plan, training_command
from train.run import make_config_mesh
from train.train import check_config, train
from train.training_command import ALLOW_FALLBACK, CONFIG, WORKDIR

flags.adopt_module_key_flags(training_command)
_DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print mesh, shardings and bytes per device, and train nothing.')


def run():
  config = CONFIG.value
  if not _DRY_RUN.value:
    return train(config, WORKDIR.value, allow_fallback=ALLOW_FALLBACK.value)
  if is_primary():
    print(plan.describe(config, check_config(config), make_config_mesh(config)))
  return None


if __name__ == '__main__':
  training_command.run(
    run,
    examples=[
      '--config=configs/stdlib_pair.py:target --workdir=runs/target',
      '--config=configs/lm1b.py:97m --workdir=runs/97m --dry_run',
      '--config=configs/lm1b.py:97m --workdir=gs://BUCKET/97m --config.mesh=data:16',
    ],
  )
