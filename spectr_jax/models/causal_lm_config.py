"""The sizes of a `causal_lm` decoder."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from spectr_jax.kernels.int8 import check_weights
from spectr_jax.model import KVCache
from spectr_jax.models.param_shapes import param_shapes
from spectr_jax.models.recurrent import Recurrence, RecurrentState
from spectr_jax.models.routing import Experts
from spectr_jax.sharding import MODEL

_MOST_EXPERTS = 2**17  # of all layers, five times those of any model that there is
ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'relu': jax.nn.relu,
  'relu2': lambda x: jnp.square(jax.nn.relu(x)),
}


# Sizes of layers without a window, by the fields for those of all layers.
_FULL = {
  'full_head_dim': 'head_dim',
  'full_kv_heads': 'num_kv_heads',
  'full_kv_copies': 'kv_copies',
  'full_projections': 'projections',
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
    residual_scale: Factor of what attention and MLP add to the stream.
    logit_scale: Factor of logits.
    is_tied: Whether the embedding is the output head as well.
    experts: The experts that MLPs are mixtures of, or None.
    kv_copies: How often each head of keys and values is stored, so that a mesh with more devices than heads can shard
      them.
    projections: The products that attention begins with: `qkv`; `qk` where values are the keys before their norm; `q`
      where keys and values are those of another layer.
    has_value_norm: Whether values are normalized per head, without a gain.
    full_head_dim: `head_dim` of layers without a window; None where it is the same.
    full_kv_heads: Likewise `num_kv_heads`.
    full_kv_copies: Likewise `kv_copies`.
    full_projections: Likewise `projections`.
    num_shared_layers: How many of the last layers read the keys and values of the last layer before these that has a
      window, or has none, as they do.
    shared_mlp_dim: `mlp_dim` of these; None where it is the same.
    layer_input_dim: Width of what every layer reads of the token beside the stream (per-layer embeddings); 0 for none.
    layer_vocab_size: Rows of the table of it, at least V.
    has_layer_scale: Whether the stream after every block is multiplied by a number.
    has_output_gate: Whether what heads mix is multiplied by sigmoids, whose products follow those of each query.
    recurrence: The recurrent layers, or None for none.
    parts: For each layer whether its block has `both` parts, its `mixer` (attention or recurrence) alone, or its `mlp`
      alone (Nemotron-H). Empty for both in all layers.

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
  residual_scale: float = 1.0
  logit_scale: float = 1.0
  is_tied: bool = False
  experts: Experts | None = None
  kv_copies: int = 1
  projections: Literal['qkv', 'qk', 'q'] = 'qkv'
  has_value_norm: bool = False
  full_head_dim: int | None = None
  full_kv_heads: int | None = None
  full_kv_copies: int | None = None
  full_projections: Literal['qkv', 'qk'] | None = None
  num_shared_layers: int = 0
  shared_mlp_dim: int | None = None
  layer_input_dim: int = 0
  layer_vocab_size: int = 0
  has_layer_scale: bool = False
  has_output_gate: bool = False
  recurrence: Recurrence | None = None
  parts: tuple[Literal['both', 'mixer', 'mlp'], ...] = ()

  def __post_init__(self):
    sizes = ('vocab_size', 'embed_dim', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'mlp_dim')
    check_sizes(self, *sizes, 'kv_copies')
    check_sizes(self, 'context_length', most=2**31 - 1)  # positions are int32
    scales = ('query_scale', 'embedding_scale', 'residual_scale', 'logit_scale')
    for name in (*scales, 'attention_soft_cap', 'logit_soft_cap'):
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
    self._check_kinds()
    self._check_parts()
    for rope in () if self._has_kinds else (self.rope, self.window_rope):
      if rope is not None and 2 * len(rope.frequencies) > self.head_dim:
        raise ValueError(f'{len(rope.frequencies)} rotary frequencies need heads of twice that; got {self.head_dim}')

  def _check_kinds(self) -> None:
    check_sizes(
      self, *(name for name in ('shared_mlp_dim', *_FULL) if type(getattr(self, name)) not in (str, type(None)))
    )
    if self.projections not in ('qkv', 'qk', 'q') or self.full_projections not in ('qkv', 'qk', None):
      raise ValueError(f'projections must be qkv, qk or q; got {self.projections!r}, {self.full_projections!r}')
    for name, most in (('num_shared_layers', self.num_layers - 1), ('layer_input_dim', 2**20)):
      value = getattr(self, name)
      if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f'{name} must be a whole number from 0 to {most}, got {value!r}')
    if self.layer_input_dim and self.layer_vocab_size < self.vocab_size:
      raise ValueError(f'layer_vocab_size {self.layer_vocab_size} must be at least vocab_size {self.vocab_size}')
    if not set(self._has_window[self.num_own_layers :]) <= set(self._has_window[: self.num_own_layers]):
      raise ValueError(
        f'the last {self.num_shared_layers} layers share keys and values, but none before is of their kind'
      )
    if self._has_kinds:
      for layer in range(self.num_layers):
        self.of_layer(layer)  # which checks its sizes

  def _check_parts(self) -> None:
    own = self.recurrence
    if len(self.parts) not in (0, self.num_layers) or not set(self.parts) <= {'both', 'mixer', 'mlp'}:
      raise ValueError(f'parts must be both, mixer or mlp for all {self.num_layers} layers or none')
    if own is None and not self.parts:
      return
    is_told = own is None or len(own.layers) == self.num_layers
    if not is_told or not any(map(self.has_attention, range(self.num_layers))):
      raise ValueError(f'recurrent layers must be said of all {self.num_layers} layers, one of which has attention')
    if self.num_shared_layers or self.layer_input_dim:
      raise ValueError('a decoder with recurrent layers has neither shared layers nor per-layer embeddings')
    if own is None:
      return
    if any(self.is_recurrent(layer) and not self.has_part(layer, 'mixer') for layer in range(self.num_layers)):
      raise ValueError('a layer that is an MLP alone cannot be recurrent')
    if own.kind == 'conv' and own.num_channels != self.embed_dim:
      raise ValueError(f'short convolutions must have {self.embed_dim} channels, got {own.num_channels}')

  def is_recurrent(self, layer: int) -> bool:
    """Whether a layer is recurrent."""
    return self.recurrence is not None and self.recurrence.layers[layer]

  def has_part(self, layer: int, part: Literal['mixer', 'mlp']) -> bool:
    """Whether a layer's block has one of its parts."""
    return not self.parts or self.parts[layer] in ('both', part)

  def has_attention(self, layer: int) -> bool:
    """Whether a layer has attention, alone or beside a recurrence."""
    is_replaced = self.recurrence is not None and self.recurrence.layers[layer] and not self.recurrence.has_attention
    return self.has_part(layer, 'mixer') and not is_replaced

  @property
  def num_query_parts(self) -> int:
    """The outputs of queries, and of their gates, in units of `head_dim`."""
    return self.num_heads * (2 if self.has_output_gate else 1)

  @property
  def num_cached_heads(self) -> int:
    """Heads of keys and values as they are stored."""
    return self.num_kv_heads * self.kv_copies

  @property
  def num_own_layers(self) -> int:
    """Layers with keys and values that they do not share; they come first."""
    return self.num_layers - self.num_shared_layers

  @functools.cached_property
  def _has_window(self) -> list[bool]:
    return [self.window(layer) is not None for layer in range(self.num_layers)]

  @property
  def _has_kinds(self) -> bool:
    return self.num_shared_layers > 0 or any(getattr(self, name) is not None for name in _FULL)

  @functools.cached_property
  def _kinds(self) -> dict[tuple[bool, bool], CausalLMConfig]:
    return {}

  def kv_layer(self, layer: int) -> int:
    """The layer whose keys and values a layer reads, its number among those that have any in the cache."""
    if layer < self.num_own_layers:
      return sum(map(self.has_attention, range(layer)))
    before = self._has_window[: self.num_own_layers]
    return len(before) - 1 - before[::-1].index(self._has_window[layer])

  def of_layer(self, layer: int) -> CausalLMConfig:
    """The configuration with the sizes of a layer in place of those of layers of its kind."""
    if not self._has_kinds:
      return self
    kind = has_window, is_shared = self._has_window[layer], layer >= self.num_own_layers
    if kind not in self._kinds:
      sizes: dict[str, Any] = {'rope': self.rope_of(layer), 'window_rope': None, **dict.fromkeys(_FULL)}
      if not has_window:
        sizes |= {name: getattr(self, full) for full, name in _FULL.items() if getattr(self, full) is not None}
      if is_shared:
        sizes |= {'projections': 'q', 'mlp_dim': self.shared_mlp_dim or self.mlp_dim}
      self._kinds[kind] = dataclasses.replace(self, num_shared_layers=0, shared_mlp_dim=None, **sizes)
    return self._kinds[kind]

  @property
  def num_params(self) -> int:
    """The number of parameters, copies of heads and scales not counted."""
    full_copies = self.full_kv_copies and 1
    shapes = param_shapes(dataclasses.replace(self, kv_copies=1, full_kv_copies=full_copies, weights=None))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))

  def for_mesh(self, mesh: Mesh | AbstractMesh) -> CausalLMConfig:
    """The configuration with as many copies of key-value heads as the mesh needs; ValueError if they do not fit."""
    num_shards = mesh.shape[MODEL]

    def copies(num_kv_heads, before):
      if num_kv_heads % num_shards == 0:
        return before
      if num_shards % num_kv_heads or self.num_heads % num_shards:
        raise ValueError(
          f'{self.num_heads} heads with {num_kv_heads} heads of keys and values cannot be sharded over'
          f' {MODEL}:{num_shards}'
        )
      return num_shards // num_kv_heads

    full = copies(self.full_kv_heads, 1) if self.full_kv_heads else self.full_kv_copies
    return dataclasses.replace(self, kv_copies=copies(self.num_kv_heads, self.kv_copies), full_kv_copies=full)

  def empty_states(self, batch_size: int) -> tuple[RecurrentState, ...]:
    """The states of the recurrent layers before a text."""
    own = self.recurrence
    return (
      ()
      if own is None
      else tuple(RecurrentState.empty(own, batch_size, self.dtype) for is_recurrent in own.layers if is_recurrent)
    )

  def empty_cache(self, batch_size: int, cache_size: int) -> KVCache:
    """An empty cache of the decoder's keys and values, see `KVCache.empty`."""
    own = [self.of_layer(layer) for layer in range(self.num_own_layers) if self.has_attention(layer)]
    return KVCache.empty(
      num_layers=len(own),
      batch_size=batch_size,
      num_heads=[layer.num_cached_heads for layer in own],
      head_dim=[layer.head_dim for layer in own],
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
