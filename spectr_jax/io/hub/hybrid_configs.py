"""What a `config.json` says about decoders with recurrent layers, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectr_jax.io.hub.config_fields import FACTOR, HEAD_DIM, HEADS, LAYERS, WIDTH, Kind
from spectr_jax.io.hub.family_configs import llama_config
from spectr_jax.io.untrusted import FLAG, list_of, real, shown, whole
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.recurrent import Recurrence

FIELDS: dict[str, Kind] = {
  'linear_conv_kernel_dim': whole(1, 64),
  'linear_key_head_dim': HEAD_DIM,
  'linear_value_head_dim': HEAD_DIM,
  'linear_num_key_heads': HEADS,
  'linear_num_value_heads': HEADS,
  'full_attention_interval': LAYERS,
  'attn_output_gate': FLAG,
  'conv_bias': FLAG,
  'conv_L_cache': whole(1, 64),
  'full_attn_idxs': list_of(whole(0, 10_000), 10_000),
  'norm_eps': real(0, 1),
  'block_ff_dim': WIDTH,
  'block_multiple_of': WIDTH,
  'block_ffn_dim_multiplier': FACTOR,
  'block_auto_adjust_ff_dim': FLAG,
  'tie_embedding': FLAG,
}
LAYER_TYPES = {'delta': 'linear_attention', 'conv': 'conv'}  # of recurrent layers, by their kind


def _recurrent_layers(spec: Mapping[str, Any], kind: str, usual: list[bool]) -> tuple[bool, ...]:
  """Which layers are recurrent: those that `layer_types` gives the name of, or the `usual` ones in older files."""
  kinds, name = spec.get('layer_types'), LAYER_TYPES[kind]
  if kinds is None:
    return tuple(usual)
  unknown = [kind for kind in kinds if kind not in (name, 'full_attention')]
  if unknown:
    raise ValueError(f'layer_types: {shown(unknown[0])} is not supported; known are full_attention, {name}')
  if len(kinds) != spec['num_hidden_layers']:
    raise ValueError(f'layer_types names {len(kinds)} layers, but there are {spec["num_hidden_layers"]}')
  return tuple(kind == name for kind in kinds)


def qwen3_5(spec: dict[str, Any], **differences: Any) -> CausalLMConfig:
  spec = {'num_key_value_heads': 4, 'head_dim': 256, 'partial_rotary_factor': 0.25, **spec}
  if not spec.get('attn_output_gate', True):
    raise ValueError('attn_output_gate false is not supported')
  step = spec.get('full_attention_interval', 4)
  recurrence = Recurrence(
    'delta',
    _recurrent_layers(spec, 'delta', [(i + 1) % step != 0 for i in range(spec['num_hidden_layers'])]),
    num_heads=spec.get('linear_num_value_heads', 32),
    num_groups=spec.get('linear_num_key_heads', 16),
    key_dim=spec.get('linear_key_head_dim', 128),
    value_dim=spec.get('linear_value_head_dim', 128),
    conv_width=spec.get('linear_conv_kernel_dim', 4),
  )
  return llama_config(
    spec, recurrence=recurrence, gain_offset=1.0, has_qk_norm=True, has_output_gate=True, **differences
  )


def lfm2(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 8, 'rope_theta': 1e6, 'rms_norm_eps': spec.get('norm_eps', 1e-5), **spec}
  attentive = spec.get('full_attn_idxs', range(spec['num_hidden_layers']))
  recurrence = Recurrence(
    'conv',
    _recurrent_layers(spec, 'conv', [i not in attentive for i in range(spec['num_hidden_layers'])]),
    num_channels=spec['hidden_size'],
    conv_width=spec.get('conv_L_cache', 3),
    has_conv_bias=spec.get('conv_bias', False),
    has_bias=spec.get('conv_bias', False),
  )
  width = spec.get('block_ff_dim', spec['intermediate_size'])
  if spec.get('block_auto_adjust_ff_dim', True):
    width = int(spec.get('block_ffn_dim_multiplier', 1.0) * int(2 * width / 3))
    unit = spec.get('block_multiple_of', 256)
    width = -(-width // unit) * unit
  is_tied = spec.get('tie_embedding', spec.get('tie_word_embeddings', True))
  return llama_config({**spec, 'intermediate_size': width}, recurrence=recurrence, has_qk_norm=True, is_tied=is_tied)
