"""A decoder-only transformer behind the `Model` seam; the only module that imports Flax.

It has pre-norm RMSNorm, rotary positions, GELU and tied embeddings. Kernels are stored `[in, out]`; `for_decoding`
stores them as the backend reads them fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from spectr_jax.kernels.attention import attend, attend_causally, rotary_angles
from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.int8 import is_int8
from spectr_jax.kernels.matrices import matmul, params_for_decoding
from spectr_jax.kernels.tpu import fused_layers
from spectr_jax.model import KVCache, Model, ModelOutput, slots_of
from spectr_jax.models import functions, layers
from spectr_jax.models.functions import model_functions
from spectr_jax.models.transformer_config import TransformerConfig
from spectr_jax.sharding import TRANSFORMER_RULES


class Linear(nn.Module):
  """`matmul` with a learned kernel `[in, features]` and no bias."""

  features: int
  dtype: Any
  init_scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.variance_scaling(self.init_scale, 'fan_in', 'normal', in_axis=-1, out_axis=-2)
    if self.has_variable('params', 'kernel'):  # in a form for decoding perhaps, whose shape `param` would refuse
      kernel = self.get_variable('params', 'kernel')
    else:
      # Drawn as `[out, in]`, so that a key gives the same numbers as when kernels were stored in that order.
      kernel = self.param('kernel', lambda key: init(key, (self.features, x.shape[-1])).T)
    return matmul(x, kernel).astype(self.dtype)


class RMSNorm(nn.Module):
  """`layers.rms_norm` with a learned gain."""

  @nn.compact
  def __call__(self, x):
    return layers.rms_norm(x, self.param('gain', nn.initializers.ones, (x.shape[-1],)))


class Block(nn.Module):
  """One pre-norm block; returns the stream and the layer's pending keys and values."""

  config: TransformerConfig
  layer: int
  dropout: float = 0.0
  attend_fn: Callable[..., jax.Array] = attend_causally
  arrange_fn: Callable[[jax.Array], jax.Array] = lambda x: x

  @nn.compact
  def __call__(self, x, rotation, mask, cache: KVCache | None):
    cfg = self.config
    drop = nn.Dropout(self.dropout, deterministic=not self.dropout)
    dtype = jnp.dtype(cfg.dtype)
    residual_scale = 1.0 / (2 * cfg.num_layers)
    normed = RMSNorm(name='attention_norm')(x)
    # Ordered by heads, then by query, key and value, so that a shard has all three for each of its heads.
    qkv = Linear(3 * cfg.embed_dim, dtype, name='qkv')(normed)
    qkv = self.arrange_fn(qkv.reshape(*x.shape[:2], cfg.num_heads, 3 * cfg.head_dim))
    # Gradients of a split are concatenated, those of slices would be padded and added.
    query, key, value = jnp.split(qkv, 3, axis=-1)
    query, key = layers.rotate(query, rotation), layers.rotate(key, rotation)
    if cache is None:
      keys, values = slots_of(key, value)
      mixed = self.attend_fn(query, keys, values, mask)
    else:
      keys, values = cache.append(self.layer, key, value, num_pending_slots=mask.shape[-1])
      committed = layers.committed_slots(cache.keys[self.layer].shape[-1], cache.lengths)
      prefix = cache.keys[self.layer], cache.values[self.layer], committed
      mixed = attend(query, keys, values, mask, prefix)
    x = x + drop(Linear(cfg.embed_dim, dtype, residual_scale, name='attention_out')(mixed.reshape(x.shape)))
    hidden = Linear(cfg.mlp_dim, dtype, name='mlp_in')(RMSNorm(name='mlp_norm')(x))
    x = x + drop(Linear(cfg.embed_dim, dtype, residual_scale, name='mlp_out')(nn.gelu(hidden)))
    return x, keys, values


