"""The decoder of all models: Llama, Mistral, Qwen, Gemma, GPT-NeoX, GPT-2, mixtures of experts, and those trained here.

`causal_lm_config` has its sizes and parameters, `transformer` trains it. A bias, a gate, an output head or a norm is
applied where the parameters have it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels import native
from spectr_jax.kernels.attention import Rotation, attend, rotary_angles
from spectr_jax.kernels.block_kernel import is_in_blocks
from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.layouts import heads_in_order
from spectr_jax.kernels.matrices import JOINED, joined_in_loop, matmul, params_for_decoding
from spectr_jax.kernels.products import accumulation_dtype, rounded, sum_of
from spectr_jax.kernels.tpu import fused_layers
from spectr_jax.model import KVCache, Model, ModelOutput, in_cache_layout
from spectr_jax.models import experts, functions, layers, recurrent
from spectr_jax.models.causal_lm_config import ACTIVATIONS, CausalLMConfig, Rope
from spectr_jax.models.causal_lm_config import lm1b_config as lm1b_config
from spectr_jax.models.functions import model_functions
from spectr_jax.models.param_shapes import init_params as init_params
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.models.recurrent import HybridCache, Paths, RecurrentState
from spectr_jax.sharding import CAUSAL_LM_RULES


def linear(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
  """The product of `x` `[..., in]` with `kernel` `[in, out]`, and perhaps `bias` `[out]`, in the dtype of `x`."""
  out = matmul(x, params['kernel'])
  return rounded(out + params['bias'] if 'bias' in params else out, x.dtype)


def linears(params: Mapping[str, Any], names: tuple[str, ...], x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
  """The products `[B, N, out]` of one input with several kernels, which `params_for_decoding` may have joined."""
  joined, num_parts = params.get(JOINED.get(names, '')), 1
  if joined is None:
    joined, num_parts = joined_in_loop([params[name] for name in names], x.shape[1])
  if joined is None:
    return [linear(params[name], x) for name in names]

  products = heads_in_order(linear(joined, x))
  if num_parts == 1:
    return jnp.split(products, np.cumsum(widths)[:-1], axis=-1)
  pieces = products.reshape(*x.shape[:-1], num_parts, -1)
  products = jnp.split(pieces, np.cumsum(widths)[:-1] // num_parts, axis=-1)
  return [product.reshape(*x.shape[:-1], -1) for product in products]


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


def project(params, config: CausalLMConfig, x: jax.Array, rotation: Rotation | None) -> tuple[Any, ...]:
  """Queries `[B, N, H, head_dim]`, keys and values `[B, N, K, head_dim]`, normalized and rotated, and what gates the
  outputs, like queries; None for what a layer does not have.
  """

  names = tuple(config.projections)
  heads = [config.num_query_parts if name == 'q' else config.num_cached_heads for name in names]
  products = linears(params, names, x, [number * config.head_dim for number in heads])
  if config.has_wide_qk_norm:
    products[:2] = [_rms_norm(params[f'{name}_norm'], product, config) for name, product in zip('qk', products)]
  gate = None
  query, *others = (product.reshape(*x.shape[:2], -1, config.head_dim) for product in products)
  key, value = (others[0], others[-1]) if others else (None, None)
  if config.has_output_gate:
    query, gate = query[:, :, ::2], query[:, :, 1::2]
  if config.has_qk_norm:
    query = _rms_norm(params['q_norm'], query, config)
    key = key if key is None else _rms_norm(params['k_norm'], key, config)
  if config.has_value_norm and value is not None:
    ones = jax.tree.map(jnp.ones_like, params['k_norm']['gain'])  # in the form of a gain
    value = layers.rms_norm(value, ones, epsilon=config.norm_epsilon)
  if rotation is not None:
    query, key = layers.rotate(query, rotation), key if key is None else layers.rotate(key, rotation)
  return query, key, value, gate


def read_slots(
  config: CausalLMConfig, layer: int, query, keys, values, visible, cache: KVCache | None, sinks=None
) -> jax.Array:
  """The mixed values `[B, N, H, head_dim]` of a layer's pending keys and values, and of its committed ones.

  `visible` are the pending tokens, bool `[1 or B, N, M]`, and the slots, bool `[B, 1 or N, S]`, that each token sees,
  and the tokens' positions, int32 `[B, N]`; None for the slots if there is no cache. `sinks` are those of `attend`.
  """
  pending_mask, slots, positions = visible
  prefix = None
  if cache is not None and slots is not None:
    prefix = cache.keys[layer], cache.values[layer], slots, positions
  options = {'scale': config.query_scale, 'soft_cap': config.attention_soft_cap, 'sinks': sinks}
  return attend(query, keys, values, pending_mask, prefix, **options)


def mix(config: CausalLMConfig, layer: int, query, key, value, visible, cache: KVCache | None, sinks=None):
  """The mixed values, see `read_slots`, and the layer's pending keys and values."""
  if cache is None:
    keys, values = in_cache_layout(key, value)
  else:
    keys, values = cache.append(layer, key, value, num_pending_slots=visible[0].shape[-1])
  return read_slots(config, layer, query, keys, values, visible, cache, sinks), keys, values


