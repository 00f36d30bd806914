"""What a published head's files describe: sizes that fit a target, and where every parameter stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.io.hub.config_fields import check_requests
from spectr_jax.io.hub.families import LLAMA_MODULES
from spectr_jax.io.hub.family_configs import layer_windows, llama_config
from spectr_jax.io.hub.hub_model import for_platform
from spectr_jax.io.hub.redundant import FREQUENCIES
from spectr_jax.io.hub.tensors import Tensors
from spectr_jax.io.untrusted import list_of, whole
from spectr_jax.model import KVCache, Model
from spectr_jax.models import causal_lm, head, one_pass
from spectr_jax.models.causal_lm_config import CausalLMConfig
from spectr_jax.models.head import HeadConfig
from spectr_jax.models.one_pass_config import OnePassConfig
from spectr_jax.models.recurrent import HybridCache

LAYER_IDS = list_of(whole(-1, 10_000), 1000)  # of a target; formats differ in what -1 is

BLOCK_MODULES = {
  ours: theirs
  for ours, theirs in LLAMA_MODULES.items()
  if ours == 'mlp_norm' or ours.startswith(('attention/', 'mlp/'))
}


@dataclasses.dataclass(frozen=True)
class TargetSizes:
  """The sizes of a target that a head must fit."""

  vocab_size: int
  width: int  # of hidden states
  embedding_dim: int | None  # of embedded tokens, or None if drafters cannot read them
  num_layers: int


def usual_layers(sizes: TargetSizes) -> tuple[int, int, int]:
  """The layers that EAGLE-3 reads by itself; in a small target some are equal."""
  return 2, sizes.num_layers // 2, sizes.num_layers - 3


def check_layer_ids(layers: tuple[int, ...], sizes: TargetSizes) -> None:
  """Refuses layers of which one is read twice, or does not stand before, between or behind the target's blocks.

  Negative ones count from the output of the final norm, -1, as in `Model.features_fn`.
  """
  if min(layers) >= 0 and layers == usual_layers(sizes):
    return
  if min(layers) < -2 - sizes.num_layers or max(layers) > sizes.num_layers or len(set(layers)) < len(layers):
    raise ValueError(
      f'the head reads layers {", ".join(map(str, layers))} of the target; possible are different ones from 0 to'
      f' {sizes.num_layers}'
    )


@dataclasses.dataclass(frozen=True)
class Described:
  """What the files of a head say, before it is known what kind it is of, and the target that it is for."""

  spec: Mapping[str, Any]  # the checked `config.json`
  tensors: Tensors
  sizes: TargetSizes
  dtype: str | None  # to compute in; None for that of `config.json`

  def saying(self, fields: Mapping[str, Any]) -> Described:
    """The same with fields of `config.json` replaced."""
    return dataclasses.replace(self, spec={**self.spec, **fields})

  def has(self, name: str) -> bool:
    return name in self.tensors.names()

  def shape_of(self, name: str, num_axes: int = 2) -> tuple[int, ...]:
    """The shape of a tensor that must have so many axes."""
    shape = self.tensors.shape(name)
    if len(shape) != num_axes or 0 in shape:
      raise ValueError(f'tensor {name} has shape {shape}, expected {num_axes} axes of at least 1')
    return shape

  def vocab_size(self, unembedding: str = 'lm_head.weight', *, is_reduced: bool = False) -> int:
    """The tokens that the head guesses: the rows of its output head or the entries of `d2t`, else the target's."""
    if self.has(unembedding):
      return self.shape_of(unembedding)[0]
    return self.shape_of('d2t', 1)[0] if is_reduced and self.has('d2t') else self.sizes.vocab_size

  def num_layers(self) -> int:
    """The blocks of a head that has several, no more than it has tensors."""
    num_layers, num_tensors = self.spec['num_hidden_layers'], len(self.tensors.names())
    if not 1 <= num_layers <= num_tensors:
      raise ValueError(f'the configuration has {num_layers} layers, but the checkpoint {num_tensors} tensors')
    return num_layers

  def table_sizes(self, name: str) -> tuple[int, int] | None:
    """Tokens and width of a table of the target's tokens, None if there is no such tensor."""
    if not self.has(name):
      return None
    num_tokens, width = self.shape_of(name)
    size = self.sizes.vocab_size
    if num_tokens < size:
      raise ValueError(f'tensor {name} has shape {(num_tokens, width)}, and the target has {size} tokens')
    return num_tokens, width

  def embedding_sizes(self, name: str = 'embed_tokens.weight') -> tuple[int | None, int]:
    """Tokens of a head's own embedding, None if it reads the target's, and the width of embedded tokens."""
    table = self.table_sizes(name)
    if table is not None:
      return table
    if self.sizes.embedding_dim is None:
      raise ValueError('this head reads embeddings of the target, but the target has no embed_fn')
    return None, self.sizes.embedding_dim

  def block_config(
    self, prefix: str, vocab_size: int, *, num_layers: int = 1, known: tuple[str, ...] = (), **differences: Any
  ) -> CausalLMConfig:
    """The configuration of a head's blocks; biases and norms of queries and keys are there where their tensors are.

    `prefix` begins the names of the first block. `known` are fields that the format reads and others refuse, and
    `differences` fields of its own.
    """
    check_requests(self.spec, known=known, has_experts=True)
    kinds = self.spec.get('layer_types', [])
    if len(kinds) != num_layers and set(kinds) <= {'full_attention'}:  # those of the target
      kinds = ['full_attention'] * num_layers
    sizes = {'num_hidden_layers': num_layers, 'vocab_size': vocab_size, 'layer_types': kinds}
    spec = {'max_position_embeddings': 2048, **self.spec, **sizes}
    config = llama_config(
      spec,
      windows=layer_windows(spec),
      has_qkv_bias=self.has(f'{prefix}self_attn.q_proj.bias'),
      has_out_bias=self.has(f'{prefix}self_attn.o_proj.bias'),
      has_mlp_bias=self.has(f'{prefix}mlp.up_proj.bias'),
      has_qk_norm=self.has(f'{prefix}self_attn.q_norm.weight'),
      is_tied=False,
      **differences,
    )
    return for_platform(dataclasses.replace(config, dtype=self.dtype or config.dtype), None)


