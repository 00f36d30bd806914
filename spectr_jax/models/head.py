"""Networks that draft from a target's hidden states: EAGLE-1, 2 and 3, P-EAGLE, the speculators format, MTP.

Such a head is one block of a decoder. At a token it reads the token's embedding and a hidden state h, which sums up
what stands before: that of the target where the target has been, else the head's own output one token earlier. Its
output is the next h, and the logits of the next token. P-EAGLE reads a mask token and one h of its own in place of
guesses, and so guesses several tokens in one pass, each whatever the others are; it may have more blocks. Sources:
EAGLE (Li et al. 2024), EAGLE-3 (Li et al. 2025), P-EAGLE (arXiv:2602.01469), multi-token prediction (DeepSeek-V3,
section 2.2).

Parameters are a nested dict of arrays of one dtype, with kernels `[in, out]`, see `param_shapes`. Heads differ in which
parameters they have and in three options of `HeadConfig`. Functions take the head's `params` and `config` first.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from spectr_jax.kernels.products import sum_of
from spectr_jax.model import KVCache
from spectr_jax.models import causal_lm
from spectr_jax.models.causal_lm_config import CausalLMConfig, check_sizes
from spectr_jax.models.layers import unembed as unembed


@dataclasses.dataclass(frozen=True)
class HeadConfig:
  """The sizes of a head, and what it does where published heads differ.

  Attributes:
    block: Sizes of the block: a decoder of one layer, of one or more with `mask_id`. Its `vocab_size` is Vd, the tokens
      that the head can guess.
    target_dim: Width of the target's hidden states.
    embedding_dim: Width of the embedded tokens that it reads.
    feature_layers: The F layers of the target that it reads, numbered as in `Model.features_fn`.
    join: How embedding and hidden state meet. `wide`: attention reads both side by side, and h is the residual
      (EAGLE-3). `linear`: a product maps both to one input (EAGLE-1, MTP).
    has_features_kernel: Whether a product maps the target's hidden states to h; without it h is the one state.
    features_norm: Whether the target's hidden states are normalized before that product: each by itself, all as one
      vector (`joint`), or not at all.
    has_input_norms: Whether embedding and h are normalized where they meet.
    has_attention_norm: Whether the input of attention is normalized after the two have met.
    has_join_bias: Whether the product of `linear` has a bias.
    is_residual_normed: Whether the residual of `wide` is the normalized h.
    has_output_norm: Whether a norm stands before the output head.
    is_output_normed: Whether the normalized output is the next h.
    num_embedded: Tokens of an embedding of its own, V; None if it reads the target's.
    has_unembedding: Whether it has an output head of its own; else it takes the target's rows.
    is_reduced: Whether it guesses some of the target's tokens only, those of the parameter `target_ids`.
    mask_id: The token that it reads in place of guesses, if it guesses all depths in one pass (P-EAGLE); None if it
      reads its guesses.

  Raises:
    ValueError: The block has more layers than it can have, a size, layer or token is no number that it can be, or
      options contradict each other.
  """

  block: CausalLMConfig
  target_dim: int
  embedding_dim: int
  feature_layers: tuple[int, ...]
  join: Literal['wide', 'linear'] = 'wide'
  has_features_kernel: bool = True
  features_norm: Literal['each', 'joint'] | None = None
  has_input_norms: bool = True
  has_attention_norm: bool = False
  has_join_bias: bool = False
  is_residual_normed: bool = False
  has_output_norm: bool = True
  is_output_normed: bool = False
  num_embedded: int | None = None
  has_unembedding: bool = True
  is_reduced: bool = True
  mask_id: int | None = None

  def __post_init__(self):
    if self.block.num_layers != 1 and self.mask_id is None:
      raise ValueError(f'a head has one layer, got num_layers {self.block.num_layers}')
    if self.block.rope is None:
      raise ValueError('a head has rotary positions, got rope None')
    check_sizes(self, 'target_dim', 'embedding_dim', *(['num_embedded'] if self.num_embedded is not None else []))
    if not self.feature_layers or any(type(layer) is not int for layer in self.feature_layers):
      raise ValueError(f'feature_layers must be integers, at least one, got {reprlib.repr(self.feature_layers)}')
    if not self.has_features_kernel and (len(self.feature_layers) != 1 or self.target_dim != self.block.embed_dim):
      raise ValueError(
        'without a product of the features a head reads one hidden state of its own width;'
        f' got {len(self.feature_layers)} of width {self.target_dim}, and width {self.block.embed_dim}'
      )
    if self.mask_id is None:
      return
    if type(self.mask_id) is not int or self.mask_id < 0 or self.mask_id >= (self.num_embedded or math.inf):
      raise ValueError(f'mask_id must be a token that is embedded, got {self.mask_id!r}')
    if self.join != 'wide' or any(self.block.windows):
      raise ValueError("a head with mask_id is of EAGLE-3's kind, without windows")


def param_shapes(config: HeadConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`.

  The output head is one of them also where it is made of the target's rows: it is gathered once, when a head is loaded.
  """
  embedding_dim = config.embedding_dim
  block, width = config.block, config.block.embed_dim

  def array(*shape, dtype=block.dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  def norm(size):
    return {'gain': array(size)} | ({'bias': array(size)} if block.norm == 'layer' else {})

  of_decoder = causal_lm.param_shapes(block)
  layer = of_decoder['layer_0']
  shapes: dict[str, Any] = {'attention': layer['attention'], 'mlp': layer['mlp'], 'mlp_norm': layer['mlp_norm']}
  shapes |= {f'layer_{i}': of_decoder[f'layer_{i}'] for i in range(1, block.num_layers)}
  if config.mask_id is not None:
    shapes['mask_features'] = array(1, 1, len(config.feature_layers) * config.target_dim)
  if config.has_features_kernel:
    shapes['features'] = {'kernel': array(len(config.feature_layers) * config.target_dim, width)}
  num_features = len(config.feature_layers)
  if config.features_norm == 'each':
    shapes['features_norm'] = {f'{i}': norm(config.target_dim) for i in range(num_features)}
  elif config.features_norm == 'joint':
    shapes['features_norm'] = norm(num_features * config.target_dim)
  if config.has_input_norms:
    shapes |= {'embedding_norm': norm(embedding_dim), 'hidden_norm': norm(width)}
  if config.join == 'linear':
    bias = {'bias': array(width)} if config.has_join_bias else {}
    shapes['join'] = {'kernel': array(embedding_dim + width, width)} | bias
  else:
    for name in 'qkv':
      kernel = shapes['attention'][name]['kernel']
      shapes['attention'][name]['kernel'] = array(embedding_dim + width, kernel.shape[1])
  if config.has_attention_norm:
    shapes['attention_norm'] = norm(width)
  if config.has_output_norm:
    shapes['output_norm'] = norm(width)
  if config.num_embedded is not None:
    shapes['embedding'] = array(config.num_embedded, embedding_dim)
  shapes['unembedding'] = array(width, config.block.vocab_size)
  if config.is_reduced:
    shapes['target_ids'] = array(config.block.vocab_size, dtype='int32')
  return shapes


def random_params(key: jax.Array, shapes: Mapping[str, Any]) -> dict[str, Any]:
  """Random parameters of a nested dict of shapes; activations are near unit variance, `target_ids` the first ids."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)

  def draw(key, path, shape):
    if path[-1].key == 'target_ids':
      return jnp.arange(*shape.shape, dtype=shape.dtype)
    if path[-1].key == 'gain':
      return jnp.ones(shape.shape, shape.dtype)
    scale = shape.shape[0] ** -0.5
    return (scale * jax.random.normal(key, shape.shape)).astype(shape.dtype)

  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(structure, [draw(key, *leaf) for key, leaf in zip(keys, leaves)])


def init_params(key: jax.Array, config: HeadConfig) -> dict[str, Any]:
  """Random parameters of a head for a typed key, see `random_params`."""
  return random_params(key, param_shapes(config))


def hidden_of_features(params: Mapping[str, Any], config: HeadConfig, features: jax.Array) -> jax.Array:
  """The hidden state h `[..., embed_dim]`, by the target's `[..., F, target_dim]` of the token before."""
  features = features.astype(config.block.dtype)
  if config.features_norm == 'each':
    each = [params['features_norm'][f'{i}'] for i in range(features.shape[-2])]
    normed = [causal_lm.norm(own, features[..., i, :], config.block) for i, own in enumerate(each)]
    features = jnp.stack(normed, axis=-2)
  joined = features.reshape(*features.shape[:-2], -1)
  if config.features_norm == 'joint':
    joined = causal_lm.norm(params['features_norm'], joined, config.block)
  return causal_lm.linear(params['features'], joined) if config.has_features_kernel else joined


# Attention: from queries `[B, N, H, head_dim]`, keys and values `[B, N, K, head_dim]` to the mixed values
# `[B, N, H, head_dim]`, and whatever the caller wants to keep of the keys and values.
Kept = TypeVar('Kept')
AttendFn = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kept]]


