"""The LM1B family: a target of 97M parameters and drafts of 2M, 6M and 20M, with their training parameters.

The drafts of 2M and 20M halve and double the layers, the width, the MLP and the heads of the 6M one ("SpecTr: Fast
Speculative Decoding via Optimal Transport", appendix F). Names are nominal. Comments give the exact counts at a
vocabulary of 32,000.
"""

import ml_collections

from configs import base

# Network, learning rate.
SIZES = {
  '2m': (dict(num_layers=3, embed_dim=72, num_heads=2, mlp_dim=288), 5e-3),  # 2,491,128
  '6m': (dict(num_layers=6, embed_dim=144, num_heads=4, mlp_dim=576), 4e-3),  # 6,102,864
  '20m': (dict(num_layers=12, embed_dim=288, num_heads=8, mlp_dim=1152), 2e-3),  # 21,167,136
  '97m': (dict(num_layers=10, embed_dim=768, num_heads=12, mlp_dim=3200), 1e-3),  # 97,337,088
}


def get_config(size: str) -> ml_collections.ConfigDict:
  """The network and optimization of a size. The experiment adds the text."""
  if size not in SIZES:
    raise ValueError(f'size must be one of {", ".join(SIZES)}, got {size!r}')
  config = base.get_config()
  network, config.learning_rate = SIZES[size]
  config.model.update(network, dtype='bfloat16')
  config.vocab_size = 32000
  config.seq_len = 512
  config.batch_size = 256
  config.warmup_steps = 2000
  config.log_every = 100
  config.eval_every = config.checkpoint_every = 2000
  return config
