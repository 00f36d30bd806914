r"""The sizes of the LM1B family on plain text of your own: `:2m`, `:6m`, `:20m` (drafts) and `:97m` (target).

Commands  python -m train.tokenizer --config=configs/public_text.py:97m --config.files='corpus/*.txt.bz2'
          python -m train.main --config=configs/public_text.py:97m --config.files='corpus/*.txt.bz2' --workdir=runs/97m
          python -m train.main --config=configs/public_text.py:6m --config.files='corpus/*.txt.bz2' --workdir=runs/6m \
            --config.distill_from=runs/97m/model
Hardware  one GPU of the H100 class; benchmarks/gpu_family.sh trains all four in pieces of minutes
Runtime   one H100 shared by three runs: 97M 2,200 steps in 350 s, 6M 3,000 in 180 s, 2M 3,000 in 93 s
Result    held-out bits per byte 1.315 (97M), 1.484 (6M), 1.679 (2M) on 50.9 million tokens of speeches, novels and
          encyclopedia, warm-up 300, not distilled: docs/tables/family.md. Tens of millions of tokens are few for these
          sizes. So dropout and early stopping are on and the vocabulary is 8,192. Results on such text are not
          comparable with LM1B
"""

import ml_collections

from configs import family


def get_config(size: str = '97m') -> ml_collections.ConfigDict:
  config = family.get_config(size)
  config.source = 'files'
  config.tokenizer = 'runs/public_text_tokenizer.json'
  config.cache_dir = 'runs/public_text_data'
  config.vocab_size = 8192
  config.batch_size = 64
  config.num_steps = 6000
  config.warmup_steps = 500
  config.dropout = 0.1
  config.log_every = 50
  config.eval_every = config.checkpoint_every = 250
  config.patience = 6
  return config
