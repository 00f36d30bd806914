"""What a `config.json` says about decoders with recurrent layers, family by family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from spectr_jax.io.hub.config_fields import FACTOR, HEAD_DIM, HEADS, LAYERS, WIDTH, Kind
from spectr_jax.io.hub.family_configs import (
  experts_of,
  granite,
  grouped_experts_of,
  layer_windows,
  layers_with_experts,
  llama_config,
)
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
  'time_step_limit': list_of(
    either(real(0), Kind('Infinity', lambda x: x == math.inf), object_of({'__float__': TEXT})), 2
  ),
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
  'num_dense_layers': whole(0, 10_000),
  'use_expert_bias': FLAG,
  'mamba_d_ssm': WIDTH,
  'mamba_rms_norm': FLAG,
  'mamba_norm_before_gate': FLAG,
  'projectors_bias': FLAG,
  **dict.fromkeys(('lm_head_multiplier', 'key_multiplier', 'ssm_in_multiplier', 'ssm_out_multiplier'), FACTOR),
  **dict.fromkeys(('attention_in_multiplier', 'attention_out_multiplier'), FACTOR),
  'mlp_multipliers': list_of(FACTOR, 2),
  'ssm_multipliers': list_of(FACTOR, 5),
  'layers_block_type': list_of(TEXT, 10_000),
  'hybrid_override_pattern': TEXT,
  'mlp_hidden_act': TEXT,
  'mamba_hidden_act': TEXT,
  **dict.fromkeys(('mamba_num_heads', 'n_groups'), HEADS),
  **dict.fromkeys(('mamba_head_dim', 'ssm_state_size'), HEAD_DIM),
  'conv_kernel': whole(1, 64),
  **dict.fromkeys(('use_conv_bias', 'use_bias'), FLAG),
  'moe_shared_expert_intermediate_size': WIDTH,
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


QWEN_DEFAULTS = {'num_key_value_heads': 4, 'head_dim': 256, 'partial_rotary_factor': 0.25}


def qwen3_5(spec: dict[str, Any], **differences: Any) -> CausalLMConfig:
  spec = {**QWEN_DEFAULTS, **spec}
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
  numbers = [math.inf if x == _INFINITY else x for x in limits]
  if len(numbers) != 2 or numbers[0] == math.inf or any(isinstance(x, dict) for x in numbers):
    raise ValueError(f'time_step_limit must be two numbers, the first of them finite, got {shown(limits)}')
  return numbers[0], numbers[1]


def _mamba(spec: Mapping[str, Any], layers: tuple[bool, ...], inner: int, **traits: Any) -> Recurrence:
  num_heads, head_dim = spec.get('mamba_n_heads', 128), spec.get('mamba_d_head', 'auto')
  head_dim = inner // num_heads if head_dim == 'auto' else head_dim
  if not isinstance(head_dim, int) or head_dim * num_heads != inner:
    raise ValueError(f'mamba_d_head {shown(head_dim)} times mamba_n_heads {num_heads} is not {inner}')
  return Recurrence(
    'mamba',
    layers,
    num_heads=num_heads,
    num_groups=spec.get('mamba_n_groups', 1),
    key_dim=spec.get('mamba_d_state', 256),
    value_dim=head_dim,
    conv_width=spec.get('mamba_d_conv', 4),
    has_conv_bias=spec.get('mamba_conv_bias', True),
    has_bias=spec.get('mamba_proj_bias', False),
    steps=_steps(spec.get('time_step_limit', (0.0, _INFINITY))),
    **traits,
  )


def granitemoehybrid(spec: dict[str, Any]) -> CausalLMConfig:
  shared = spec.get('shared_intermediate_size', 1024)
  layers = _recurrent_layers(spec, 'mamba', [True] * spec['num_hidden_layers'])
  recurrence = _mamba(spec, layers, int(spec.get('mamba_expand', 2) * spec['hidden_size']))
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


def lfm2(spec: dict[str, Any], **differences: Any) -> CausalLMConfig:
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
  differences |= {'recurrence': recurrence, 'has_qk_norm': True, 'is_tied': is_tied}
  return llama_config({**spec, 'intermediate_size': width}, **differences)


def lfm2_moe(spec: dict[str, Any]) -> CausalLMConfig:
  num_dense = spec.get('num_dense_layers', 2)
  experts = experts_of(
    spec,
    spec.get('moe_intermediate_size', 1792),
    32,
    4,
    layers=tuple(layer >= num_dense for layer in range(spec['num_hidden_layers'])) if num_dense else (),
    scores='sigmoid',
    is_normalized=spec.get('norm_topk_prob', True),
    sum_epsilon=1e-6,
    scale=spec.get('routed_scaling_factor', 1.0),
    has_choice_bias=spec.get('use_expert_bias', True),
  )
  return lfm2({**spec, 'layer_types': spec['layer_types'], 'block_auto_adjust_ff_dim': False}, experts=experts)


def falcon_h1(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'max_position_embeddings': 8192, **spec}
  if spec.get('mamba_proj_bias', False) != spec.get('projectors_bias', False):
    raise ValueError('mamba_proj_bias and projectors_bias that differ are not supported')
  inner = spec.get('mamba_d_ssm', 1024) or int(spec.get('mamba_expand', 2) * spec['hidden_size'])
  norm = 'before' if spec.get('mamba_norm_before_gate', True) else 'behind'
  recurrence = _mamba(
    spec,
    (True,) * spec['num_hidden_layers'],
    inner,
    norm=norm if spec.get('mamba_rms_norm', False) else None,
    num_norm_groups=spec.get('mamba_n_groups', 1),
    has_attention=True,
  )
  return llama_config(
    spec,
    recurrence=recurrence,
    embedding_scale=spec.get('embedding_multiplier', 1.0),
    logit_scale=spec.get('lm_head_multiplier', 1.0),
  )


def falcon_h1_factors(spec: Mapping[str, Any], config: CausalLMConfig) -> dict[str, Any]:
  """The multipliers of Falcon-H1 as factors of the products beside them, see `families.Factors`."""
  mlp, ssm = spec.get('mlp_multipliers', [1.0] * 2), spec.get('ssm_multipliers', [1.0] * 5)
  if (len(mlp), len(ssm)) != (2, 5):
    raise ValueError(f'mlp_multipliers must be 2 numbers and ssm_multipliers 5, got {len(mlp)} and {len(ssm)}')
  own = config.recurrence
  assert own is not None
  keys = own.num_groups * own.key_dim
  ends = tuple(itertools.accumulate((own.inner_dim, own.inner_dim, keys, keys)))
  attention_in, ssm_in = spec.get('attention_in_multiplier', 1.0), spec.get('ssm_in_multiplier', 1.0)
  key = spec.get('key_multiplier', 1.0)
  of_inputs = {
    'attention/q': (1.0, attention_in),
    'attention/k': (key, attention_in),
    'attention/v': (1.0, attention_in),
  }
  of_outputs = {
    'attention/out': spec.get('attention_out_multiplier', 1.0),
    'recurrence/out': spec.get('ssm_out_multiplier', 1.0),
    'mlp/gate': mlp[0],
    'mlp/down': mlp[1],
  }
  factors: dict[str, Any] = {'recurrence/into/kernel': (ends, tuple(ssm_in * x for x in ssm))}
  factors['recurrence/into/bias'] = ends, tuple(ssm)
  for name, (out, into) in (of_inputs | {name: (out, 1.0) for name, out in of_outputs.items()}).items():
    factors |= {f'{name}/kernel': ((), (out * into,)), f'{name}/bias': ((), (out,))}
  return {path: each for path, each in factors.items() if set(each[1]) != {1.0}}


_BLOCK_TYPES = {'M': 'linear_attention', '*': 'full_attention', '-': 'mlp', 'E': 'moe'}
_OLDER_BLOCK_TYPES = {'mamba': 'linear_attention', 'attention': 'full_attention'}


def block_types(spec: Mapping[str, Any]) -> list[str]:
  """What each layer of Nemotron-H is, which older files say by a letter."""
  pattern: str | None = spec.get('hybrid_override_pattern')
  by_letter = None if pattern is None else [_BLOCK_TYPES.get(letter, letter) for letter in pattern]
  named: list[str] = spec.get('layers_block_type') or by_letter or spec['layers_block_type']
  kinds = [_OLDER_BLOCK_TYPES.get(kind, kind) for kind in named]
  if by_letter not in (None, kinds):
    raise ValueError('layers_block_type and hybrid_override_pattern contradict each other')
  unknown = [kind for kind in kinds if kind not in _BLOCK_TYPES.values()]
  if unknown:
    raise ValueError(f'a layer {shown(unknown[0])} is not supported; known are {", ".join(_BLOCK_TYPES.values())}')
  if spec.get('num_hidden_layers', len(kinds)) != len(kinds):
    raise ValueError(f'there are {len(kinds)} kinds of layers, but num_hidden_layers is {spec["num_hidden_layers"]}')
  return kinds


def nemotron_h(spec: dict[str, Any]) -> CausalLMConfig:
  if spec.get('moe_latent_size') is not None:
    raise ValueError(f'moe_latent_size {shown(spec["moe_latent_size"])}, experts on a product, is not supported')
  for name, computed in (('mamba_hidden_act', 'silu'), ('attention_bias', False)):
    if spec.get(name, computed) != computed:
      raise ValueError(f'{name} {shown(spec[name])} is not supported')
  kinds = block_types(spec)
  spec = {
    'num_hidden_layers': len(kinds), 'num_key_value_heads': 8, 'head_dim': 128, 'intermediate_size': 21504,
    'max_position_embeddings': 4096, 'rms_norm_eps': spec.get('layer_norm_epsilon', 1e-5), **spec,
    'hidden_act': spec.get('mlp_hidden_act', 'relu2'),
  }  # fmt: skip
  num_groups = spec.get('n_groups', 8)
  recurrence = Recurrence(
    'mamba',
    tuple(kind == 'linear_attention' for kind in kinds),
    num_heads=spec.get('mamba_num_heads', 128),
    num_groups=num_groups,
    key_dim=spec.get('ssm_state_size', 128),
    value_dim=spec.get('mamba_head_dim', 64),
    conv_width=spec.get('conv_kernel', 4),
    has_conv_bias=spec.get('use_conv_bias', True),
    has_bias=spec.get('use_bias', False),
    num_norm_groups=num_groups,
    # Transformers also bounds the steps of prompts, not those of single tokens, by `time_step_min`, which is for
    # training; other engines do not.
    steps=_steps(spec.get('time_step_limit', (0.0, _INFINITY))),
  )
  experts = None
  if 'moe' in kinds:
    experts = grouped_experts_of(
      spec,
      spec.get('moe_intermediate_size', 7688),
      8,
      2,
      layers=tuple(kind == 'moe' for kind in kinds),
      shared_dim=spec.get('moe_shared_expert_intermediate_size', 7688),
    )
  return llama_config(
    spec,
    recurrence=recurrence if any(recurrence.layers) else None,
    experts=experts,
    parts=tuple('mlp' if kind in ('mlp', 'moe') else 'mixer' for kind in kinds),
    rope=Rope(()),
    context_length=spec['max_position_embeddings'],
    windows=layer_windows({name: value for name, value in spec.items() if name != 'layer_types'}),
    is_gated=False,
  )
