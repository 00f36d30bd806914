r"""The shipped pair: a target of 7.9M and a draft of 0.6M parameters on public-domain English, vocabulary 4096.

The draft is distilled from the target. `draft_undistilled` is the same draft without distillation.

Command   python -m train.main --config=configs/pretrained_pair.py:target --workdir=runs/target \
            --config.files=congress_floor_speeches.txt.bz2,english_novels_100.txt.bz2
Hardware  2 CPU cores
Runtime   about 55 minutes for the target (2,000 tokens/s), 45 for the draft (3,800 tokens/s), 13 without distillation
Result    held-out loss 3.947, 4.192 and 4.254 nats per token, perplexity 51.8, 66.2 and 70.4; the distributions of
          draft and target overlap by .772, and by .690 without distillation
Files     congress_floor_speeches.txt.bz2 and english_novels_100.txt.bz2, prepared as pretrained/README.md describes
"""

import ml_collections

from configs import base


def get_config(size: str = 'target') -> ml_collections.ConfigDict:
  config = base.get_config()
  config.source = 'files'
  config.files = ''
  config.tokenizer = 'runs/tokenizer.json'
  config.vocab_size = 4096
  config.seq_len = 512
  config.batch_size = 4
  config.warmup_steps = 200
  if size == 'target':
    config.model.update(embed_dim=384, num_layers=4, num_heads=6, mlp_dim=1280)
    config.learning_rate = 1.5e-3
    config.num_steps = 3200
  elif size in ('draft', 'draft_undistilled'):
    config.distill_from = 'runs/target/model' if size == 'draft' else ''
    config.model.update(embed_dim=96, num_layers=2, num_heads=3, mlp_dim=384)
    config.learning_rate = 4e-3
    config.num_steps = 5000
  else:
    raise ValueError(f'size must be target, draft or draft_undistilled, got {size!r}')
  return config
