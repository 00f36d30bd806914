"""Heads that guess depth by depth, as EAGLE, speculators and the makers of MTP layers publish them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from spectr_jax.io.heads import layout
from spectr_jax.io.hub import hybrid_configs
from spectr_jax.io.hub.config_fields import checked
from spectr_jax.io.untrusted import FLAG
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig

EAGLE3_FIELDS = {
  'eagle_aux_hidden_state_layer_ids': layout.LAYER_IDS,
  'use_aux_hidden_state': FLAG,
  'fc_norm': FLAG,
  'norm_before_fc': FLAG,
  'norm_before_residual': FLAG,
  'norm_output': FLAG,
}


def _feature_layers(head: layout.Described) -> tuple[int, ...]:
  """The target's layers that a head of EAGLE-3's kind reads, numbered as in `Model.features_fn`: i enters block i.

  | writer | field of `config.json` | i stands for |
  |---|---|---|
  | EAGLE's repository | none: 2, n // 2, n - 3 of n blocks | what enters block i |
  | speculators (EAGLE-3, P-EAGLE) and vLLM | at the top | what enters block i |
  | SpecForge, Model-Optimizer | in `eagle_config`, the first is 1 | what leaves block i |
  | SGLang's exports | in `eagle_config`, the first is another one | what enters block i |

  In `eagle_config` the first number tells, as in SGLang (pull requests 25454 and 32334), unless the target has too few
  blocks for that. DFlash's and DSpark's `target_layer_ids` leave blocks, see `one_pass_formats`.
  """
  num_inputs, sizes = head.shape_of('fc.weight')[1], head.sizes
  if num_inputs % sizes.width:
    raise ValueError(f'the head reads {num_inputs} numbers of the target, whose hidden states have {sizes.width}')
  nested = head.spec['eagle_config'].get('eagle_aux_hidden_state_layer_ids')
  named = head.spec.get('eagle_aux_hidden_state_layer_ids') or head.spec.get('aux_hidden_state_layer_ids')
  if not named and not nested and sizes.num_layers < 3:
    raise ValueError(f'config.json does not say which layers the head reads, and the target has {sizes.num_layers}')
  layers = tuple(named or nested or layout.usual_layers(sizes))
  if num_inputs != len(layers) * sizes.width:
    raise ValueError(
      f'the head reads {num_inputs // sizes.width} hidden states of the target, and the configuration names'
      f' {len(layers)} layers: {", ".join(map(str, layers))}'
    )
  layout.check_layer_ids(layers, sizes)
  if not named and nested and layers[0] == 1 and max(layers) < sizes.num_layers:
    return tuple(layer + 1 for layer in layers)
  return layers


def eagle3_modules(config: HeadConfig, block: str) -> dict[str, str]:
  """The hub's name of every module of a head of EAGLE-3's kind, by ours."""
  layers = layout.layer_modules(range(1, config.block.num_layers))
  return layers | layout.block_modules(
    block,
    mask_features='mask_hidden',
    features='fc',
    features_norm='input_norm' if config.features_norm == 'joint' else 'fc_norm',
    embedding_norm=f'{block}input_layernorm',
    hidden_norm=f'{block}hidden_norm',
    output_norm='norm',
    embedding='embed_tokens',
    unembedding='lm_head',
  )


def read_eagle3(head: layout.Described, *, mask_id: int | None = None) -> layout.Layout:
  """A head of EAGLE-3's kind, with what the speculators format adds; `ValueError`, or `KeyError` for a missing size."""
  block = 'midlayer.' if any(name.startswith('midlayer.') for name in head.tensors.names()) else 'layers.0.'
  nested = checked(head.spec.get('eagle_config', {}), EAGLE3_FIELDS, 'eagle_config')
  head, options = head.saying({'eagle_config': nested}), {**head.spec, **nested}
  if not options.get('use_aux_hidden_state', True):
    raise ValueError(
      "use_aux_hidden_state False is not supported: such a head reads the target's last hidden state, without a product"
    )
  num_embedded, embedding_dim = head.embedding_sizes()
  vocab_size = head.vocab_size(is_reduced=True)
  if not head.has('fc.weight'):
    raise ValueError('the checkpoint lacks fc.weight')
  config = HeadConfig(
    head.block_config(block, vocab_size, num_layers=1 if mask_id is None else head.num_layers()),
    head.sizes.width,
    embedding_dim,
    _feature_layers(head),
    features_norm='each' if options.get('fc_norm') else 'joint' if options.get('norm_before_fc') else None,
    is_residual_normed=options.get('norm_before_residual', False),
    is_output_normed=options.get('norm_output', False),
    num_embedded=num_embedded,
    has_unembedding=head.has('lm_head.weight'),
    is_reduced=head.has('d2t'),
    mask_id=mask_id,
  )
  return layout.Layout(config, eagle3_modules(config, block))


