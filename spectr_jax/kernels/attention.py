"""Attention over pending tokens and a committed prefix, and the angles of rotary positions."""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp

from spectr_jax.kernels import attention_kernel, native
from spectr_jax.kernels.dispatch import launch, operation
from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.sharding import dividing_axes

# Keys `[B, K, head_dim, S]` and values `[B, K, S, head_dim]` of a committed prefix; bool `[B, 1 or N, S]`, the slots
# that each query sees; and int32 `[B, N]`, the slot that each query's own token will take.
Prefix: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Rotation: TypeAlias = tuple[jax.Array, jax.Array]  # sines and cosines `[B, N, 1, F]`
_BLOCK_SLOTS = 256  # slots of a cache that a CPU's attention of many queries visits at a time
_MANY_QUERIES = 24
_NATIVE_TYPES = jnp.float32, jnp.bfloat16
CAUSAL_BLOCK = 128  # queries that read the same keys


@operation
def rotary_angles(positions: jax.Array, frequencies: jax.Array, *, magnitude: float = 1.0) -> Rotation:
  """The angles of rotary position embedding at positions `[B, N]`, for `rotate` of all layers.

  `frequencies` `[F]` are in radians per position; `magnitude` is a factor of the entries that are rotated.
  """
  angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
  return magnitude * jnp.sin(angles), magnitude * jnp.cos(angles)


@rotary_angles.form('cpu')
def _kept_angles(positions, frequencies, *, magnitude=1.0):
  # The result of a branch is kept. Otherwise XLA's CPU backend computes it in every layer and for every head.
  zeros = jnp.zeros((*positions.shape, 1, frequencies.shape[0]), jnp.float32)
  compute = functools.partial(rotary_angles.plain, frequencies=frequencies, magnitude=magnitude)
  return jax.lax.cond(jnp.any(positions > 0), compute, lambda _: (zeros, zeros + magnitude), positions)


