"""What a `config.json` says about the decoder, family by family.

Fields that a file does not name have the values that the configurations of Transformers give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spectr_jax.io.hub.rope import context_length, read_rope, rope_parameters
from spectr_jax.io.untrusted import shown
from spectr_jax.models.causal_lm_config import CausalLMConfig, lm1b_config
from spectr_jax.models.routing import Experts

_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'relu': 'relu',
  'relu2': 'relu2',
}
_DTYPES = ('float32', 'bfloat16')
_LAYER_TYPES = {'full_attention': False, 'sliding_attention': True}  # whether there is a window


def _activation(name: str) -> str:
  if name not in _ACTIVATIONS:
    raise ValueError(f'activation {shown(name)} is unknown; known are {", ".join(_ACTIVATIONS)}')
  return _ACTIVATIONS[name]


def _dtype(spec: Mapping[str, Any]) -> str:
  """The checkpoint's type if it is computed in, else float32, which holds numbers of float16 exactly."""
  name = (spec.get('dtype') or spec.get('torch_dtype') or '').removeprefix('torch.')
  return name if name in _DTYPES else 'float32'


def _rope_parameters(spec: Mapping[str, Any], **defaults: float | None) -> dict[str, Any]:
  """The parameters of rotary positions, which older files spread over several entries."""
  new, old = spec.get('rope_parameters'), spec.get('rope_scaling')
  if new and old and new != old:
    raise ValueError('rope_parameters and rope_scaling contradict each other')
  name, values = ('rope_scaling', old) if old else ('rope_parameters', new or {})
  usual = {'rope_theta': spec.get('rope_theta', 10000.0), 'partial_rotary_factor': spec.get('partial_rotary_factor')}
  return rope_parameters(spec, name, values, **(usual | defaults))


def _head_dim(width: int, num_heads: int) -> int:
  if width % num_heads:
    raise ValueError(f'a width of {width} does not divide into {num_heads} heads')
  return width // num_heads


def layer_windows(
  spec: Mapping[str, Any], is_sliding: Callable[[int], bool] | None = None, size: int | None = None
) -> tuple[int | None, ...]:
  """The window of every layer, by `layer_types` or, in older files, by the family's rule `is_sliding`.

  A family without a rule has windows only by `layer_types`. `size` is the family's window, for files that name none.
  """
  num_layers, kinds, size = spec['num_hidden_layers'], spec.get('layer_types'), spec.get('sliding_window', size)
  if kinds is None:
    if is_sliding is None:
      is_asked = size is not None and spec.get('use_sliding_window', True)
      if is_asked and size < spec['max_position_embeddings']:
        raise ValueError(f'sliding_window {size} is not supported in this family without layer_types')
      return ()
    sliding = [is_sliding(i) for i in range(num_layers)] if size is not None else []
    return tuple(size if slides else None for slides in sliding) if any(sliding) else ()
  unknown = [kind for kind in kinds if kind not in _LAYER_TYPES]
  if unknown:
    raise ValueError(f'layer_types: {shown(unknown[0])} is not supported; known are {", ".join(_LAYER_TYPES)}')
  if len(kinds) != num_layers:
    raise ValueError(f'layer_types names {len(kinds)} layers, but there are {num_layers}')
  if not any(_LAYER_TYPES[kind] for kind in kinds):
    return ()
  if size is None:
    raise ValueError('layer_types names sliding_attention, but there is no sliding_window')
  return tuple(size if _LAYER_TYPES[kind] else None for kind in kinds)