class Transformer(nn.Module):
  """Maps tokens to float32 logits `[B, N, V]`, features `[B, N, F, embed_dim]` or None, and the new cache."""

  config: TransformerConfig
  remat: bool = False  # whether a gradient recomputes the activations inside blocks instead of keeping them
  constrain_fn: Callable[[jax.Array], jax.Array] = lambda x: x  # constrains activations to their sharding
  dropout: float = 0.0  # of entries of what a block adds; needs the rng `dropout` unless 0
  feature_layers: tuple[int, ...] = ()  # numbered as in `Model.features_fn`
  attend_fn: Callable[..., jax.Array] = attend_causally  # of queries, keys, values and mask, without a cache
  arrange_fn: Callable[[jax.Array], jax.Array] = lambda x: x  # arranges [B, N, num_heads, 3 head_dim] in memory

  @nn.compact
  def __call__(self, tokens, positions, mask, cache: KVCache | None = None):
    cfg = self.config
    dtype = jnp.dtype(cfg.dtype)
    block = nn.remat(Block) if self.remat else Block
    # Logits have unit variance at initialization; the inputs are scaled up to match.
    init = nn.initializers.normal(cfg.embed_dim**-0.5)
    embedding = self.param('embedding', init, (cfg.vocab_size, cfg.embed_dim))
    x = self.constrain_fn((layers.take_rows(embedding, tokens) * cfg.embed_dim**0.5).astype(dtype))
    mask = mask[None] if mask.ndim == 2 else mask
    # Whole heads are rotated, with base 10000.
    half = cfg.head_dim // 2
    rotation = rotary_angles(positions, 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half))
    pending, streams = [], [x]
    for layer in range(cfg.num_layers):
      network = block(cfg, layer, self.dropout, self.attend_fn, self.arrange_fn, name=f'layer_{layer}')
      x, keys, values = network(x, rotation, mask, cache)
      x = self.constrain_fn(x)
      pending.append((keys, values))
      streams.append(x)
    streams.append(RMSNorm(name='final_norm')(x))
    logits = self.constrain_fn(layers.unembed(self.variables['params'], streams[-1]))
    features = None
    if self.feature_layers:
      features = jnp.stack([streams[layer] for layer in self.feature_layers], axis=2)
    if cache is not None:
      cache = cache.with_pending(pending, tokens.shape[1])
    return logits, features, cache


_Outputs: TypeAlias = tuple[jax.Array, jax.Array | None, KVCache]  # of `Transformer`, called with a cache


@operation
def transformer_call(params, tokens, positions, mask, cache, *, config, feature_layers):
  """`Model.apply` of a transformer."""
  network = Transformer(config, feature_layers=feature_layers)
  # Flax types the result as a pair for calls with mutable variables, of which there are none here.
  outputs = cast(_Outputs, network.apply({'params': params}, tokens, positions, mask, cache))
  logits, features, cache = outputs
  return ModelOutput(logits, cache, features)


def _init_cache(batch_size, cache_size, *, config):
  return KVCache.empty(
    num_layers=config.num_layers,
    batch_size=batch_size,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    cache_size=cache_size,
    dtype=config.dtype,
  )


def _embed(params, tokens, *, config):
  return (layers.take_rows(params['embedding'], tokens) * config.embed_dim**0.5).astype(config.dtype)


def _unembed(params, features, *, config):
  del config
  return layers.unembed(params, features)


fused_layers.register(transformer_call, _embed, _unembed)


def _for_decoding(params, *, config):
  del config
  return params_for_decoding(params)


def init_params(key: jax.Array, config: TransformerConfig) -> Any:
  """Randomly initialized float32 parameters, a nested dict, for a typed key."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Transformer(config).init(key, tokens, tokens, jnp.ones((1, 1), bool))['params']


def param_shapes(config: TransformerConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of float32 `jax.ShapeDtypeStruct`."""

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def linear(num_in, num_out):
    return {'kernel': array(num_in, num_out)}

  width = config.embed_dim

  def block():
    return {
      'attention_norm': {'gain': array(width)},
      'qkv': linear(width, 3 * width),
      'attention_out': linear(width, width),
      'mlp_norm': {'gain': array(width)},
      'mlp_in': linear(width, config.mlp_dim),
      'mlp_out': linear(config.mlp_dim, width),
    }

  once = {'embedding': array(config.vocab_size, width), 'final_norm': {'gain': array(width)}}
  return once | {f'layer_{layer}': block() for layer in range(config.num_layers)}


def transformer_model(params: Any, config: TransformerConfig) -> Model:
  """The transformer with `params` as a `Model`.

  Args:
    params: A nested dict as of `init_params`, of any float dtype; two-dimensional arrays are converted to
      `config.dtype`, the others to float32. Kernels may be in int8, as `int8.quantized` makes them, and stay so.
    config: The sizes.

  Raises:
    ValueError: The parameters do not have the configured shapes.
  """
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params, is_leaf=is_int8)
  layers.check_params(shapes, param_shapes(config))

  return Model(
    layers.converted(params, lambda x: config.dtype if x.ndim == 2 else jnp.float32),
    vocab_size=config.vocab_size,
    context_length=config.max_length,
    sharding_rules=TRANSFORMER_RULES,
    **model_functions(
      config,
      apply=transformer_call,
      init_cache=_init_cache,
      embed=_embed,
      unembed=_unembed,
      for_decoding=_for_decoding,
    ),
  )


def config_of(model: Model) -> TransformerConfig:
  """The configuration that a model was made with; ValueError unless `transformer_model` made it."""
  return functions.config_of(model, transformer_call, 'transformer_model')