def _first_block(
  params: Mapping[str, Any],
  config: HeadConfig,
  embedded: jax.Array,
  hidden: jax.Array,
  positions: jax.Array,
  attend_fn: AttendFn[Kept],
) -> tuple[jax.Array, Kept]:
  """The stream after the block where embedding and hidden state meet, and what `attend_fn` keeps."""
  block = config.block
  embedded = embedded.astype(block.dtype)
  residual = hidden
  if config.has_input_norms:
    embedded = causal_lm.norm(params['embedding_norm'], embedded, block)
    hidden = causal_lm.norm(params['hidden_norm'], hidden, block)
  x = jnp.concatenate([embedded, hidden], axis=-1)
  if config.join == 'linear':
    x = residual = causal_lm.linear(params['join'], x)
  elif config.is_residual_normed:
    residual = hidden
  if config.has_attention_norm:
    x = causal_lm.norm(params['attention_norm'], x, block)
  rotation = causal_lm.rotation_of(block.rope_of(0), positions)
  *products, gate = causal_lm.project(params['attention'], block, x, rotation)
  mixed, kept = attend_fn(*products)
  x = sum_of(residual, causal_lm.attention_output(params['attention'], mixed, gate))
  return sum_of(x, causal_lm.mlp(params['mlp'], block, causal_lm.norm(params['mlp_norm'], x, block))), kept


