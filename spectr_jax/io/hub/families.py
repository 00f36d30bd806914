"""The families of checkpoints: how each names its sizes in `config.json`, and where it keeps its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectr_jax.io.hub.rope import read_rope
from spectr_jax.models.causal_lm_config import CausalLMConfig

_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'relu': 'relu',
}
_DTYPES = ('float32', 'bfloat16')


def _activation(name: str) -> str:
  if name not in _ACTIVATIONS:
    raise ValueError(f'activation {name!r} is unknown; known are {", ".join(_ACTIVATIONS)}')
  return _ACTIVATIONS[name]


def _dtype(spec: Mapping[str, Any]) -> str:
  """The checkpoint's type if it is computed in, else float32, which holds numbers of float16 exactly."""
  name = str(spec.get('dtype') or spec.get('torch_dtype')).removeprefix('torch.')
  return name if name in _DTYPES else 'float32'


def _rope_parameters(spec: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of rotary positions, which older files spread over several entries."""
  parameters = spec.get('rope_parameters') or spec.get('rope_scaling') or {}
  defaults = {
    'rope_theta': spec.get('rope_theta') or 10000.0,
    'max_position_embeddings': spec['max_position_embeddings'],
    'original_max_position_embeddings': spec['max_position_embeddings'],
    'partial_rotary_factor': spec.get('partial_rotary_factor'),
  }
  return {**defaults, **parameters}


def layer_windows(spec: Mapping[str, Any], is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
  """The window of every layer, by `layer_types` or, in older files, by a rule of the family.

  Args:
    spec: The content of `config.json`.
    is_sliding: The rule: whether a layer has a window.
  """
  num_layers, size = spec['num_hidden_layers'], spec.get('sliding_window')
  kinds = spec.get('layer_types')
  sliding = [kind == 'sliding_attention' for kind in kinds] if kinds else [is_sliding(i) for i in range(num_layers)]
  return tuple(size if found else None for found in sliding) if size and any(sliding) else ()


def llama_config(spec: Mapping[str, Any], **differences: Any) -> CausalLMConfig:
  """The configuration of a decoder whose blocks are of Llama's kind.

  Args:
    spec: The content of `config.json`.
    **differences: Fields of a family's own.

  Raises:
    ValueError: The activation, the RoPE scaling or a size is not possible.
    KeyError: A size is missing.
  """
  head_dim = spec.get('head_dim') or spec['hidden_size'] // spec['num_attention_heads']
  fields = {
    'vocab_size': spec['vocab_size'],
    'embed_dim': spec['hidden_size'],
    'num_layers': spec['num_hidden_layers'],
    'num_heads': spec['num_attention_heads'],
    'num_kv_heads': spec.get('num_key_value_heads') or spec['num_attention_heads'],
    'head_dim': head_dim,
    'mlp_dim': spec['intermediate_size'],
    'context_length': spec['max_position_embeddings'],
    'dtype': _dtype(spec),
    'norm_epsilon': spec.get('rms_norm_eps', 1e-6),
    'has_qkv_bias': bool(spec.get('attention_bias', False)),
    'has_out_bias': bool(spec.get('attention_bias', False)),
    'has_mlp_bias': bool(spec.get('mlp_bias', False)),
    'is_tied': bool(spec.get('tie_word_embeddings', False)),
  }
  if 'rope' not in differences:
    fields['rope'] = read_rope(_rope_parameters(spec), head_dim)
  if 'activation' not in differences:
    fields['activation'] = _activation(spec.get('hidden_act', 'silu'))
  return CausalLMConfig(**(fields | differences))


def _mistral(spec):
  return llama_config(spec, windows=layer_windows(spec, lambda layer: True))


def _qwen_windows(spec):
  if not spec.get('use_sliding_window', False):
    return ()
  return layer_windows(spec, lambda layer: layer >= spec.get('max_window_layers', 28))


def _qwen2(spec):
  return llama_config(spec, has_qkv_bias=True, has_out_bias=False, windows=_qwen_windows(spec))


def _qwen3(spec):
  return llama_config(spec, has_qk_norm=True, windows=_qwen_windows(spec))


def _gemma(spec, **differences):
  # The first files of Gemma say `gelu` and mean its approximation by tanh.
  name = spec.get('hidden_activation') or spec.get('hidden_act') or 'gelu_pytorch_tanh'
  fields = {
    'gain_offset': 1.0,
    'embedding_scale': spec['hidden_size'] ** 0.5,
    'activation': 'gelu_tanh' if name == 'gelu' else _activation(name),
    'is_tied': bool(spec.get('tie_word_embeddings', True)),
  }
  return llama_config(spec, **(fields | differences))


def _gemma2(spec, **differences):
  fields = {
    'has_post_norms': True,
    'windows': layer_windows(spec, lambda layer: layer % 2 == 0),
    'query_scale': spec.get('query_pre_attn_scalar', 256) ** -0.5,
    'attention_soft_cap': spec.get('attn_logit_softcapping'),
    'logit_soft_cap': spec.get('final_logit_softcapping'),
  }
  return _gemma(spec, **(fields | differences))


def _gemma3(spec):
  pattern = spec.get('sliding_window_pattern') or spec.get('_sliding_window_pattern') or 6
  ropes = spec.get('rope_parameters') or {
    'full_attention': {'rope_theta': spec.get('rope_theta') or 1e6, **(spec.get('rope_scaling') or {})},
    'sliding_attention': {'rope_theta': spec.get('rope_local_base_freq') or 10000.0},
  }
  head_dim = spec.get('head_dim', 256)
  return _gemma2(
    {'head_dim': head_dim, **spec},
    windows=layer_windows(spec, lambda layer: (layer + 1) % pattern != 0),
    rope=read_rope(ropes['full_attention'], head_dim),
    window_rope=read_rope(ropes['sliding_attention'], head_dim),
    has_qk_norm=True,
  )


def _gpt_neox(spec):
  parameters = {
    'rope_theta': spec.get('rotary_emb_base') or 10000.0,
    'partial_rotary_factor': spec.get('rotary_pct', 0.25),
    **(spec.get('rope_parameters') or spec.get('rope_scaling') or {}),
  }
  has_bias = bool(spec.get('attention_bias', True))
  return llama_config(
    spec,
    rope=read_rope(parameters, spec['hidden_size'] // spec['num_attention_heads']),
    norm='layer',
    norm_epsilon=spec.get('layer_norm_eps', 1e-5),
    is_parallel=bool(spec.get('use_parallel_residual', True)),
    has_qkv_bias=has_bias,
    has_out_bias=has_bias,
    has_mlp_bias=True,
    is_gated=False,
    activation=_activation(spec.get('hidden_act', 'gelu')),
  )


def _gpt2(spec):
  for name, only in (('scale_attn_by_inverse_layer_idx', False), ('scale_attn_weights', True)):
    if spec.get(name, only) is not only:
      raise ValueError(f'{name} {spec[name]} is not supported')
  return CausalLMConfig(
    vocab_size=spec['vocab_size'],
    embed_dim=spec['n_embd'],
    num_layers=spec['n_layer'],
    num_heads=spec['n_head'],
    num_kv_heads=spec['n_head'],
    head_dim=spec['n_embd'] // spec['n_head'],
    mlp_dim=spec.get('n_inner') or 4 * spec['n_embd'],
    context_length=spec.get('n_positions') or spec['n_ctx'],
    dtype=_dtype(spec),
    norm='layer',
    norm_epsilon=spec.get('layer_norm_epsilon', 1e-5),
    has_qkv_bias=True,
    has_out_bias=True,
    has_mlp_bias=True,
    is_gated=False,
    activation=_activation(spec.get('activation_function', 'gelu_new')),
    is_tied=bool(spec.get('tie_word_embeddings', True)),
  )


# Where the entries of a head begin along the outputs of the hub's tensor. Parts 0, 1, 2 are queries, keys and values.


def _apart(part: int, head: int, config: CausalLMConfig) -> int:
  """A tensor for each part; copies of a head are the same entries."""
  return (head if part == 0 else head // config.kv_copies) * config.head_dim


def _by_head(part: int, head: int, config: CausalLMConfig) -> int:
  """One tensor, ordered by heads, then by parts."""
  return (3 * head + part) * config.head_dim


def _by_part(part: int, head: int, config: CausalLMConfig) -> int:
  """One tensor, ordered by parts, then by heads."""
  return (part * config.num_heads + head) * config.head_dim


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of checkpoints.

  Attributes:
    read_config: Makes the configuration of a `config.json`.
    prefix: The beginning of all names but the output head's; files of the body alone have none.
    blocks: The name of the list of blocks.
    modules: The name of every module; those below `blocks` stand with our name in a block.
    head_names: Names of the output head, of which a file has one.
    head_start: Where the entries of a head of queries, keys or values begin.
    is_transposed: Whether kernels are stored `[out, in]`.
    buffers: Ends of names that are no parameters.
    num_layers: What `config.json` calls the number of blocks.
  """

  read_config: Callable[[Mapping[str, Any]], CausalLMConfig]
  prefix: str
  blocks: str
  modules: Mapping[str, str]
  head_names: tuple[str, ...] = ('lm_head',)
  head_start: Callable[[int, int, CausalLMConfig], int] = _apart
  is_transposed: bool = True
  buffers: tuple[str, ...] = ('rotary_emb.inv_freq',)
  num_layers: str = 'num_hidden_layers'


LLAMA_MODULES = {
  'embedding': 'embed_tokens',
  'final_norm': 'norm',
  'attention_norm': 'input_layernorm',
  'attention/q': 'self_attn.q_proj',
  'attention/k': 'self_attn.k_proj',
  'attention/v': 'self_attn.v_proj',
  'attention/out': 'self_attn.o_proj',
  'attention/q_norm': 'self_attn.q_norm',
  'attention/k_norm': 'self_attn.k_norm',
  'mlp_norm': 'post_attention_layernorm',
  'mlp/gate': 'mlp.gate_proj',
  'mlp/up': 'mlp.up_proj',
  'mlp/down': 'mlp.down_proj',
}
_GEMMA2_MODULES = LLAMA_MODULES | {
  'attention_post_norm': 'post_attention_layernorm',
  'mlp_norm': 'pre_feedforward_layernorm',
  'mlp_post_norm': 'post_feedforward_layernorm',
}
_GPT_NEOX_MODULES = {
  'embedding': 'embed_in',
  'final_norm': 'final_layer_norm',
  'attention_norm': 'input_layernorm',
  **{f'attention/{part}': 'attention.query_key_value' for part in 'qkv'},
  'attention/out': 'attention.dense',
  'mlp_norm': 'post_attention_layernorm',
  'mlp/up': 'mlp.dense_h_to_4h',
  'mlp/down': 'mlp.dense_4h_to_h',
}
_GPT2_MODULES = {
  'embedding': 'wte',
  'position_embedding': 'wpe',
  'final_norm': 'ln_f',
  'attention_norm': 'ln_1',
  **{f'attention/{part}': 'attn.c_attn' for part in 'qkv'},
  'attention/out': 'attn.c_proj',
  'mlp_norm': 'ln_2',
  'mlp/up': 'mlp.c_fc',
  'mlp/down': 'mlp.c_proj',
}


def _llama_family(read_config, modules=LLAMA_MODULES):
  return Family(read_config, 'model.', 'layers', modules)


FAMILIES = {
  'LlamaForCausalLM': _llama_family(llama_config),
  'MistralForCausalLM': _llama_family(_mistral),
  'Qwen2ForCausalLM': _llama_family(_qwen2),
  'Qwen3ForCausalLM': _llama_family(_qwen3),
  'GemmaForCausalLM': _llama_family(_gemma),
  'Gemma2ForCausalLM': _llama_family(_gemma2, _GEMMA2_MODULES),
  'Gemma3ForCausalLM': _llama_family(_gemma3, _GEMMA2_MODULES),
  'GPTNeoXForCausalLM': Family(
    _gpt_neox,
    'gpt_neox.',
    'layers',
    _GPT_NEOX_MODULES,
    head_names=('embed_out', 'lm_head'),
    head_start=_by_head,
    buffers=('rotary_emb.inv_freq', '.attention.bias', '.attention.masked_bias'),
  ),
  'GPT2LMHeadModel': Family(
    _gpt2,
    'transformer.',
    'h',
    _GPT2_MODULES,
    head_start=_by_part,
    is_transposed=False,
    buffers=('.attn.bias', '.attn.masked_bias'),
    num_layers='n_layer',
  ),
}


def read_spec(spec: Mapping[str, Any]) -> tuple[Family, CausalLMConfig]:
  """The family and the configuration that a `config.json` describes.

  Args:
    spec: Its content.

  Raises:
    ValueError: The architecture, or something that it is made with, is unknown or missing.
  """
  names = spec.get('architectures') or ['none']
  if names[0] not in FAMILIES:
    raise ValueError(f'architecture {names[0]} is unknown; known are {", ".join(FAMILIES)}')
  quantization = spec.get('quantization_config')
  if quantization:
    kind = quantization.get('quant_method', 'an unnamed method')
    raise ValueError(f'weights quantized by {kind} are not read; known are unquantized weights and .gguf files')
  family = FAMILIES[names[0]]
  try:
    return family, family.read_config(spec)
  except KeyError as error:
    raise ValueError(f'the configuration of {names[0]} has no {error.args[0]}') from error


def spec_of_layers(spec: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
  """The `config.json` of a model that has some of another one's blocks.

  Args:
    spec: The content of the other one's.
    layers: The blocks, from 0.

  Raises:
    ValueError: As for `read_spec`.
  """
  family, config = read_spec(spec)
  fewer = {**spec, family.num_layers: len(layers)}
  if config.windows or spec.get('layer_types'):
    kinds = ('full_attention' if config.window(layer) is None else 'sliding_attention' for layer in layers)
    fewer['layer_types'] = list(kinds)
  return fewer
