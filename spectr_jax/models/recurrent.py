"""Layers that keep a state of their text in place of keys and values: gated delta nets, Mamba-2, short convolutions.

Pending tokens have no state, see `kernels.recurrence`. So trees are scored exactly, and what is rejected was never
written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spectr_jax.kernels.products import accumulation_dtype, inverse_root, rounded
from spectr_jax.kernels.recurrence import Writes, convolve, fold, last_inputs, path_inputs, placed, recur
from spectr_jax.model import NO_SLOTS, KVCache
from spectr_jax.models import layers
from spectr_jax.sharding import DATA, MODEL

_EPSILON = 1e-6  # added to the squares of queries and keys of delta nets


@dataclasses.dataclass(frozen=True)
class Recurrence:
  """The recurrent layers of a decoder.

  Attributes:
    kind: `delta`, gated delta nets (Yang et al. 2025); `mamba`, Mamba-2 (Dao and Gu 2024); `conv`, gated short
      convolutions without another state.
    layers: For each layer whether it is recurrent; the others have attention.
    num_heads: H; 0 for convolutions.
    num_groups: G, a divisor of H: groups of heads that share keys and queries.
    key_dim: Width of a key, the first one of a head's state.
    value_dim: Width of a value, the second one.
    num_channels: Channels of a short convolution; 0 for the other kinds.
    conv_width: Inputs of the convolutions, the token's own included.
    has_conv_bias: Whether these have biases.
    has_bias: Whether products have biases.
    norm: Of Mamba-2, whether the norm of the output stands `behind` or `before` its gate; None for no norm.
    num_norm_groups: Of Mamba-2, the parts of the output that are normalized each by itself.
    steps: Of Mamba-2, the least and the largest step.
    has_attention: Whether these layers have attention as well, whose output is added (Falcon-H1).

  Raises:
    ValueError: A number is beyond its range, or numbers do not fit each other.
  """

  kind: Literal['delta', 'mamba', 'conv']
  layers: tuple[bool, ...]
  num_heads: int = 0
  num_groups: int = 1
  key_dim: int = 0
  value_dim: int = 0
  num_channels: int = 0
  conv_width: int = 4
  has_conv_bias: bool = False
  has_bias: bool = False
  norm: Literal['behind', 'before'] | None = 'behind'
  num_norm_groups: int = 1
  steps: tuple[float, float] = (0.0, math.inf)
  has_attention: bool = False

  def __post_init__(self):
    if self.kind not in ('delta', 'mamba', 'conv'):
      raise ValueError(f'recurrent layers must be delta, mamba or conv, got {self.kind!r}')
    sizes = {'num_channels': 2**31 - 1} if self.kind == 'conv' else {'num_heads': 2**20, 'num_groups': self.num_heads}
    sizes |= {} if self.kind == 'conv' else {'key_dim': 2**16, 'value_dim': 2**16, 'num_norm_groups': self.num_heads}
    for name, most in (sizes | {'conv_width': 64}).items():
      value = getattr(self, name)
      if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f'{name} of recurrent layers must be from 1 to {most}, got {value!r}')
    for name in ('num_groups', 'num_norm_groups'):
      if self.num_heads % getattr(self, name):
        raise ValueError(f'{self.num_heads} heads of recurrent layers do not divide into {name} {getattr(self, name)}')
    if self.norm not in ('behind', 'before', None):
      raise ValueError(f'norm of recurrent layers must be behind, before or None, got {self.norm!r}')
    if not 0 <= self.steps[0] <= self.steps[1]:
      raise ValueError(f'steps of recurrent layers must be from at least 0 to no less, got {self.steps}')

  @property
  def inner_dim(self) -> int:
    """The width of what the last product reads."""
    return self.num_channels or self.num_heads * self.value_dim

  @property
  def conv_dim(self) -> int:
    """The channels of the convolution."""
    return self.num_channels or self.inner_dim + 2 * self.num_groups * self.key_dim

  @property
  def products(self) -> dict[str, int]:
    """The widths of the products that a layer begins with, by their names."""
    if self.kind == 'delta':
      return {'into': self.conv_dim, 'z': self.inner_dim, 'b': self.num_heads, 'a': self.num_heads}
    if self.kind == 'mamba':
      return {'into': self.inner_dim + self.conv_dim + self.num_heads}
    return {'into': 3 * self.num_channels}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
  """What a recurrent layer keeps of the committed texts of rows, and of their pending tokens.

  Attributes:
    inputs: `[B, conv_width - 1, C]`, the last inputs of the convolution; zeros before a text.
    state: `[B, H, key_dim, value_dim]` in float32 or wider; None for convolutions.
    pending_inputs: `[B, M, C]`, or None when nothing is pending.
    writes: The pending tokens' for `state`, or None.
  """

  inputs: jax.Array
  state: jax.Array | None
  pending_inputs: jax.Array | None = None
  writes: Writes | None = None

  @classmethod
  def empty(cls, config: Recurrence, batch_size: int, dtype: Any) -> RecurrentState:
    """The state before a text."""
    shape = batch_size, config.num_heads, config.key_dim, config.value_dim
    state = None if config.kind == 'conv' else jnp.zeros(shape, accumulation_dtype(dtype))
    return cls(jnp.zeros((batch_size, config.conv_width - 1, config.conv_dim), dtype), state)

  def commit(self, path: jax.Array, num_committed: jax.Array) -> RecurrentState:
    """See `KVCache.commit`."""
    assert self.pending_inputs is not None
    inputs = last_inputs(self.inputs, self.pending_inputs, path, num_committed)
    state = self.state
    if state is not None and self.writes is not None:
      state = fold(state, self.writes, path, num_committed)
    return RecurrentState(inputs, state)

  def of_rows(self, is_kept: jax.Array) -> RecurrentState:
    """The state, but that before a text in rows that are not kept, bool `[B]`."""
    return jax.tree.map(lambda x: jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, 0), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
  """The keys and values of a decoder's layers with attention, and the states of its recurrent ones."""

  attention: KVCache
  recurrent: tuple[RecurrentState, ...]

  @property
  def lengths(self) -> jax.Array:
    """int32 `[B]`, the committed tokens of each row."""
    return self.attention.lengths

  def commit(self, path: jax.Array, num_committed: jax.Array) -> HybridCache:
    """See `KVCache.commit`."""
    states = tuple(state.commit(path, num_committed) for state in self.recurrent)
    return HybridCache(self.attention.commit(path, num_committed), states)

  def with_pending(self, pending: Sequence[Any], num_new: int) -> HybridCache:
    """See `KVCache.with_pending`; of every layer its keys and values, and its state with the tokens pending, if any."""
    attention = [each[:2] for each in pending if len(each) > 1]
    states = tuple(each[-1] for each in pending if len(each) % 2)
    return HybridCache(self.attention.with_pending(attention, num_new), states)

  def keep(self, lengths: jax.Array) -> HybridCache:
    """The cache of the rows whose committed tokens are `lengths` `[B]`; those of other rows begin a text."""
    is_kept = lengths == self.lengths
    attention = dataclasses.replace(self.attention, lengths=jnp.where(is_kept, lengths, 0))
    return HybridCache(attention, tuple(state.of_rows(is_kept) for state in self.recurrent))

  def slot_axes(self) -> HybridCache:
    """See `KVCache.slot_axes`."""
    return HybridCache(self.attention.slot_axes(), jax.tree.map(lambda _: NO_SLOTS, self.recurrent))

  def partition_specs(self) -> HybridCache:
    """See `KVCache.partition_specs`."""
    by_row, by_heads = PartitionSpec(DATA), PartitionSpec(DATA, MODEL)
    specs = [jax.tree.map(lambda x: by_row, dataclasses.replace(each, state=None)) for each in self.recurrent]
    states = tuple(
      dataclasses.replace(spec, state=None if each.state is None else by_heads)
      for spec, each in zip(specs, self.recurrent, strict=True)
    )
    return HybridCache(self.attention.partition_specs(), states)


