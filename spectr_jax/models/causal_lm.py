"""The decoder of all models: Llama, Mistral, Qwen, Gemma, GPT-NeoX, GPT-2, mixtures of experts, and those trained here.

`causal_lm_config` has its sizes and parameters, `transformer` trains it. A bias, a gate, an output head or a norm is
applied where the parameters have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.attention import Rotation, attend, rotary_angles
from spectr_jax.kernels.block_kernel import is_in_blocks
from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.layouts import heads_in_order
from spectr_jax.kernels.matrices import JOINED, matmul, params_for_decoding
from spectr_jax.kernels.products import accumulation_dtype, rounded, sum_of
from spectr_jax.kernels.tpu import fused_layers
from spectr_jax.model import KVCache, Model, ModelOutput, slots_of
from spectr_jax.models import experts, functions, layers
from spectr_jax.models.causal_lm_config import ACTIVATIONS, CausalLMConfig, Rope, param_shapes
from spectr_jax.models.causal_lm_config import init_params as init_params
from spectr_jax.models.causal_lm_config import lm1b_config as lm1b_config
from spectr_jax.models.functions import model_functions
from spectr_jax.sharding import CAUSAL_LM_RULES


def linear(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
  """The product of `x` `[..., in]` with `kernel` `[in, out]`, and perhaps `bias` `[out]`, in the dtype of `x`."""
  out = matmul(x, params['kernel'])
  return rounded(out + params['bias'] if 'bias' in params else out, x.dtype)


def linears(params: Mapping[str, Any], names: tuple[str, ...], x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
  """The products `[..., out]` of one input with several kernels, which `params_for_decoding` may have joined."""
  joined = params.get(JOINED[names])
  if joined is None:
    return [linear(params[name], x) for name in names]

  products = heads_in_order(linear(joined, x))
  return jnp.split(products, np.cumsum(widths)[:-1], axis=-1)


def _rms_norm(params, x, config):
  return layers.rms_norm(x, params['gain'], epsilon=config.norm_epsilon, offset=config.gain_offset)


def norm(params: Mapping[str, Any], x: jax.Array, config: CausalLMConfig) -> jax.Array:
  """The norm that a configuration names, of `x` `[..., D]`, with `gain` `[D]`, and `bias` `[D]` of layer norms."""
  if config.norm == 'rms':
    return _rms_norm(params, x, config)
  return layers.layer_norm(x, params['gain'], params['bias'], epsilon=config.norm_epsilon)


def visible_tokens(window: int | None, mask: jax.Array) -> jax.Array:
  """The pending tokens, bool `[1 or B, N, M]`, that each token attends to in a layer; a mask of that shape without a
  window.

  Those that a token sees are its ancestors in order, so their distances are differences of their ranks among them.
  """
  if window is None:
    return mask
  rank = jnp.cumsum(mask, axis=-1)
  return mask & (rank[..., -1:] - rank < window)


def visible_slots(window: int | None, positions: jax.Array, cache: KVCache) -> jax.Array:
  """The slots, bool `[B, 1 or N, S]`, that tokens at `positions` `[B, N]` attend to, by the layer's window."""
  num_slots = cache.keys[0].shape[-1]
  slots = layers.committed_slots(num_slots, cache.lengths)
  if window is None:
    return slots
  return slots & (positions[:, :, None] - jnp.arange(num_slots) < window)


def rotation_of(rope: Rope | None, positions: jax.Array) -> Rotation | None:
  """The angles of rotary positions at `positions` `[B, N]`; None for learned ones, where `rope` is None."""
  if rope is None:
    return None
  return rotary_angles(positions, jnp.asarray(rope.frequencies, jnp.float32), magnitude=rope.magnitude)


