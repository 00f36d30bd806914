"""Prepares LM1B: `python -m train.prepare_data --manual_dir=DIR_OF_THE_ARCHIVE [--data_dir=DIR]`."""

import functools

from absl import flags
from etils import epath
from rich import console

from common import command_line
from common.progress_bar import ProgressBar
from train import lm1b

_MANUAL_DIR = flags.DEFINE_string('manual_dir', None, f'Directory that holds {lm1b.ARCHIVE}.', required=True)
_DATA_DIR = flags.DEFINE_string('data_dir', '~/tensorflow_datasets', 'Where lm1b is written to.')
_SHA256 = flags.DEFINE_string('sha256', lm1b.SHA256, "The archive's checksum.")


def main():
  archive = epath.Path(_MANUAL_DIR.value).expanduser() / lm1b.ARCHIVE
  stderr = console.Console(stderr=True)
  with ProgressBar(stderr, disable=not stderr.is_terminal) as bar:
    lm1b.check_archive(archive, _SHA256.value, functools.partial(bar.show, 'checking the archive'))
  path = lm1b.prepare(_MANUAL_DIR.value, _DATA_DIR.value)
  print(f'{path}: train with --config.source=lm1b --config.data_dir={_DATA_DIR.value}')


if __name__ == '__main__':
  command_line.run(main, ['--manual_dir=DOWNLOADS', '--manual_dir=DOWNLOADS --data_dir=DATA'])
