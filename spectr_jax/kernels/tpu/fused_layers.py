"""All layers of a small transformer on a few tokens as one TPU kernel.

A small draft scores some eight nodes of a tree at a time. As operations of XLA that is some twenty launches per layer,
each of which takes longer than its work. Here the weights of a layer are read while the layer before is computed, and
the tokens stay on the chip. The plain form is that of `causal_lm`, which this equals up to rounding; it is
for the sizes of `lm1b_config` alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.dispatch import Operation, is_round_on_one_device
from spectr_jax.kernels.products import inverse_root
from spectr_jax.model import KVCache, ModelOutput
from spectr_jax.models.causal_lm_config import is_lm1b

_SUBLANES = 8
_SLOTS = 16  # pending slots come in multiples: the rows of a bfloat16 tile
_MEMORY = 64 * 2**20  # of the vector memory's 128 MiB on v5e and v6e
_MOST_ROWS = 16  # the kernel's code has a part for each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedLayers:
  """The kernels of all layers, stacked.

  Projections are those of queries, keys and values, and of queries and keys once more, with the two entries of a
  rotated pair exchanged and the first of them negated. `mlp_out` is transposed, so that no kernel has more padding than
  its inputs need.
  """

  projections: jax.Array  # `[num_layers, 5, D, D]`
  attention_out: jax.Array  # `[num_layers, D, D]`
  mlp_in: jax.Array  # `[num_layers, D, F]`
  mlp_out: jax.Array  # `[num_layers, D, F]`
  gains: jax.Array  # float32 `[num_layers, 2, D]`, of the norms before attention and before the MLP
  final_gain: jax.Array  # float32 `[1, D]`


def fuse(params: Mapping[str, Any], config: Any) -> FusedLayers:
  """The layers of a decoder's parameters in the kernel's form; their kernels are plain arrays."""
  num_heads, head_dim = config.num_heads, config.head_dim
  half = head_dim // 2
  by_layer = [params[f'layer_{i}'] for i in range(config.num_layers)]

  def projections(layer):
    query, key, value = (layer['attention'][part]['kernel'].reshape(-1, num_heads, head_dim) for part in 'qkv')
    exchanged = (jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) for x in (query, key))
    return jnp.stack([x.reshape(len(x), -1) for x in (query, key, value, *exchanged)])

  def stacked(part, name):
    return jnp.stack([layer[part][name]['kernel'] for layer in by_layer])

  gains = [jnp.stack([layer[name]['gain'] for name in ('attention_norm', 'mlp_norm')]) for layer in by_layer]
  return FusedLayers(
    projections=jnp.stack([projections(layer) for layer in by_layer]),
    attention_out=stacked('attention', 'out'),
    mlp_in=stacked('mlp', 'up'),
    mlp_out=jnp.swapaxes(stacked('mlp', 'down'), 1, 2),
    gains=jnp.stack(gains).astype(jnp.float32),
    final_gain=params['final_norm']['gain'][None].astype(jnp.float32),
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedCache:
  """A `KVCache` during a round of calls of the kernel, with all layers in one array and the heads in one dimension."""

  cache: KVCache  # before the round
  keys: jax.Array  # `[num_layers, B, D, S]`, its committed slots
  values: jax.Array  # the same
  pending_keys: jax.Array  # `[num_layers, B, M, D]`, of the round; M is a multiple of 16
  pending_values: jax.Array  # the same
  num_pending: jax.Array  # int32 scalar, the number of pending slots already written

  @classmethod
  def of(cls, cache: KVCache, num_pending_slots: int) -> FusedCache:
    """A cache without pending tokens, with room for those of a round."""

    def stacked(arrays):
      array = jnp.stack(arrays)
      return array.reshape(*array.shape[:2], -1, array.shape[-1])

    keys, values = stacked(cache.keys), stacked([jnp.swapaxes(x, 2, 3) for x in cache.values])
    size = -(-num_pending_slots // _SLOTS) * _SLOTS
    pending = jnp.zeros((*keys.shape[:2], size, keys.shape[2]), keys.dtype)
    return cls(cache, keys, values, pending, pending, jnp.zeros((), jnp.int32))

  def commit(self, path: jax.Array, num_committed: jax.Array) -> KVCache:
    """`KVCache.commit` of the cache before the round with the round's tokens pending."""
    num_heads, head_dim = self.cache.keys[0].shape[1:3]

    def by_heads(pending):
      return jnp.moveaxis(pending.reshape(*pending.shape[:3], num_heads, head_dim), 2, 3)

    # Only what is on the path can be kept.
    on_path = path[None, :, :, None]
    keys, values = (by_heads(jnp.take_along_axis(x, on_path, axis=2)) for x in (self.pending_keys, self.pending_values))
    cache = dataclasses.replace(self.cache, pending_keys=tuple(jnp.swapaxes(keys, 3, 4)), pending_values=tuple(values))
    return cache.commit(jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape), num_committed)


