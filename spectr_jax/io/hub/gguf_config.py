"""The metadata of a GGUF file as the `config.json` that the same model has on the hub."""

from __future__ import annotations

from typing import Any

import numpy as np

from spectr_jax.io.hub import config_fields
from spectr_jax.io.hub.families import FAMILIES
from spectr_jax.io.hub.gguf_header import GgufHeader
from spectr_jax.io.hub.gguf_metadata import ARCHITECTURES, HEAD_WIDTHS, Metadata
from spectr_jax.io.hub.gguf_tokenizer import ID_KEYS, check_metadata
from spectr_jax.io.hub.rope import read_rope
from spectr_jax.io.untrusted import shown

# Layers of the one size of a family that scales queries by the width per head and not by the head's.
_SCALED_BY_WIDTH = {'gemma2': 46, 'gemma3': 62}
# Whether the weights of a token's experts are divided by their sum, which llama.cpp knows by the architecture.
_NORMALIZED = {
  'llama': True,
  'qwen3moe': True,
  'olmoe': False,
  'gpt-oss': False,
  'gemma4': True,
  'granitehybrid': False,
  'qwen35moe': True,
}
# Every n-th layer attends to everything, unless the metadata says otherwise.
_WINDOW_PATTERN = {'gemma2': 2, 'gemma3': 6}
# Llama 3.1 scales RoPE like this in all sizes; the files have the divisors that follow from it.
_LLAMA3_ROPE = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192}
ROPE_FREQS = 'rope_freqs.weight'
_MIXTURES = 'Qwen3MoeForCausalLM', 'OlmoeForCausalLM', 'GptOssForCausalLM'
_PLAIN_TYPES = {0: 'float32', 1: 'float16', 30: 'bfloat16'}

# The hub's fields of sizes, and what GGUF calls them.
_FIELDS = {
  'hidden_size': 'embedding_length',
  'intermediate_size': 'feed_forward_length',
  'num_hidden_layers': 'block_count',
  'num_attention_heads': 'attention.head_count',
  'max_position_embeddings': 'context_length',
}
_GPT2_FIELDS = {
  'n_embd': 'embedding_length',
  'n_inner': 'feed_forward_length',
  'n_layer': 'block_count',
  'n_head': 'attention.head_count',
  **dict.fromkeys(('n_positions', 'n_ctx'), 'context_length'),
}


def hub_config(header: GgufHeader) -> dict[str, Any]:
  """The configuration of a model with the names that the hub has for its fields."""
  check_metadata(header)
  metadata = Metadata(header)
  name = ARCHITECTURES[metadata.architecture]
  is_mixture = bool(metadata.get('expert_count', 0))
  if is_mixture and metadata.architecture not in _NORMALIZED:
    raise metadata.refusal(f'a mixture of experts, which {metadata.architecture} is not')
  if is_mixture and metadata.architecture == 'llama':
    name = 'MixtralForCausalLM'
  if metadata.architecture == 'llama' and metadata.get('attention.sliding_window') and not is_mixture:
    name = 'MistralForCausalLM'
  config = {'architectures': [name], 'model_type': FAMILIES[name].model_type, **_common(header)}
  if metadata.architecture == 'gpt2':
    epsilon = metadata.required('attention.layer_norm_epsilon')
    return config | metadata.sizes(_GPT2_FIELDS) | {'layer_norm_epsilon': epsilon, 'activation_function': 'gelu_new'}
  if metadata.architecture == 'gemma4':
    config |= _gemma4(metadata)
    return config | _experts(metadata, config) if is_mixture else config
  has_mlps = metadata.architecture != 'qwen35moe'
  config |= metadata.sizes(_FIELDS | ({} if has_mlps else {'intermediate_size': 'expert_feed_forward_length'}))
  if metadata.architecture == 'gptneox':
    return config | _gpt_neox(metadata, config)
  config |= _rms_decoder(metadata, config)
  if metadata.architecture.startswith('gemma'):
    config |= _gemma(metadata, config)
  elif name in ('MistralForCausalLM', 'MixtralForCausalLM', 'GptOssForCausalLM'):
    config['sliding_window'] = metadata.get('attention.sliding_window')
  elif metadata.architecture in ('qwen35', 'qwen35moe'):
    config |= _qwen35(metadata, config)
  elif metadata.architecture.startswith('qwen'):
    config['use_sliding_window'] = False
  elif metadata.architecture == 'lfm2':
    types = _layer_types(metadata, config, 'conv')
    config |= {'layer_types': types, 'conv_L_cache': metadata.size('shortconv.l_cache')}
    config['block_auto_adjust_ff_dim'] = False
  elif metadata.architecture == 'granitehybrid':
    config |= _granite_hybrid(metadata, config)
  return config | _experts(metadata, config) if is_mixture or name in _MIXTURES else config


