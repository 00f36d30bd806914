"""The families of checkpoints: where each keeps its tensors, and what reads its `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from spectr_jax.io.hub import family_configs, gemma4_config, hybrid_configs
from spectr_jax.io.hub.config_fields import FIELDS, check_requests, checked
from spectr_jax.io.hub.scaled_tensors import METHODS, block_of
from spectr_jax.io.untrusted import name_shown, named, shown
from spectr_jax.models.causal_lm_config import CausalLMConfig

# Where parts of a kernel's outputs end, and what each part is multiplied by, one more than there are ends.
Factors: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]

# Where the entries of heads begin along the outputs of the hub's tensor. Parts 0, 1, 2 are queries, keys and values.


def _apart(part: int, head: np.ndarray, config: CausalLMConfig) -> np.ndarray:
  """A tensor for each part; copies of a head are the same entries."""
  return (head if part == 0 else head // config.kv_copies) * config.head_dim


def _by_head(part: int, head: np.ndarray, config: CausalLMConfig) -> np.ndarray:
  """One tensor, ordered by heads, then by parts."""
  return (3 * head + part) * config.head_dim


def _by_part(part: int, head: np.ndarray, config: CausalLMConfig) -> np.ndarray:
  """One tensor, ordered by parts, then by heads."""
  return (part * config.num_heads + head) * config.head_dim


# Where the outputs of parameters stand among those of a tensor that holds several, and how many it has.


def _of_key_heads(part: str, outputs: np.ndarray, config: CausalLMConfig) -> tuple[np.ndarray, int]:
  """Qwen3-Next's products, ordered by the heads of keys: queries, keys, values and gates of each, or `b` and `a`."""
  own = config.recurrence
  assert own is not None
  size = own.num_heads // own.num_groups
  if part in ('a', 'b'):
    head, offset = np.divmod(outputs, size)
    return 2 * size * head + (part == 'a') * size + offset, 2 * own.num_heads
  key, value, keys = own.key_dim, size * own.value_dim, own.num_groups * own.key_dim
  kind = np.full_like(outputs, 3) if part == 'z' else np.searchsorted([keys, 2 * keys], outputs, side='right')
  begins, widths, before = np.array(
    [(0, key, 0), (keys, key, key), (2 * keys, value, 2 * key), (0, value, 2 * key + value)]
  ).T
  head, offset = np.divmod(outputs - begins[kind], widths[kind])
  return 2 * (key + value) * head + before[kind] + offset, own.conv_dim + own.inner_dim


