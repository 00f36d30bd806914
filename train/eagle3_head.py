"""Training of a head of EAGLE-3's kind (Li et al. 2025), unrolled on its own hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax import Model
from spectr_jax.draft import head_drafter
from spectr_jax.draft.head_drafter import config_of
from spectr_jax.io.heads.head_sizes import EAGLE3_FIELDS, head_config
from spectr_jax.io.model_files import ModelFiles
from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.models import causal_lm, head
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from train.draft_kind import FeatureHead, as_float32, begin_features
from train.head_step import Guesses, HeadBatch, guesses_ahead


def _attend(query, keys: Sequence[jax.Array], values: Sequence[jax.Array], *, scale):
  """Attention of the last of several steps over the pairs of a text.

  Step 0 has read the target's hidden states. A guess of step s at pair i has seen these up to pair i - s, and one pair
  of each later step: those of the chain of guesses that it ends, pair i - s + j of step j. Queries and result are `[B,
  T, H, head_dim]`; keys and values of each step are `[B, T, K, head_dim]`.
  """
  batch_size, num_pairs, num_heads, head_dim = query.shape
  num_kv_heads, step = keys[0].shape[2], len(keys) - 1
  grouped = (query * scale).reshape(batch_size, num_pairs, num_kv_heads, -1, head_dim)
  wide = accumulation_dtype(query.dtype)
  scores = jnp.einsum('btkgd,bskd->bkgts', grouped, keys[0], preferred_element_type=wide)
  is_seen = jnp.arange(num_pairs) <= jnp.arange(num_pairs)[:, None] - step
  scores = jnp.where(is_seen, scores, jnp.finfo(wide).min)
  later = [(jnp.roll(key, step - j, 1), jnp.roll(value, step - j, 1))
           for j, (key, value) in enumerate(zip(keys, values, strict=True)) if j > 0]  # fmt: skip
  own = [jnp.einsum('btkgd,btkd->bkgt', grouped, key, preferred_element_type=wide)[..., None] for key, _ in later]
  weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1).astype(query.dtype)
  mixed = jnp.einsum('bkgts,bskd->btkgd', weights[..., :num_pairs], values[0])
  for j, (_, value) in enumerate(later):
    mixed += jnp.moveaxis(weights[..., num_pairs + j], 3, 1)[..., None] * value[:, :, :, None]
  return mixed.reshape(query.shape)


def unrolled_outputs(
  params: Any, config: HeadConfig, embedded: jax.Array, features: jax.Array, num_steps: int
) -> list[jax.Array]:
  """Inputs `[B, T, embed_dim]` of the output head for guesses that are 1, 2, ... tokens ahead of the target (EAGLE-3,
  training-time test), from the embedded tokens 1 to T, `[B, T, embedding_dim]`, and the target's hidden states of
  tokens 0 to T - 1, `[B, T, F, target_dim]`. Entry i of step s guesses token i + 2 from the tokens up to i + 1 and the
  hidden states up to token i - s; the first s entries are not valid.
  """
  positions = jnp.broadcast_to(jnp.arange(embedded.shape[1]), embedded.shape[:2])
  hidden = head.hidden_of_features(params, config, features)
  keys, values, outputs = [], [], []
  scale = config.block.query_scale or config.block.head_dim**-0.5

  def attend(query, key, value):
    keys.append(key)
    values.append(value)
    return _attend(query, keys, values, scale=scale), None

  for _ in range(num_steps):
    hidden, output, _ = head.advance(params, config, embedded, hidden, positions, attend)
    outputs.append(output)
    hidden = jnp.roll(hidden, 1, axis=1)
  return outputs


@dataclasses.dataclass(frozen=True)
class Eagle3Kind(FeatureHead):
  """A head of EAGLE-3's kind."""

  fields = EAGLE3_FIELDS
  config_of = staticmethod(config_of)
  param_shapes = staticmethod(head.param_shapes)
  make_drafter = staticmethod(head_drafter)

  config: HeadConfig
  num_depths: int
  # Whether h begins as the last hidden state that is read, and the block as the target's last one, which reads h;
  # else they are random. The output norm begins as the target's in any case.
  from_target: bool

  @property
  def num_ids(self) -> int | None:
    return self.config.block.vocab_size

  @classmethod
  def of(cls, config, target: CausalLMConfig, files: ModelFiles) -> Eagle3Kind:
    del files
    return cls(head_config(config, target), config.num_unrolled, config.from_target)

  def init_params(self, key: jax.Array, target: Model, unembedding: jax.Array) -> dict[str, Any]:
    block, params = self.config.block, self.random_params(key, unembedding)
    target_config = causal_lm.config_of(target)
    last = as_float32(target.params[f'layer_{target_config.num_layers - 1}'])
    params['output_norm'] = as_float32(target.params['final_norm'])
    if not self.from_target:
      return params
    width, own = block.embed_dim, params['attention']
    params['features']['kernel'] = begin_features(params['features']['kernel'], width)
    for name in 'qkv':
      kernel = 0.3 * own[name]['kernel']
      own[name]['kernel'] = kernel.at[-width:].set(last['attention'][name]['kernel'])
    if block.has_qk_norm:
      own |= {name: last['attention'][name] for name in ('q_norm', 'k_norm')}
    own['out'], params['hidden_norm'] = last['attention']['out'], last['attention_norm']
    if block.mlp_dim == target_config.mlp_dim and 'router' not in last['mlp']:
      params |= {'mlp': last['mlp'], 'mlp_norm': last['mlp_norm']}
    return params

  def guesses(self, params: Mapping[str, Any], frozen: Mapping[str, Any], batch: HeadBatch) -> list[Guesses]:
    embedded = jnp.take(frozen['embedding'], batch.tokens[:, 1:-1], axis=0)
    outputs = unrolled_outputs(params, self.config, embedded, batch.features[:, :-2, :-1], self.num_depths)
    unembedding = params.get('unembedding', frozen['unembedding'])
    return [guesses_ahead(output, unembedding, step) for step, output in enumerate(outputs)]