def attention(
  params,
  config: CausalLMConfig,
  layer: int,
  x,
  rotation,
  visible,
  cache: KVCache | None,
  *,
  mix_fn: Callable = mix,
  shared: tuple[jax.Array, jax.Array] | None = None,
):
  """The output `[B, N, embed_dim]` for `x` `[B, N, in]`, and the layer's pending keys and values; see `mix`.

  A layer without keys and values reads the pending ones `shared` and the committed ones of `layer`, another one.
  Training has another `mix`.
  """
  query, key, value, gate = project(params, config, x, rotation)
  sinks = {'sinks': params['sinks']} if config.has_sinks else {}
  if shared is None:
    mixed, keys, values = mix_fn(config, layer, query, key, value, visible, cache, **sinks)
  else:
    keys, values = shared
    mixed = read_slots(config, layer, query, keys, values, visible, cache, **sinks)
  return attention_output(params, mixed, gate), keys, values


def attention_output(params, mixed, gate: jax.Array | None):
  """The output `[B, N, embed_dim]` of mixed values `[B, N, H, head_dim]` and the products that gate them, if any."""
  if gate is not None:
    mixed = rounded(mixed * jax.nn.sigmoid(gate), mixed.dtype)
  return linear(params['out'], mixed.reshape(*mixed.shape[:2], -1))


def recurrence(
  params, config: CausalLMConfig, x, paths: Paths, held: RecurrentState
) -> tuple[jax.Array, RecurrentState]:
  """The output `[B, N, embed_dim]` of a recurrent layer for `x` of that shape, and its state with tokens pending."""
  own = config.recurrence
  assert own is not None
  products = linears(params, tuple(own.products), x, list(own.products.values()))
  mixed, held = recurrent.mix(params, own, products, paths, held, config.norm_epsilon)
  return linear(params['out'], mixed), held


def activation(config: CausalLMConfig, products: jax.Array) -> jax.Array:
  """The hidden units of products."""
  # Rounded once, as in PyTorch. To round after each of its operations takes CPUs longer than these.
  wide = products.astype(accumulation_dtype(products.dtype))
  return rounded(ACTIVATIONS[config.activation](wide), products.dtype)


def mlp(params, config: CausalLMConfig, x: jax.Array) -> jax.Array:
  """The output of a layer's MLP, `[..., embed_dim]`, for `x` of that shape."""

  if config.experts is not None and 'router' in params:
    out = experts.mixture(params, config.experts, functools.partial(activation, config), x)
    if 'shared' not in params:
      return out
    own = dataclasses.replace(config, experts=None, mlp_dim=config.experts.shared_dim)
    shared = mlp(params['shared'], own, x)
    if 'shared_gate' in params:
      gate = linear(params['shared_gate'], x)
      shared = rounded(shared * jax.nn.sigmoid(gate.astype(accumulation_dtype(x.dtype))), x.dtype)
    return sum_of(out, shared)
  if config.is_gated:
    gate, up = linears(params, ('gate', 'up'), x, [config.mlp_dim] * 2)
    hidden = activation(config, gate) * up
  else:
    hidden = activation(config, linear(params['up'], x))
  return linear(params['down'], hidden)


