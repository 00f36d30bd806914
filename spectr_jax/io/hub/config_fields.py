"""What the fields of a `config.json` may hold, in any family of checkpoints, and what they may ask for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from spectr_jax.io.foreign import FLAG, TEXT, check_object, either, list_of, object_of, real, shown, whole

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

ROPE_FIELDS = {
  'rope_type': TEXT,
  'type': TEXT,
  'rope_theta': BASE,
  'partial_rotary_factor': SHARE,
  'factor': FACTOR,
  'low_freq_factor': FACTOR,
  'high_freq_factor': FACTOR,
  'beta_fast': FACTOR,
  'beta_slow': FACTOR,
  'attention_factor': real(above=0, most=1e3),
  'mscale': real(0, 1e3),
  'mscale_all_dim': real(0, 1e3),
  'original_max_position_embeddings': LENGTH,
  'truncate': FLAG,
  'short_factor': list_of(FACTOR, 2**13),
  'long_factor': list_of(FACTOR, 2**13),
}
_ANY_OBJECT = object_of({})
# Of blocks, those of heads included.
BLOCK_FIELDS = {
  'model_type': TEXT,
  'torch_dtype': TEXT,
  'dtype': TEXT,
  'hidden_size': WIDTH,
  'intermediate_size': WIDTH,
  'num_hidden_layers': LAYERS,
  'num_attention_heads': HEADS,
  'num_key_value_heads': HEADS,
  'head_dim': HEAD_DIM,
  'max_position_embeddings': LENGTH,
  'original_max_position_embeddings': LENGTH,
  'rms_norm_eps': EPSILON,
  'hidden_act': TEXT,
  'attention_bias': FLAG,
  'mlp_bias': FLAG,
  'rope_theta': BASE,
  'partial_rotary_factor': SHARE,
  'rope_scaling': _ANY_OBJECT,
  'rope_parameters': _ANY_OBJECT,
  'layer_types': list_of(TEXT, 10_000),
  'sliding_window': LENGTH,
  'use_sliding_window': FLAG,
}
FIELDS = BLOCK_FIELDS | {
  'architectures': list_of(TEXT, 100),
  'quantization_config': _ANY_OBJECT,
  'vocab_size': VOCAB,
  'bos_token_id': TOKEN,
  'eos_token_id': either(TOKEN, list_of(TOKEN, 10_000)),
  'tie_word_embeddings': FLAG,
  'max_window_layers': whole(),
  'sliding_window_pattern': LAYERS,
  '_sliding_window_pattern': LAYERS,
  'hidden_activation': TEXT,
  'query_pre_attn_scalar': real(1e-6, 1e9),
  'attn_logit_softcapping': SOFT_CAP,
  'final_logit_softcapping': SOFT_CAP,
  'rope_local_base_freq': BASE,
  'rotary_emb_base': BASE,
  'rotary_pct': SHARE,
  'use_parallel_residual': FLAG,
  'layer_norm_eps': EPSILON,
  'n_embd': WIDTH,
  'n_layer': LAYERS,
  'n_head': HEADS,
  'n_inner': WIDTH,
  'n_positions': LENGTH,
  'n_ctx': LENGTH,
  'layer_norm_epsilon': EPSILON,
  'activation_function': TEXT,
}
# Fields in which null is a value of its own, another one than the default.
_NULLABLE = ('num_key_value_heads', 'sliding_window', 'attn_logit_softcapping', 'final_logit_softcapping')

# Fields that change what is computed, in some family or another, and the values that change nothing here.
_NO, _NONE, _ONE = (False,), (), (1,)
_EXPERTS = {
  'num_experts': (0, 1),
  'num_local_experts': (0, 1),
  'n_routed_experts': (0, 1),
  'moe_num_experts': (0, 1),
}
_REQUESTS = {
  'use_bidirectional_attention': _NO,
  'is_causal': (True,),
  'is_encoder_decoder': _NO,
  'add_cross_attention': _NO,
  'attention_chunk_size': _NONE,
  'attn_temperature_tuning': _NO,
  'attn_logit_softcapping': _NONE,
  'final_logit_softcapping': _NONE,
  'query_pre_attn_scalar': _NONE,
  'use_qk_norm': _NO,
  'qk_layernorm': _NO,
  'clip_qkv': _NONE,
  'alibi': _NO,
  'use_alibi': _NO,
  'position_embedding_type': ('rope', 'rotary', 'absolute', 'learned'),
  'rope_interleave': _NO,
  'rope_interleaved': _NO,
  'rotary_interleaved': _NO,
  'no_rope_layer_interval': (0,),
  'num_kv_shared_layers': (0,),
  'parallel_attn': _NO,
  'use_parallel_residual': _NO,
  'attention_multiplier': _ONE,
  'embedding_multiplier': _ONE,
  'residual_multiplier': _ONE,
  'logits_scaling': _ONE,
  'logit_scale': _ONE,
  'scale_emb': _ONE,
  'scale_depth': _NONE,
  'scale_attn_weights': (True,),
  'scale_attn_by_inverse_layer_idx': _NO,
}


def check_requests(spec: Mapping[str, Any], *, known: Collection[str] = (), has_experts: bool = False) -> None:
  """Refuses fields that ask for something that is not computed here.

  Args:
    spec: The content of a `config.json`.
    known: Fields that the family reads by itself.
    has_experts: Whether the number of experts may be that of another model.
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
  found = check_object(spec, fields, where)
  return {name: value for name, value in found.items() if value is not None or name in _NULLABLE}


def plain_name(name: str) -> str:
  """A name as messages show it, without quotes unless it has been chosen to spoil them."""
  return name if re.fullmatch(r'[\w. -]{1,60}', name, re.ASCII) else shown(name)