def llama_config(spec: Mapping[str, Any], **differences: Any) -> CausalLMConfig:
  """The configuration of a decoder with blocks of Llama's kind.

  What is not possible raises `ValueError`, and a missing size `KeyError`.
  """
  width, num_heads = spec['hidden_size'], spec['num_attention_heads']
  head_dim = spec['head_dim'] if 'head_dim' in spec else _head_dim(width, num_heads)
  fields = {
    'vocab_size': spec['vocab_size'],
    'embed_dim': width,
    'num_layers': spec['num_hidden_layers'],
    'num_heads': num_heads,
    'num_kv_heads': spec.get('num_key_value_heads') or num_heads,
    'head_dim': head_dim,
    'mlp_dim': spec['intermediate_size'],
    'dtype': _dtype(spec),
    'norm_epsilon': spec.get('rms_norm_eps', 1e-6),
    'has_qkv_bias': spec.get('attention_bias', False),
    'has_out_bias': spec.get('attention_bias', False),
    'has_mlp_bias': spec.get('mlp_bias', False),
    'is_tied': spec.get('tie_word_embeddings', False),
  }
  if 'rope' not in differences:
    parameters = _rope_parameters(spec)
    fields |= {'rope': read_rope(parameters, head_dim), 'context_length': context_length(parameters)}
  if 'activation' not in differences:
    fields['activation'] = _activation(spec.get('hidden_act', 'silu'))
  return CausalLMConfig(**(fields | differences))


# Families. All take the content of `config.json` as `config_fields.checked` gives it.


def llama(spec: dict[str, Any]) -> CausalLMConfig:
  return llama_config(spec, windows=layer_windows(spec))


def lm1b(spec: dict[str, Any]) -> CausalLMConfig:
  """Of models that are trained here; `dtype` is the type that they compute in, whatever that of their tensors."""
  return lm1b_config(
    spec['vocab_size'],
    spec['hidden_size'],
    spec['num_hidden_layers'],
    spec['num_attention_heads'],
    spec['intermediate_size'],
    spec['max_position_embeddings'],
    _dtype(spec),
  )


def mistral(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 8, **spec}
  return llama_config(spec, windows=layer_windows(spec, lambda layer: True, 4096))


def _qwen_window(spec):
  return spec.get('sliding_window', 4096) if spec.get('use_sliding_window', False) else None


def _qwen_windows(spec):
  return layer_windows(
    {**spec, 'sliding_window': _qwen_window(spec)}, lambda layer: layer >= spec.get('max_window_layers', 28)
  )


def qwen2(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 32, **spec}
  return llama_config(spec, has_qkv_bias=True, has_out_bias=False, windows=_qwen_windows(spec))


def qwen3(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 32, 'head_dim': 128, **spec}
  return llama_config(spec, has_qk_norm=True, windows=_qwen_windows(spec))


def _gemma_config(spec, **differences):
  fields = {
    'gain_offset': 1.0,
    'embedding_scale': spec['hidden_size'] ** 0.5,
    'is_tied': spec.get('tie_word_embeddings', True),
  }
  return llama_config(spec, **(fields | differences))


def gemma(spec: dict[str, Any]) -> CausalLMConfig:
  # The first files of Gemma say `gelu` and mean its approximation by tanh.
  names = {
    'gelu_pytorch_tanh' if spec[name] == 'gelu' else spec[name]
    for name in ('hidden_act', 'hidden_activation')
    if name in spec
  }
  if len(names) > 1:
    raise ValueError('hidden_act and hidden_activation contradict each other')
  activation = _activation(*(names or ('gelu_pytorch_tanh',)))
  spec = {'num_key_value_heads': 16, 'head_dim': 256, **spec}
  return _gemma_config(spec, activation=activation, windows=layer_windows(spec))


def gemma2(spec: dict[str, Any], **differences: Any) -> CausalLMConfig:
  spec = {'num_key_value_heads': 4, 'head_dim': 256, **spec}
  fields = {
    'activation': _activation(spec.get('hidden_activation', 'gelu_pytorch_tanh')),
    'has_post_norms': True,
    'query_scale': spec.get('query_pre_attn_scalar', 256) ** -0.5,
    'attention_soft_cap': spec.get('attn_logit_softcapping', 50.0),
    'logit_soft_cap': spec.get('final_logit_softcapping', 30.0),
  }
  if 'windows' not in differences:
    fields['windows'] = layer_windows(spec, lambda layer: layer % 2 == 0, 4096)
  return _gemma_config(spec, **(fields | differences))


