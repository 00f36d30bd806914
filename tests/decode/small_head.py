"""A head with random parameters for the tiny target on disk."""

import dataclasses

import jax
import numpy as np

from spectr_jax import save_drafter
from spectr_jax.draft import head_drafter
from spectr_jax.models import causal_lm, head

_BLOCK = causal_lm.CausalLMConfig(
  vocab_size=40, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16, context_length=64,
  rope=causal_lm.Rope((1.0, 0.1, 0.01, 0.001)),
)  # fmt: skip
CONFIG = head.HeadConfig(_BLOCK, 16, 16, (0, 1, -1), has_unembedding=False)


def save_head(path, vocab_size=320, target_dim=16):
  """Writes the head to a folder, and returns its path as text."""
  rng = np.random.default_rng(0)
  block = dataclasses.replace(_BLOCK, embed_dim=target_dim)
  config = dataclasses.replace(CONFIG, block=block, target_dim=target_dim, embedding_dim=target_dim)
  shapes = head.param_shapes(config)
  params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), shapes)
  params['target_ids'] = np.arange(3, 43, dtype=np.int32)
  save_drafter(path, head_drafter(params, config, vocab_size), param_dtype='float32')
  return str(path)
