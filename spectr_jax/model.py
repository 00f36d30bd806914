"""The seam between algorithms and networks: `Model`, `ModelOutput`, `KVCache`.

A model scores tokens that stand after a committed prefix. One call to `apply_fn` adds *pending* tokens, which may be a
chain, a tree or a ragged batch of prompts; `commit_fn` keeps some of them and forgets the rest. The prefix is only ever
written by `commit_fn`, so rejecting a draft costs nothing: rollback is never having written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from spectr_jax.kernels.cache_writes import write_slots
from spectr_jax.sharding import DATA, MODEL, Rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
  """The result of a forward call.

  Attributes:
    logits: `[B, N, V]`, the next-token logits after each token of the call, best in float32: narrower ones are widened
      before anything is computed. Padded vocabulary columns are -inf.
    cache: The cache with the call's tokens pending.
    features: `[B, N, F, D]`, hidden states of the F layers that `Model.with_features` asked for, or None.
  """

  logits: jax.Array
  cache: Any
  features: jax.Array | None = None


# In place of an axis of tokens, see `KVCache.slot_axes`.
NO_SLOTS, LENGTH = -1, -2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of a committed prefix per row, and of the pending tokens after it.

  Keys are stored with the slot axis last and values with it second to last, so that both attention products read
  contiguous memory.

  Attributes:
    keys: One `[B, H, head_dim, S]` array per layer; slots from a row's length on hold unused values.
    values: One `[B, H, S, head_dim]` array per layer.
    lengths: int32 `[B]`, the committed tokens of each row.
    pending_keys: One `[B, H, head_dim, M]` array per layer, or `()` when nothing is pending.
    pending_values: One `[B, H, M, head_dim]` array per layer, or `()`.
    num_pending: int32 scalar, the number of pending slots already written; later calls of the round append after them.
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  lengths: jax.Array
  pending_keys: tuple[jax.Array, ...]
  pending_values: tuple[jax.Array, ...]
  num_pending: jax.Array

  @classmethod
  def empty(
    cls,
    *,
    num_layers: int,
    batch_size: int,
    num_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    cache_size: int,
    dtype: DTypeLike,
  ) -> KVCache:
    """An empty cache of a model's layers for `cache_size` committed tokens of each row, of some type.

    Heads and their width are those of all layers, or of each.
    """

    def by_layer(sizes: int | Sequence[int]) -> Sequence[int]:
      return (sizes,) * num_layers if isinstance(sizes, int) else sizes

    sizes = list(zip(by_layer(num_heads), by_layer(head_dim), strict=True))
    keys = tuple(jnp.zeros((batch_size, heads, width, cache_size), dtype) for heads, width in sizes)
    values = tuple(jnp.zeros((batch_size, heads, cache_size, width), dtype) for heads, width in sizes)
    return cls(keys, values, jnp.zeros(batch_size, jnp.int32), (), (), jnp.zeros((), jnp.int32))

  def partition_specs(self) -> KVCache:
    """PartitionSpecs in place of the arrays: rows are sharded over `data`, heads over `model`."""
    by_heads = PartitionSpec(DATA, MODEL)
    arrays = {
      field: tuple(by_heads for _ in getattr(self, field))
      for field in ('keys', 'values', 'pending_keys', 'pending_values')
    }
    return dataclasses.replace(self, lengths=PartitionSpec(DATA), num_pending=PartitionSpec(), **arrays)

  def slot_axes(self) -> KVCache:
    """The axes of committed tokens in place of the arrays, `LENGTH` for the number of these; none is pending."""
    keys, values = tuple(3 for _ in self.keys), tuple(2 for _ in self.values)
    return dataclasses.replace(self, keys=keys, values=values, lengths=LENGTH, num_pending=NO_SLOTS)

  def with_pending_slots(self, num_slots: int) -> KVCache:
    """The cache with room for the `num_slots` pending tokens of a round, so that `append` keeps its shapes."""

    def room(arrays, axis):
      return tuple(jnp.zeros((*x.shape[:axis], num_slots, *x.shape[axis + 1 :]), x.dtype) for x in arrays)

    return dataclasses.replace(self, pending_keys=room(self.keys, 3), pending_values=room(self.values, 2))

  def append(
    self, layer: int, key: jax.Array, value: jax.Array, *, num_pending_slots: int
  ) -> tuple[jax.Array, jax.Array]:
    """The layer's pending keys `[B, H, head_dim, M]` and values `[B, H, M, head_dim]`, a call's after earlier calls'.

    `key` and `value` are `[B, N, H, head_dim]`, converted to the cache's dtype; `num_pending_slots` is M, which the
    whole round needs.
    """
    num_new, dtype = key.shape[1], self.keys[layer].dtype
    new_keys, new_values = (x.astype(dtype) for x in in_cache_layout(key, value))
    if not self.pending_keys:
      if num_new == num_pending_slots:
        return new_keys, new_values
      spare = num_pending_slots - num_new
      return (
        jnp.pad(new_keys, ((0, 0), (0, 0), (0, 0), (0, spare))),
        jnp.pad(new_values, ((0, 0), (0, 0), (0, spare), (0, 0))),
      )
    at = self.num_pending
    return (
      jax.lax.dynamic_update_slice_in_dim(self.pending_keys[layer], new_keys, at, axis=3),
      jax.lax.dynamic_update_slice_in_dim(self.pending_values[layer], new_values, at, axis=2),
    )

  def with_pending(self, pending: Sequence[tuple[jax.Array, jax.Array]], num_new: int) -> KVCache:
    """The cache with the pending keys and values of all layers, as `append` returns them, `num_new` tokens more."""
    keys, values = zip(*pending, strict=True)
    return dataclasses.replace(self, pending_keys=keys, pending_values=values, num_pending=self.num_pending + num_new)

  def commit(self, path: jax.Array, num_committed: jax.Array) -> KVCache:
    """Keeps pending entries `path[b, :num_committed[b]]`, in that order, as the next committed ones; drops the rest.

    `path` is int32 `[B, D]`, `num_committed` int32 `[B]`, the root of a tree included. A row with 0 stays as it is.
    Entries beyond the cache's size are dropped.
    """
    depth = path.shape[1]
    size = self.keys[0].shape[-1]
    offsets = jnp.arange(depth)
    slots = jnp.where(offsets < num_committed[:, None], self.lengths[:, None] + offsets, size)

    num_layers = len(self.keys)
    arrays, pending = (*self.keys, *self.values), (*self.pending_keys, *self.pending_values)
    written = write_slots(arrays, pending, path, slots, [3] * num_layers + [2] * num_layers)
    return KVCache(
      keys=tuple(written[:num_layers]),
      values=tuple(written[num_layers:]),
      lengths=jnp.minimum(self.lengths + num_committed, size),
      pending_keys=(),
      pending_values=(),
      num_pending=jnp.zeros((), jnp.int32),
    )

  def truncate(self, lengths: jax.Array) -> KVCache:
    """The cache with the first `lengths[b]` committed tokens of each row, which it must hold; none is pending."""
    return dataclasses.replace(self, lengths=lengths)


def in_cache_layout(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Keys `[B, H, head_dim, N]` and values `[B, H, N, head_dim]`, as in caches, of both as `[B, N, H, head_dim]`."""
  return jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))