def gemma3(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'attn_logit_softcapping': None, 'final_logit_softcapping': None, 'head_dim': 256, **spec}
  pattern = spec.get('sliding_window_pattern') or spec.get('_sliding_window_pattern') or 6
  new, old = spec.get('rope_parameters') or {}, spec.get('rope_scaling') or {}
  if new and old:
    raise ValueError('rope_parameters and rope_scaling contradict each other')
  unknown = sorted(new.keys() - {'full_attention', 'sliding_attention'})
  if unknown:
    raise ValueError(
      f'rope_parameters: {shown(unknown[0])} is not supported; known are full_attention, sliding_attention'
    )
  base, local_base = spec.get('rope_theta', 1e6), spec.get('rope_local_base_freq', 10000.0)
  full, local = new.get('full_attention') or old, new.get('sliding_attention') or {}
  full = rope_parameters(spec, 'rope_parameters' if new else 'rope_scaling', full, rope_theta=base)
  local = rope_parameters(spec, 'rope_parameters', local, rope_theta=local_base)
  return gemma2(
    spec,
    windows=layer_windows(spec, lambda layer: (layer + 1) % pattern != 0, 4096),
    rope=read_rope(full, spec['head_dim']),
    window_rope=read_rope(local, spec['head_dim']),
    context_length=context_length(full),
    has_qk_norm=True,
  )


def gpt_neox(spec: dict[str, Any]) -> CausalLMConfig:
  head_dim = _head_dim(spec['hidden_size'], spec['num_attention_heads'])
  if spec.get('head_dim', head_dim) != head_dim:
    raise ValueError(f'head_dim {spec["head_dim"]} is not supported in this family, whose heads share the width')
  parameters = _rope_parameters(
    spec, rope_theta=spec.get('rotary_emb_base', 10000.0), partial_rotary_factor=spec.get('rotary_pct', 0.25)
  )
  has_bias = spec.get('attention_bias', True)
  return llama_config(
    {**spec, 'num_key_value_heads': None},
    rope=read_rope(parameters, head_dim),
    context_length=context_length(parameters),
    windows=layer_windows(spec),
    norm='layer',
    norm_epsilon=spec.get('layer_norm_eps', 1e-5),
    is_parallel=spec.get('use_parallel_residual', True),
    has_qkv_bias=has_bias,
    has_out_bias=has_bias,
    has_mlp_bias=True,
    is_gated=False,
    activation=_activation(spec.get('hidden_act', 'gelu')),
  )


def gpt2(spec: dict[str, Any]) -> CausalLMConfig:
  width, length = spec['n_embd'], spec['n_positions'] if 'n_positions' in spec else spec['n_ctx']
  sizes = {'num_hidden_layers': spec['n_layer'], 'max_position_embeddings': length}
  return CausalLMConfig(
    vocab_size=spec['vocab_size'],
    embed_dim=width,
    num_layers=spec['n_layer'],
    num_heads=spec['n_head'],
    num_kv_heads=spec['n_head'],
    head_dim=_head_dim(width, spec['n_head']),
    mlp_dim=spec.get('n_inner', 4 * width),
    context_length=length,
    windows=layer_windows(spec | sizes),
    dtype=_dtype(spec),
    norm='layer',
    norm_epsilon=spec.get('layer_norm_epsilon', 1e-5),
    has_qkv_bias=True,
    has_out_bias=True,
    has_mlp_bias=True,
    is_gated=False,
    activation=_activation(spec.get('activation_function', 'gelu_new')),
    is_tied=spec.get('tie_word_embeddings', True),
  )


def granite(spec: dict[str, Any], **differences: Any) -> CausalLMConfig:
  return llama_config(
    spec,
    windows=() if 'recurrence' in differences else layer_windows(spec),
    query_scale=spec.get('attention_multiplier', 1.0),
    embedding_scale=spec.get('embedding_multiplier', 1.0),
    residual_scale=spec.get('residual_multiplier', 1.0),
    logit_scale=1 / spec.get('logits_scaling', 1.0),
    **differences,
  )


# Mixtures of experts.


_NUMBERS = 'num_experts', 'num_local_experts', 'n_routed_experts'


def experts_of(spec: Mapping[str, Any], hidden_dim: int, num: int, num_chosen: int, **traits: Any) -> Experts:
  """The experts, whose number files of one family have by several names, or do not have: then it is `num`."""
  numbers = {name: spec[name] for name in _NUMBERS if name in spec}
  if len(set(numbers.values())) > 1:
    raise ValueError(f'{" and ".join(numbers)} contradict each other')
  num = next(iter(numbers.values()), num)
  return Experts(num, spec.get('num_experts_per_tok', num_chosen), hidden_dim, **traits)


