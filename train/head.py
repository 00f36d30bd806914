"""Trains a head or a small model for a target.

Command   python -m train.head --config=configs/head.py --target=MODEL --workdir=DIR

The target writes the text (`train.head_data`), so nothing but the target is needed. Several processes run as those of
`train.main` do.
"""

from absl import flags
from etils import epath

from train import training_command
from train.head_training import HeadTraining
from train.training_command import ALLOW_FALLBACK, CONFIG, WORKDIR

flags.adopt_module_key_flags(training_command)
_TARGET = flags.DEFINE_string('target', None, 'Model that the draft is for: a folder, a .gguf file or ORG/NAME.')


def run():
  workdir = epath.Path(WORKDIR.value)
  return HeadTraining(CONFIG.value, _TARGET.value, workdir, allow_fallback=ALLOW_FALLBACK.value).run()


def next_flags(folder: epath.Path, target: str, config) -> list[str]:
  """Flags with which `decode.main` takes what was trained for a target, with drafts as long as it guesses."""
  depth = config.num_unrolled if config.kind == 'medusa' else config.get('block_size')
  return [f'--target={target}', f'--draft={folder}', *([f'--draft_length={depth}'] if depth else [])]


if __name__ == '__main__':
  training_command.run(
    run,
    'target',
    next_flags=lambda folder: next_flags(folder, _TARGET.value, CONFIG.value),
    example='configs/head.py',
    examples=[
      '--config=configs/head.py --target=MODEL --workdir=runs/head',
      '--config=configs/head.py:model --target=MODEL --workdir=runs/draft --config.num_steps=400',
    ],
  )
