"""Gemma 4's assistants as the hub serves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter, assistant_drafter
from spectr_jax.io.heads.layout import target_sizes
from spectr_jax.io.hub.config_fields import FIELDS, WIDTH, checked
from spectr_jax.io.hub.families import FAMILIES, read_spec
from spectr_jax.io.hub.hub_model import for_platform
from spectr_jax.io.hub.sources import Source, source_of
from spectr_jax.io.hub.tensors import Tensors, check_tensors
from spectr_jax.io.untrusted import FLAG, TEXT, list_of, name_shown, object_of, whole
from spectr_jax.model import Model
from spectr_jax.models.assistant import AssistantConfig, param_shapes
from spectr_jax.models.causal_lm import config_of
from spectr_jax.models.causal_lm_config import CausalLMConfig

FORMAT = 'Gemma 4 assistant'
MARKS = {'pre_projection.weight', 'post_projection.weight'}
_FIELDS = {
  'architectures': list_of(TEXT, 100),
  'text_config': object_of({'model_type': TEXT}),
  'backbone_hidden_size': WIDTH,
  'use_ordered_embeddings': FLAG,
  'num_centroids': whole(1, 2**20),
  'centroid_intermediate_top_k': whole(1, 2**20),
  'tie_word_embeddings': FLAG,
}
_ORDERING = 'masked_embedding.token_ordering'
_ARCHITECTURES = ('Gemma4AssistantForCausalLM', 'Gemma4UnifiedAssistantForCausalLM')


def _kv_layers(block: CausalLMConfig, target: CausalLMConfig) -> tuple[int, ...]:
  """The target's last layer with keys and values of each layer's kind, which must have heads of its sizes."""
  found = []
  for layer in range(block.num_layers):
    is_alike = [(target.window(i) is None) == (block.window(layer) is None) for i in range(target.num_own_layers)]
    if True not in is_alike:
      raise ValueError(f'layer {layer} of the assistant reads a layer of its kind, and the target has none')
    found.append(len(is_alike) - 1 - is_alike[::-1].index(True))
    own, read = block.of_layer(layer), target.of_layer(found[-1])
    sizes = (own.num_kv_heads, own.head_dim), (read.num_kv_heads, read.head_dim)
    if sizes[0] != sizes[1]:
      raise ValueError(
        f'layer {layer} of the assistant reads {sizes[0][0]} heads of {sizes[0][1]} numbers, and layer {found[-1]} of'
        f' the target has {sizes[1][0]} of {sizes[1][1]}'
      )
    if own.num_heads % read.num_cached_heads:
      raise ValueError(
        f'{own.num_heads} heads of the assistant do not divide among {read.num_cached_heads} of the target'
      )
  return tuple(found)


def _read_config(spec: Mapping[str, Any], target: Model, dtype: str | None) -> tuple[AssistantConfig, Any]:
  if spec.get('architectures') and spec['architectures'][0] not in _ARCHITECTURES:
    raise ValueError(
      f'architecture {name_shown(spec["architectures"][0])} is unknown in this format; known are'
      f' {", ".join(_ARCHITECTURES)}'
    )
  text = checked(spec['text_config'], FIELDS, 'text_config')
  architecture = {FAMILIES[name].model_type: name for name in ('Gemma4ForCausalLM', 'Gemma4UnifiedForCausalLM')}
  kind = text.get('model_type', 'gemma4_text')
  if kind not in architecture:
    raise ValueError(f'text_config has model_type {name_shown(kind)}; known are {", ".join(architecture)}')
  num_layers, num_shared = text.get('num_hidden_layers'), text.get('num_kv_shared_layers', 0)
  if num_shared not in (0, num_layers):
    raise ValueError(f'num_kv_shared_layers must be {num_layers}, all layers of an assistant; got {num_shared!r}')
  for name in ('hidden_size_per_layer_input', 'use_double_wide_mlp', 'enable_moe_block'):
    if text.get(name):
      raise ValueError(f'{name} {text[name]!r} is not supported in an assistant')
  alone = {'architectures': [architecture[kind]], 'num_kv_shared_layers': 0, 'hidden_size_per_layer_input': 0}
  stored = {name: spec[name] for name in ('dtype', 'torch_dtype') if spec.get(name)}
  family, block = read_spec({**text, **stored, **alone}, 'text_config')
  is_tied = spec.get('tie_word_embeddings', True)
  block = dataclasses.replace(
    block, dtype=dtype or block.dtype, projections='q', full_projections=None, logit_soft_cap=None, is_tied=True
  )
  sizes = target_sizes(target)
  if {spec['backbone_hidden_size']} != {sizes.width, sizes.embedding_dim}:
    raise ValueError(f'backbone_hidden_size is {spec["backbone_hidden_size"]}, and the target is {sizes.width} wide')
  clusters = (0, 0)
  if spec.get('use_ordered_embeddings', False):
    clusters = spec.get('num_centroids', 2048), spec.get('centroid_intermediate_top_k', 32)
  block = for_platform(block, None)
  config = AssistantConfig(block, sizes.width, _kv_layers(block, config_of(target)), *clusters)
  return config, (family, is_tied)


def _sources(config: AssistantConfig, family: Any, is_tied: bool) -> dict[str, Source]:
  """The tensor of every parameter, by its path."""
  own = {
    'before/kernel': 'pre_projection.weight',
    'after/kernel': 'post_projection.weight',
    'centroids/kernel': 'masked_embedding.centroids.weight',
    'token_ids': _ORDERING,
  } | ({} if is_tied else {'embedding': 'lm_head.weight'})
  sources = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    if path in own:
      is_transposed = path.endswith('kernel')
      shape = leaf.shape[::-1] if is_transposed else leaf.shape
      sources[path] = Source(own[path], shape, is_transposed, None, family, config.block)
    else:
      sources[path] = source_of(path, leaf.shape, family, config.block, {family.prefix})
  return sources


def load_assistant(spec: Any, tensors: Tensors, target: Model, dtype: str | None) -> Drafter:
  """The assistant that a folder's files describe, as a drafter for its target; `ValueError` if it does not fit."""
  spec = checked(spec, _FIELDS, 'config.json')
  for name in ('text_config', 'backbone_hidden_size'):
    if name not in spec:
      raise ValueError(f'the configuration of the assistant has no {name}')
  config, (family, is_tied) = _read_config(spec, target, dtype)
  if config.block.num_layers > len(tensors.names()):
    raise ValueError(f'the assistant has {config.block.num_layers} layers, but {len(tensors.names())} tensors')
  sources = _sources(config, family, is_tied)
  wanted = {source.name: source.shape for source in sources.values()}
  # A head that is tied is the embedding, and one that is not makes an embedding of no use.
  others = ('lm_head.weight', 'model.embed_tokens.weight')
  check_tensors(tensors, wanted, lambda name: name in others, integers=(_ORDERING,))

  def read(keys, leaf):
    source = sources[jax.tree_util.keystr(keys, simple=True, separator='/')]
    array = tensors.read(source.name, tuple(slice(0, size) for size in source.shape))
    if source.name == _ORDERING and not np.array_equal(np.sort(array), np.arange(len(array))):
      raise ValueError(f'{_ORDERING} does not have each of the {len(array)} tokens once')
    return jnp.asarray((array.T if source.is_transposed else array).astype(leaf.dtype))

  params = jax.tree_util.tree_map_with_path(read, param_shapes(config))
  return assistant_drafter(params, config, target.vocab_size)