def project(params, config: CausalLMConfig, x: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, ...]:
  """Queries `[B, N, H, head_dim]`, and keys and values `[B, N, K, head_dim]`, normalized and rotated."""

  widths = [heads * config.head_dim for heads in (config.num_heads, config.num_cached_heads, config.num_cached_heads)]
  products = linears(params, ('q', 'k', 'v'), x, widths)
  if config.has_wide_qk_norm:
    products[:2] = [_rms_norm(params[f'{name}_norm'], product, config) for name, product in zip('qk', products)]
  query, key, value = (product.reshape(*x.shape[:2], -1, config.head_dim) for product in products)
  if config.has_qk_norm:
    query, key = _rms_norm(params['q_norm'], query, config), _rms_norm(params['k_norm'], key, config)
  if rotation is not None:
    query, key = layers.rotate(query, rotation), layers.rotate(key, rotation)
  return query, key, value


def mix(config: CausalLMConfig, layer: int, query, key, value, visible, cache: KVCache | None, sinks=None):
  """The mixed values `[B, N, H, head_dim]`, and the layer's pending keys and values.

  `visible` are the pending tokens, bool `[1 or B, N, M]`, and the slots, bool `[B, 1 or N, S]`, that each token sees,
  and the tokens' positions, int32 `[B, N]`; None for the slots if there is no cache. `sinks` are those of `attend`.
  """
  pending_mask, slots, positions = visible
  if cache is None:
    (keys, values), prefix = slots_of(key, value), None
  else:
    keys, values = cache.append(layer, key, value, num_pending_slots=pending_mask.shape[-1])
    prefix = None if slots is None else (cache.keys[layer], cache.values[layer], slots, positions)
  options = {'scale': config.query_scale, 'soft_cap': config.attention_soft_cap, 'sinks': sinks}
  return attend(query, keys, values, pending_mask, prefix, **options), keys, values


def attention(
  params, config: CausalLMConfig, layer: int, x, rotation, visible, cache: KVCache | None, *, mix_fn: Callable = mix
):
  """The output `[B, N, embed_dim]` for `x` `[B, N, in]`, and the layer's pending keys and values; see `mix`."""
  query, key, value = project(params, config, x, rotation)
  sinks = {'sinks': params['sinks']} if config.has_sinks else {}
  mixed, keys, values = mix_fn(config, layer, query, key, value, visible, cache, **sinks)
  return linear(params['out'], mixed.reshape(*x.shape[:2], -1)), keys, values


def mlp(params, config: CausalLMConfig, x: jax.Array) -> jax.Array:
  """The output of a layer's MLP, `[..., embed_dim]`, for `x` of that shape."""

  def activation(products):
    # Rounded once, as in PyTorch. To round after each of its operations takes CPUs longer than these.
    wide = products.astype(accumulation_dtype(products.dtype))
    return rounded(ACTIVATIONS[config.activation](wide), products.dtype)

  if config.experts is not None and 'router' in params:
    return experts.mixture(params, config.experts, activation, x)
  if config.is_gated:
    gate, up = linears(params, ('gate', 'up'), x, [config.mlp_dim] * 2)
    hidden = activation(gate) * up
  else:
    hidden = activation(linear(params['up'], x))
  return linear(params['down'], hidden)


def block(
  params,
  config: CausalLMConfig,
  layer: int,
  x,
  rotation,
  visible,
  cache: KVCache | None,
  *,
  mix_fn: Callable = mix,
  drop_fn: Callable[[str, jax.Array], jax.Array] = lambda part, out: out,
):
  """The stream `[B, N, embed_dim]` after a block, given `x` before it, and the layer's pending keys and values.

  Training has another `mix`, and drops entries of what the parts `attention` and `mlp` add.
  """

  def post(part, out):
    return drop_fn(part, norm(params[f'{part}_post_norm'], out, config) if config.has_post_norms else out)

  normed = norm(params['attention_norm'], x, config)
  attended, keys, values = attention(
    params['attention'], config, layer, normed, rotation, visible, cache, mix_fn=mix_fn
  )
  after = sum_of(x, post('attention', attended))
  normed = norm(params['mlp_norm'], x if config.is_parallel else after, config)
  return sum_of(after, post('mlp', mlp(params['mlp'], config, normed))), keys, values


def _embed(params, tokens, *, config):
  x = rounded(layers.take_rows(params['embedding'], tokens), config.dtype)
  if config.embedding_scale == 1:
    return x
  wide = accumulation_dtype(x.dtype)
  return rounded(x.astype(wide) * jnp.asarray(config.embedding_scale, x.dtype).astype(wide), x.dtype)