def stop_ids(header: GgufHeader) -> tuple[int, ...]:
  """The tokens that end a text: the end of a document, of a turn, of a message; as far as the file names them."""
  keys = (f'tokenizer.ggml.{name}_token_id' for name in ('eos', 'eot', 'eom'))
  return tuple(dict.fromkeys(header.metadata[key] for key in keys if key in header.metadata))


def _common(header: GgufHeader) -> dict[str, Any]:
  embedding = header.tensors.get('token_embd.weight')
  if embedding is None:
    raise ValueError(f'{header.path}: no tensor token_embd.weight')
  if len(embedding.shape) != 2:
    raise ValueError(f'{header.path}: tensor token_embd.weight has {len(embedding.shape)} axes, expected 2')
  for key in ID_KEYS:
    if header.metadata.get(key, 0) >= embedding.shape[0]:
      raise ValueError(f'{header.path}: {key} {header.metadata[key]} is beyond the {embedding.shape[0]} tokens')
  config = {'vocab_size': embedding.shape[0], 'tie_word_embeddings': 'output.weight' not in header.tensors}
  if embedding.type_id in _PLAIN_TYPES:
    config['torch_dtype'] = _PLAIN_TYPES[embedding.type_id]
  for ours, theirs in (('bos_token_id', 'bos'), ('pad_token_id', 'padding')):
    if f'tokenizer.ggml.{theirs}_token_id' in header.metadata:
      config[ours] = header.metadata[f'tokenizer.ggml.{theirs}_token_id']
  stops = stop_ids(header)
  if stops:
    config['eos_token_id'] = stops[0] if len(stops) == 1 else list(stops)
  return config