def commit_cache(cache: Any, path: jax.Array, num_committed: jax.Array) -> Any:
  """`cache.commit(path, num_committed)`, the default `Model.commit_fn`; see `KVCache.commit`."""
  return cache.commit(path, num_committed)


def truncate_cache(cache: Any, lengths: jax.Array) -> Any:
  """`cache.truncate(lengths)`, the default `Model.truncate_fn`; see `KVCache.truncate`."""
  return cache.truncate(lengths)


def cache_partition_specs(cache: Any) -> Any:
  """`cache.partition_specs()`, the default `Model.cache_specs_fn`; see `KVCache.partition_specs`."""
  return cache.partition_specs()


# For messages about a model that fails, and does not say for which texts it was made.
NO_LIMIT = 'a model that takes texts up to some length only must state it as context_length, and this one states none'

NETWORK = 'network'  # the scope of a model's calls in compiled programs
PREFILL_CHUNK = 128  # prompt tokens per call; attention's memory grows with their product with the cache's size


def static_field(default: Any = dataclasses.MISSING) -> Any:
  """A static field of a registered dataclass: programs are compiled for its value."""
  return dataclasses.field(default=default, metadata={'static': True})


@functools.cache
def _cache_like(init_cache_fn: Callable[[int, int], Any]) -> Any:
  """What `init_cache_fn` returns, with shapes in place of arrays."""
  return jax.eval_shape(functools.partial(init_cache_fn, 1, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
  """A language model as data and static functions.

  `params` are a pytree of arrays and travel through `jit` as arguments, so they can be sharded; everything else is
  static. The functions must be module-level or otherwise compare equal between calls, or every call compiles anew.

  Attributes:
    params: The parameters.
    apply_fn: `(params, tokens[B, N], positions[B, N], mask, cache) -> ModelOutput`. `mask` is bool `[N, M]` or
      `[B, N, M]`, a NumPy array where it is known while a program is made. Its column j stands for the j-th token
      pending since the last commit, the call's own tokens included. Token i attends to the pending tokens where row i
      is True, and always to the whole committed prefix.
    init_cache_fn: `(batch_size, cache_size) -> cache`, for up to `cache_size` committed tokens per row.
    vocab_size: V.
    commit_fn: `(cache, path[B, D], num_committed[B]) -> cache`, as `KVCache.commit`.
    truncate_fn: `(cache, lengths[B]) -> cache`, as `KVCache.truncate`. A model whose cache cannot do it has
      `can_truncate` False, and rows read each prompt from its start.
    context_length: The longest prompt plus continuation that the model was made for, or None if any will do.
    sharding_rules: Rules that shard the parameters over the axes of a mesh, see `spectr_jax.sharding.shardings`; None
      for a model that every device holds whole.
    cache_specs_fn: `cache -> PartitionSpecs` in place of the cache's arrays, for a model with `sharding_rules`.
    features_fn: `layers -> apply_fn`, where the returned function also fills `ModelOutput.features` with these layers;
      None for a model without features. Layer i is the input of block i, layer -1 the input of the output head.
    embed_fn: `(params, tokens[...]) -> [..., D]`, the input of block 0, or None. Drafters may share it.
    unembed_fn: `(params, features[..., D]) -> logits[..., V]`, the output head, or None. Drafters may share it.
    for_decoding_fn: `params -> params` in the form that the default device decodes fastest, or None.
  """

  params: Any
  apply_fn: Callable[..., ModelOutput] = static_field()
  init_cache_fn: Callable[[int, int], Any] = static_field()
  vocab_size: int = static_field()
  commit_fn: Callable[..., Any] = static_field(commit_cache)
  truncate_fn: Callable[[Any, jax.Array], Any] = static_field(truncate_cache)
  context_length: int | None = static_field(None)
  sharding_rules: Rules | None = static_field(None)
  cache_specs_fn: Callable[[Any], Any] = static_field(cache_partition_specs)
  features_fn: Callable[[tuple[int, ...]], Callable[..., ModelOutput]] | None = static_field(None)
  embed_fn: Callable[..., jax.Array] | None = static_field(None)
  unembed_fn: Callable[..., jax.Array] | None = static_field(None)
  for_decoding_fn: Callable[[Any], Any] | None = static_field(None)

  @property
  def can_truncate(self) -> bool:
    """Whether its cache can go back to a beginning of its text: it has a `truncate`, or the model a `truncate_fn`."""
    return self.truncate_fn is not truncate_cache or hasattr(_cache_like(self.init_cache_fn), 'truncate')

  @property
  def keeps_ends(self) -> bool:
    """Whether its cache, which cannot truncate, can be continued where it ends: it has a `keep`, as `HybridCache`."""
    return hasattr(_cache_like(self.init_cache_fn), 'keep')

  @property
  def num_kv_layers(self) -> int:
    """The layers of its cache whose keys and values a drafter may read; 0 for a cache of another kind."""
    cache = _cache_like(self.init_cache_fn)
    return len(cache.keys) if isinstance(cache, KVCache) else 0

  def apply(self, tokens: jax.Array, positions: jax.Array, mask: ArrayLike, cache: Any) -> ModelOutput:
    """Scores tokens after the committed prefix: the logits after each token, and the cache with the tokens pending.

    Args:
      tokens: int32 `[B, N]`.
      positions: int32 `[B, N]`, their absolute positions.
      mask: bool `[N, M]` or `[B, N, M]`, the pending tokens that each token attends to; see `apply_fn`.
      cache: The cache, with the tokens of earlier calls of the round pending.
    """
    with jax.named_scope(NETWORK):
      return self.apply_fn(self.params, tokens, positions, mask, cache)

  def with_features(self, layers: tuple[int, ...]) -> Model:
    """The model whose calls also return the hidden states of `layers`; itself for none. ValueError if it has none."""
    if not layers:
      return self
    if self.features_fn is None:
      raise ValueError(
        'the drafter reads hidden states of the target, but this target returns none: its features_fn is None'
      )
    return dataclasses.replace(self, apply_fn=self.features_fn(layers))

  def for_decoding(self) -> Model:
    """The same model in the form that the default device decodes fastest.

    Its parameters may hold copies of others. They take memory and do not follow changes, so such models are not for
    training or saving.
    """
    params = self.params if self.for_decoding_fn is None else self.for_decoding_fn(self.params)
    return self if params is self.params else dataclasses.replace(self, params=params)

  def with_vocab_size(self, vocab_size: int) -> Model:
    """The model with logits for `vocab_size` tokens: the model itself if it has as many. ValueError if it is below 1.

    Models that share a tokenizer may be padded to different sizes, and a target and its draft must have one. Ids that
    are added have logits of -inf, so that the model never draws them; where it reads one, it reads id 0 instead. Ids
    that are cut are those from `vocab_size` on.
    """
    if not isinstance(vocab_size, int) or vocab_size < 1:
      raise ValueError(f'vocab_size must be a positive int, got {vocab_size!r}')
    if vocab_size == self.vocab_size:
      return self
    sizes = self.vocab_size, vocab_size
    functions = {
      name: None if (function := getattr(self, name)) is None else resized(function, sizes)
      for name, resized in _RESIZED.items()
    }
    return dataclasses.replace(self, vocab_size=vocab_size, **functions)

  def prefill(
    self,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Any,
    *,
    start: jax.Array | None = None,
    chunk_size: int = PREFILL_CHUNK,
  ) -> tuple[Any, jax.Array | None]:
    """Commits prompts to a cache, some tokens at a time, so that memory grows linearly with their length.

    The number of calls is that of the longest prompt, however wide `tokens` is.

    Args:
      tokens: Integers `[B, P]`, right-padded; tokens behind `lengths` are not read.
      lengths: int32 `[B]`, the number of tokens of each row that are committed, from 0 to P.
      cache: A cache with room for these tokens.
      start: int32 `[B]`, the committed tokens that the cache holds of each row; None for an empty cache.
      chunk_size: Tokens per call.

    Returns:
      The cache, and the features `[B, P, F, D]` of all tokens, or None if the model returns none.
    """
    # Without the barrier XLA folds attention over the cache of zeros, which takes longer than the rest of compilation.
    cache = jax.lax.optimization_barrier(cache)
    batch_size, num_tokens = tokens.shape
    size = min(chunk_size, num_tokens)
    offsets = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch_size, size))
    causal = jnp.tril(jnp.ones((size, size), bool))
    before = 0 if start is None else start[:, None]

    def add(first, cache):
      chunk = jax.lax.dynamic_slice_in_dim(padded, first, size, axis=1)
      # Padding may be any number. An invalid id would embed as NaN, which an attention weight of 0 does not silence, so
      # a valid one replaces it; nothing that is kept attends to it.
      chunk = jnp.where(first + offsets < lengths[:, None], chunk, 0)
      output = self.apply(chunk, before + first + offsets, causal, cache)
      return self.commit_fn(output.cache, offsets, jnp.clip(lengths - first, 0, size)), output.features

    padded = jnp.pad(tokens, ((0, 0), (0, -num_tokens % size)))
    if size == num_tokens:
      return add(0, cache)
    like = jax.eval_shape(add, 0, cache)[1]
    features = None if like is None else jnp.zeros((batch_size, padded.shape[1], *like.shape[2:]), like.dtype)

    def add_chunk(i, carry):
      cache, features = carry
      cache, own = add(i * size, cache)
      if own is not None:
        features = jax.lax.dynamic_update_slice_in_dim(features, own, i * size, axis=1)
      return cache, features

    num_chunks = -(-jnp.max(lengths) // size)
    cache, features = jax.lax.fori_loop(0, num_chunks, add_chunk, (cache, features))
    return cache, None if features is None else features[:, :num_tokens]

  def prefill_rest(
    self, tokens: jax.Array, lengths: jax.Array, cache: Any, num_kept: jax.Array, num_new: int
  ) -> tuple[Any, jax.Array | None]:
    """Commits prompts to a cache that holds their beginnings, and drops what the cache holds beyond these.

    Args:
      tokens: Integers `[B, cache_size]`, right-padded.
      lengths: int32 `[B]`, the number of tokens of each row that are committed in the end, at least `num_kept`.
      cache: A cache whose first `num_kept[b]` tokens are those of the prompts; none is pending.
      num_kept: int32 `[B]`; for a model that cannot truncate 0, or all that the cache holds if it `keeps_ends`.
      num_new: The most tokens that a row gets, static.

    Returns:
      The cache, and the features `[B, num_new, F, D]` of the tokens from `num_kept` on, or None.
    """
    places = jnp.minimum(num_kept[:, None] + jnp.arange(num_new), tokens.shape[1] - 1)
    new = jnp.take_along_axis(tokens, places, axis=1)
    if self.keeps_ends:
      cache = cache.keep(num_kept)
    else:
      cache = self.truncate_fn(cache, num_kept) if self.can_truncate else self.init_cache_fn(*tokens.shape)
    return self.prefill(new, lengths - num_kept, cache, start=num_kept)


# The functions of `Model.with_vocab_size`, one object per function and sizes, so that equal models share compiled
# programs. Sizes are those before and after.


def _readable(tokens: jax.Array, sizes: tuple[int, int]) -> jax.Array:
  return jnp.where(tokens < sizes[0], tokens, 0)


def _resize_logits(logits: jax.Array, sizes: tuple[int, int]) -> jax.Array:
  num_added = sizes[1] - sizes[0]
  if num_added <= 0:
    return logits[..., : sizes[1]]
  return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, num_added)], constant_values=-jnp.inf)


@functools.lru_cache
def _resized_apply_fn(apply_fn, sizes):
  def apply(params, tokens, positions, mask, cache):
    output = apply_fn(params, _readable(tokens, sizes), positions, mask, cache)
    return dataclasses.replace(output, logits=_resize_logits(output.logits, sizes))

  return apply


@functools.lru_cache
def _resized_features_fn(features_fn, sizes):
  return lambda layers: _resized_apply_fn(features_fn(layers), sizes)


@functools.lru_cache
def _resized_embed_fn(embed_fn, sizes):
  return lambda params, tokens: embed_fn(params, _readable(tokens, sizes))


@functools.lru_cache
def _resized_unembed_fn(unembed_fn, sizes):
  return lambda params, features: _resize_logits(unembed_fn(params, features), sizes)


_RESIZED = {
  'apply_fn': _resized_apply_fn,
  'features_fn': _resized_features_fn,
  'embed_fn': _resized_embed_fn,
  'unembed_fn': _resized_unembed_fn,
}
