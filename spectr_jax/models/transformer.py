"""A decoder-only transformer behind the `Model` seam; the only module that imports Flax.

It has pre-norm RMSNorm, rotary positions, GELU and tied embeddings. Kernels are stored `[in, out]`, the order that
XLA's CPU backend multiplies in. It would copy kernels of another order at every call on several tokens, which takes up
to twice the time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from spectr_jax.model import KVCache, Model, ModelOutput
from spectr_jax.sharding import TRANSFORMER_RULES


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes of a transformer.

  Attributes:
    vocab_size: V.
    embed_dim: Width of the residual stream.
    num_layers: Number of blocks.
    num_heads: Attention heads; must divide `embed_dim` into even parts.
    mlp_dim: Hidden width of the MLP.
    max_length: Longest context it is trained for, in tokens.
    dtype: Type of activations, caches and of kernels when multiplied. Softmaxes, norms and logits are float32.

  Raises:
    ValueError: A size or the type is not allowed, or `embed_dim` is not an even multiple of `num_heads`.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  mlp_dim: int
  max_length: int
  dtype: str = 'float32'

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != 'dtype' and (not isinstance(value, int) or value < 1):
        raise ValueError(f'{field.name} must be a positive integer, got {value!r}')
    if self.embed_dim % (2 * self.num_heads):
      raise ValueError(f'embed_dim {self.embed_dim} must be an even multiple of num_heads {self.num_heads}')
    if self.dtype not in ('float32', 'bfloat16', 'float64'):
      raise ValueError(f'dtype must be float32, bfloat16 or float64, got {self.dtype!r}')

  @property
  def head_dim(self) -> int:
    """Width of an attention head."""
    return self.embed_dim // self.num_heads

  @property
  def num_params(self) -> int:
    """The exact number of parameters."""
    per_layer = 4 * self.embed_dim**2 + 2 * self.embed_dim * self.mlp_dim + 2 * self.embed_dim
    return self.vocab_size * self.embed_dim + self.num_layers * per_layer + self.embed_dim


def _accumulation_dtype(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def matmul(x: jax.Array, kernel: jax.Array, *, axis: int = 0) -> jax.Array:
  """The product of activations and a kernel, accumulated in float32 or wider.

  Args:
    x: `[..., in]`.
    kernel: `[in, out]` for axis 0, `[out, in]` for axis 1.
    axis: The kernel's input axis.

  Returns:
    `[..., out]` in the accumulation's dtype.
  """
  rows = x.reshape(-1, x.shape[-1])
  num_rows = rows.shape[0]
  if num_rows == 1 and x.dtype == jnp.bfloat16:
    # CPUs multiply a single bfloat16 row without their matrix units, which takes 8 times as long as two rows.
    rows = jnp.concatenate([rows, rows])
  contracted = ((1,), (axis,)), ((), ())
  out = jax.lax.dot_general(rows, kernel, contracted, preferred_element_type=_accumulation_dtype(x.dtype))
  return out[:num_rows].reshape(*x.shape[:-1], kernel.shape[1 - axis])


class Linear(nn.Module):
  """`matmul` with a learned kernel `[in, features]` and no bias."""

  features: int
  dtype: Any
  init_scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.variance_scaling(self.init_scale, 'fan_in', 'normal', in_axis=-1, out_axis=-2)
    # Drawn as `[out, in]`, so that a key gives the same numbers as when kernels were stored in that order.
    kernel = self.param('kernel', lambda key: init(key, (self.features, x.shape[-1])).T)
    return matmul(x, kernel.astype(self.dtype)).astype(self.dtype)


class RMSNorm(nn.Module):
  """Root-mean-square normalisation with a learned gain, computed in float32 or wider."""

  @nn.compact
  def __call__(self, x):
    gain = self.param('gain', nn.initializers.ones, (x.shape[-1],))
    wide = x.astype(_accumulation_dtype(x.dtype))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * scale * gain).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
  """Rotary position embedding with base 10000.

  Args:
    x: `[B, N, H, head_dim]`, queries or keys.
    positions: int32 `[B, N]`, their absolute positions.

  Returns:
    The rotated array, of the shape and dtype of `x`.
  """
  half = x.shape[-1] // 2
  frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x.astype(_accumulation_dtype(x.dtype)), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(query, new_keys, new_values, mask, prefix=None):
  """Attention over pending tokens and, where given, a committed prefix, normalised over both together.

  On TPUs a single query is repeated to eight, so that its products run on the matrix units. On the vector units a step
  would take twice the time.

  Args:
    query: `[B, N, H, head_dim]`.
    new_keys: `[B, H, head_dim, M]`, of pending tokens.
    new_values: `[B, H, M, head_dim]`, of pending tokens.
    mask: bool, broadcastable to `[B, 1, N, M]`, the pending tokens that each query attends to.
    prefix: None, or keys `[B, H, head_dim, S]`, values `[B, H, S, head_dim]` and lengths `[B]`.

  Returns:
    `[B, N, H, head_dim]` in the query's dtype.
  """
  arguments = query, new_keys, new_values, mask, prefix
  if query.shape[1] > 1:
    return _attend(*arguments)

  def as_eight(query, new_keys, new_values, mask, prefix):
    rows = jnp.repeat(query, 8, axis=1), new_keys, new_values, jnp.repeat(mask, 8, axis=2), prefix
    return _attend(*rows)[:, :1]

  return jax.lax.platform_dependent(*arguments, tpu=as_eight, default=_attend)


def _attend(query, new_keys, new_values, mask, prefix=None):
  """`attend` for any number of queries, without repeating them."""
  wide = _accumulation_dtype(query.dtype)
  query = query * query.shape[-1] ** -0.5
  lowest = jnp.finfo(wide).min

  def scores(keys, visible):
    return jnp.where(visible, jnp.einsum('bnhd,bhdm->bhnm', query, keys, preferred_element_type=wide), lowest)

  def mix(weights, values):
    return jnp.einsum('bhnm,bhmd->bnhd', weights.astype(values.dtype), values, preferred_element_type=wide)

  new_scores = scores(new_keys, mask)
  if prefix is None:
    weights = jax.nn.softmax(new_scores, axis=-1)
    return mix(weights, new_values).astype(query.dtype)
  keys, values, lengths = prefix
  old_scores = scores(keys, jnp.arange(keys.shape[-1]) < lengths[:, None, None, None])
  top = jnp.maximum(new_scores.max(-1, keepdims=True), old_scores.max(-1, keepdims=True))
  new_weights, old_weights = jnp.exp(new_scores - top), jnp.exp(old_scores - top)
  total = new_weights.sum(-1) + old_weights.sum(-1)
  mixed = mix(new_weights, new_values) + mix(old_weights, values)
  return (mixed / jnp.swapaxes(total, 1, 2)[..., None]).astype(query.dtype)


class Block(nn.Module):
  """One pre-norm block; returns the stream and the layer's pending keys and values."""

  config: TransformerConfig
  layer: int
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x, positions, mask, cache: KVCache | None):
    cfg = self.config
    drop = nn.Dropout(self.dropout, deterministic=not self.dropout)
    dtype = jnp.dtype(cfg.dtype)
    residual_scale = 1.0 / (2 * cfg.num_layers)
    normed = RMSNorm(name='attention_norm')(x)
    # Ordered by heads, then by query, key and value, so that a shard has all three for each of its heads.
    qkv = Linear(3 * cfg.embed_dim, dtype, name='qkv')(normed)
    qkv = qkv.reshape(*x.shape[:2], cfg.num_heads, 3, cfg.head_dim)
    query, key, value = (qkv[:, :, :, part] for part in range(3))
    query, key = rotate(query, positions), rotate(key, positions)
    keys, values = jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))
    prefix = None
    if cache is not None:
      keys, values = cache.append(self.layer, keys, values, num_pending_slots=mask.shape[-1])
      prefix = cache.keys[self.layer], cache.values[self.layer], cache.lengths
    mixed = attend(query, keys, values, mask, prefix).reshape(x.shape)
    x = x + drop(Linear(cfg.embed_dim, dtype, residual_scale, name='attention_out')(mixed))
    hidden = Linear(cfg.mlp_dim, dtype, name='mlp_in')(RMSNorm(name='mlp_norm')(x))
    x = x + drop(Linear(cfg.embed_dim, dtype, residual_scale, name='mlp_out')(nn.gelu(hidden)))
    return x, keys, values


