"""What the fields of a `config.json` may hold, in any family of checkpoints, and what they may ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from spectr_jax.io.untrusted import (
  FLAG,
  TEXT,
  Kind,
  check_object,
  either,
  list_of,
  map_of,
  object_of,
  real,
  shown,
  whole,
)  # fmt: skip
from spectr_jax.models.routing import MOST_EXPERTS

# Far above any model that there is, and low enough that numbers and names of that size are made in no time. What they
# say is compared with the tensors before anything else is made of them.
LAYERS = whole(1, 10_000)
WIDTH = whole(1, 2**20)
HEADS = whole(1, 2**14)
HEAD_DIM = whole(1, 2**14)
VOCAB = whole(1, 2**22)
LENGTH = whole(1, 2**31 - 1)  # positions are int32
TOKEN = whole(0, 2**31 - 1)
EPSILON = real(0, 1)
BASE = real(above=1)  # of rotary frequencies
SHARE = real(most=1, above=0)  # of a head
FACTOR = real(1e-6, 1e6)
SOFT_CAP = real(above=0, most=1e9)
EXPERTS = whole(0, MOST_EXPERTS)

_ANY_OBJECT = object_of({})


def _fields(*groups: tuple[str, Kind]) -> dict[str, Kind]:
  return {name: kind for names, kind in groups for name in names.split()}


ROPE_FIELDS = _fields(
  ('rope_type type', TEXT),
  ('rope_theta', BASE),
  ('partial_rotary_factor', SHARE),
  ('factor low_freq_factor high_freq_factor beta_fast beta_slow', FACTOR),
  ('attention_factor', real(above=0, most=1e3)),
  ('mscale mscale_all_dim', real(0, 1e3)),
  ('original_max_position_embeddings', LENGTH),
  ('truncate', FLAG),
  ('short_factor long_factor', list_of(FACTOR, 2**13)),
)
# Of blocks, those of heads included.
BLOCK_FIELDS = _fields(
  ('model_type torch_dtype dtype hidden_act', TEXT),
  ('hidden_size intermediate_size', WIDTH),
  ('num_hidden_layers', LAYERS),
  ('num_attention_heads num_key_value_heads', HEADS),
  ('head_dim', HEAD_DIM),
  ('max_position_embeddings original_max_position_embeddings sliding_window', LENGTH),
  ('rms_norm_eps', EPSILON),
  ('attention_bias mlp_bias use_sliding_window', FLAG),
  ('rope_theta', BASE),
  ('partial_rotary_factor', SHARE),
  ('rope_scaling rope_parameters', _ANY_OBJECT),
  ('layer_types', list_of(TEXT, 10_000)),
)
FIELDS = BLOCK_FIELDS | _fields(
  ('architectures', list_of(TEXT, 100)),
  ('hidden_activation activation_function', TEXT),
  ('quantization_config', _ANY_OBJECT),
  ('vocab_size', VOCAB),
  ('bos_token_id', TOKEN),
  ('eos_token_id', either(TOKEN, list_of(TOKEN, 10_000))),
  ('tie_word_embeddings use_parallel_residual', FLAG),
  ('max_window_layers', whole()),
  ('sliding_window_pattern _sliding_window_pattern n_layer', LAYERS),
  ('query_pre_attn_scalar', real(1e-6, 1e9)),
  ('attn_logit_softcapping final_logit_softcapping', SOFT_CAP),
  ('rope_local_base_freq rotary_emb_base', BASE),
  ('rotary_pct', SHARE),
  ('layer_norm_eps layer_norm_epsilon', EPSILON),
  ('n_embd n_inner', WIDTH),
  ('n_head', HEADS),
  ('n_positions n_ctx', LENGTH),
  ('global_head_dim', HEAD_DIM),
  ('num_global_key_value_heads', HEADS),
  ('num_kv_shared_layers', whole(0, 10_000)),
  ('hidden_size_per_layer_input vocab_size_per_layer_input', whole(0, 2**22)),
  ('attention_k_eq_v use_double_wide_mlp enable_moe_block', FLAG),
  ('per_layer_config', map_of(object_of({'head_dim': HEAD_DIM, 'num_key_value_heads': HEADS}))),
  ('num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok top_k_experts', EXPERTS),
  ('n_shared_experts n_group topk_group', EXPERTS),
  ('routed_scaling_factor', FACTOR),
  ('first_k_dense_replace num_nextn_predict_layers', whole(0, 10_000)),
  ('moe_intermediate_size', WIDTH),
  ('decoder_sparse_step', LAYERS),
  ('mlp_only_layers', list_of(whole(0, 10_000), 10_000)),
  ('norm_topk_prob', FLAG),
  ('attention_multiplier embedding_multiplier residual_multiplier logits_scaling', FACTOR),
  ('swiglu_limit swiglu_alpha', SOFT_CAP),
)
# Fields in which null is a value of its own, another one than the default.
_NULLABLE = (
  'num_key_value_heads', 'sliding_window', 'attn_logit_softcapping', 'final_logit_softcapping',
  'hidden_size_per_layer_input', 'mamba_d_ssm',
)  # fmt: skip

# Fields that change what is computed, in some family or another, by the values that change nothing here.
_EXPERTS = dict.fromkeys(('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts'), (0, 1))
_REQUESTS = {
  name: harmless
  for names, harmless in (
    ('use_bidirectional_attention is_encoder_decoder add_cross_attention attn_temperature_tuning', (False,)),
    ('use_qk_norm qk_layernorm alibi use_alibi rope_interleave rope_interleaved rotary_interleaved', (False,)),
    ('parallel_attn use_parallel_residual scale_attn_by_inverse_layer_idx', (False,)),
    ('is_causal scale_attn_weights', (True,)),
    ('attention_chunk_size attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar', ()),
    ('clip_qkv scale_depth', ()),
    ('no_rope_layer_interval num_kv_shared_layers hidden_size_per_layer_input', (0,)),
    ('attention_k_eq_v use_double_wide_mlp enable_moe_block', (False,)),
    ('per_layer_config', ({},)),
    ('attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb', (1,)),
    ('position_embedding_type', ('rope', 'rotary', 'absolute', 'learned')),
  )
  for name in names.split()
}


def check_requests(spec: Mapping[str, Any], *, known: Collection[str] = (), has_experts: bool = False) -> None:
  """Refuses fields that ask for something that is not computed here, but for those `known` to the family.

  `has_experts` is for a head, whose number of experts may be that of its target.
  """
  for name, harmless in (_REQUESTS if has_experts else _REQUESTS | _EXPERTS).items():
    value = spec.get(name)
    if value is not None and name not in known and value not in harmless:
      raise ValueError(f'{name} {shown(value)} is not supported')
  without = spec.get('no_rope_layers')
  if without and not (isinstance(without, list) and all(has_rope == 1 for has_rope in without)):
    raise ValueError(f'no_rope_layers {shown(without)} is not supported')


def checked(spec: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
  """A `config.json` with fields of the right kinds, without those that are null where that means the default."""
  values = check_object(spec, fields, where).items()
  return {name: value for name, value in values if value is not None or name in _NULLABLE}
