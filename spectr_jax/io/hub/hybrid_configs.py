"""What a `config.json` says about decoders with recurrent layers, family by family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spectr_jax.io.hub.config_fields import FACTOR, HEAD_DIM, HEADS, LAYERS, WIDTH, Kind
from spectr_jax.io.hub.family_configs import experts_of, granite, layers_with_experts, llama_config
from spectr_jax.io.untrusted import FLAG, TEXT, either, list_of, object_of, real, shown, whole
from spectr_jax.models.causal_lm_config import CausalLMConfig, Rope
from spectr_jax.models.recurrent import Recurrence

FIELDS: dict[str, Kind] = {
  'linear_conv_kernel_dim': whole(1, 64),
  'linear_key_head_dim': HEAD_DIM,
  'linear_value_head_dim': HEAD_DIM,
  'linear_num_key_heads': HEADS,
  'linear_num_value_heads': HEADS,
  'full_attention_interval': LAYERS,
  'attn_output_gate': FLAG,
  'shared_expert_intermediate_size': WIDTH,
  'shared_intermediate_size': WIDTH,
  'mamba_n_heads': HEADS,
  'mamba_n_groups': HEADS,
  'mamba_d_head': either(HEAD_DIM, TEXT),
  'mamba_d_state': HEAD_DIM,
  'mamba_d_conv': whole(1, 64),
  'mamba_expand': FACTOR,
  'mamba_conv_bias': FLAG,
  'mamba_proj_bias': FLAG,
  'time_step_limit': list_of(either(real(0), object_of({'__float__': TEXT})), 2),
  'position_embedding_type': TEXT,
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
_INFINITY = {'__float__': 'Infinity'}  # in JSON of Transformers
LAYER_TYPES = {'delta': 'linear_attention', 'mamba': 'mamba', 'conv': 'conv'}  # of recurrent layers, by their kind


def _recurrent_layers(spec: Mapping[str, Any], kind: str, usual: list[bool]) -> tuple[bool, ...]:
  """Which layers are recurrent: those that `layer_types` gives the name of, or the `usual` ones in older files."""
  kinds, name = spec.get('layer_types'), LAYER_TYPES[kind]
  if kinds is None:
    return tuple(usual)
  # Granite's files have other names than what newer versions of Transformers write.
  kinds = [{'attention': 'full_attention', 'mamba': name, 'linear_attention': name}.get(kind, kind) for kind in kinds]
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


def qwen3_5_moe(spec: dict[str, Any]) -> CausalLMConfig:
  """Also of Qwen3-Next, whose files may name layers without experts."""
  experts = experts_of(
    spec,
    spec.get('moe_intermediate_size', 512),
    256,
    8,
    layers=layers_with_experts(spec),
    is_normalized=spec.get('norm_topk_prob', True),
    shared_dim=spec.get('shared_expert_intermediate_size', 512),
    has_shared_gate=True,
  )
  return qwen3_5({'intermediate_size': experts.hidden_dim, **spec}, experts=experts)


def _steps(limits: Sequence[Any]) -> tuple[float, float]:
  if len(limits) != 2 or limits[0] == _INFINITY or any(isinstance(x, dict) and x != _INFINITY for x in limits):
    raise ValueError(f'time_step_limit must be two numbers, the first of them finite, got {shown(limits)}')
  return limits[0], math.inf if limits[1] == _INFINITY else limits[1]


def granitemoehybrid(spec: dict[str, Any]) -> CausalLMConfig:
  width, num_heads = spec['hidden_size'], spec.get('mamba_n_heads', 128)
  inner, shared = int(spec.get('mamba_expand', 2) * width), spec.get('shared_intermediate_size', 1024)
  head_dim = spec.get('mamba_d_head', 'auto')
  head_dim = inner // num_heads if head_dim == 'auto' else head_dim
  if not isinstance(head_dim, int) or head_dim * num_heads != inner:
    raise ValueError(f'mamba_d_head {shown(head_dim)} times mamba_n_heads {num_heads} is not {inner}')
  recurrence = Recurrence(
    'mamba',
    _recurrent_layers(spec, 'mamba', [True] * spec['num_hidden_layers']),
    num_heads=num_heads,
    num_groups=spec.get('mamba_n_groups', 1),
    key_dim=spec.get('mamba_d_state', 256),
    value_dim=head_dim,
    conv_width=spec.get('mamba_d_conv', 4),
    has_conv_bias=spec.get('mamba_conv_bias', True),
    has_bias=spec.get('mamba_proj_bias', False),
    steps=_steps(spec.get('time_step_limit', (0.0, _INFINITY))),
  )
  experts = None
  if spec.get('num_local_experts', 8):
    experts = experts_of(
      spec, spec['intermediate_size'], 8, 2, is_chosen_first=True, is_normalized=False, shared_dim=shared
    )
  differences = {'recurrence': recurrence, 'experts': experts}
  if spec.get('position_embedding_type') != 'rope':
    differences['rope'] = Rope(())
    differences['context_length'] = spec['max_position_embeddings']
  return granite(
    {'intermediate_size': shared, **spec} | ({} if experts else {'intermediate_size': shared}), **differences
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