class Transformer(nn.Module):
  """Maps tokens to float32 logits `[B, N, V]`, features `[B, N, F, embed_dim]` of F layers or None, and the new cache.

  Attributes:
    config: The sizes.
    remat: Whether a gradient recomputes the activations inside blocks instead of keeping them.
    constrain_fn: Constrains activations `[B, ...]` to their sharding.
    dropout: Probability of dropping an entry of what a block adds, in training; needs the rng `dropout` unless 0.
    feature_layers: The F layers whose hidden states are returned, numbered as in `Model.features_fn`.
  """

  config: TransformerConfig
  remat: bool = False
  constrain_fn: Callable[[jax.Array], jax.Array] = lambda x: x
  dropout: float = 0.0
  feature_layers: tuple[int, ...] = ()

  @nn.compact
  def __call__(self, tokens, positions, mask, cache: KVCache | None = None):
    cfg = self.config
    dtype = jnp.dtype(cfg.dtype)
    block = nn.remat(Block) if self.remat else Block
    # Logits have unit variance at initialisation; the inputs are scaled up to match.
    init = nn.initializers.normal(cfg.embed_dim**-0.5)
    embedding = self.param('embedding', init, (cfg.vocab_size, cfg.embed_dim))
    x = self.constrain_fn((jnp.take(embedding, tokens, axis=0) * cfg.embed_dim**0.5).astype(dtype))
    mask = mask[None, None] if mask.ndim == 2 else mask[:, None]
    pending, streams = [], [x]
    for layer in range(cfg.num_layers):
      x, keys, values = block(cfg, layer, self.dropout, name=f'layer_{layer}')(x, positions, mask, cache)
      x = self.constrain_fn(x)
      pending.append((keys, values))
      streams.append(x)
    streams.append(RMSNorm(name='final_norm')(x))
    logits = self.constrain_fn(_unembed(self.variables['params'], streams[-1], dtype))
    features = None
    if self.feature_layers:
      features = jnp.stack([streams[layer] for layer in self.feature_layers], axis=2)
    if cache is not None:
      keys, values = zip(*pending, strict=True)
      num_pending = cache.num_pending + tokens.shape[1]
      cache = dataclasses.replace(cache, pending_keys=keys, pending_values=values, num_pending=num_pending)
    return logits, features, cache


