"""The parts that networks share: norms, rotary positions, attention, the output head."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from spectr_jax.kernels import tree_attention
from spectr_jax.kernels.dispatch import by_platform
from spectr_jax.kernels.launch import launch
from spectr_jax.models.int8 import Int8Kernel
from spectr_jax.models.products import accumulation_dtype, matmul
from spectr_jax.sharding import dividing_axes

# Keys `[B, K, head_dim, S]` and values `[B, K, S, head_dim]` of a committed prefix, and bool `[B, 1 or N, S]`, the
# slots that each query sees.
Prefix: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Rotation: TypeAlias = tuple[jax.Array, jax.Array]  # sines and cosines `[B, N, 1, F]`
_BLOCK_SLOTS = 256  # slots of a cache that a CPU's attention of many queries visits at a time
_MANY_QUERIES = 24
CAUSAL_BLOCK = 128  # queries that read the same keys


def take_rows(embedding: jax.Array | Int8Kernel, rows: jax.Array) -> jax.Array:
  """Rows of an embedding.

  Args:
    embedding: `[V, embed_dim]`, of any float dtype, in int8, or uint16, the bits of bfloat16.
    rows: Integers `[...]`.

  Returns:
    `[..., embed_dim]` in the embedding's dtype, or in that of its scale.
  """
  if isinstance(embedding, Int8Kernel):
    return jnp.take(embedding.values, rows, axis=0) * jnp.take(embedding.scale, rows)[..., None]
  taken = jnp.take(embedding, rows, axis=0)
  return jax.lax.bitcast_convert_type(taken, jnp.bfloat16) if taken.dtype == jnp.uint16 else taken


def inverse_root(variance: jax.Array) -> jax.Array:
  """`rsqrt` for norms: NaN where the variance has overflowed, since 0 would make numbers out of range look sound."""
  return jnp.where(variance < jnp.inf, jax.lax.rsqrt(variance), jnp.nan)


def rms_norm(x: jax.Array, gain: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
  """Root-mean-square normalisation, computed in float32 or wider.

  Args:
    x: `[..., D]`.
    gain: `[D]`.
    epsilon: Added to the mean square.

  Returns:
    The normalised array, of the shape and dtype of `x`; NaN where the sum of squares overflows.
  """
  wide = x.astype(accumulation_dtype(x.dtype))
  scale = inverse_root(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
  return (wide * scale * gain).astype(x.dtype)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array, *, epsilon: float) -> jax.Array:
  """Layer normalisation, computed in float32 or wider.

  Args:
    x: `[..., D]`.
    gain: `[D]`.
    bias: `[D]`.
    epsilon: Added to the variance.

  Returns:
    The normalised array, of the shape and dtype of `x`; NaN where the sum of squares overflows.
  """
  wide = x.astype(accumulation_dtype(x.dtype))
  centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
  scale = inverse_root(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
  return (centred * scale * gain + bias).astype(x.dtype)


def rotation(positions: jax.Array, frequencies: jax.Array, *, magnitude: float = 1.0) -> Rotation:
  """The angles of rotary position embedding, for `rotate` of all layers.

  Args:
    positions: int32 `[B, N]`, absolute positions.
    frequencies: float32 `[F]`, radians per position.
    magnitude: Factor of the entries that are rotated.
  """

  def compute(positions):
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return magnitude * jnp.sin(angles), magnitude * jnp.cos(angles)

  def kept(positions):
    # The result of a branch is kept. Otherwise XLA's CPU backend computes it in every layer and for every head.
    zeros = jnp.zeros((*positions.shape, 1, frequencies.shape[0]), jnp.float32)
    return jax.lax.cond(jnp.any(positions > 0), compute, lambda _: (zeros, zeros + magnitude), positions)

  return by_platform(positions, cpu=kept, default=compute)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotary position embedding, which pairs entry i of a head with entry F + i.

  Args:
    x: `[B, N, H, head_dim]`, queries or keys; entries of a head from 2 F on are not rotated.
    rotation: The angles.

  Returns:
    The rotated array, of the shape and dtype of `x`.
  """
  sin, cos = rotation
  width = 2 * sin.shape[-1]
  first, second = jnp.split(x[..., :width].astype(accumulation_dtype(x.dtype)), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
  return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)


def committed_slots(num_slots: int, lengths: jax.Array) -> jax.Array:
  """The slots of a cache that hold committed tokens, bool `[B, 1, S]`.

  Args:
    num_slots: S.
    lengths: int32 `[B]`, committed tokens.
  """
  return jnp.arange(num_slots) < lengths[:, None, None]