@dataclasses.dataclass(frozen=True)
class Paths:
  """The paths of a call's tokens among what is pending, for all recurrent layers.

  Attributes:
    mask: bool `[1 or B, N, M]`, the pending tokens of each path, its end included.
    places: See `path_inputs`.
    num_before: The number of pending tokens of earlier calls.
  """

  mask: jax.Array
  places: jax.Array
  num_before: jax.Array | int

  @classmethod
  def of(cls, config: Recurrence, mask: jax.Array, cache: KVCache | None) -> Paths:
    num_before = cache.num_pending if cache is not None and cache.pending_keys else 0
    return cls(mask, path_inputs(mask, config.conv_width), num_before)


def mix(
  params: Mapping[str, Any],
  config: Recurrence,
  products: Sequence[jax.Array],
  paths: Paths,
  held: RecurrentState,
  epsilon: float,
) -> tuple[jax.Array, RecurrentState]:
  """What the last product of a layer reads, `[B, N, inner_dim]`, and the layer's state with the tokens pending.

  Args:
    params: `taps` `[conv_width, C]`, perhaps `taps_bias` `[C]`; but for convolutions `log_rate` and `step_bias` `[H]`,
      and perhaps `norm` of the output's channels; of Mamba-2 `skip` `[H]`.
    config: The sizes.
    products: `[B, N, width]`, those of `Recurrence.products`.
    paths: The tokens' paths.
    held: Of the committed texts.
    epsilon: Of the norm.
  """
  return _MIXERS[config.kind](params, config, products, paths, held, epsilon)


