"""The seam between algorithms and networks: `Model`, `ModelOutput`, `KVCache`.

A model scores tokens that stand after a committed prefix. One call to `apply_fn` adds *pending* tokens, which may be a
chain, a tree or a ragged batch of prompts; `commit_fn` keeps some of them and forgets the rest. The prefix is only ever
written by `commit_fn`, so rejecting a draft costs nothing: rollback is never having written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.sharding import Rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
  """What a forward call returns.

  Attributes:
    logits: float32 `[B, N, V]`, the next-token logits after each token of the call. Padded vocabulary columns are -inf.
    cache: The cache with the call's tokens pending.
    features: Hidden states `[B, N, D]` for drafters that read them, or None.
  """

  logits: jax.Array
  cache: Any
  features: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of a committed prefix per row, and of the pending tokens after it.

  Keys are stored with the slot axis last and values with it second to last, so that both attention products read
  contiguous memory.

  Attributes:
    keys: One `[B, H, head_dim, S]` array per layer; slots at and beyond a row's length hold nothing of meaning.
    values: One `[B, H, S, head_dim]` array per layer.
    lengths: int32 `[B]`, the committed tokens of each row.
    pending_keys: One `[B, H, head_dim, M]` array per layer, or `()` when nothing is pending.
    pending_values: One `[B, H, M, head_dim]` array per layer, or `()`.
    num_pending: int32 scalar, the pending slots already written; later calls of the same round append after them.
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  lengths: jax.Array
  pending_keys: tuple[jax.Array, ...]
  pending_values: tuple[jax.Array, ...]
  num_pending: jax.Array

  @classmethod
  def empty(cls, *, num_layers: int, batch_size: int, num_heads: int, head_dim: int, max_length: int, dtype) -> KVCache:
    """A cache with room for `max_length` committed tokens per row and none committed."""
    keys = tuple(jnp.zeros((batch_size, num_heads, head_dim, max_length), dtype) for _ in range(num_layers))
    values = tuple(jnp.zeros((batch_size, num_heads, max_length, head_dim), dtype) for _ in range(num_layers))
    return cls(keys, values, jnp.zeros(batch_size, jnp.int32), (), (), jnp.zeros((), jnp.int32))

  def append(self, layer: int, new_keys: jax.Array, new_values: jax.Array, *, capacity: int):
    """Pending keys and values of one layer with a call's tokens behind those of earlier calls.

    Args:
      layer: The layer's index.
      new_keys: `[B, H, head_dim, N]`.
      new_values: `[B, H, N, head_dim]`.
      capacity: M, the pending slots the whole round needs.

    Returns:
      The layer's pending `[B, H, head_dim, M]` keys and `[B, H, M, head_dim]` values.
    """
    num_new = new_keys.shape[-1]
    if not self.pending_keys:
      if num_new == capacity:
        return new_keys, new_values
      spare = capacity - num_new
      return (
        jnp.pad(new_keys, ((0, 0), (0, 0), (0, 0), (0, spare))),
        jnp.pad(new_values, ((0, 0), (0, 0), (0, spare), (0, 0))),
      )
    at = self.num_pending
    return (
      jax.lax.dynamic_update_slice_in_dim(self.pending_keys[layer], new_keys, at, axis=3),
      jax.lax.dynamic_update_slice_in_dim(self.pending_values[layer], new_values, at, axis=2),
    )

  def commit(self, path: jax.Array, num_accepted: jax.Array) -> KVCache:
    """Keeps pending entries `path[b, :num_accepted[b]]`, in that order, as the next committed ones; drops the rest.

    A row with `num_accepted` 0 is left as it is. Entries that would stand beyond the cache's size are dropped.

    Args:
      path: int32 `[B, D]` indices of pending entries.
      num_accepted: int32 `[B]`.
    """
    depth = path.shape[1]
    size = self.keys[0].shape[-1]
    offsets = jnp.arange(depth)
    slots = jnp.where(offsets < num_accepted[:, None], self.lengths[:, None] + offsets, size)

    def keep(arrays, pending, axis):
      return tuple(_write(*layer, path, slots, axis) for layer in zip(arrays, pending, strict=True))

    return KVCache(
      keys=keep(self.keys, self.pending_keys, 3),
      values=keep(self.values, self.pending_values, 2),
      lengths=jnp.minimum(self.lengths + num_accepted, size),
      pending_keys=(),
      pending_values=(),
      num_pending=jnp.zeros((), jnp.int32),
    )


_MOST_SELECTED = 128  # entries; a prefill may write more, once


def _write(array: jax.Array, pending: jax.Array, path: jax.Array, slots: jax.Array, axis: int) -> jax.Array:
  """Writes pending entries `path` `[B, D]` to `slots` `[B, D]` along an axis; slots beyond its end are left out."""
  by_platform = {}
  if path.shape[1] <= _MOST_SELECTED:
    by_platform['tpu'] = functools.partial(_select, axis=axis)
  if array.dtype == jnp.bfloat16:
    by_platform['cpu'] = functools.partial(_scatter_integers, axis=axis)
  return jax.lax.platform_dependent(
    array, pending, path, slots, **by_platform, default=functools.partial(_scatter, axis=axis)
  )


def _scatter(array, pending, path, slots, *, axis: int):
  # Row by row, not by indices of rows: only so does the compiler see that rows on other devices are not needed.
  def keep(row, pending, path, slots):
    before = (slice(None),) * (axis - 1)
    return row.at[*before, slots].set(pending[*before, path], mode='drop')

  return jax.vmap(keep)(array, pending, path, slots)


def _scatter_integers(array, pending, *where, axis: int):
  """To move bfloat16 as it is, processors would convert all of the array to float32 and back."""
  bits = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (array, pending))
  return jax.lax.bitcast_convert_type(_scatter(*bits, *where, axis=axis), array.dtype)


def _select(array, pending, path, slots, *, axis: int):
  """Passes over all slots, with a product of as many terms as there are entries.

  For a scatter, XLA keeps the cache with slots in front on TPUs, the rest padded to multiples of 8 heads and 128
  numbers: several times the memory, and a conversion for attention in every round.
  """
  size = array.shape[axis]
  wide = tuple(i for i in range(1, 4) if i != axis)
  new = jnp.take_along_axis(pending, jnp.expand_dims(path, wide), axis=axis)
  new = jnp.where(jnp.expand_dims(slots < size, wide), new, 0)
  is_here = slots[:, :, None] == jnp.arange(size)
  # A product with zeros and a single one is exact.
  spread = jnp.einsum(
    {2: 'bhid,bis->bhsd', 3: 'bhdi,bis->bhds'}[axis],
    new,
    is_here.astype(new.dtype),
    precision=jax.lax.Precision.HIGHEST,
  )
  return jnp.where(jnp.expand_dims(is_here.any(axis=1), wide), spread, array)


def commit_kv_cache(cache: KVCache, path: jax.Array, num_accepted: jax.Array) -> KVCache:
  """`KVCache.commit` as the default `Model.commit_fn`."""
  return cache.commit(path, num_accepted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
  """A language model as data and three functions.

  `params` are a pytree of arrays and travel through `jit` as arguments, so they can be sharded; everything else is
  static. The functions must be module-level or otherwise compare equal between calls, or every call compiles anew.

  Attributes:
    params: The parameters.
    apply_fn: `(params, tokens[B, N], positions[B, N], mask, cache) -> ModelOutput`. `mask` is bool `[N, M]` or
      `[B, N, M]`: column j is the j-th token pending since the last commit, the call's own tokens included, and token i
      attends to those where it is True, and to the whole committed prefix always.
    init_cache_fn: `(batch_size, max_length) -> cache`.
    vocab_size: V.
    commit_fn: `(cache, path[B, D], num_accepted[B]) -> cache`, as `KVCache.commit`.
    max_length: The longest prompt plus continuation the model was made for, or None if any will do.
    sharding_rules: How parameters are divided over the axes of a mesh, see `spectr_jax.sharding.shardings`, or None for
      a model that is not divided. One that is has its cache divided by heads, as the second axis of `KVCache` arrays.
  """

  params: Any
  apply_fn: Callable[..., ModelOutput] = dataclasses.field(metadata={'static': True})
  init_cache_fn: Callable[[int, int], Any] = dataclasses.field(metadata={'static': True})
  vocab_size: int = dataclasses.field(metadata={'static': True})
  commit_fn: Callable[..., Any] = dataclasses.field(default=commit_kv_cache, metadata={'static': True})
  max_length: int | None = dataclasses.field(default=None, metadata={'static': True})
  sharding_rules: Rules | None = dataclasses.field(default=None, metadata={'static': True})

  def apply(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Any) -> ModelOutput:
    """Scores `tokens` after the committed prefix; see `apply_fn`."""
    return self.apply_fn(self.params, tokens, positions, mask, cache)

  def prefill(self, tokens: jax.Array, lengths: jax.Array, cache: Any) -> Any:
    """Commits right-padded `tokens` `[B, P]`, the first `lengths[b]` of each row, to an empty cache, in one call."""
    num_tokens = tokens.shape[1]
    slots = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), tokens.shape)
    causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    # XLA would fold attention over a cache it can see is all zeros, for longer than the rest of the compilation takes.
    cache = jax.lax.optimization_barrier(cache)
    # What stands behind a prompt need not be an id at all. Any valid id does in its place, since nothing that is kept
    # attends to it, but an invalid one would embed as NaN, which a weight of 0 does not silence.
    output = self.apply(jnp.where(slots < lengths[:, None], tokens, 0), slots, causal, cache)
    return self.commit_fn(output.cache, slots, lengths)