def attend(
  query: jax.Array,
  new_keys: jax.Array,
  new_values: jax.Array,
  mask: jax.Array,
  prefix: Prefix | None = None,
  *,
  scale: float | None = None,
  soft_cap: float | None = None,
) -> jax.Array:
  """Attention over pending tokens and, where given, a committed prefix, normalised over both together.

  Query head h reads key-value head h // (H / K).

  On TPUs a single query is repeated to eight, so that its products run on the matrix units. On the vector units a step
  would take twice the time. On GPUs attention over a prefix is one kernel, see `tree_attention`.

  Args:
    query: `[B, N, H, head_dim]`.
    new_keys: `[B, K, head_dim, M]`, of pending tokens.
    new_values: `[B, K, M, head_dim]`, of pending tokens.
    mask: bool `[1 or B, N, M]`, the pending tokens that each query attends to.
    prefix: None, or the keys, the values and the slots that each query attends to.
    scale: Factor of the queries; None for `head_dim ** -0.5`.
    soft_cap: The bound c of scores s, which become c tanh(s / c); None for no bound.

  Returns:
    `[B, N, H, head_dim]` in the query's dtype.
  """
  query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
  plain = functools.partial(_attend_by_heads, soft_cap=soft_cap)
  arguments = query, new_keys, new_values, mask, prefix
  if prefix is None or not tree_attention.takes(query.shape[-1], query.dtype, prefix[0].dtype):
    return plain(*arguments)
  return by_platform(*arguments, gpu=functools.partial(_attend_by_kernel, soft_cap=soft_cap), default=plain)


def _attend_by_kernel(query, new_keys, new_values, mask, prefix, *, soft_cap):
  """`attend` for scaled queries and a prefix, on a GPU by one kernel."""
  if dividing_axes():  # the compiler divides no kernel
    return _attend_by_heads(query, new_keys, new_values, mask, prefix, soft_cap=soft_cap)

  def plain(query, new_keys, new_values, mask, *prefix):
    return (_attend_by_heads(query, new_keys, new_values, mask, prefix, soft_cap=soft_cap),)

  kernel = functools.partial(tree_attention.attend_by_kernel, soft_cap=soft_cap)
  mask, visible = (jnp.broadcast_to(x, (query.shape[0], *x.shape[1:])) for x in (mask, prefix[2]))
  return launch(plain, kernel, query, new_keys, new_values, mask, *prefix[:2], visible, platform='gpu')[0]


def _attend_by_heads(query, new_keys, new_values, mask, prefix, *, soft_cap):
  """`attend` for scaled queries."""
  batch_size, num_queries, num_heads, head_dim = query.shape
  num_kv_heads = new_keys.shape[1]
  group = num_heads // num_kv_heads
  if group > 1:
    # The heads that share keys become queries of one head, so that no key is repeated.
    query = jnp.swapaxes(query.reshape(batch_size, num_queries, num_kv_heads, group, head_dim), 2, 3)
    query = query.reshape(batch_size, num_queries * group, num_kv_heads, head_dim)
    mask = jnp.repeat(mask, group, axis=1)
    if prefix is not None and prefix[2].shape[1] > 1:
      prefix = *prefix[:2], jnp.repeat(prefix[2], group, axis=1)
  arguments = query, new_keys, new_values, mask, prefix
  plain = functools.partial(_attend, soft_cap=soft_cap)

  def as_eight(query, new_keys, new_values, mask, prefix):
    rows = jnp.repeat(query, 8, axis=1), new_keys, new_values, jnp.repeat(mask, 8, axis=1), prefix
    return plain(*rows)[:, :1]

  if prefix is not None and query.shape[1] >= _MANY_QUERIES:
    in_blocks = functools.partial(_attend_in_blocks, soft_cap=soft_cap)
    mixed = by_platform(*arguments, cpu=in_blocks, default=plain)
  elif query.shape[1] > 1:
    mixed = plain(*arguments)
  else:
    mixed = by_platform(*arguments, tpu=as_eight, default=plain)
  if group > 1:
    mixed = jnp.swapaxes(mixed.reshape(batch_size, num_queries, group, num_kv_heads, head_dim), 2, 3)
    mixed = mixed.reshape(batch_size, num_queries, num_heads, head_dim)
  return mixed