def _halves(part: str, outputs: np.ndarray, config: CausalLMConfig) -> tuple[np.ndarray, int]:
  """Gates, then what they multiply."""
  width = config.experts.shared_dim if config.experts else config.mlp_dim
  return outputs + (part == 'up') * width, 2 * width


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of checkpoints."""

  model_type: str  # in Transformers
  read_config: Callable[[dict[str, Any]], CausalLMConfig]
  prefix: str  # of all names but the output head's; files of the body alone have none
  blocks: str  # the name of their list
  modules: Mapping[str, str]  # names by ours; those of blocks stand below `blocks`, and {} is the number of an expert
  head_names: tuple[str, ...] = ('lm_head',)  # of the output head, of which a file has one
  # Where the entries of a head of queries, keys or values begin.
  head_start: Callable[[int, np.ndarray, CausalLMConfig], np.ndarray] = _apart
  is_transposed: bool = True  # whether kernels are stored `[out, in]`
  buffers: tuple[str, ...] = ('rotary_emb.inv_freq',)  # ends of names that are no parameters
  num_layers: str = 'num_hidden_layers'  # what `config.json` calls the number of blocks
  known: tuple[str, ...] = ()  # fields that it reads and other families refuse
  quantization: str | None = None  # the method of quantized weights that it reads
  dense_layers: str = 'mlp_only_layers'  # the field for layers without experts: their numbers, or how many come first
  is_saved: bool = True  # whether models are written as their files are, which have all experts in one tensor otherwise
  # Of parameters that share a tensor, by our names: rules like `_halves`.
  fused: Mapping[str, Callable[[str, np.ndarray, CausalLMConfig], tuple[np.ndarray, int]]] = dataclasses.field(
    default_factory=dict
  )
  beside: tuple[str, ...] = ()  # beginnings of names that are no part of the model
  # What parameters are multiplied by when they are read, by our names in a block; and what finds it in `config.json`.
  factors: Mapping[str, Factors] = dataclasses.field(default_factory=dict)
  read_factors: Callable[[dict[str, Any], CausalLMConfig], Mapping[str, Factors]] | None = None
  more_layers: str | None = None  # the field for the number of layers after the last that guess, which are not read


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
_GEMMA4_MODULES = _GEMMA2_MODULES | {
  'layer_scale': 'layer_scalar',
  'layer_input/gate': 'per_layer_input_gate',
  'layer_input/out': 'per_layer_projection',
  'layer_input/norm': 'post_per_layer_input_norm',
  'per_layer': 'embed_tokens_per_layer',
  'per_layer/projection': 'per_layer_model_projection',
  'per_layer/norm': 'per_layer_projection_norm',
  'mixture/router': 'router.proj',
  'mixture/router/gain': 'router.scale',
  'mixture/router/expert_scale': 'router.per_expert_scale',
  **{f'mixture/experts/{part}': f'experts.{{}}.{part}_proj' for part in ('gate', 'up', 'down')},
  'mixture/norm': 'pre_feedforward_layernorm_2',
  'mixture/post_norm': 'post_feedforward_layernorm_2',
  'mixture/mlp_post_norm': 'post_feedforward_layernorm_1',
}


def _mixture_modules(router, experts, gate='gate_proj', up='up_proj', down='down_proj'):
  names = {'gate': gate, 'up': up, 'down': down}
  return {'mlp/router': router} | {f'mlp/experts/{ours}': f'{experts}.{{}}.{name}' for ours, name in names.items()}


_MIXTRAL_MODULES = LLAMA_MODULES | _mixture_modules(
  'block_sparse_moe.gate', 'block_sparse_moe.experts', 'w1', 'w3', 'w2'
)
_QWEN_MOE_MODULES = LLAMA_MODULES | _mixture_modules('mlp.gate', 'mlp.experts')
_GLM_MOE_MODULES = _QWEN_MOE_MODULES | {
  'mlp/router/choice_bias': 'mlp.gate.e_score_correction_bias',
  **{f'mlp/shared/{name}': f'mlp.shared_experts.{name}_proj' for name in ('gate', 'up', 'down')},
}
_GRANITE_MOE_MODULES = LLAMA_MODULES | _mixture_modules('block_sparse_moe.router.layer', 'block_sparse_moe.experts')
_GPT_OSS_MODULES = (
  LLAMA_MODULES | {'attention/sinks': 'self_attn.sinks'} | _mixture_modules('mlp.router', 'mlp.experts')
)
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


_DELTA_MODULES = {
  'recurrence/into': 'linear_attn.in_proj_qkv',
  'recurrence/z': 'linear_attn.in_proj_z',
  'recurrence/b': 'linear_attn.in_proj_b',
  'recurrence/a': 'linear_attn.in_proj_a',
  'recurrence/out': 'linear_attn.out_proj',
  'recurrence/taps': 'linear_attn.conv1d.weight',
  'recurrence/log_rate': 'linear_attn.A_log',
  'recurrence/step_bias': 'linear_attn.dt_bias',
  'recurrence/norm': 'linear_attn.norm.weight',
}
_QWEN_SHARED_MODULES = {
  **{f'mlp/shared/{name}': f'mlp.shared_expert.{name}_proj' for name in ('gate', 'up', 'down')},
  'mlp/shared_gate': 'mlp.shared_expert_gate',
}
_QWEN_NEXT_MODULES = _DELTA_MODULES | {
  **dict.fromkeys(('recurrence/into', 'recurrence/z'), 'linear_attn.in_proj_qkvz'),
  **dict.fromkeys(('recurrence/b', 'recurrence/a'), 'linear_attn.in_proj_ba'),
}
_MAMBA_MODULES = {
  'recurrence/into': 'mamba.in_proj',
  'recurrence/out': 'mamba.out_proj',
  'recurrence/taps': 'mamba.conv1d.weight',
  'recurrence/taps_bias': 'mamba.conv1d.bias',
  'recurrence/log_rate': 'mamba.A_log',
  'recurrence/step_bias': 'mamba.dt_bias',
  'recurrence/norm': 'mamba.norm.weight',
  'recurrence/skip': 'mamba.D',
}
_GRANITE_HYBRID_MODULES = (
  _GRANITE_MOE_MODULES
  | _MAMBA_MODULES
  | {
    **{
      f'{mlp}/{ours}': f'shared_mlp.{theirs}_linear'
      for mlp in ('mlp', 'mlp/shared')
      for ours, theirs in (('gate', 'input'), ('up', 'input'), ('down', 'output'))
    },
  }
)
_FALCON_H1_MODULES = (
  LLAMA_MODULES
  | _MAMBA_MODULES
  | {
    'final_norm': 'final_layernorm',
    'mlp_norm': 'pre_ff_layernorm',
    **{f'mlp/{name}': f'feed_forward.{name}_proj' for name in ('gate', 'up', 'down')},
  }
)
_NEMOTRON_H_MODULES = {
  'embedding': 'embeddings',
  'final_norm': 'norm_f',
  **dict.fromkeys(('attention_norm', 'mlp_norm'), 'norm'),
  **{f'attention/{ours}': f'mixer.{theirs}_proj' for ours, theirs in zip(('q', 'k', 'v', 'out'), 'qkvo')},
  **{ours: theirs.replace('mamba.', 'mixer.') for ours, theirs in _MAMBA_MODULES.items()},
  'mlp/router': 'mixer.gate',
  'mlp/router/choice_bias': 'mixer.gate.e_score_correction_bias',
  **{
    f'mlp/{ours}{name}': f'mixer.{theirs}{name}_proj'
    for ours, theirs in (('', ''), ('experts/', 'experts.{}.'), ('shared/', 'shared_experts.'))
    for name in ('up', 'down')
  },
}
_LFM2_MODULES = LLAMA_MODULES | {
  'final_norm': 'embedding_norm',
  'attention_norm': 'operator_norm',
  'attention/out': 'self_attn.out_proj',
  'attention/q_norm': 'self_attn.q_layernorm',
  'attention/k_norm': 'self_attn.k_layernorm',
  'mlp_norm': 'ffn_norm',
  'mlp/gate': 'feed_forward.w1',
  'mlp/up': 'feed_forward.w3',
  'mlp/down': 'feed_forward.w2',
  'recurrence/into': 'conv.in_proj',
  'recurrence/out': 'conv.out_proj',
  'recurrence/taps': 'conv.conv.weight',
  'recurrence/taps_bias': 'conv.conv.bias',
}
_LFM2_MOE_MODULES = (
  _LFM2_MODULES
  | _mixture_modules('feed_forward.gate', 'feed_forward.experts', 'w1', 'w3', 'w2')
  | {'mlp/router/choice_bias': 'feed_forward.expert_bias'}
)


def _llama_family(model_type, read_config, modules=LLAMA_MODULES, known=(), **traits):
  return Family(model_type, read_config, 'model.', 'layers', modules, known=known, **traits)


def _gemma4_family(model_type):
  known = ('final_logit_softcapping', 'num_experts', *gemma4_config.FIELDS)
  return _llama_family(model_type, gemma4_config.gemma4, _GEMMA4_MODULES, known)


_EXPERTS = 'num_experts', 'num_local_experts'
_MTP = ('mtp.',)  # layers that guess
_GRANITE_FIELDS = 'attention_multiplier', 'embedding_multiplier', 'residual_multiplier', 'logits_scaling'
_GEMMA2_FIELDS = ('query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping')
OWN = 'SpectrLM1B'  # the architecture of models that are trained here
FAMILIES = {
  'LlamaForCausalLM': _llama_family('llama', family_configs.llama),
  'MistralForCausalLM': _llama_family('mistral', family_configs.mistral),
  'Qwen2ForCausalLM': _llama_family('qwen2', family_configs.qwen2),
  'Qwen3ForCausalLM': _llama_family('qwen3', family_configs.qwen3, known=('use_qk_norm',)),
  'MixtralForCausalLM': _llama_family('mixtral', family_configs.mixtral, _MIXTRAL_MODULES, _EXPERTS),
  'Qwen3MoeForCausalLM': _llama_family(
    'qwen3_moe', family_configs.qwen3_moe, _QWEN_MOE_MODULES, (*_EXPERTS, 'use_qk_norm')
  ),
  'OlmoeForCausalLM': _llama_family('olmoe', family_configs.olmoe, _QWEN_MOE_MODULES, _EXPERTS),
  'Glm4MoeForCausalLM': _llama_family(
    'glm4_moe',
    family_configs.glm4_moe,
    _GLM_MOE_MODULES,
    ('num_local_experts', 'n_routed_experts', 'use_qk_norm'),
    dense_layers='first_k_dense_replace',
    more_layers='num_nextn_predict_layers',
  ),
  'GptOssForCausalLM': _llama_family(
    'gpt_oss', family_configs.gpt_oss, _GPT_OSS_MODULES, _EXPERTS, quantization='mxfp4', is_saved=False
  ),
  'GraniteForCausalLM': _llama_family('granite', family_configs.granite, known=_GRANITE_FIELDS),
  'GraniteMoeForCausalLM': _llama_family(
    'granitemoe',
    family_configs.granitemoe,
    _GRANITE_MOE_MODULES,
    (*_EXPERTS, *_GRANITE_FIELDS),
    is_saved=False,
  ),
  'GemmaForCausalLM': _llama_family('gemma', family_configs.gemma),
  'Gemma2ForCausalLM': _llama_family('gemma2', family_configs.gemma2, _GEMMA2_MODULES, _GEMMA2_FIELDS),
  'Gemma3ForCausalLM': _llama_family(
    'gemma3_text', family_configs.gemma3, _GEMMA2_MODULES, (*_GEMMA2_FIELDS, 'use_qk_norm')
  ),
  'Gemma4ForCausalLM': _gemma4_family('gemma4_text'),
  'Gemma4UnifiedForCausalLM': _gemma4_family('gemma4_unified_text'),
  'GPTNeoXForCausalLM': Family(
    'gpt_neox',
    family_configs.gpt_neox,
    'gpt_neox.',
    'layers',
    _GPT_NEOX_MODULES,
    head_names=('embed_out', 'lm_head'),
    head_start=_by_head,
    buffers=('rotary_emb.inv_freq', '.attention.bias', '.attention.masked_bias'),
    known=('use_parallel_residual',),
  ),
  'GPT2LMHeadModel': Family(
    'gpt2',
    family_configs.gpt2,
    'transformer.',
    'h',
    _GPT2_MODULES,
    head_start=_by_part,
    is_transposed=False,
    buffers=('.attn.bias', '.attn.masked_bias'),
    num_layers='n_layer',
  ),
  'Qwen3_5ForCausalLM': _llama_family(
    'qwen3_5_text', hybrid_configs.qwen3_5, LLAMA_MODULES | _DELTA_MODULES, beside=_MTP
  ),
  'Qwen3_5MoeForCausalLM': _llama_family(
    'qwen3_5_moe_text',
    hybrid_configs.qwen3_5_moe,
    _QWEN_MOE_MODULES | _DELTA_MODULES | _QWEN_SHARED_MODULES,
    _EXPERTS,
    beside=_MTP,
  ),
  'Qwen3NextForCausalLM': _llama_family(
    'qwen3_next',
    hybrid_configs.qwen3_5_moe,
    _QWEN_MOE_MODULES | _QWEN_NEXT_MODULES | _QWEN_SHARED_MODULES,
    _EXPERTS,
    fused=dict.fromkeys((f'recurrence/{name}' for name in ('into', 'z', 'b', 'a')), _of_key_heads),
    beside=_MTP,
  ),
  'GraniteMoeHybridForCausalLM': _llama_family(
    'granitemoehybrid',
    hybrid_configs.granitemoehybrid,
    _GRANITE_HYBRID_MODULES,
    (*_EXPERTS, *_GRANITE_FIELDS, 'position_embedding_type'),
    fused=dict.fromkeys((f'{mlp}/{name}' for mlp in ('mlp', 'mlp/shared') for name in ('gate', 'up')), _halves),
    is_saved=False,
  ),
  'Lfm2ForCausalLM': _llama_family('lfm2', hybrid_configs.lfm2, _LFM2_MODULES),
  'Lfm2MoeForCausalLM': _llama_family(
    'lfm2_moe', hybrid_configs.lfm2_moe, _LFM2_MOE_MODULES, _EXPERTS, dense_layers='num_dense_layers'
  ),
  'FalconH1ForCausalLM': _llama_family(
    'falcon_h1',
    hybrid_configs.falcon_h1,
    _FALCON_H1_MODULES,
    ('embedding_multiplier',),
    read_factors=hybrid_configs.falcon_h1_factors,
    is_saved=False,
  ),
  'NemotronHForCausalLM': Family(
    'nemotron_h',
    hybrid_configs.nemotron_h,
    'backbone.',
    'layers',
    _NEMOTRON_H_MODULES,
    known=(*_EXPERTS, 'n_routed_experts'),
    beside=_MTP,
  ),
  OWN: _llama_family('spectr_lm1b', family_configs.lm1b),
}
# Of multi-head latent attention.
_LATENT = ('DeepseekV2ForCausalLM', 'DeepseekV3ForCausalLM', 'DeepseekV32ForCausalLM', 'Glm4MoeLiteForCausalLM')


def read_spec(spec: Mapping[str, Any], where: str = 'config.json') -> tuple[Family, CausalLMConfig]:
  """The family and the configuration that a `config.json` describes.

  Raises `ValueError` where something is unknown or missing, of the wrong kind, beyond all bounds, or not computed here.
  """
  with named(where):
    spec = checked(spec, FIELDS | hybrid_configs.FIELDS, where)
    name = [*spec.get('architectures', []), 'none'][0]
    if name in _LATENT:
      raise ValueError(f'{name} has multi-head latent attention (MLA), which is not read')
    if name not in FAMILIES:
      raise ValueError(f'architecture {name_shown(name)} is unknown; known are {", ".join(FAMILIES)}')
    family = FAMILIES[name]
    if spec.get('model_type', family.model_type) != family.model_type:
      raise ValueError(f'model_type {name_shown(spec["model_type"])} is not {family.model_type}, that of {name}')
    quantization = spec.get('quantization_config')
    method = str(quantization.get('quant_method', 'an unnamed method')) if quantization else None
    if quantization and method in METHODS:
      block_of(quantization)
    elif method not in (None, family.quantization):
      known = ', '.join((*([family.quantization] if family.quantization else []), *METHODS, 'unquantized weights'))
      raise ValueError(f'weights quantized by {name_shown(method)} are not read; known are {known} and .gguf files')
    check_requests(spec, known=family.known)
    try:
      config = family.read_config(spec)
      return dataclasses.replace(
        family, factors=family.read_factors(spec, config)
      ) if family.read_factors else family, config
    except KeyError as error:
      raise ValueError(f'the configuration of {name} has no {error.args[0]}') from error


def spec_of_layers(spec: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
  """The `config.json` of a model that has some of another one's blocks; `ValueError` as of `read_spec`."""
  family, config = read_spec(spec)
  if config.num_shared_layers or config.full_head_dim:
    raise ValueError('the layers of this model read what others make, or differ from them: some alone are no model')
  fewer = {**spec, family.num_layers: len(layers)}
  if config.parts:
    kinds = hybrid_configs.block_types(spec)
    return fewer | {'layers_block_type': [kinds[layer] for layer in layers], 'hybrid_override_pattern': None}
  if config.recurrence is not None and not config.recurrence.has_attention:
    name = hybrid_configs.LAYER_TYPES[config.recurrence.kind]
    fewer['layer_types'] = [name if config.is_recurrent(layer) else 'full_attention' for layer in layers]
  elif config.windows or spec.get('layer_types'):
    kinds = ('full_attention' if config.window(layer) is None else 'sliding_attention' for layer in layers)
    fewer['layer_types'] = list(kinds)
  if config.experts and config.experts.layers:
    dense = [i for i, layer in enumerate(layers) if not config.experts.are_in(layer)]
    if family.dense_layers == 'mlp_only_layers':
      return fewer | {'decoder_sparse_step': 1, 'mlp_only_layers': dense}
    if dense != list(range(len(dense))):
      raise ValueError(f'layers {shown(layers)}: those without experts come first in this family')
    fewer[family.dense_layers] = len(dense)
  return fewer
