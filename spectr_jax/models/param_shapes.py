"""The shapes of the parameters of a `causal_lm` decoder, and random ones.

Parameters are a nested dict of arrays of one dtype, with kernels `[in, out]`; matrices may be in int8. A bias, a gate,
an output head or a norm is there where the configuration says so; `param_shapes` alone decides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.kernels.int8 import CHANNEL_AXES, INT8, Int8Kernel, quantized
from spectr_jax.kernels.products import accumulation_dtype


def param_shapes(config: Any) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`, and of `Int8Kernel` of these.

  `config` is a `CausalLMConfig`, which counts its parameters by this function.
  """

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, config.dtype)

  def matrix(name, *shape) -> dict[str, Any]:
    if config.weights != INT8:
      return {name: array(*shape)}
    axis = CHANNEL_AXES[name]
    scale = jax.ShapeDtypeStruct((*shape[:-2], shape[axis - 2]), accumulation_dtype(config.dtype))
    return {name: Int8Kernel(jax.ShapeDtypeStruct(shape, jnp.int8), scale, axis)}

  def linear(num_in, num_out, has_bias, *stack):
    return matrix('kernel', *stack, num_in, num_out) | ({'bias': array(*stack, num_out)} if has_bias else {})

  def gain(width):
    # Gains are multiplied in float32. TPUs would convert them anew in every round.
    return {'gain': jax.ShapeDtypeStruct((width,), accumulation_dtype(config.dtype))}

  def norm():
    return gain(width) | ({'bias': array(width)} if config.norm == 'layer' else {})

  width, input_dim = config.embed_dim, config.layer_input_dim

  def mlp(config):
    into = {name: linear(width, config.mlp_dim, config.has_mlp_bias) for name in ('gate', 'up')[not config.is_gated :]}
    return {**into, 'down': linear(config.mlp_dim, width, config.has_mlp_bias)}

  def mixture(experts):
    router = {'kernel': array(width, experts.num)}
    router |= {'bias': array(experts.num)} if experts.has_bias else {}
    if experts.has_choice_bias:  # small differences of large numbers
      router['choice_bias'] = jax.ShapeDtypeStruct((experts.num,), accumulation_dtype(config.dtype))
    names = ('gate', 'up')[not config.is_gated :]
    into = {name: linear(width, experts.hidden_dim, experts.has_bias, experts.num) for name in names}
    down = linear(experts.hidden_dim, width, experts.has_bias, experts.num)
    params = {'router': router, 'experts': {**into, 'down': down}}
    if experts.shared_dim:
      params['shared'] = mlp(dataclasses.replace(config, mlp_dim=experts.shared_dim))
    if experts.has_shared_gate:
      params['shared_gate'] = linear(width, 1, False)
    if experts.are_beside_mlp:
      router |= gain(width) | {'expert_scale': array(experts.num)}
      params |= {name: norm() for name in ('norm', 'post_norm', 'mlp_post_norm')}
    return params

  def recurrence(own):
    of_heads = gain(own.num_heads)['gain']
    params = {name: linear(width, size, own.has_bias) for name, size in own.products.items()}
    params |= {'out': linear(own.inner_dim, width, own.has_bias), 'taps': array(own.conv_width, own.conv_dim)}
    params |= {'taps_bias': array(own.conv_dim)} if own.has_conv_bias else {}
    if own.kind == 'conv':
      return params
    norm_dim = own.value_dim if own.kind == 'delta' else own.inner_dim
    params |= {'log_rate': of_heads, 'step_bias': of_heads}
    params |= {'norm': gain(norm_dim)['gain']} if own.norm else {}
    return params | ({'skip': of_heads} if own.kind == 'mamba' else {})

  def block(layer):
    own = config.of_layer(layer)
    head_dim = own.head_dim
    query_width, kv_width = own.num_heads * head_dim, own.num_cached_heads * head_dim
    attention: dict[str, Any] = {'out': linear(query_width, width, own.has_out_bias)}
    for name in own.projections:
      outputs = own.num_query_parts * head_dim if name == 'q' else kv_width
      attention[name] = linear(width, outputs, own.has_qkv_bias)
    if own.has_qk_norm or own.has_wide_qk_norm:
      widths = {'q': query_width, 'k': kv_width} if own.has_wide_qk_norm else dict.fromkeys('qk', head_dim)
      attention |= {f'{name}_norm': gain(widths[name]) for name in own.projections if name != 'v'}
    if own.has_sinks:
      attention['sinks'] = array(own.num_heads)
    has_mlp = own.has_part(layer, 'mlp')
    experts = own.experts if has_mlp and own.experts and own.experts.are_in(layer) else None
    parts = (['attention'] if own.has_part(layer, 'mixer') else []) + (['mlp'] if has_mlp else [])
    kinds = ('norm', 'post_norm') if own.has_post_norms else ('norm',)
    params: dict[str, Any] = {f'{part}_{kind}': norm() for part in parts for kind in kinds}
    if own.has_attention(layer):
      params['attention'] = attention
    if own.is_recurrent(layer):
      params['recurrence'] = recurrence(own.recurrence)
    if has_mlp and (experts is None or experts.are_beside_mlp):
      params['mlp'] = mlp(own)
    if experts is not None:
      params['mixture' if experts.are_beside_mlp else 'mlp'] = mixture(experts)
    if input_dim:
      into, out = linear(width, input_dim, False), linear(input_dim, width, False)
      params['layer_input'] = {'gate': into, 'out': out, 'norm': norm()}
    return params | ({'layer_scale': array(1)} if own.has_layer_scale else {})

  shapes = matrix('embedding', config.vocab_size, width) | {'final_norm': norm()}
  if config.rope is None:
    shapes['position_embedding'] = array(config.context_length, width)
  if not config.is_tied:
    shapes |= matrix('unembedding', width, config.vocab_size)
  if input_dim:
    all_inputs = config.num_layers * input_dim
    table = matrix('embedding', config.layer_vocab_size, all_inputs)
    shapes['per_layer'] = table | {'projection': linear(width, all_inputs, False), 'norm': gain(input_dim)}
  return shapes | {f'layer_{layer}': block(layer) for layer in range(config.num_layers)}


def init_params(key: jax.Array, config: Any) -> dict[str, Any]:
  """Random parameters for a typed key; activations are near unit variance."""
  shapes, structure = jax.tree_util.tree_flatten_with_path(param_shapes(dataclasses.replace(config, weights=None)))

  def draw(key, path, shape):
    scale = shape.shape[-2] ** -0.5 if path[-1].key in ('kernel', 'unembedding') else shape.shape[-1] ** -0.5
    if path[-1].key == 'layer_scale':
      return jnp.full(shape.shape, 0.5, shape.dtype)
    offset = 1.0 - config.gain_offset if path[-1].key == 'gain' else float(path[-1].key in ('norm', 'skip'))
    return (offset + scale * jax.random.normal(key, shape.shape)).astype(shape.dtype)

  keys = jax.random.split(key, len(shapes))
  params = jax.tree.unflatten(structure, [draw(key, *shape) for key, shape in zip(keys, shapes)])
  return quantized(params) if config.weights == INT8 else params
