"""The sizes of a `causal_lm` decoder, the shapes of its parameters, and random ones.

Parameters are a nested dict of arrays of one dtype, with kernels `[in, out]`; matrices may be in int8. A bias, a gate,
an output head or a norm is there where the configuration says so; `param_shapes` alone decides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from spectr_jax.kernels.int8 import CHANNEL_AXES, INT8, Int8Kernel, check_weights, quantized
from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.model import KVCache
from spectr_jax.models.routing import Experts
from spectr_jax.sharding import MODEL

_MOST_EXPERTS = 2**17  # of all layers, five times those of any model that there is
ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'relu': jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotary positions.

  Attributes:
    frequencies: The F radians per position; entries of a head from 2 F on are not rotated.
    magnitude: Factor of the entries that are rotated.

  Raises:
    ValueError: A number is not finite, or the magnitude is not above 0.
  """

  frequencies: tuple[float, ...]
  magnitude: float = 1.0

  def __post_init__(self):
    if not all(map(math.isfinite, self.frequencies)):
      raise ValueError('rotary frequencies must be finite')
    if not 0 < self.magnitude < math.inf:
      raise ValueError(f'the magnitude of rotary positions must be finite and above 0, got {self.magnitude!r}')


def check_size(name: str, value: Any, most: int | None = None) -> None:
  """Checks that a number is a positive integer, at most `most`; ValueError if it is not."""
  if type(value) is not int or value < 1:
    raise ValueError(f'{name} must be a positive integer, got {value!r}')
  if most is not None and value > most:
    raise ValueError(f'{name} must be at most {most}, got {value}')