def attend(
  query: jax.Array,
  new_keys: jax.Array,
  new_values: jax.Array,
  mask: jax.Array,
  prefix: Prefix | None = None,
  *,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Attention over pending tokens and, where given, a committed prefix, normalized over both together.

  Query head h reads key-value head h // (H / K).

  Args:
    query: `[B, N, H, head_dim]`.
    new_keys, new_values: `[B, K, head_dim, M]` and `[B, K, M, head_dim]`, of pending tokens.
    mask: bool `[1 or B, N, M]`, the pending tokens that each query attends to.
    prefix: None, or the keys, the values, the slots that each query attends to, and the slots of the queries' tokens.
    scale: Factor of the queries; None for `head_dim ** -0.5`.
    soft_cap: The bound c of scores s, which become c tanh(s / c); None for no bound.
    sinks: None, or `[H]`, a score of each head that counts in its softmax and mixes no value (Xiao et al. 2023).
  """
  query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
  return tree_attention(query, new_keys, new_values, mask, prefix, soft_cap=soft_cap, sinks=sinks)


@operation
def tree_attention(
  query: jax.Array,
  new_keys: jax.Array,
  new_values: jax.Array,
  mask: jax.Array,
  prefix: Prefix | None,
  *,
  soft_cap: float | None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """`attend` for scaled queries."""
  return _by_heads(_attend, query, new_keys, new_values, mask, prefix, soft_cap=soft_cap, sinks=sinks)


def _group(query, new_keys):
  """How many query heads read the same keys."""
  return query.shape[2] // new_keys.shape[1]


def _takes_many_queries(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  return prefix is not None and query.shape[1] * _group(query, new_keys) >= _MANY_QUERIES


def _takes_one_query(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  return query.shape[1] * _group(query, new_keys) == 1


def _takes_prefix(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  if prefix is None or sinks is not None or dividing_axes():  # the compiler divides no kernel
    return False
  return attention_kernel.takes(query.shape[-1], query.dtype, prefix[0].dtype)


@tree_attention.form('cpu', takes=_takes_many_queries)
def _attend_to_blocks(*arguments, **options):
  return _by_heads(_attend_in_blocks, *arguments, **options)


def _is_native(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  if prefix is None or dividing_axes() or native.form() is None:
    return False
  is_wide = all(array.dtype == jnp.float32 for array in (new_keys, new_values, *prefix[:2]))
  width = query.shape[-1]
  return is_wide and query.dtype in _NATIVE_TYPES and width % native.PANEL == 0 and width <= native.WIDEST_HEAD


@tree_attention.form('cpu', takes=_is_native)
def _attend_natively(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  sinks = None if sinks is None else sinks.astype(jnp.float32)
  mixed = native.attention(query, new_keys, new_values, mask, *prefix, sinks=sinks, soft_cap=soft_cap)
  return mixed.astype(query.dtype)


@tree_attention.form('tpu', takes=_takes_one_query)
def _attend_as_eight(query, new_keys, new_values, mask, prefix, **options):
  # The products of eight run on the matrix units. On the vector units a step would take twice the time.
  query, mask = (jnp.repeat(x, 8, axis=1) for x in (query, mask))
  return tree_attention.plain(query, new_keys, new_values, mask, prefix, **options)[:, :1]


@tree_attention.form('gpu', takes=_takes_prefix)
def _attend_by_kernel(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  del sinks

  def plain(query, new_keys, new_values, mask, keys, values, visible):
    prefix = keys, values, visible, jnp.zeros(query.shape[:2], jnp.int32)  # places are for forms that keep an order
    return tree_attention.plain(query, new_keys, new_values, mask, prefix, soft_cap=soft_cap)

  kernel = functools.partial(attention_kernel.attend_by_kernel, soft_cap=soft_cap)
  mask, visible = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (mask, prefix[2]))
  return launch(plain, kernel, query, new_keys, new_values, mask, *prefix[:2], visible, platform='gpu')


def _by_heads(attend_fn, query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  """`attend_fn`, which takes as many heads of queries as of keys, and sinks `[H, N, 1]`."""
  batch_size, num_queries, num_heads, head_dim = query.shape
  num_kv_heads = new_keys.shape[1]
  group = num_heads // num_kv_heads
  if group > 1:
    # The heads that share keys become queries of one head, so that no key is repeated.
    query = jnp.swapaxes(query.reshape(batch_size, num_queries, num_kv_heads, group, head_dim), 2, 3)
    query = query.reshape(batch_size, num_queries * group, num_kv_heads, head_dim)
    mask = jnp.repeat(mask, group, axis=1)
    if prefix is not None and prefix[2].shape[1] > 1:
      prefix = *prefix[:2], jnp.repeat(prefix[2], group, axis=1), prefix[3]
  if sinks is not None:
    sinks = jnp.tile(sinks.astype(accumulation_dtype(query.dtype)).reshape(-1, group), num_queries)[..., None]
  mixed = attend_fn(query, new_keys, new_values, mask, prefix, soft_cap=soft_cap, sinks=sinks)
  if group > 1:
    mixed = jnp.swapaxes(mixed.reshape(batch_size, num_queries, group, num_kv_heads, head_dim), 2, 3)
    mixed = mixed.reshape(batch_size, num_queries, num_heads, head_dim)
  return mixed


def attend_causally(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  """`attend` of the same N tokens where none attends to a later one: blocks of queries read keys up to their last."""
  blocks = []
  for start in range(0, query.shape[1], CAUSAL_BLOCK):
    end = start + CAUSAL_BLOCK
    blocks.append(attend(query[:, start:end], keys[..., :end], values[:, :, :end], mask[:, start:end, :end]))
  return jnp.concatenate(blocks, axis=1)


def _scores(query, keys, visible, soft_cap):
  """Scores `[B, H, N, M]` of scaled queries; the smallest number where a key is not visible."""
  wide = accumulation_dtype(query.dtype)
  scores = jnp.einsum('bnhd,bhdm->bhnm', query, keys, preferred_element_type=wide)
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  return jnp.where(visible[:, None], scores, jnp.finfo(wide).min)


def _attend_in_blocks(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  """`_attend` for many queries, over blocks of the prefix as far as any query sees (Milakov and Gimelshein 2018).

  Products are those of the queries' type, to which a CPU's cache in float32 is converted block by block.
  """
  keys, values, visible, _ = prefix
  dtype, num_slots = query.dtype, keys.shape[-1]
  size = min(_BLOCK_SLOTS, num_slots)

  def add(carry, scores, values):
    top, total, mixed = carry
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, kept = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    more = jnp.einsum('bhnm,bhmd->bhnd', weights.astype(dtype), values.astype(dtype), preferred_element_type=top.dtype)
    return new_top, kept * total + weights.sum(-1, keepdims=True), kept * mixed + more

  def add_block(i, carry):
    start = jnp.minimum(i * size, num_slots - size)  # the last block overlaps the one before it
    block = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    is_new = start + jnp.arange(size) >= i * size
    scores = _scores(query, block(keys, axis=3).astype(dtype), block(visible, axis=2) & is_new, soft_cap)
    return add(carry, scores, block(values, axis=2))

  scores = _scores(query, new_keys, mask, soft_cap)
  top = jnp.full((*scores.shape[:3], 1), jnp.finfo(scores.dtype).min)
  total = jnp.zeros_like(top)
  if sinks is not None:
    top, total = jnp.broadcast_to(sinks, top.shape), jnp.ones_like(top)
  mixed = jnp.zeros((*scores.shape[:3], values.shape[-1]), scores.dtype)
  carry = add((top, total, mixed), scores, new_values)
  num_seen = jnp.max(jnp.where(visible, 1 + jnp.arange(num_slots), 0))
  _, total, mixed = jax.lax.fori_loop(0, (num_seen + size - 1) // size, add_block, carry)
  return jnp.swapaxes(mixed / total, 1, 2).astype(dtype)


def _attend(query, new_keys, new_values, mask, prefix, *, soft_cap, sinks=None):
  """`attend` for scaled queries of as many heads as the keys have, without repeating them."""
  wide = accumulation_dtype(query.dtype)
  scores = functools.partial(_scores, query, soft_cap=soft_cap)
  new_scores = scores(new_keys, mask)
  if prefix is None:
    if sinks is not None:  # as a further token, whose weight is left out
      new_scores = jnp.concatenate([new_scores, jnp.broadcast_to(sinks, (*new_scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(new_scores, axis=-1)[..., : new_values.shape[2]].astype(new_values.dtype)
    mixed = jnp.einsum('bhnm,bhmd->bnhd', weights, new_values, preferred_element_type=wide)
    return mixed.astype(query.dtype)

  def mix(weights, values):
    # With queries before heads in the result, XLA's CPU backend would multiply several rows 8 times slower.
    return jnp.einsum('bhnm,bhmd->bhnd', weights.astype(values.dtype), values, preferred_element_type=wide)

  keys, values, visible, _ = prefix
  old_scores = scores(keys, visible)
  top = jnp.maximum(new_scores.max(-1, keepdims=True), old_scores.max(-1, keepdims=True))
  if sinks is not None:
    top = jnp.maximum(top, sinks)
  new_weights, old_weights = jnp.exp(new_scores - top), jnp.exp(old_scores - top)
  total = new_weights.sum(-1) + old_weights.sum(-1)
  if sinks is not None:
    total += jnp.exp(sinks - top)[..., 0]
  mixed = mix(new_weights, new_values) + mix(old_weights, values)
  return jnp.swapaxes(mixed / total[..., None], 1, 2).astype(query.dtype)