def _with_experts(params, config: CausalLMConfig, out: jax.Array, x: jax.Array) -> jax.Array:
  """The output of a layer's MLP and of the experts beside it, both normalized, given the stream `x` before both."""
  assert config.experts is not None
  normed, routed_by = norm(params['norm'], x, config), _rms_norm(params['router'], x, config)
  mixed = experts.mixture(params, config.experts, functools.partial(activation, config), normed, routed_by)
  return sum_of(norm(params['mlp_post_norm'], out, config), norm(params['post_norm'], mixed, config))


def block(
  params,
  config: CausalLMConfig,
  layer: int,
  x,
  *context,
  drop_fn: Callable[[str, jax.Array], jax.Array] = lambda part, out: out,
  layer_input: jax.Array | None = None,
  state: tuple[Paths, RecurrentState] | None = None,
  **options,
) -> tuple[Any, ...]:
  """The stream `[B, N, embed_dim]` after a block, given `x` before it, and what the layer has pending: keys and values,
  then a state with the tokens pending; nothing of what it does not have.

  `context` and `options` are as for `attention`, behind `x`. `layer_input` is one of `layer_inputs`, and `state` what a
  recurrent layer reads. Training drops entries of what the parts `attention` and `mlp` add.
  """

  def post(part, out):
    out = norm(params[f'{part}_post_norm'], out, config) if config.has_post_norms else out
    return drop_fn(part, out if config.residual_scale == 1 else _times(out, config.residual_scale))

  out, mixed, pending = x, [], []
  if 'attention_norm' in params:
    normed = norm(params['attention_norm'], x, config)
    if 'attention' in params:
      attended, *pending = attention(params['attention'], config, layer, normed, *context, **options)
      mixed.append(attended)
    if state is not None:
      recurred, held = recurrence(params['recurrence'], config, normed, *state)
      mixed, pending = [*mixed, recurred], [*pending, held]
    out = sum_of(x, post('attention', functools.reduce(sum_of, mixed)))
  if 'mlp_norm' in params:
    before = x if config.is_parallel else out
    hidden = mlp(params['mlp'], config, norm(params['mlp_norm'], before, config))
    if 'mixture' in params:
      hidden = _with_experts(params['mixture'], config, hidden, before)
    out = sum_of(out, post('mlp', hidden))
  if layer_input is not None:
    own = params['layer_input']
    gated = rounded(activation(config, linear(own['gate'], out)) * layer_input, out.dtype)
    out = sum_of(out, norm(own['norm'], linear(own['out'], gated), config))
  if config.has_layer_scale:
    out = _times(out, params['layer_scale'])
  return out, *pending


def _times(x: jax.Array, factor: Any) -> jax.Array:
  """`x` times a number, multiplied in float32 or wider and rounded once."""
  wide = accumulation_dtype(x.dtype)
  return rounded(x.astype(wide) * jnp.asarray(factor, wide), x.dtype)


def layer_inputs(params, config: CausalLMConfig, tokens: jax.Array, embedded: jax.Array) -> list[jax.Array | None]:
  """What each layer reads of the tokens beside the stream (per-layer embeddings), `[B, N, layer_input_dim]`: their rows
  of a table and a product of the embedded ones `[B, N, embed_dim]`, added; None for a model without.
  """
  size, num_layers = config.layer_input_dim, config.num_layers
  if not size:
    return [None] * num_layers
  own, shape = params['per_layer'], (*tokens.shape, num_layers, size)
  rows = rounded(layers.take_rows(own['embedding'], tokens), config.dtype)
  product = _times(linear(own['projection'], embedded), config.embed_dim**-0.5).reshape(shape)
  both = sum_of(
    _rms_norm(own['norm'], product, config), _times(rows, jnp.asarray(size**0.5, rows.dtype)).reshape(shape)
  )
  both = _times(both, 0.5**0.5)
  return [both[:, :, layer] for layer in range(num_layers)]