def check_sizes(config: Any, *names: str, most: int | None = None) -> None:
  """`check_size` of fields."""
  for name in names:
    check_size(name, getattr(config, name), most)


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
  """Sizes of a decoder, and what it does where families differ. The defaults are those of Llama.

  Attributes:
    vocab_size: V.
    embed_dim: Width of the residual stream.
    num_layers: Number of blocks.
    num_heads: Query heads, a multiple of `num_cached_heads`.
    num_kv_heads: Heads of keys and values.
    head_dim: Width of a head.
    mlp_dim: Hidden width of the MLP.
    context_length: Longest context it is made for, in tokens.
    dtype: Type of parameters and activations. Softmaxes, norms and logits are float32 or wider.
    cache_dtype: Type of the caches, or None for `dtype`. CPUs write bfloat16 caches by copying them, and float32 ones
      in place.
    weights: `int8` for kernels, embedding and output head in int8 with a scale per output channel; `blocks` where they
      may be of `BlockKernel`; None for `dtype`.
      Norms, biases and learned positions are of `dtype` in any case.
    rope: Rotary positions, or None for learned ones that are added to the embedding.
    window_rope: Rotary positions of the layers with a window, or None for `rope`.
    windows: For each layer, the number of last tokens that a token attends to, itself included, or None for all. Empty
      for no windows at all.
    norm: Norm of the stream: root mean square, or layer norm with a bias.
    norm_epsilon: Added to variances.
    gain_offset: Added to the gains of root-mean-square norms.
    has_qk_norm: Whether queries and keys are normalized per head.
    has_wide_qk_norm: Whether they are normalized over all heads together.
    has_sinks: Whether each head has a learned score that counts in its softmax and mixes no value.
    has_post_norms: Whether the outputs of attention and MLP are normalized.
    is_parallel: Whether attention and MLP of a block both read the block's input.
    has_qkv_bias: Whether queries, keys and values have biases.
    has_out_bias: Whether the output of attention has a bias.
    has_mlp_bias: Whether the MLP's products have biases.
    is_gated: Whether the MLP multiplies its hidden units by a gate.
    activation: A name of `ACTIVATIONS`.
    query_scale: Factor of queries, or None for `head_dim ** -0.5`.
    attention_soft_cap: Bound of attention's scores, or None.
    logit_soft_cap: Bound of logits, or None.
    embedding_scale: Factor of embedded tokens.
    is_tied: Whether the embedding is the output head as well.
    experts: The experts that MLPs are mixtures of, or None.
    kv_copies: How often each head of keys and values is stored, so that a mesh with more devices than heads can shard
      them.

  Raises:
    ValueError: Sizes do not fit each other, a name is unknown, or a number is beyond its range.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  context_length: int
  dtype: str = 'float32'
  weights: Literal['int8', 'blocks'] | None = None
  cache_dtype: str | None = None
  rope: Rope | None = None
  window_rope: Rope | None = None
  windows: tuple[int | None, ...] = ()
  norm: Literal['rms', 'layer'] = 'rms'
  norm_epsilon: float = 1e-6
  gain_offset: float = 0.0
  has_qk_norm: bool = False
  has_wide_qk_norm: bool = False
  has_sinks: bool = False
  has_post_norms: bool = False
  is_parallel: bool = False
  has_qkv_bias: bool = False
  has_out_bias: bool = False
  has_mlp_bias: bool = False
  is_gated: bool = True
  activation: str = 'silu'
  query_scale: float | None = None
  attention_soft_cap: float | None = None
  logit_soft_cap: float | None = None
  embedding_scale: float = 1.0
  is_tied: bool = False
  experts: Experts | None = None
  kv_copies: int = 1

  def __post_init__(self):
    sizes = ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_dim')
    check_sizes(self, *sizes, 'kv_copies')
    check_sizes(self, 'context_length', most=2**31 - 1)  # positions are int32
    for name in ('query_scale', 'attention_soft_cap', 'logit_soft_cap', 'embedding_scale'):
      value = getattr(self, name)
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f'{name} must be finite and above 0, got {value!r}')
    if not 0 <= self.norm_epsilon < math.inf:
      raise ValueError(f'norm_epsilon must be finite and at least 0, got {self.norm_epsilon!r}')
    if any(window is not None and (type(window) is not int or window < 1) for window in self.windows):
      raise ValueError(f'windows must be positive integers or None, got {reprlib.repr(self.windows)}')
    if self.num_heads % self.num_cached_heads:
      raise ValueError(
        f'num_heads {self.num_heads} must be a multiple of the {self.num_cached_heads} heads of keys and values'
      )
    dtypes = ('float32', 'bfloat16', 'float64')
    for name, allowed in (
      ('dtype', dtypes),
      ('cache_dtype', (*dtypes, None)),
      ('norm', ('rms', 'layer')),
      ('activation', tuple(ACTIVATIONS)),
    ):
      if getattr(self, name) not in allowed:
        raise ValueError(f'{name} must be one of {", ".join(map(str, allowed))}; got {getattr(self, name)!r}')
    check_weights(self.weights)
    if len(self.windows) not in (0, self.num_layers):
      raise ValueError(f'windows must be given for all {self.num_layers} layers or none, got {len(self.windows)}')
    if self.experts is not None and len(self.experts.layers) not in (0, self.num_layers):
      raise ValueError(f'experts must be said of all {self.num_layers} layers, got {len(self.experts.layers)}')
    if self.experts is not None and self.num_layers * self.experts.num > _MOST_EXPERTS:
      raise ValueError(f'{self.num_layers} layers of {self.experts.num} experts are too many; at most {_MOST_EXPERTS}')
    for rope in (self.rope, self.window_rope):
      if rope is not None and 2 * len(rope.frequencies) > self.head_dim:
        raise ValueError(f'{len(rope.frequencies)} rotary frequencies need heads of twice that; got {self.head_dim}')

  @property
  def num_cached_heads(self) -> int:
    """Heads of keys and values as they are stored."""
    return self.num_kv_heads * self.kv_copies

  @property
  def num_params(self) -> int:
    """The number of parameters, copies of heads and scales not counted."""
    shapes = param_shapes(dataclasses.replace(self, kv_copies=1, weights=None))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

  def for_mesh(self, mesh: Mesh | AbstractMesh) -> CausalLMConfig:
    """The configuration with as many copies of key-value heads as the mesh needs; ValueError if they do not fit."""
    num_shards, num_kv_heads = mesh.shape[MODEL], self.num_kv_heads
    if num_kv_heads % num_shards == 0:
      return self
    if num_shards % num_kv_heads or self.num_heads % num_shards:
      raise ValueError(
        f'{self.num_heads} heads with {num_kv_heads} heads of keys and values cannot be sharded over'
        f' {MODEL}:{num_shards}'
      )
    return dataclasses.replace(self, kv_copies=num_shards // num_kv_heads)

  def empty_cache(self, batch_size: int, cache_size: int) -> KVCache:
    """An empty cache of the decoder's keys and values, see `KVCache.empty`."""
    return KVCache.empty(
      num_layers=self.num_layers,
      batch_size=batch_size,
      num_heads=self.num_cached_heads,
      head_dim=self.head_dim,
      cache_size=cache_size,
      dtype=self.cache_dtype or self.dtype,
    )

  def window(self, layer: int) -> int | None:
    """The window of a layer, or None for all tokens."""
    return self.windows[layer] if self.windows else None

  def rope_of(self, layer: int) -> Rope | None:
    """The rotary positions of a layer, or None for learned ones."""
    has_own = self.window_rope is not None and self.window(layer) is not None
    return self.window_rope if has_own else self.rope