def _rms_decoder(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  """The fields of Llama, Qwen and Gemma."""
  num_heads = config['num_attention_heads']
  default = metadata.size('rope.dimension_count', max(config['hidden_size'] // num_heads, 1))
  head_dim = metadata.size('attention.key_length', default)
  if metadata.size('attention.value_length', head_dim) != head_dim:
    raise metadata.refusal('keys and values of different widths')
  rotary_dim = metadata.size('rope.dimension_count', head_dim)
  if rotary_dim != head_dim and metadata.architecture not in ('qwen35', 'qwen35moe'):
    raise metadata.refusal(f'RoPE of {rotary_dim} of {head_dim} dimensions of a head')
  base = metadata.get('rope.freq_base', 1e6 if metadata.architecture == 'gemma3' else 1e4)
  return {
    'num_key_value_heads': metadata.size('attention.head_count_kv', num_heads),
    'head_dim': head_dim,
    **({} if rotary_dim == head_dim else {'partial_rotary_factor': rotary_dim / head_dim}),
    'rms_norm_eps': metadata.required('attention.layer_norm_rms_epsilon'),
    'rope_theta': base,
    'rope_scaling': _rope_scaling(metadata, base, rotary_dim),
    'hidden_act': 'silu',
    'attention_bias': 'blk.0.attn_q.bias' in metadata.header.tensors,
    'mlp_bias': 'blk.0.ffn_up.bias' in metadata.header.tensors,
  }


def _gemma(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  architecture, num_layers = metadata.architecture, config['num_hidden_layers']
  fields: dict[str, Any] = {'hidden_act': 'gelu_pytorch_tanh', 'hidden_activation': 'gelu_pytorch_tanh'}
  if architecture == 'gemma':
    return fields
  by_width = config['hidden_size'] // config['num_attention_heads']
  caps, window = ((50.0, 30.0), 4096) if architecture == 'gemma2' else ((None, None), None)
  window = metadata.get('attention.sliding_window', window)
  pattern = metadata.get('attention.sliding_window_pattern', _WINDOW_PATTERN[architecture]) if window else 1
  slides = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(num_layers)]
  if architecture == 'gemma3':
    fields['rope_local_base_freq'] = metadata.get('rope.freq_base_swa', 1e4)
  return fields | {
    'query_pre_attn_scalar': by_width if num_layers == _SCALED_BY_WIDTH[architecture] else config['head_dim'],
    'attn_logit_softcapping': metadata.get('attn_logit_softcapping', caps[0]),
    'final_logit_softcapping': metadata.get('final_logit_softcapping', caps[1]),
    'sliding_window': window,
    'layer_types': ['sliding_attention' if slide else 'full_attention' for slide in slides],
  }


def _layer_types(metadata: Metadata, config: dict[str, Any], recurrent: str) -> list[str]:
  """The types of layers, of which recurrent ones have no heads of keys and values."""
  heads, num_layers = metadata.required('attention.head_count_kv'), config['num_hidden_layers']
  if not isinstance(heads, list) or len(heads) != num_layers:
    raise metadata.refusal(f'{metadata.architecture}.attention.head_count_kv must tell all {num_layers} layers')
  return ['full_attention' if num else recurrent for num in heads]


def _qwen35(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  """The fields of Qwen 3.5, without the layers that guess, which are the last."""
  num_layers = config['num_hidden_layers'] - metadata.get('nextn_predict_layers', 0)
  if num_layers < 1:
    raise metadata.refusal(f'{config["num_hidden_layers"]} layers, all of which guess')
  step, num_heads = metadata.get('full_attention_interval', 4), metadata.size('ssm.time_step_rank')
  return {
    'num_hidden_layers': num_layers,
    'layer_types': ['linear_attention' if (i + 1) % step else 'full_attention' for i in range(num_layers)],
    'linear_conv_kernel_dim': metadata.size('ssm.conv_kernel'),
    'linear_key_head_dim': metadata.size('ssm.state_size'),
    'linear_num_key_heads': metadata.size('ssm.group_count'),
    'linear_num_value_heads': num_heads,
    'linear_value_head_dim': max(metadata.size('ssm.inner_size') // num_heads, 1),
    'shared_expert_intermediate_size': metadata.get('expert_shared_feed_forward_length') or 1,
  }


def _granite_hybrid(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  if metadata.get('rope.scaling.finetuned', False):
    raise metadata.refusal('granitehybrid with rotary positions (Bamba) is not supported')
  inner, num_heads = metadata.size('ssm.inner_size'), metadata.size('ssm.time_step_rank')
  shared = metadata.get('expert_shared_feed_forward_length', 0) or config['intermediate_size']
  types = _layer_types(metadata, config, 'mamba')
  first = types.index('mamba') if 'mamba' in types else 0
  return {
    'layer_types': types,
    'mamba_expand': (inner + 0.5) / config['hidden_size'],  # is rounded down where it is read
    'mamba_n_heads': num_heads,
    'mamba_n_groups': metadata.size('ssm.group_count'),
    'mamba_d_state': metadata.size('ssm.state_size'),
    'mamba_d_conv': metadata.size('ssm.conv_kernel'),
    'mamba_conv_bias': f'blk.{first}.ssm_conv1d.bias' in metadata.header.tensors,
    'shared_intermediate_size': shared,
    'num_local_experts': metadata.get('expert_count', 0),
    'attention_multiplier': metadata.get('attention.scale') or config['head_dim'] ** -0.5,
    'embedding_multiplier': metadata.get('embedding_scale') or 1.0,
    'residual_multiplier': metadata.get('residual_scale') or 1.0,
    'logits_scaling': metadata.get('logit_scale') or 1.0,
  }


def _gemma4(metadata: Metadata) -> dict[str, Any]:
  """The fields of Gemma 4. What its layers with a window have is named `_swa`, or listed layer by layer."""
  fields = metadata.sizes({name: key for name, key in _FIELDS.items() if name != 'intermediate_size'})
  num_layers, tensors = fields['num_hidden_layers'], metadata.header.tensors
  slides = metadata.required('attention.sliding_window_pattern')
  if not isinstance(slides, list) or len(slides) != num_layers or slides[-1]:
    raise metadata.refusal('gemma4.attention.sliding_window_pattern must tell each layer, and the last has no window')
  full_dim, head_dim = (_width(metadata, suffix) for suffix in ('', '_swa'))
  heads, hidden = (metadata.by_layer(key, num_layers) for key in ('attention.head_count_kv', 'feed_forward_length'))
  num_shared = metadata.get('attention.shared_kv_layers', 0)
  num_own = max(num_layers - num_shared, 0)
  is_wide = num_own < num_layers and hidden[-1] == 2 * hidden[0]
  if hidden != [hidden[0]] * num_own + [hidden[0] * (1 + is_wide)] * (num_layers - num_own):
    raise metadata.refusal('gemma4.feed_forward_length differs between layers')
  own_full = [layer for layer in range(num_own) if not slides[layer]]
  table = tensors.get('per_layer_token_embd.weight')
  return fields | {
    'intermediate_size': hidden[0],
    'use_double_wide_mlp': is_wide,
    'num_kv_shared_layers': num_shared,
    'head_dim': head_dim,
    'num_key_value_heads': heads[slides.index(True) if True in slides else 0],
    'per_layer_config': {
      str(layer): {'head_dim': head_dim if slide else full_dim, 'num_key_value_heads': heads[layer]}
      for layer, slide in enumerate(slides)
    },
    'attention_k_eq_v': bool(own_full) and f'blk.{own_full[0]}.attn_v.weight' not in tensors,
    'hidden_size_per_layer_input': metadata.get('embedding_length_per_layer_input', 0),
    'vocab_size_per_layer_input': table.shape[0] if table else 0,
    'layer_types': ['sliding_attention' if slide else 'full_attention' for slide in slides],
    'sliding_window': metadata.get('attention.sliding_window'),
    'rms_norm_eps': metadata.required('attention.layer_norm_rms_epsilon'),
    'final_logit_softcapping': metadata.get('final_logit_softcapping'),
    'rope_parameters': {
      'full_attention': _proportional_rope(metadata, full_dim),
      'sliding_attention': {'rope_type': 'default', 'rope_theta': metadata.get('rope.freq_base_swa', 1e4)},
    },
  }


def _width(metadata: Metadata, suffix: str) -> int:
  """The width of a head in layers of one kind."""
  key, value, rotary = (f'{key}{suffix}' for key in HEAD_WIDTHS)
  width = metadata.size(key)
  if {metadata.size(value, width), metadata.size(rotary, width)} != {width}:
    raise metadata.refusal(f'gemma4.{key}, {value} and {rotary} differ')
  return width


def _proportional_rope(metadata: Metadata, width: int) -> dict[str, Any]:
  """Rotary positions of which the first turn: llama.cpp divides the frequencies of the others by 1e30."""
  if _scaling(metadata) is not None:
    raise metadata.refusal('scaled rotary positions of gemma4 are not supported')
  if ROPE_FREQS not in metadata.header.tensors:
    raise metadata.refusal(f'no tensor {ROPE_FREQS}')
  divisors = _stored_divisors(metadata.header, width)
  num_turned = int((divisors == 1).sum())
  if not np.array_equal(divisors, np.where(np.arange(width // 2) < num_turned, 1, np.float32(1e30))):
    raise metadata.refusal(f'{ROPE_FREQS} must hold 1 and then 1e30')
  share = min((2 * num_turned + 1) / width, 1.0)  # is rounded down where it is read
  base = metadata.get('rope.freq_base', 1e6)
  return {'rope_type': 'proportional', 'partial_rotary_factor': share, 'rope_theta': base}


def _experts(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  architecture, is_normalized = metadata.architecture, _NORMALIZED[metadata.architecture]
  if metadata.get('expert_weights_norm', is_normalized) != is_normalized:
    raise metadata.refusal(f'{architecture}.expert_weights_norm must be {is_normalized}')
  hidden = metadata.size('expert_feed_forward_length', config['intermediate_size'])
  fields = {
    'num_experts': metadata.required('expert_count'),
    'num_experts_per_tok': metadata.required('expert_used_count'),
    'moe_intermediate_size': hidden,
    'norm_topk_prob': is_normalized,
  }
  if architecture in ('qwen3moe', 'qwen35moe', 'granitehybrid'):
    return fields
  if architecture == 'gemma4':
    return fields | {'enable_moe_block': True, 'top_k_experts': fields['num_experts_per_tok']}
  fields['intermediate_size'] = hidden
  if architecture == 'gpt-oss':
    # llama.cpp rounds the ends of YaRN's ramp; the model was trained without this.
    scaling = config.pop('rope_scaling')
    fields['rope_parameters'] = {'rope_type': 'default'} if scaling is None else {**scaling, 'truncate': False}
  return fields


def _gpt_neox(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
  head_dim = max(config['hidden_size'] // config['num_attention_heads'], 1)
  rotary_dim, base = metadata.size('rope.dimension_count', head_dim), metadata.get('rope.freq_base', 1e4)
  return {
    'layer_norm_eps': metadata.required('attention.layer_norm_epsilon'),
    'rotary_pct': rotary_dim / head_dim,
    'rotary_emb_base': base,
    'rope_scaling': _rope_scaling(metadata, base, rotary_dim),
    'use_parallel_residual': metadata.get('use_parallel_residual', True),
    'hidden_act': 'gelu',
    'attention_bias': True,
  }


def _rope_scaling(metadata: Metadata, base: float, rotary_dim: int) -> dict[str, Any] | None:
  scaling, length = _scaling(metadata), metadata.size('context_length')
  if ROPE_FREQS not in metadata.header.tensors:
    return scaling
  divisors = _divisors(metadata.header, rotary_dim)

  def rope(scaling):
    return read_rope({'rope_theta': base, 'max_position_embeddings': length, **scaling}, rotary_dim)

  def frequencies(scaling):
    return np.array(rope(scaling).frequencies)

  llama3 = {'rope_type': 'llama3', 'factor': float(divisors.max()), **_LLAMA3_ROPE}
  if scaling is None and np.allclose(divisors, frequencies({}) / frequencies(llama3), rtol=1e-4):
    return llama3
  scaling = scaling or {}
  divisors = (divisors * (frequencies({}) / frequencies(scaling))).tolist()
  return {
    'rope_type': 'longrope',
    'short_factor': divisors,
    'long_factor': divisors,
    'attention_factor': rope(scaling).magnitude,
    'original_max_position_embeddings': length,
  }


def _scaling(metadata: Metadata) -> dict[str, Any] | None:
  factor = metadata.get('rope.scaling.factor') or metadata.get('rope.scale_linear') or 1.0
  kind = metadata.get('rope.scaling.type', 'linear')
  if kind not in ('none', 'linear', 'yarn'):
    raise metadata.refusal(f'unknown RoPE scaling {shown(kind)}; known are none, linear, yarn')
  if kind == 'none' or factor == 1:
    return None
  scaling = {'rope_type': kind, 'factor': factor}
  if kind == 'yarn':
    scaling['original_max_position_embeddings'] = metadata.required('rope.scaling.original_context_length')
    for ours, theirs in (('attention_factor', 'attn_factor'), ('beta_fast', 'beta_fast'), ('beta_slow', 'beta_slow')):
      value = metadata.get(f'rope.scaling.yarn_{theirs}')
      if value is not None:
        scaling[ours] = value
  return scaling


def _stored_divisors(header: GgufHeader, rotary_dim: int) -> np.ndarray:
  """float32 `[rotary_dim / 2]`, what a file divides each frequency by, whatever the scaling."""
  stored = header.tensors[ROPE_FREQS]
  end = stored.offset + 4 * rotary_dim // 2
  if stored.type_id != 0 or stored.shape != (rotary_dim // 2,) or end > len(header.data):
    raise ValueError(f'{header.path}: {ROPE_FREQS} must be {rotary_dim // 2} float32 numbers')
  return header.data[stored.offset : end].view('<f4')


def _divisors(header: GgufHeader, rotary_dim: int) -> np.ndarray:
  """`_stored_divisors` within bounds."""
  divisors = _stored_divisors(header, rotary_dim)
  wrong = [value for value in divisors.tolist() if not config_fields.FACTOR.is_valid(value)]
  if wrong:
    raise ValueError(f'{header.path}: {ROPE_FREQS} must hold {config_fields.FACTOR.words}, got {wrong[0]}')
  return divisors