def _unembed(params, features, dtype):
  """Logits `[..., V]` of the final norm's output `[..., embed_dim]`."""
  if 'unembedding' in params:
    return matmul(features, params['unembedding'].astype(dtype))
  return matmul(features, params['embedding'].astype(dtype), axis=1)


_Outputs: TypeAlias = tuple[jax.Array, jax.Array | None, KVCache]  # of `Transformer`, called with a cache


def _apply(params, tokens, positions, mask, cache, *, config, feature_layers):
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
  return (jnp.take(params['embedding'], tokens, axis=0) * config.embed_dim**0.5).astype(config.dtype)


# One function object per configuration, so that equal models share compiled programs.


@functools.lru_cache
def _apply_fn(config, feature_layers):
  num_streams = config.num_layers + 2
  if any(not -num_streams <= layer < num_streams for layer in feature_layers):
    raise ValueError(
      f'feature layers must be from 0 to {num_streams - 1}, or from -{num_streams} to -1 counted from the last one;'
      f' got {list(feature_layers)}'
    )
  return functools.partial(_apply, config=config, feature_layers=feature_layers)


@functools.lru_cache
def _functions(config):
  """The functions of a `Model`, by field."""
  return {
    'apply_fn': _apply_fn(config, ()),
    'init_cache_fn': functools.partial(_init_cache, config=config),
    'features_fn': functools.partial(_apply_fn, config),
    'embed_fn': functools.partial(_embed, config=config),
    'unembed_fn': functools.partial(_unembed, dtype=config.dtype),
  }


def init_params(key: jax.Array, config: TransformerConfig) -> Any:
  """Randomly initialised float32 parameters, a nested dict.

  Args:
    key: A typed key.
    config: The sizes.
  """
  tokens = jnp.zeros((1, 1), jnp.int32)
  return Transformer(config).init(key, tokens, tokens, jnp.ones((1, 1), bool))['params']


def transformer_model(params: Any, config: TransformerConfig) -> Model:
  """The transformer with `params` as a `Model`.

  Args:
    params: A nested dict as of `init_params`, of any float dtype; two-dimensional arrays are converted to
      `config.dtype`, the others to float32.
    config: The sizes.

  Raises:
    ValueError: The parameters do not have the configured shapes.
  """
  expected = jax.eval_shape(functools.partial(init_params, config=config), jax.random.key(0))
  wanted, found = jax.tree.map(jnp.shape, expected), jax.tree.map(jnp.shape, params)
  if wanted != found:
    raise ValueError(f'parameters do not fit the configuration {config}: expected shapes {wanted}, got {found}')
  params = jax.tree.map(lambda x: jnp.asarray(x, config.dtype if x.ndim == 2 else jnp.float32), params)
  return Model(
    params,
    vocab_size=config.vocab_size,
    context_length=config.max_length,
    sharding_rules=TRANSFORMER_RULES,
    **_functions(config),
  )


def for_decoding(model: Model) -> Model:
  """The same model in the form that the default backend decodes fastest.

  On CPUs a float32 model gets a copy of its embedding as `[embed_dim, V]`, which cuts the time for logits of several
  tokens by a quarter. The copy takes as much memory as the embedding and does not follow changes of it, so such models
  are not for training or saving.

  Raises:
    ValueError: The model was not made by `transformer_model`.
  """
  if config_of(model).dtype != 'float32' or jax.default_backend() != 'cpu':
    return model
  unembedding = jnp.asarray(model.params['embedding']).T
  return dataclasses.replace(model, params={**model.params, 'unembedding': unembedding})


def config_of(model: Model) -> TransformerConfig:
  """The configuration that a model was made with.

  Raises:
    ValueError: The model was not made by `transformer_model`.
  """
  if not isinstance(model.apply_fn, functools.partial) or model.apply_fn.func is not _apply:
    raise ValueError('not a model made by transformer_model')
  return model.apply_fn.keywords['config']