def _convolved(params, inputs, paths: Paths, held: RecurrentState):
  """The convolution's outputs in float32 or wider, and its pending inputs."""
  pending = placed(held.pending_inputs, inputs.astype(held.inputs.dtype), paths.num_before, paths.mask.shape[-1])
  out = convolve(held.inputs, pending, params['taps'], paths.places)
  return out + params['taps_bias'].astype(out.dtype) if 'taps_bias' in params else out, pending


def _heads(x, width):
  return x.reshape(*x.shape[:2], -1, width)


def _unit(x):
  return x * inverse_root(jnp.square(x).sum(-1, keepdims=True) + _EPSILON)


def _delta(params, config, products, paths, held, epsilon):
  into, z, b, a = products
  mixed, inputs = _convolved(params, into, paths, held)
  mixed = rounded(jax.nn.silu(mixed), into.dtype).astype(mixed.dtype)
  keys = config.num_groups * config.key_dim
  query, key = (_unit(_heads(x, config.key_dim)) for x in (mixed[..., :keys], mixed[..., keys : 2 * keys]))
  value = _heads(mixed[..., 2 * keys :], config.value_dim)
  steps = jax.nn.softplus(a.astype(mixed.dtype) + params['step_bias'])
  log_decay, gate = -jnp.exp(params['log_rate']) * steps, jax.nn.sigmoid(b.astype(mixed.dtype))
  scaled = query * config.key_dim**-0.5
  out, writes = recur(held.state, held.writes, scaled, key, value, log_decay, gate, paths.mask, paths.num_before)
  normed = layers.rms_norm(rounded(out, into.dtype), params['norm'], epsilon=epsilon)
  gated = normed.astype(mixed.dtype) * jax.nn.silu(_heads(z, config.value_dim).astype(mixed.dtype))
  out = rounded(gated, into.dtype).reshape(*into.shape[:2], -1)
  return out, dataclasses.replace(held, pending_inputs=inputs, writes=writes)


def _mamba(params, config, products, paths, held, epsilon):
  (product,), inner, conv = products, config.inner_dim, config.conv_dim
  z, into, steps = jnp.split(product, [inner, inner + conv], axis=-1)
  mixed, inputs = _convolved(params, into, paths, held)
  mixed = rounded(jax.nn.silu(mixed), product.dtype).astype(mixed.dtype)
  keys = config.num_groups * config.key_dim
  value = _heads(mixed[..., :inner], config.value_dim)
  key, query = (_heads(x, config.key_dim) for x in (mixed[..., inner : inner + keys], mixed[..., inner + keys :]))
  steps = jnp.clip(jax.nn.softplus(steps.astype(mixed.dtype) + params['step_bias']), *config.steps)
  log_decay, written = -jnp.exp(params['log_rate']) * steps, steps[..., None] * value
  out, writes = recur(held.state, held.writes, query, key, written, log_decay, None, paths.mask, paths.num_before)
  out, gate = (out + params['skip'][:, None] * value).reshape(z.shape), jax.nn.silu(z.astype(mixed.dtype))
  out = out if config.norm == 'before' else out * gate
  if config.norm is not None:
    parts = _heads(out, inner // config.num_norm_groups)
    parts = parts * inverse_root(jnp.square(parts).mean(-1, keepdims=True) + epsilon)
    out = parts.reshape(out.shape) * params['norm']
  out = out * gate if config.norm == 'before' else out
  return rounded(out, product.dtype), dataclasses.replace(held, pending_inputs=inputs, writes=writes)


def _conv(params, config, products, paths, held, epsilon):
  del epsilon
  before, after, x = jnp.split(products[0], 3, axis=-1)
  mixed, inputs = _convolved(params, before * x, paths, held)
  out = after * rounded(mixed, after.dtype)
  return out, dataclasses.replace(held, pending_inputs=inputs)


_MIXERS = {'delta': _delta, 'mamba': _mamba, 'conv': _conv}