def attend_causally(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
  """`attend` where no token attends to a later one: a block of queries reads the keys up to its last.

  Args:
    query, keys, values, mask: As for `attend`, of the same N tokens; the mask is False for later ones.

  Returns:
    `[B, N, H, head_dim]` in the query's dtype.
  """
  blocks = []
  for start in range(0, query.shape[1], CAUSAL_BLOCK):
    end = start + CAUSAL_BLOCK
    blocks.append(attend(query[:, start:end], keys[..., :end], values[:, :, :end], mask[:, start:end, :end]))
  return jnp.concatenate(blocks, axis=1)


def _scores(query, keys, visible, soft_cap):
  """Scores `[B, H, N, M]` of scaled queries; the smallest number where a key is not visible."""
  wide = accumulation_dtype(query.dtype)
  found = jnp.einsum('bnhd,bhdm->bhnm', query, keys, preferred_element_type=wide)
  if soft_cap is not None:
    found = soft_cap * jnp.tanh(found / soft_cap)
  return jnp.where(visible[:, None], found, jnp.finfo(wide).min)


def _attend_in_blocks(query, new_keys, new_values, mask, prefix, *, soft_cap):
  """`_attend` for many queries, over blocks of the prefix as far as any query sees (Milakov and Gimelshein 2018).

  Products are those of the queries' type, to which a CPU's cache in float32 is converted block by block.
  """
  keys, values, visible = prefix
  dtype, num_slots = query.dtype, keys.shape[-1]
  size = min(_BLOCK_SLOTS, num_slots)

  def add(carry, scores, values):
    top, total, mixed = carry
    new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, kept = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    found = jnp.einsum('bhnm,bhmd->bhnd', weights.astype(dtype), values.astype(dtype), preferred_element_type=top.dtype)
    return new_top, kept * total + weights.sum(-1, keepdims=True), kept * mixed + found

  def add_block(i, carry):
    start = jnp.minimum(i * size, num_slots - size)  # the last block overlaps the one before it
    block = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
    is_new = start + jnp.arange(size) >= i * size
    scores = _scores(query, block(keys, axis=3).astype(dtype), block(visible, axis=2) & is_new, soft_cap)
    return add(carry, scores, block(values, axis=2))

  scores = _scores(query, new_keys, mask, soft_cap)
  nothing = jnp.full((*scores.shape[:3], 1), jnp.finfo(scores.dtype).min)
  mixed = jnp.zeros((*scores.shape[:3], values.shape[-1]), scores.dtype)
  carry = add((nothing, jnp.zeros_like(nothing), mixed), scores, new_values)
  num_seen = jnp.max(jnp.where(visible, 1 + jnp.arange(num_slots), 0))
  _, total, mixed = jax.lax.fori_loop(0, (num_seen + size - 1) // size, add_block, carry)
  return jnp.swapaxes(mixed / total, 1, 2).astype(dtype)


def _attend(query, new_keys, new_values, mask, prefix, *, soft_cap):
  """`attend` for scaled queries of as many heads as the keys have, without repeating them."""
  wide = accumulation_dtype(query.dtype)
  scores = functools.partial(_scores, query, soft_cap=soft_cap)
  new_scores = scores(new_keys, mask)
  if prefix is None:
    weights = jax.nn.softmax(new_scores, axis=-1).astype(new_values.dtype)
    mixed = jnp.einsum('bhnm,bhmd->bnhd', weights, new_values, preferred_element_type=wide)
    return mixed.astype(query.dtype)

  def mix(weights, values):
    # With queries before heads in the result, XLA's CPU backend would multiply several rows 8 times slower.
    return jnp.einsum('bhnm,bhmd->bhnd', weights.astype(values.dtype), values, preferred_element_type=wide)

  keys, values, visible = prefix
  old_scores = scores(keys, visible)
  top = jnp.maximum(new_scores.max(-1, keepdims=True), old_scores.max(-1, keepdims=True))
  new_weights, old_weights = jnp.exp(new_scores - top), jnp.exp(old_scores - top)
  total = new_weights.sum(-1) + old_weights.sum(-1)
  mixed = mix(new_weights, new_values) + mix(old_weights, values)
  return jnp.swapaxes(mixed / total[..., None], 1, 2).astype(query.dtype)


def unembed(params: Mapping[str, Any], features: jax.Array) -> jax.Array:
  """Logits of the final norm's output, by the output head or, where there is none, by the embedding.

  Args:
    params: `unembedding` `[embed_dim, V]` or `embedding` `[V, embed_dim]`.
    features: `[..., embed_dim]`.

  Returns:
    `[..., V]` in the accumulation's dtype.
  """
  if 'unembedding' in params:
    return matmul(features, params['unembedding'])
  return matmul(features, params['embedding'], axis=1)


def check_feature_layers(feature_layers: tuple[int, ...], num_layers: int) -> None:
  """Checks layers whose hidden states are asked for, numbered as in `Model.features_fn`.

  Args:
    feature_layers: The layers.
    num_layers: Blocks of the network; the inputs of the final norm and of the output head come after theirs.

  Raises:
    ValueError: There is no such layer.
  """
  num_streams = num_layers + 2
  if any(not -num_streams <= layer < num_streams for layer in feature_layers):
    raise ValueError(
      f'feature layers must be from 0 to {num_streams - 1}, or from -{num_streams} to -1 counted from the last one;'
      f' got {list(feature_layers)}'
    )


def check_params(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
  """Checks a network's parameters.

  Args:
    params: A nested dict of arrays.
    shapes: The same with shapes.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape.
  """

  def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator='/'): jnp.shape(leaf) for keys, leaf in leaves}

  found, wanted = by_path(params), by_path(shapes)
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f'parameters do not fit the configuration: {path} must be {wanted.get(path, "absent")},'
        f' got {found.get(path, "nothing")}'
      )