@dataclasses.dataclass(frozen=True)
class Layout:
  """A head as its files describe it."""

  config: HeadConfig | OnePassConfig
  modules: Mapping[str, str]  # the hub's name of every module, by ours
  prefix: str = ''  # of the names that belong to the head

  @property
  def blocks(self) -> CausalLMConfig:
    return self.config.backbone if isinstance(self.config, OnePassConfig) else self.config.block

  @property
  def param_shapes(self) -> dict[str, Any]:
    if isinstance(self.config, OnePassConfig):
      return one_pass.param_shapes(self.config)
    return head.param_shapes(self.config)


def target_sizes(target: Model) -> TargetSizes:
  """The sizes of a target; `ValueError` if it returns no hidden states or has an unknown cache."""
  if target.features_fn is None:
    raise ValueError('a head reads hidden states of the target, but this target returns none: its features_fn is None')

  def call(target):
    token, cache = jnp.zeros((1, 1), jnp.int32), target.init_cache_fn(1, 1)
    output = target.with_features((-1,)).apply(token, token, jnp.ones((1, 1), bool), cache)
    return cache, output.features, None if target.embed_fn is None else target.embed_fn(target.params, token)

  cache, features, embedded = jax.eval_shape(call, target)
  if not isinstance(cache, (KVCache, HybridCache)):
    raise ValueError('a head needs the number of layers of its target, which only a KVCache tells')
  num_layers = len(cache.keys) if isinstance(cache, KVCache) else causal_lm.config_of(target).num_layers
  embedding_dim = None if embedded is None else embedded.shape[-1]
  return TargetSizes(target.vocab_size, features.shape[-1], embedding_dim, num_layers)


def block_modules(block: str, **others: str) -> dict[str, str]:
  """The hub's names of modules: those of a block of Llama's kind below `block`, and others."""
  return {ours: block + theirs for ours, theirs in BLOCK_MODULES.items()} | others


def layer_modules(layers: range) -> dict[str, str]:
  """The hub's name of every module of whole blocks, which stand below `layers`, by ours."""
  modules = BLOCK_MODULES | {'attention_norm': 'input_layernorm'}
  for conv in ('attention_conv', 'mlp_conv'):
    modules |= {conv: f'{conv}.kernel_projection', f'{conv}/base': f'{conv}.base_kernel'}
  return {f'layer_{i}/{ours}': f'layers.{i}.{theirs}' for i in layers for ours, theirs in modules.items()}


def is_beside(prefix: str, name: str) -> bool:
  """Whether a tensor may stand beside those of a head, whose names begin with `prefix`.

  It follows from others, with which it is compared when the head is loaded, or belongs to the target.
  """
  return not name.startswith(prefix) or name.endswith(FREQUENCIES) or name == 't2d' or 'verifier_' in name


# Ends of names of tensors that are not the weight of a module.
_WITHOUT_WEIGHT = '_codebook', '.base_kernel', 'mask_hidden'


def _name_of(path: str, modules: Mapping[str, str]) -> str:
  if path == 'target_ids':
    return 'd2t'
  if path in modules:
    return modules[path] if modules[path].endswith(_WITHOUT_WEIGHT) else f'{modules[path]}.weight'
  module, leaf = path.rsplit('/', 1)
  kind, _, number = module.partition('/')
  stem = modules[module] if module in modules else f'{modules[kind]}.{number}'
  return f'{stem}.{"bias" if leaf == "bias" else "weight"}'


def is_transposed(path: str) -> bool:
  """Whether the parameter of a path is stored as its transpose."""
  return path.endswith(('unembedding', '/kernel'))


def names_and_shapes(layout: Layout) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
  """The hub's name and our shape of every parameter that a file holds, by our path."""
  leaves = jax.tree_util.tree_leaves_with_path(layout.param_shapes)
  paths = {jax.tree_util.keystr(keys, simple=True, separator='/'): leaf for keys, leaf in leaves}
  if not layout.config.has_unembedding:
    del paths['unembedding']
  return {path: (_name_of(path, layout.modules), leaf) for path, leaf in paths.items()}
