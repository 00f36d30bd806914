r"""The pairs of SpecTr's experiments on LM1B: `:2m`, `:6m`, `:20m` (drafts) and `:97m` (target).

Commands  python -m train.tokenizer --config=configs/lm1b.py:97m --config.data_dir=DIR
          python -m train.main --config=configs/lm1b.py:97m --config.data_dir=DIR --workdir=runs/lm1b_97m
          python -m train.main --config=configs/lm1b.py:6m --config.data_dir=DIR --workdir=runs/lm1b_6m \
            --config.distill_from=runs/lm1b_97m/model
          python -m train.aot --config=configs/lm1b.py:97m --topology=v5e:4x4 --mesh=data:16
Data      DIR holds the extracted archive, or the output of python -m train.prepare_data
Hardware  TPU v5e 4x4 or larger, where :97m takes 2.5 of a chip's 16 GiB (compiled, not run); fewer chips need
          --config.num_microbatches
Runtime   not measured; docs/training.md has the compiler's estimate per step
Result    not measured, since the data was not available. 60,000 steps of 131,072 tokens are about eight passes
"""

import ml_collections

from configs import family


def get_config(size: str = '97m') -> ml_collections.ConfigDict:
  config = family.get_config(size)
  config.source = 'lm1b'
  config.tokenizer = 'runs/lm1b_tokenizer.json'
  config.cache_dir = 'runs/lm1b_data'
  config.num_steps = 60000
  return config