def _embed(params, tokens, *, config):
  x = rounded(layers.take_rows(params['embedding'], tokens), config.dtype)
  if config.embedding_scale == 1:
    return x
  wide = accumulation_dtype(x.dtype)
  return rounded(x.astype(wide) * jnp.asarray(config.embedding_scale, x.dtype).astype(wide), x.dtype)


def _unembed(params, features, *, config):
  logits, cap = layers.unembed(params, features), config.logit_soft_cap
  if config.logit_scale != 1:
    logits = rounded(logits * config.logit_scale, logits.dtype)
  return logits if cap is None else rounded(cap * jnp.tanh(logits / cap), logits.dtype)


def streams_of(
  params: Mapping[str, Any],
  config: CausalLMConfig,
  tokens: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  cache: KVCache | HybridCache | None = None,
  *,
  block_fn: Callable = block,
  constrain_fn: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[list[jax.Array], list[Any]]:
  """The stream before and after every block and after the final norm, and what all layers have pending, see `block`.

  Training has another `block`, and constrains activations to their sharding.
  """
  x = constrain_fn(_embed(params, tokens, config=config))
  if config.rope is None:
    # Padding may stand at any position; a missing one would embed as NaN.
    x = sum_of(x, jnp.take(params['position_embedding'], positions, axis=0, mode='clip').astype(x.dtype))
  held, kv = (
    (cache.recurrent, cache.attention) if isinstance(cache, HybridCache) else (config.empty_states(len(x)), cache)
  )
  paths = config.recurrence and Paths.of(config.recurrence, mask, kv)
  visible = {
    window: (visible_tokens(window, mask), kv and visible_slots(window, positions, kv), positions)
    for window in {config.window(layer) for layer in range(config.num_layers)}
  }
  rotations = {rope: rotation_of(rope, positions) for rope in map(config.rope_of, range(config.num_layers))}
  pending, streams, inputs, states = [], [x], layer_inputs(params, config, tokens, x), iter(held)
  for layer in range(config.num_layers):
    rotation, seen = rotations[config.rope_of(layer)], visible[config.window(layer)]
    own, source, more = config.of_layer(layer), config.kv_layer(layer), {}
    if config.is_recurrent(layer):
      more['state'] = paths, next(states)
    if inputs[layer] is not None:
      more['layer_input'] = inputs[layer]
    if layer >= config.num_own_layers:
      more['shared'] = pending[source]
    x, *new = block_fn(params[f'layer_{layer}'], own, source, x, rotation, seen, kv, **more)
    x = constrain_fn(x)
    if new and layer < config.num_own_layers:
      pending.append(new)
    streams.append(x)
  return [*streams, norm(params['final_norm'], x, config)], pending


def hidden_states(params: Mapping[str, Any], config: CausalLMConfig, tokens: jax.Array) -> jax.Array:
  """The inputs of the output head, `[B, T, embed_dim]`, after all tokens `[B, T]` of whole texts, with a gradient."""
  size = tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  causal = jnp.tril(jnp.ones((1, size, size), bool))
  with native.disabled():  # which has no gradients
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
  cache = config.empty_cache(batch_size, cache_size)
  return cache if config.recurrence is None else HybridCache(cache, config.empty_states(batch_size))


def causal_lm(params: Mapping[str, Any], config: CausalLMConfig) -> Model:
  """The decoder with `params` as a `Model`.

  Args:
    params: A nested dict as of `init_params`, of any float dtype; converted to `config.dtype`, gains to float32 or
      wider. Kernels are in int8, as `int8.quantized` makes them, where `config.weights` says so; or each is a
      `BlockKernel`.
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
