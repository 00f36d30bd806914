"""What a `config.json` says about Gemma 4, whose layers with a window differ from those without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectr_jax.io.hub.family_configs import layer_windows, llama_config
from spectr_jax.io.hub.rope import context_length, read_rope, rope_parameters
from spectr_jax.io.untrusted import shown
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.routing import Experts

# What other families refuse.
FIELDS = (
  'attention_k_eq_v', 'use_double_wide_mlp', 'num_kv_shared_layers', 'hidden_size_per_layer_input', 'per_layer_config',
  'use_bidirectional_attention', 'enable_moe_block',
)  # fmt: skip
_FULL, _SLIDING = 'full_attention', 'sliding_attention'
_ROPES = {
  _FULL: {'rope_type': 'proportional', 'partial_rotary_factor': 0.25, 'rope_theta': 1e6},
  _SLIDING: {'rope_type': 'default', 'rope_theta': 1e4},
}


def _kinds(spec: Mapping[str, Any]) -> list[str]:
  """The kind of every layer. The last has no window, as in Transformers, whatever the file says."""
  num_layers = spec['num_hidden_layers']
  kinds = spec.get('layer_types') or [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(num_layers)]
  return [*kinds[:-1], _FULL]


def _full_heads(spec: Mapping[str, Any], kinds: Sequence[str]) -> tuple[int, int]:
  """Width and number of the heads of keys and values in layers without a window.

  Files of Transformers 5.6 and later have them layer by layer, and older ones once.
  """
  usual = {name: spec[name] for name in ('head_dim', 'num_key_value_heads')}
  given = spec.get('per_layer_config')
  if given is None:
    num_heads = spec.get('num_global_key_value_heads') if spec.get('attention_k_eq_v') else None
    return spec.get('global_head_dim', 512), num_heads or usual['num_key_value_heads']
  unknown = sorted(given.keys() - set(map(str, range(len(kinds)))))
  unknown += sorted({name for sizes in given.values() for name in sizes} - usual.keys())
  if unknown:
    raise ValueError(f'per_layer_config: {shown(unknown[0])} is not supported; known are {", ".join(usual)} of layers')
  found = {kind: set() for kind in _ROPES} | {_SLIDING: {tuple(usual.values())}}
  for layer, kind in enumerate(kinds):
    sizes = {name: size for name, size in given.get(str(layer), {}).items() if size is not None}
    found[kind].add(tuple((usual | sizes).values()))
    if len(found[kind]) > 1:
      raise ValueError(f'per_layer_config: other sizes for layer {layer} than for others of {kind} are not supported')
  return found[_FULL].pop()


def gemma4(spec: dict[str, Any]) -> CausalLMConfig:
  """The text model, of `Gemma4ForCausalLM`; what is not possible raises `ValueError`."""
  spec = {'num_key_value_heads': 4, 'head_dim': 256, **spec}
  spec['num_key_value_heads'] = spec['num_key_value_heads'] or spec['num_attention_heads']
  spec['hidden_act'] = spec.get('hidden_activation', 'gelu_pytorch_tanh')
  if spec.get('use_bidirectional_attention', 'vision') != 'vision':  # of images alone, which are not read
    raise ValueError(f'use_bidirectional_attention {shown(spec["use_bidirectional_attention"])} is not supported')
  kinds, width = _kinds(spec), spec['head_dim']
  is_unified = spec['architectures'][0] == 'Gemma4UnifiedForCausalLM'
  windows = layer_windows({**spec, 'layer_types': kinds}, size=1024 if is_unified else 512)
  full_dim, full_heads = _full_heads(spec, kinds)
  num_layers, num_shared = spec['num_hidden_layers'], spec.get('num_kv_shared_layers', 0)
  if num_shared >= num_layers:
    raise ValueError(f'num_kv_shared_layers {num_shared} must be below num_hidden_layers {num_layers}')

  given, ropes = spec.get('rope_parameters') or _ROPES, {}
  for kind in (_FULL, _SLIDING):
    if kind in kinds or kind == _FULL:
      if not isinstance(given.get(kind), dict):
        raise ValueError(f'rope_parameters has no {kind}')
      ropes[kind] = rope_parameters(spec, 'rope_parameters', given[kind])
  by_layer = spec.get('hidden_size_per_layer_input', 0 if is_unified else 256) or 0
  experts = None
  if spec.get('enable_moe_block', False):
    sizes = (spec[name] for name in ('num_experts', 'top_k_experts', 'moe_intermediate_size'))
    experts = Experts(*sizes, are_beside_mlp=True, logit_scale=spec['hidden_size'] ** -0.5)
  elif spec.get('num_experts'):
    raise ValueError(f'num_experts {spec["num_experts"]} is not supported without enable_moe_block')
  return llama_config(
    spec,
    experts=experts,
    rope=read_rope(ropes[_FULL], full_dim),
    window_rope=read_rope(ropes[_SLIDING], width) if _SLIDING in ropes else None,
    context_length=context_length(ropes[_FULL]),
    windows=windows,
    is_tied=spec.get('tie_word_embeddings', True),
    embedding_scale=spec['hidden_size'] ** 0.5,
    has_qk_norm=True,
    has_value_norm=True,
    has_post_norms=True,
    has_mlp_bias=False,
    query_scale=1.0,
    logit_soft_cap=spec.get('final_logit_softcapping'),
    full_head_dim=full_dim,
    full_kv_heads=full_heads,
    full_projections='qk' if spec.get('attention_k_eq_v') else None,
    num_shared_layers=num_shared,
    shared_mlp_dim=2 * spec['intermediate_size'] if spec.get('use_double_wide_mlp') and num_shared else None,
    layer_input_dim=by_layer,
    layer_vocab_size=spec.get('vocab_size_per_layer_input', 262_144) if by_layer else 0,
    has_layer_scale=True,
  )