def layers_with_experts(spec: Mapping[str, Any]) -> tuple[bool, ...]:
  """Which layers of Qwen's mixtures have experts; empty for all."""
  step, dense = spec.get('decoder_sparse_step', 1), set(spec.get('mlp_only_layers', []))
  layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(spec['num_hidden_layers']))
  return () if all(layers) else layers


def mixtral(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 8, 'rope_theta': 1e6, 'rms_norm_eps': 1e-5, **spec}
  experts = experts_of(spec, spec['intermediate_size'], 8, 2)
  return llama_config(spec, experts=experts, windows=layer_windows(spec, lambda layer: True))


def qwen3_moe(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 4, **spec}
  experts = experts_of(
    spec,
    spec.get('moe_intermediate_size', 768),
    128,
    8,
    layers=layers_with_experts(spec),
    is_normalized=spec.get('norm_topk_prob', False),
  )
  windows = layer_windows({**spec, 'sliding_window': _qwen_window(spec)}, lambda layer: True)
  return llama_config(spec, experts=experts, has_qk_norm=True, windows=windows)


def olmoe(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'rms_norm_eps': 1e-5, 'max_position_embeddings': 4096, **spec}
  experts = experts_of(spec, spec['intermediate_size'], 64, 8, is_normalized=spec.get('norm_topk_prob', False))
  return llama_config(spec, experts=experts, has_wide_qk_norm=True, windows=layer_windows(spec))


_GPT_OSS_ROPE = {
  'rope_type': 'yarn', 'factor': 32.0, 'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False,
  'original_max_position_embeddings': 4096,
}  # fmt: skip


def gpt_oss(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'rms_norm_eps': 1e-5, 'rope_theta': 150000.0, 'attention_bias': True, 'head_dim': 64, **spec}
  if not spec.get('rope_scaling') and not spec.get('rope_parameters'):
    spec['rope_parameters'] = _GPT_OSS_ROPE
  experts = experts_of(
    spec,
    spec['intermediate_size'],
    128,
    4,
    is_chosen_first=True,
    is_normalized=False,
    has_bias=True,
    limit=spec.get('swiglu_limit', 7.0),
    gate_factor=spec.get('swiglu_alpha', 1.702),
  )
  windows = layer_windows(spec, lambda layer: layer % 2 == 0, 128)
  return llama_config(spec, experts=experts, has_sinks=True, windows=windows)


def grouped_experts_of(spec: Mapping[str, Any], hidden_dim: int, num: int, num_chosen: int, **traits: Any) -> Experts:
  """`experts_of` for routers with sigmoids, groups and a bias of the choice, as DeepSeek 3 has them."""
  return experts_of(
    spec,
    hidden_dim,
    num,
    num_chosen,
    scores='sigmoid',
    is_normalized=spec.get('norm_topk_prob', True),
    scale=spec.get('routed_scaling_factor', 1.0),
    num_groups=spec.get('n_group', 1),
    num_chosen_groups=spec.get('topk_group', 1),
    has_choice_bias=True,
    **traits,
  )


def glm4_moe(spec: dict[str, Any]) -> CausalLMConfig:
  spec = {'num_key_value_heads': 8, 'partial_rotary_factor': 0.5, 'rms_norm_eps': 1e-5, **spec}
  hidden_dim, num_dense = spec.get('moe_intermediate_size', 1408), spec.get('first_k_dense_replace', 1)
  experts = grouped_experts_of(
    spec,
    hidden_dim,
    128,
    8,
    layers=tuple(layer >= num_dense for layer in range(spec['num_hidden_layers'])) if num_dense else (),
    shared_dim=hidden_dim * spec.get('n_shared_experts', 1),
  )
  return llama_config(
    spec,
    experts=experts,
    has_out_bias=False,
    has_qk_norm=spec.get('use_qk_norm', False),
    windows=layer_windows(spec),
  )


def granitemoe(spec: dict[str, Any]) -> CausalLMConfig:
  return granite(
    spec, experts=experts_of(spec, spec['intermediate_size'], 8, 2, is_chosen_first=True, is_normalized=False)
  )
