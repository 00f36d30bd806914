"""The metadata of a GGUF file about its architecture, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectr_jax.io.hub import config_fields
from spectr_jax.io.hub.gguf_header import GgufHeader
from spectr_jax.io.untrusted import FLAG, TEXT, Kind, check_object, either, list_of, real, shown, whole

# Architectures of llama.cpp and their names on the hub.
ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'qwen3moe': 'Qwen3MoeForCausalLM',
  'olmoe': 'OlmoeForCausalLM',
  'gpt-oss': 'GptOssForCausalLM',
  'gemma': 'GemmaForCausalLM',
  'gemma2': 'Gemma2ForCausalLM',
  'gemma3': 'Gemma3ForCausalLM',
  'gemma4': 'Gemma4ForCausalLM',
  'gptneox': 'GPTNeoXForCausalLM',
  'gpt2': 'GPT2LMHeadModel',
  'granitehybrid': 'GraniteMoeHybridForCausalLM',
  'lfm2': 'Lfm2ForCausalLM',
  'qwen35': 'Qwen3_5ForCausalLM',
  'qwen35moe': 'Qwen3_5MoeForCausalLM',
}
_MOST = 2**64 - 1
_POSITIVE = Kind('a positive number', either(whole(1, _MOST), list_of(whole(1, _MOST), 10_000)).is_valid)
HEAD_WIDTHS = 'attention.key_length', 'attention.value_length', 'rope.dimension_count'
# Kinds of the values that are read, by their names after the architecture's. Sizes may be listed for every layer.
_SIZES = {
  'block_count': config_fields.LAYERS,
  'context_length': config_fields.LENGTH,
  **dict.fromkeys(('embedding_length', 'feed_forward_length', 'expert_feed_forward_length'), config_fields.WIDTH),
  'ssm.inner_size': config_fields.WIDTH,
  **dict.fromkeys(('ssm.time_step_rank', 'ssm.group_count'), config_fields.HEADS),
  'ssm.state_size': config_fields.HEAD_DIM,
  **dict.fromkeys(('ssm.conv_kernel', 'shortconv.l_cache'), whole(1, 64)),
  **dict.fromkeys(('attention.head_count', 'attention.head_count_kv'), config_fields.HEADS),
  **dict.fromkeys(
    (f'{key}{suffix}' for key in HEAD_WIDTHS for suffix in ('', '_swa')),
    config_fields.HEAD_DIM,
  ),
}
_OTHERS = {
  **dict.fromkeys(('attention.layer_norm_epsilon', 'attention.layer_norm_rms_epsilon'), config_fields.EPSILON),
  **dict.fromkeys(('attention.sliding_window', 'rope.scaling.original_context_length'), config_fields.LENGTH),
  'attention.sliding_window_pattern': either(config_fields.LAYERS, list_of(FLAG, 10_000)),
  **dict.fromkeys(('attn_logit_softcapping', 'final_logit_softcapping'), config_fields.SOFT_CAP),
  **dict.fromkeys(('expert_count', 'expert_used_count'), config_fields.EXPERTS),
  'attention.shared_kv_layers': whole(0, 10_000),
  'embedding_length_per_layer_input': whole(0, 2**20),
  'expert_weights_norm': FLAG,
  'use_parallel_residual': FLAG,
  'rope.scaling.finetuned': FLAG,
  'full_attention_interval': config_fields.LAYERS,
  'nextn_predict_layers': whole(0, 100),
  **dict.fromkeys(('attention.scale', 'embedding_scale', 'residual_scale', 'logit_scale'), real(0, 1e6)),
  'expert_shared_feed_forward_length': whole(0, 2**20),
  **dict.fromkeys(('rope.freq_base', 'rope.freq_base_swa'), config_fields.BASE),
  'rope.scaling.type': TEXT,
  **dict.fromkeys(('rope.scaling.factor', 'rope.scale_linear'), real(0, 1e6)),
  'rope.scaling.yarn_attn_factor': real(above=0, most=1e3),
  **dict.fromkeys(('rope.scaling.yarn_beta_fast', 'rope.scaling.yarn_beta_slow'), config_fields.FACTOR),
}
# Values that change what is computed, and those among them that change nothing.
_OFF = {
  'attention.causal': (True,),
  'rope.scaling.attn_factor': (1,),
  **dict.fromkeys(('expert_shared_count', 'leading_dense_block_count', 'expert_shared_feed_forward_length'), (0,)),
  **dict.fromkeys(('expert_weights_scale', 'expert_group_count', 'expert_group_used_count'), (0, 1)),
  **dict.fromkeys(('attention.scale', 'attention.clamp_kqv', 'attention.max_alibi_bias'), (0,)),
  **dict.fromkeys(('attention.shared_kv_layers', 'attention.temperature_scale'), (0,)),
  **dict.fromkeys(('rope.scaling.alpha', 'rope.scaling.yarn_log_multiplier'), (0,)),
  **dict.fromkeys(('attention.output_scale', 'embedding_scale', 'residual_scale', 'logit_scale'), (0, 1)),
}
# Of these, those that an architecture reads.
_READ = {
  'gemma4': ('attention.shared_kv_layers',),
  'qwen35moe': ('expert_shared_feed_forward_length',),
  'granitehybrid': (
    'attention.scale', 'embedding_scale', 'residual_scale', 'logit_scale', 'expert_shared_feed_forward_length',
  ),
}  # fmt: skip


def architecture_of(header: GgufHeader) -> str:
  """The architecture of a model, as llama.cpp names it."""
  architecture = header.required('general.architecture')
  if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
    raise ValueError(f'{header.path}: unknown architecture {shown(architecture)}; known are {", ".join(ARCHITECTURES)}')
  return architecture


class Metadata:
  """The part of the metadata that belongs to the architecture, its values checked."""

  def __init__(self, header: GgufHeader):
    self.header = header
    self.architecture = architecture_of(header)
    own = dict.fromkeys(_SIZES, _POSITIVE) | _OTHERS
    own['attention.head_count_kv'] = either(_POSITIVE, list_of(whole(0, _MOST), 10_000))
    check_object(header.metadata, {f'{self.architecture}.{key}': kind for key, kind in own.items()}, header.path)
    for key, harmless in _OFF.items():
      value = self.get(key)
      if value is not None and value not in harmless and key not in _READ.get(self.architecture, ()):
        raise self.refusal(f'{self.architecture}.{key} {shown(value)} is not supported')

  def refusal(self, problem: str) -> ValueError:
    return ValueError(f'{self.header.path}: {problem}')

  def get(self, key: str, default: Any = None) -> Any:
    return self.header.metadata.get(f'{self.architecture}.{key}', default)

  def required(self, key: str) -> Any:
    return self.header.required(f'{self.architecture}.{key}')

  def size(self, key: str, default: int | None = None) -> int:
    """A number of things, within bounds. It may be listed for every layer but must be the same in all that have any."""
    value = self.required(key) if default is None else self.get(key, default)
    values = set(value) if isinstance(value, list) else {value}
    if self.architecture in ('granitehybrid', 'lfm2'):
      values.discard(0)
    if len(values) != 1:
      raise self.refusal(f'{self.architecture}.{key} differs between layers')
    return self._checked(key, values.pop())

  def by_layer(self, key: str, num_layers: int) -> list[int]:
    """`size` of every layer."""
    value = self.required(key)
    if isinstance(value, list) and len(value) != num_layers:
      raise self.refusal(f'{self.architecture}.{key} has {len(value)} numbers, and there are {num_layers} layers')
    return [self._checked(key, size) for size in (value if isinstance(value, list) else [value] * num_layers)]

  def _checked(self, key: str, size: int) -> int:
    if not _SIZES[key].is_valid(size):
      raise self.refusal(f'{self.architecture}.{key} must be {_SIZES[key].words}, got {size}')
    return size

  def sizes(self, fields: Mapping[str, str]) -> dict[str, Any]:
    """The hub's fields of sizes."""
    return {field: self.size(key) for field, key in fields.items()}