def lm1b_config(
  vocab_size: int,
  embed_dim: int,
  num_layers: int,
  num_heads: int,
  mlp_dim: int,
  context_length: int,
  dtype: str = 'float32',
) -> CausalLMConfig:
  """The decoder that is trained here, shaped as Flax's LM1B example: an MLP without a gate, and tied embeddings.

  Whole heads are rotated, with base 10000. Inputs are scaled up to unit variance.

  Raises:
    ValueError: A size or the type is not allowed, or `embed_dim` is not an even multiple of `num_heads`.
  """
  for name, value in (('embed_dim', embed_dim), ('num_heads', num_heads)):
    check_size(name, value)
  if embed_dim % (2 * num_heads):
    raise ValueError(f'embed_dim {embed_dim} must be an even multiple of num_heads {num_heads}')
  head_dim = embed_dim // num_heads
  half = head_dim // 2
  return CausalLMConfig(
    vocab_size,
    embed_dim,
    num_layers,
    num_heads,
    num_kv_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    context_length=context_length,
    dtype=dtype,
    rope=Rope(tuple(10000.0 ** (-i / half) for i in range(half))),
    is_gated=False,
    activation='gelu_tanh',
    embedding_scale=embed_dim**0.5,
    is_tied=True,
  )


def is_lm1b(config: CausalLMConfig) -> bool:
  """Whether a configuration is one of `lm1b_config`, whatever the type of its caches and the copies of its weights."""
  if config.embed_dim % (2 * config.num_heads):
    return False
  names = ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'mlp_dim', 'context_length', 'dtype')
  plain = lm1b_config(*(getattr(config, name) for name in names))
  return dataclasses.replace(config, cache_dtype=None, weights=None) == plain


def param_shapes(config: CausalLMConfig) -> dict[str, Any]:
  """The shapes of all parameters, a nested dict of `jax.ShapeDtypeStruct`, and of `Int8Kernel` of these."""

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

  def norm():
    return {'gain': array(width)} | ({'bias': array(width)} if config.norm == 'layer' else {})

  width, head_dim = config.embed_dim, config.head_dim
  query_width, kv_width = config.num_heads * head_dim, config.num_cached_heads * head_dim

  def mlp():
    into = {name: linear(width, config.mlp_dim, config.has_mlp_bias) for name in ('gate', 'up')[not config.is_gated :]}
    return {**into, 'down': linear(config.mlp_dim, width, config.has_mlp_bias)}

  def mixture(experts):
    router = {'kernel': array(width, experts.num)}
    router |= {'bias': array(experts.num)} if experts.has_bias else {}
    router |= {'choice_bias': array(experts.num)} if experts.has_choice_bias else {}
    into = {name: linear(width, experts.hidden_dim, experts.has_bias, experts.num) for name in ('gate', 'up')}
    down = linear(experts.hidden_dim, width, experts.has_bias, experts.num)
    return {'router': router, 'experts': {**into, 'down': down}}

  def block(layer):
    attention: dict[str, Any] = {
      'q': linear(width, query_width, config.has_qkv_bias),
      'k': linear(width, kv_width, config.has_qkv_bias),
      'v': linear(width, kv_width, config.has_qkv_bias),
      'out': linear(query_width, width, config.has_out_bias),
    }
    if config.has_qk_norm or config.has_wide_qk_norm:
      widths = (query_width, kv_width) if config.has_wide_qk_norm else (head_dim, head_dim)
      attention |= {f'{name}_norm': {'gain': array(size)} for name, size in zip('qk', widths)}
    if config.has_sinks:
      attention['sinks'] = array(config.num_heads)
    experts = config.experts if config.experts and config.experts.are_in(layer) else None
    norms = {'attention_norm': norm(), 'mlp_norm': norm()}
    if config.has_post_norms:
      norms |= {'attention_post_norm': norm(), 'mlp_post_norm': norm()}
    return {'attention': attention, 'mlp': mixture(experts) if experts else mlp(), **norms}

  shapes = matrix('embedding', config.vocab_size, width) | {'final_norm': norm()}
  if config.rope is None:
    shapes['position_embedding'] = array(config.context_length, width)
  if not config.is_tied:
    shapes |= matrix('unembedding', width, config.vocab_size)
  return shapes | {f'layer_{layer}': block(layer) for layer in range(config.num_layers)}


def init_params(key: jax.Array, config: CausalLMConfig) -> dict[str, Any]:
  """Random parameters for a typed key; activations are near unit variance."""
  shapes, structure = jax.tree_util.tree_flatten_with_path(param_shapes(dataclasses.replace(config, weights=None)))

  def draw(key, path, shape):
    scale = shape.shape[-2] ** -0.5 if path[-1].key in ('kernel', 'unembedding') else shape.shape[-1] ** -0.5
    offset = 1.0 - config.gain_offset if path[-1].key == 'gain' else 0.0
    return (offset + scale * jax.random.normal(key, shape.shape)).astype(shape.dtype)

  keys = jax.random.split(key, len(shapes))
  params = jax.tree.unflatten(structure, [draw(key, *shape) for key, shape in zip(keys, shapes)])
  return quantized(params) if config.weights == INT8 else params
