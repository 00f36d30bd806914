"""Attention over a cache and pending tokens as one kernel, for GPUs.

XLA makes some twelve kernels of it in every layer, and to multiply the keys of both parts at once it copies those of
the cache. Here a program of the kernel has some queries of one head of keys. It goes through the slots in blocks, as
far as the cache is used, then through the pending tokens (Milakov and Gimelshein 2018). Where rows and heads are few
beside the device, the slots are divided among programs (flash decoding, Dao et al. 2023) and their results added up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_MOST_QUERIES = 64  # of a program
_FEWEST = 16  # queries, keys or numbers of a head in a product of the matrix units
_BLOCK = 64  # slots or pending tokens that a program visits at a time
_WIDE_HEAD = 128  # with wider heads a program visits half as many
_PROGRAMS = 264  # that a GPU is given if there is work for them: two for each multiprocessor of an H100
_FEWEST_SLOTS = 256  # of a program, if the slots are divided
_NUM_WARPS, _NUM_STAGES = 4, 3


def takes(head_dim: int, query_dtype: DTypeLike, cache_dtype: DTypeLike) -> bool:
  """Whether the kernel takes heads of a width and types, those that the matrix units multiply exactly."""
  is_power = head_dim & (head_dim - 1) == 0
  return is_power and head_dim >= _FEWEST and query_dtype == cache_dtype and query_dtype in (jnp.bfloat16, jnp.float16)


def attend_by_kernel(
  query: jax.Array,
  new_keys: jax.Array,
  new_values: jax.Array,
  mask: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  visible: jax.Array,
  *,
  soft_cap: float | None,
  interpret: bool = False,
) -> jax.Array:
  """`attend` by the kernel, of sizes and types that `takes` names and of a `query` that is scaled.

  `keys` and `values` are `[B, K, head_dim, S]` and `[B, K, S, head_dim]`, of the cache, and `visible`, bool
  `[B, 1 or N, S]`, the slots that queries attend to. Each attends to at least one pending token. `interpret` runs it
  without a GPU, for tests.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  batch_size, num_queries, num_heads, head_dim = query.shape
  num_kv_heads, num_slots, num_new = keys.shape[1], keys.shape[-1], new_keys.shape[-1]
  group = num_heads // num_kv_heads
  num_rows = num_queries * group  # that read the same keys
  size = min(_MOST_QUERIES, max(_FEWEST, pl.next_power_of_2(num_rows)))
  block = _BLOCK if head_dim <= _WIDE_HEAD else _BLOCK // 2
  num_blocks = pl.cdiv(num_rows, size)
  num_others = batch_size * num_kv_heads * num_blocks
  num_parts = max(1, min(pl.cdiv(_PROGRAMS, num_others), num_slots // _FEWEST_SLOTS))
  has_own_slots = visible.shape[1] > 1
  lowest = jnp.finfo(jnp.float32).min

  def kernel(num_used_ref, query_ref, new_keys_ref, new_values_ref, mask_ref, keys_ref, values_ref, visible_ref, *out):
    part, rows = pl.program_id(0) // num_blocks, pl.program_id(0) % num_blocks * size + jnp.arange(size)
    head, batch_row = pl.program_id(1), pl.program_id(2)
    is_row = rows < num_rows
    node = jnp.minimum(rows // group, num_queries - 1)
    # Rows that are too many have places behind the last, where nothing is read or written.
    places = jnp.where(is_row, node * num_heads + head * group + rows % group, num_queries * num_heads)
    numbers = jnp.arange(head_dim)[None, :]
    query = triton.load(query_ref.at[batch_row, places[:, None], numbers], mask=is_row[:, None], other=0)

    def add(carry, keys, values, is_seen):
      top, total, mixed = carry
      scores = jnp.dot(query, keys, preferred_element_type=jnp.float32)
      if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
      scores = jnp.where(is_seen, scores, lowest)
      new_top = jnp.maximum(top, jnp.max(scores, axis=1))
      # Before the first token that a query sees, all scores are the lowest.
      weights, kept = jnp.where(is_seen, jnp.exp(scores - new_top[:, None]), 0), jnp.exp(top - new_top)
      more = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
      return new_top, kept * total + jnp.sum(weights, axis=1), kept[:, None] * mixed + more

    def load_block(keys_ref, values_ref, start, limit):
      tokens = start + jnp.arange(block)
      is_token = tokens < limit
      where = pl.ds(start, block)
      keys = triton.load(keys_ref.at[batch_row, head, :, where], mask=is_token[None, :], other=0)
      values = triton.load(values_ref.at[batch_row, head, where, :], mask=is_token[:, None], other=0)
      return keys, values, is_token

    def load_seen(ref, start, is_token, is_own):
      tokens = start + jnp.arange(block)[None, :]
      queries = node[:, None] if is_own else jnp.zeros((1, 1), jnp.int32)
      return triton.load(ref.at[batch_row, queries, tokens], mask=is_token[None, :], other=0) != 0

    def add_slots(i, carry):
      start = i * block
      keys, values, is_token = load_block(keys_ref, values_ref, start, num_slots)
      return add(carry, keys, values, load_seen(visible_ref, start, is_token, has_own_slots))

    def add_pending(i, carry):
      start = i * block
      keys, values, is_token = load_block(new_keys_ref, new_values_ref, start, num_new)
      return add(carry, keys, values, load_seen(mask_ref, start, is_token, True))

    num_visits = pl.cdiv(num_used_ref[batch_row], block)
    each = pl.cdiv(num_visits, num_parts)
    carry = (
      jnp.full(size, lowest), jnp.zeros(size, jnp.float32), jnp.zeros((size, head_dim), jnp.float32)
    )  # fmt: skip
    carry = jax.lax.fori_loop(part * each, jnp.minimum((part + 1) * each, num_visits), add_slots, carry)
    # The first part visits the pending tokens.
    num_pending = jnp.where(part == 0, jnp.full((), pl.cdiv(num_new, block), jnp.int32), 0)
    top, total, mixed = jax.lax.fori_loop(0, num_pending, add_pending, carry)
    if num_parts == 1:
      mixed = (mixed / total[:, None]).astype(query.dtype)
      triton.store(out[0].at[0, batch_row, places[:, None], numbers], mixed, mask=is_row[:, None])
    else:
      triton.store(out[0].at[part, batch_row, places[:, None], numbers], mixed, mask=is_row[:, None])
      for ref, values in zip(out[1:], (top, total), strict=True):
        triton.store(ref.at[part, batch_row, places], values, mask=is_row)

  shape = num_parts, batch_size, num_queries * num_heads
  shapes = [jax.ShapeDtypeStruct((*shape, head_dim), query.dtype if num_parts == 1 else jnp.float32)]
  if num_parts > 1:
    shapes += [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
  num_used = jnp.max(jnp.where(visible, 1 + jnp.arange(num_slots), 0), axis=(1, 2)).astype(jnp.int32)
  out = pl.pallas_call(
    kernel,
    out_shape=shapes,
    grid=(num_blocks * num_parts, num_kv_heads, batch_size),
    compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=_NUM_STAGES),
    interpret=interpret,
    name='tree_attention',
  )(
    num_used, query.reshape(batch_size, -1, head_dim), new_keys, new_values, mask.astype(jnp.int8), keys, values,
    visible.astype(jnp.int8),
  )  # fmt: skip
  if num_parts == 1:
    return out[0].reshape(query.shape)
  mixed, top, total = out
  weights = jnp.exp(top - jnp.max(top, axis=0))
  mixed = jnp.sum(weights[..., None] * mixed, axis=0) / jnp.sum(weights * total, axis=0)[..., None]
  return mixed.reshape(query.shape).astype(query.dtype)
