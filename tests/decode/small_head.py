"""Heads with random parameters for the tiny target on disk."""

import dataclasses

import jax
import numpy as np

from spectr_jax import save_drafter
from spectr_jax.draft import head_drafter, one_pass_drafter
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.models.one_pass_config import Markov, OnePassConfig

_BLOCK = causal_lm.CausalLMConfig(
  vocab_size=40, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16, context_length=64,
  rope=causal_lm.Rope((1.0, 0.1, 0.01, 0.001)),
)  # fmt: skip
CONFIG = head.HeadConfig(_BLOCK, 16, 16, (0, 1, -1), has_unembedding=False)


def _random(shapes):
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype), shapes)
  return params | {'target_ids': np.arange(3, 43, dtype=np.int32)}


def save_one_pass(path, vocab_size=320, target_dim=16):
  """Writes a network that guesses three tokens in one pass to a folder, and returns its path as text."""
  backbone = dataclasses.replace(_BLOCK, embed_dim=target_dim, num_layers=2)
  config = OnePassConfig(
    backbone, target_dim, (0,), num_slots=3, mask_id=1, guesses_at_root=True, sees_from_root=True,
    markov=Markov(4, vocab_size), confidence='markov', has_unembedding=False, is_reduced=True,
  )  # fmt: skip
  drafter = one_pass_drafter(_random(one_pass.param_shapes(config)), config, vocab_size)
  save_drafter(path, drafter, param_dtype='float32')
  return str(path)


def save_head(path, vocab_size=320, target_dim=16):
  block = dataclasses.replace(_BLOCK, embed_dim=target_dim)
  config = dataclasses.replace(CONFIG, block=block, target_dim=target_dim, embedding_dim=target_dim)
  save_drafter(path, head_drafter(_random(head.param_shapes(config)), config, vocab_size), param_dtype='float32')
  return str(path)
