"""Trains a model: `python -m train.main --config=configs/NAME.py --workdir=DIR`.

With several processes each runs this command: those of a TPU pod find each other, others are told with
`--coordinator_address`, `--num_processes` and `--process_id`.
"""

from absl import flags
from etils import epath

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


def next_flags(folder: epath.Path, config) -> list[str]:
  """Flags with which `decode.main` takes a trained model: as a draft beside its teacher, else as a target alone.

  The prompt is short, and so is the text, since the context may be.
  """
  room = ['--prompt=A', *([] if config.seq_len >= 80 else [f'--max_new_tokens={max(config.seq_len // 2, 1)}'])]
  if config.distill_from:
    return [f'--target={config.distill_from}', f'--draft={folder}', *room]
  return [f'--target={folder}', '--method=autoregressive', *room]


if __name__ == '__main__':
  training_command.run(
    run,
    next_flags=lambda folder: next_flags(folder, CONFIG.value),
    examples=[
      '--config=configs/stdlib_pair.py:target --workdir=runs/target',
      '--config=configs/lm1b.py:97m --workdir=runs/97m --dry_run',
      '--config=configs/lm1b.py:97m --workdir=gs://BUCKET/97m --config.mesh=data:16',
    ],
  )