def _padded_tokens(num_tokens: int) -> int:
  return -(-num_tokens // _SUBLANES) * _SUBLANES


def fits(config: Any, batch_size: int, num_slots: int, cache_size: int) -> bool:
  """Whether the kernel takes the calls of a round: two layers with their caches fit into the vector memory.

  `num_slots` are the pending slots of a row, also the most tokens of a call; `cache_size` are committed ones.
  """
  size, wide = jnp.dtype(config.dtype).itemsize, -(-config.embed_dim // 128) * 128
  num_tokens = -(-num_slots // _SLOTS) * _SLOTS
  weights = config.embed_dim * (6 * wide + 2 * (config.mlp_dim + 128))
  caches = 2 * batch_size * config.embed_dim * (cache_size + 128) + 4 * batch_size * num_tokens * wide
  scores = 4 * config.num_heads * num_tokens * (cache_size + num_tokens + 2 * wide)
  activations = batch_size * num_tokens * (12 * wide + 2 * config.mlp_dim)
  return batch_size <= _MOST_ROWS and 2 * size * (weights + caches) + 4 * (scores + activations) <= _MEMORY


def _kernel(
  lengths, first, x_in, cos, sin, mask, keys, values, old_keys, old_values, projections, attention_out, mlp_in,
  mlp_out, gains, final_gain, x_out, pending_keys, pending_values, stream, mixed, *, config, num_rows, num_new,
):  # fmt: skip
  """One layer; the grid visits the layers, and `stream` keeps the tokens between them."""
  from jax.experimental import pallas as pl

  layer = pl.program_id(0)
  dtype, wide = x_in.dtype, jnp.float32
  num_tokens = x_in.shape[0] // num_rows
  num_heads, head_dim = config.num_heads, config.head_dim

  @pl.when(layer == 0)
  def _():
    stream[...] = x_in[...].astype(wide)

  def rounded(x):  # activations have the model's type wherever the plain form rounds them to it
    return x.astype(dtype).astype(wide)

  def dot(x, y, axis=0):
    precision = jax.lax.Precision.HIGHEST if y.dtype == wide else None
    axes = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x.astype(y.dtype), y, axes, precision=precision, preferred_element_type=wide)

  def norm(x, gain):
    mean = jnp.sum(jnp.square(x), axis=-1, keepdims=True) / x.shape[-1]
    return x * inverse_root(mean + 1e-6) * gain

  x = stream[...]
  normed = norm(x, gains[0, :1])
  query, key, value, turned_query, turned_key = (rounded(dot(normed, projections[0, part])) for part in range(5))
  query = rounded(rounded(query * cos[...] + turned_query * sin[...]) * head_dim**-0.5)
  key = rounded(key * cos[...] + turned_key * sin[...])

  place = jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
  starts = range(0, num_heads * head_dim, head_dim)
  of_head = [((place >= start) & (place < start + head_dim)).astype(wide) for start in starts]
  num_slots = old_keys.shape[2]
  # The new tokens' slots: entry (m, i) says whether slot m is that of token i.
  slot = jax.lax.broadcasted_iota(jnp.int32, (num_slots, num_tokens), 0) - first[0]
  is_slot = (slot == jax.lax.broadcasted_iota(jnp.int32, slot.shape, 1)) & (slot < num_new)
  is_new = jnp.sum(is_slot.astype(wide), axis=1, keepdims=True) > 0
  smallest = jnp.finfo(wide).min

  def attend(row):
    tokens = slice(row * num_tokens, (row + 1) * num_tokens)

    def put(new, old, out):
      # A product with zeros and a single one is exact.
      spread = dot(is_slot.astype(dtype), new[tokens].astype(dtype))
      out[0, row] = jnp.where(is_new, spread, old[0, row].astype(wide)).astype(dtype)
      return out[0, row]

    own_keys, own_values = put(key, old_keys, pending_keys), put(value, old_values, pending_values)
    # Heads below each other, each with zeros in place of the others, so that one product serves all.
    queries = jnp.concatenate([query[tokens] * mine for mine in of_head])
    new_scores, old_scores = dot(queries, own_keys, axis=1), dot(queries, keys[0, row])
    is_visible = jnp.concatenate([mask[tokens]] * num_heads) > 0
    new_scores = jnp.where(is_visible, new_scores, smallest)
    is_committed = jax.lax.broadcasted_iota(jnp.int32, old_scores.shape, 1) < lengths[row]
    old_scores = jnp.where(is_committed, old_scores, smallest)
    top = jnp.maximum(new_scores.max(-1, keepdims=True), old_scores.max(-1, keepdims=True))
    new_weights, old_weights = jnp.exp(new_scores - top), jnp.exp(old_scores - top)
    total = new_weights.sum(-1, keepdims=True) + old_weights.sum(-1, keepdims=True)
    weighed = (
      dot(new_weights.astype(dtype), own_values) + dot(old_weights.astype(dtype), values[0, row], axis=1)
    ) / total
    by_head = (weighed[i * num_tokens : (i + 1) * num_tokens] * mine for i, mine in enumerate(of_head))
    mixed[tokens] = functools.reduce(jnp.add, by_head)

  for row in range(num_rows):
    attend(row)
  x = rounded(x + rounded(dot(mixed[...], attention_out[0])))
  hidden = rounded(dot(norm(x, gains[0, 1:]), mlp_in[0]))
  x = rounded(x + rounded(dot(jax.nn.gelu(hidden), mlp_out[0], axis=1)))
  stream[...] = x

  @pl.when(layer == config.num_layers - 1)
  def _():
    x_out[...] = norm(x, final_gain[...]).astype(dtype)


def apply_layers(
  fused: FusedLayers, x: jax.Array, positions: jax.Array, mask: jax.Array, cache: FusedCache, *, config: Any
) -> tuple[jax.Array, FusedCache]:
  """All layers and the final norm: `[B, N, D]`, and the cache with the call's tokens pending behind those of before.

  `x` `[B, N, D]` are embedded tokens; `mask`, bool `[1 or B, N, M]`, names the pending tokens that each attends to.
  """
  from jax.experimental import pallas as pl  # takes seconds to import
  from jax.experimental.pallas import tpu as pltpu

  from spectr_jax.kernels.tpu.calls import call_kernel

  batch_size, num_new, width = x.shape
  num_tokens = _padded_tokens(num_new)
  num_slots = cache.pending_keys.shape[2]
  frequencies = jnp.asarray(np.tile(config.rope.frequencies, 2 * config.num_heads), jnp.float32)

  def by_token(array, size=None):
    size = array.shape[-1] if size is None else size
    wide = jnp.broadcast_to(array, (batch_size, *array.shape[1:]))
    padding = ((0, 0), (0, num_tokens - num_new), (0, size - array.shape[-1]))
    return jnp.pad(wide, padding).reshape(-1, size)

  angles = by_token(positions[..., None].astype(jnp.float32)) * frequencies
  arguments = (
    jnp.minimum(cache.cache.lengths, cache.keys.shape[3]), cache.num_pending[None], by_token(x), jnp.cos(angles),
    jnp.sin(angles), by_token(mask.astype(jnp.float32), num_slots), cache.keys, cache.values, cache.pending_keys,
    cache.pending_values, *(getattr(fused, field.name) for field in dataclasses.fields(fused)),
  )  # fmt: skip
  in_scalar_memory = pl.BlockSpec(memory_space=pltpu.SMEM)

  def whole(array):
    return pl.BlockSpec(array.shape, lambda _: (0,) * array.ndim)

  def of_layer(array):
    return pl.BlockSpec((1, *array.shape[1:]), lambda layer: (layer,) + (0,) * (array.ndim - 1))

  streams = [whole(array) for array in arguments[2:6]]
  by_layer = [of_layer(array) for array in arguments[6:-1]]
  tokens = jax.ShapeDtypeStruct((batch_size * num_tokens, width), x.dtype)
  pending = jax.ShapeDtypeStruct(cache.pending_keys.shape, cache.pending_keys.dtype)
  out, pending_keys, pending_values = call_kernel(
    functools.partial(_kernel, config=config, num_rows=batch_size, num_new=num_new),
    *arguments,
    grid=(config.num_layers,),
    in_specs=[in_scalar_memory, in_scalar_memory, *streams, *by_layer, whole(arguments[-1])],
    out_specs=[whole(tokens), of_layer(pending), of_layer(pending)],
    out_shape=[tokens, pending, pending],
    scratch_shapes=[pltpu.VMEM(tokens.shape, jnp.float32)] * 2,
    input_output_aliases={8: 1, 9: 2},
    needs_memory=True,
    name='transformer_layers',
  )
  cache = dataclasses.replace(
    cache, pending_keys=pending_keys, pending_values=pending_values, num_pending=cache.num_pending + num_new
  )
  return out.reshape(batch_size, num_tokens, width)[:, :num_new], cache


def register(call: Operation, embed: Callable[..., jax.Array], unembed: Callable[..., jax.Array]) -> None:
  """Registers the kernel as the form for TPUs of a transformer's calls that one device computes whole.

  `call` is `(params, tokens, positions, mask, cache, *, config, feature_layers) -> ModelOutput`; `embed` gives the
  input `[..., D]` of the first layer, `unembed` the output head's `[..., V]`.
  """

  def takes(params, tokens, positions, mask, cache, *, config, feature_layers):
    if isinstance(cache, FusedCache):
      return True
    if feature_layers or not is_round_on_one_device() or not is_lm1b(config) or config.cache_dtype is not None:
      return False
    if any(x.dtype == jnp.int8 for x in jax.tree.leaves(params)):
      return False
    return fits(config, tokens.shape[0], mask.shape[-1], cache.keys[0].shape[-1])

  @call.form('tpu', takes=takes)
  def apply_fused(params, tokens, positions, mask, cache, *, config, feature_layers):
    del feature_layers
    if isinstance(cache, KVCache):
      cache = FusedCache.of(cache, mask.shape[-1])
    mask = mask[None] if mask.ndim == 2 else mask
    x = embed(params, tokens, config=config)
    x, cache = apply_layers(fuse(params, config), x, positions, mask, cache, config=config)
    return ModelOutput(unembed(params, x, config=config), cache)