def _finish(params: Mapping[str, Any], config: HeadConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The next hidden states and the input of the output head, of the stream after the last block."""
  output = causal_lm.norm(params['output_norm'], x, config.block) if config.has_output_norm else x
  return (output if config.is_output_normed else x), output


def advance(
  params: Mapping[str, Any],
  config: HeadConfig,
  embedded: jax.Array,
  hidden: jax.Array,
  positions: jax.Array,
  attend_fn: AttendFn[Kept],
) -> tuple[jax.Array, jax.Array, Kept]:
  """A head of one block: the next hidden states, the input of the output head, and what `attend_fn` keeps.

  It takes embedded tokens `[B, N, embedding_dim]`, hidden states h `[B, N, embed_dim]` of what stands before each,
  whose shape results have, and positions `[B, N]` from any origin.
  """
  x, kept = _first_block(params, config, embedded, hidden, positions, attend_fn)
  return *_finish(params, config, x), kept


def apply(
  params: Mapping[str, Any],
  config: HeadConfig,
  embedded: jax.Array,
  hidden: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: KVCache,
) -> tuple[jax.Array, jax.Array, KVCache]:
  """`advance` through all blocks after the committed tokens of a cache, which is returned with the tokens pending.

  `positions` `[B, N]` continue the slots of committed tokens; `mask`, bool `[N, M]` or `[B, N, M]`, says which pending
  tokens each attends to.
  """
  block = config.block
  mask = mask[None] if mask.ndim == 2 else mask
  window = block.window(0)
  visible = causal_lm.visible_tokens(window, mask), causal_lm.visible_slots(window, positions, cache), positions

  def attend(query, key, value):
    mixed, keys, values = causal_lm.mix(block, 0, query, key, value, visible, cache)
    return mixed, (keys, values)

  x, *pending = _first_block(params, config, embedded, hidden, positions, attend)
  for layer in range(1, block.num_layers):
    rotation = causal_lm.rotation_of(block.rope_of(layer), positions)
    x, keys, values = causal_lm.block(params[f'layer_{layer}'], block, layer, x, rotation, visible, cache)
    pending.append((keys, values))
  return *_finish(params, config, x), cache.with_pending(pending, embedded.shape[1])


def check_target_ids(params: Mapping[str, Any], is_reduced: bool, num_ids: int, vocab_size: int) -> None:
  """Checks that the `num_ids` tokens which a head guesses are the target's; ids without values are not checked."""
  if not is_reduced:
    if num_ids != vocab_size:
      raise ValueError(f'the head guesses {num_ids} tokens, but the target has {vocab_size}')
    return
  ids = params['target_ids']
  has_values = not isinstance(ids, (jax.ShapeDtypeStruct, Tracer))
  if has_values and not ((ids >= 0) & (ids < vocab_size)).all():
    raise ValueError(f'target_ids must be from 0 to {vocab_size - 1}')
