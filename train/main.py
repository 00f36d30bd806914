"""Trains a model: `python -m train.main --config=configs/NAME.py --workdir=DIR`."""

from absl import flags
from ml_collections import config_flags

from train import config_flag
from train.train import train

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment, a file of configs/.', lock_config=True)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Checkpoints, metrics and the trained model go here.')


def main(argv):
  del argv
  final = train(_CONFIG.value, _WORKDIR.value)
  print('held-out ' + ', '.join(f'{name} {value:.4f}' for name, value in final.items()))


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  config_flag.run(main)
