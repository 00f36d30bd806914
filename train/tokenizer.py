"""Trains a tokenizer: `python -m train.tokenizer --config=configs/NAME.py`."""

from absl import flags
from etils import epath
from ml_collections import config_flags

from spectr_jax import Tokenizer
from spectr_jax.io.new_files import check_writable
from train import config_flag
from train.text_sources import make_source

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment; its source, vocab_size and split are used.')
_OUTPUT = flags.DEFINE_string('output', None, 'File to write; config.tokenizer if not given.')


def _check_absent(output: epath.Path) -> None:
  if output.exists():
    raise ValueError(f'{output} exists and is not overwritten')


def main():
  config = _CONFIG.value
  output = epath.Path(_OUTPUT.value or config.tokenizer)
  _check_absent(output)
  source = make_source(config)
  output.parent.mkdir(parents=True, exist_ok=True)
  check_writable(output)  # said before the training, which takes long
  tokenizer = Tokenizer.train(source.documents('train'), config.vocab_size)
  _check_absent(output)
  tokenizer.save(output)
  print(f'{output}: {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint}, from {source.name}')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  config_flag.run(
    main,
    [
      '--config=configs/stdlib_pair.py:target',
      '--config=configs/stdlib_pair.py:target --config.vocab_size=4000 --output=tokenizer.json',
    ],
  )