def _unembed(params, features, *, config):
  logits = layers.unembed(params, features)
  cap = config.logit_soft_cap
  return logits if cap is None else rounded(cap * jnp.tanh(logits / cap), logits.dtype)


def streams_of(
  params: Mapping[str, Any],
  config: CausalLMConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: KVCache | None = None,
  *,
  block_fn: Callable = block,
  constrain_fn: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[list[jax.Array], list[tuple[jax.Array, jax.Array]]]:
  """The stream before and after every block and after the final norm, and the pending keys and values of all layers.

  Training has another `block`, and constrains activations to their sharding.
  """
  x = constrain_fn(_embed(params, tokens, config=config))
  if config.rope is None:
    # Padding may stand at any position; a missing one would embed as NaN.
    x = sum_of(x, jnp.take(params['position_embedding'], positions, axis=0, mode='clip').astype(x.dtype))
  visible = {
    window: (visible_tokens(window, mask), cache and visible_slots(window, positions, cache), positions)
    for window in {config.window(layer) for layer in range(config.num_layers)}
  }
  rotations = {rope: rotation_of(rope, positions) for rope in map(config.rope_of, range(config.num_layers))}
  pending, streams = [], [x]
  for layer in range(config.num_layers):
    rotation, seen = rotations[config.rope_of(layer)], visible[config.window(layer)]
    x, keys, values = block_fn(params[f'layer_{layer}'], config, layer, x, rotation, seen, cache)
    x = constrain_fn(x)
    pending.append((keys, values))
    streams.append(x)
  return [*streams, norm(params['final_norm'], x, config)], pending


def hidden_states(params: Mapping[str, Any], config: CausalLMConfig, tokens: jax.Array) -> jax.Array:
  """The inputs of the output head, `[B, T, embed_dim]`, after all tokens `[B, T]` of whole texts, with a gradient."""
  size = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  causal = jnp.tril(jnp.ones((1, size, size), bool))
  return streams_of(params, config, tokens, positions, causal)[0][-1]


@operation
def _apply(params, tokens, positions, mask, cache, *, config, feature_layers):
  mask = mask[None] if mask.ndim == 2 else mask
  streams, pending = streams_of(params, config, tokens, positions, mask, cache)
  features = jnp.stack([streams[layer] for layer in feature_layers], axis=2) if feature_layers else None
  cache = cache.with_pending(pending, tokens.shape[1])
  return ModelOutput(_unembed(params, streams[-1], config=config), cache, features)


fused_layers.register(_apply, _embed, _unembed)


def _for_decoding(params, *, config):
  del config
  return params_for_decoding(params)


def _init_cache(batch_size, cache_size, *, config):
  return config.empty_cache(batch_size, cache_size)


def causal_lm(params: Mapping[str, Any], config: CausalLMConfig) -> Model:
  """The decoder with `params` as a `Model`.

  Args:
    params: A nested dict as of `init_params`, of any float dtype; converted to `config.dtype`. Kernels are in int8, as
      `int8.quantized` makes them, where `config.weights` says so; or they are each a `BlockKernel`.
    config: The sizes.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape.
  """

  shapes = param_shapes(config)
  layers.check_params(params, shapes)
  return Model(
    jax.tree.map(
      lambda x, shape: x if is_in_blocks(x) else jnp.asarray(x, shape.dtype), dict(params), shapes, is_leaf=is_in_blocks
    ),
    vocab_size=config.vocab_size,
    context_length=config.context_length,
    sharding_rules=CAUSAL_LM_RULES,
    **model_functions(
      config,
      apply=_apply,
      init_cache=_init_cache,
      # With learned positions the input of block 0 depends on more than the tokens.
      embed=None if config.rope is None else _embed,
      unembed=_unembed,
      for_decoding=_for_decoding,
    ),
  )


def config_of(model: Model) -> CausalLMConfig:
  """The configuration that a model was made with; ValueError unless `causal_lm` made it."""
  return functions.config_of(model, _apply, 'causal_lm')