def read_peagle(head: layout.Described) -> layout.Layout:
  return read_eagle3(head, mask_id=head.spec['mask_token_id'])


def _linear(head: layout.Described, block: CausalLMConfig, modules: Mapping[str, str], **fields: Any) -> HeadConfig:
  """A head that reads one hidden state of the target, by a product with the embedding."""
  num_embedded, embedding_dim = head.embedding_sizes(f'{modules["embedding"]}.weight')
  return HeadConfig(
    block,
    head.sizes.width,
    embedding_dim,
    (-1,),
    join='linear',
    has_features_kernel=False,
    num_embedded=num_embedded,
    has_unembedding=head.has(f'{modules["unembedding"]}.weight'),
    is_reduced=False,
    **fields,
  )


def read_eagle(head: layout.Described) -> layout.Layout:
  modules = layout.block_modules('layers.0.', join='fc', embedding='embed_tokens', unembedding='lm_head')
  block, has_bias = head.block_config('layers.0.', head.vocab_size()), head.spec.get('bias', True)
  config = _linear(head, block, modules, has_input_norms=False, has_join_bias=has_bias, has_output_norm=False)
  return layout.Layout(config, modules)


_HYBRIDS = 'qwen3_next', 'qwen3_5_text', 'qwen3_5_moe_text'  # whose layers are of several types
_MTP_PARTS = 'join', 'embedding_norm', 'hidden_norm', 'output_norm', 'embedding', 'unembedding'


def _mtp(head: layout.Described, prefix: str, block: str, parts: tuple[str, ...], **differences: Any) -> layout.Layout:
  """A layer for multi-token prediction, which stands among the tensors of its target; `parts` as `_MTP_PARTS`."""
  others = {ours: f'{prefix}{theirs}' for ours, theirs in zip(_MTP_PARTS, parts, strict=True)}
  names = {name.removeprefix(block) for name in head.tensors.names() if name.startswith(block)}
  unknown = 'this MTP head has {}, which is not computed here; known are dense blocks of Llama and Qwen'
  for marker, kind in (('mlp.experts.', 'a mixture of experts'), ('self_attn.kv_', 'latent attention')):
    if any(name.startswith(marker) for name in names):
      raise ValueError(unknown.format(kind))
  modules = layout.block_modules(block, attention_norm=f'{block}input_layernorm', **others)
  config = head.block_config(block, head.vocab_size(f'{modules["unembedding"]}.weight'), **differences)
  queries = f'{block}self_attn.q_proj.weight'
  if head.has(queries) and head.shape_of(queries)[0] == 2 * config.num_heads * config.head_dim:
    config = dataclasses.replace(config, has_output_gate=True)
  config = _linear(head, config, modules, has_attention_norm=True, is_output_normed=True)
  return layout.Layout(config, modules, prefix)


def read_qwen_mtp(head: layout.Described) -> layout.Layout:
  names = 'fc', 'pre_fc_norm_embedding', 'pre_fc_norm_hidden', 'norm', 'embed_tokens', 'lm_head'
  if head.spec.get('model_type') in _HYBRIDS:
    head = head.saying({**hybrid_configs.QWEN_DEFAULTS, **head.spec, 'layer_types': []})
  # The norms of this family hold the gain less 1.
  return _mtp(head, 'mtp.', 'mtp.layers.0.', names, gain_offset=1.0)


def deepseek_prefix(names: set[str]) -> str | None:
  """The beginning of the names of a DeepSeek model's MTP layer, None if it has none."""
  pattern = r'(model\.layers\.[0-9]{1,5}\.)eh_proj\.weight'
  prefixes = [match[1] for name in names if (match := re.fullmatch(pattern, name))]
  if len(prefixes) > 1:
    raise ValueError(f'the checkpoint has {len(prefixes)} MTP layers; one is read')
  return prefixes[0] if prefixes else None


def read_deepseek_mtp(head: layout.Described) -> layout.Layout:
  prefix = deepseek_prefix(head.tensors.names())
  assert prefix is not None  # as the format is recognised by it
  names = 'eh_proj', 'enorm', 'hnorm', 'shared_head.norm', 'embed_tokens', 'shared_head.head'
  return _mtp(head, prefix, prefix, names)
