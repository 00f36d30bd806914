"""The parts that networks share: norms, rotary positions, the output head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spectr_jax.kernels import native
from spectr_jax.kernels.attention import Rotation
from spectr_jax.kernels.block_kernel import BlockKernel, is_in_blocks
from spectr_jax.kernels.int8 import Int8Kernel, is_int8
from spectr_jax.kernels.matrices import OrderedGain, matmul
from spectr_jax.kernels.products import accumulation_dtype, inverse_root, rounded


def take_rows(embedding: jax.Array | Int8Kernel | BlockKernel, rows: jax.Array) -> jax.Array:
  """Rows `[..., embed_dim]` of an embedding, in its dtype or that of its scale; uint16 are bits of bfloat16."""
  if isinstance(embedding, BlockKernel):
    return embedding.columns(jnp.clip(rows, 0, embedding.num_out - 1))
  if isinstance(embedding, Int8Kernel):
    return jnp.take(embedding.values, rows, axis=0) * jnp.take(embedding.scale, rows)[..., None]
  taken = jnp.take(embedding, rows, axis=0)
  return jax.lax.bitcast_convert_type(taken, jnp.bfloat16) if taken.dtype == jnp.uint16 else taken


def rms_norm(x: jax.Array, gain: jax.Array | OrderedGain, *, epsilon: float = 1e-6, offset: float = 0.0) -> jax.Array:
  """Root-mean-square norm of `x` `[..., D]` with gains `[D]` and an offset of all, in float32 or wider; NaN where
  squares overflow.
  """
  if isinstance(gain, OrderedGain):
    return _ordered_norm(x, gain.values + offset if offset else gain.values, None, epsilon)
  wide = x.astype(accumulation_dtype(x.dtype))
  scale = inverse_root(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
  gain = gain.astype(wide.dtype) + offset if offset else gain
  return (wide * scale * gain).astype(x.dtype)


def _ordered_norm(x, gain, bias, epsilon):
  """A norm in float32 whose result does not depend on the rows beside it, to the bit."""
  return native.norm(x.reshape(-1, x.shape[-1]), gain, bias, epsilon=epsilon).reshape(x.shape)


def layer_norm(x: jax.Array, gain: jax.Array | OrderedGain, bias: jax.Array, *, epsilon: float) -> jax.Array:
  """Layer norm of `x` `[..., D]` with gains and biases `[D]`, in float32 or wider; NaN where squares overflow."""
  if isinstance(gain, OrderedGain):
    return _ordered_norm(x, gain.values, bias.astype(jnp.float32), epsilon)
  wide = x.astype(accumulation_dtype(x.dtype))
  centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
  scale = inverse_root(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
  return (centered * scale * gain + bias).astype(x.dtype)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
  """Rotary positions of `x` `[B, N, H, head_dim]`: entries i and F + i are a pair, those from 2 F on stay."""
  sin, cos = rotation
  width = 2 * sin.shape[-1]
  first, second = jnp.split(x[..., :width].astype(accumulation_dtype(x.dtype)), 2, axis=-1)
  rotated = rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)
  return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)


def committed_slots(num_slots: int, lengths: jax.Array) -> jax.Array:
  """The slots of a cache that hold committed tokens, bool `[B, 1, S]`, of numbers of committed tokens `[B]`."""
  return jnp.arange(num_slots) < lengths[:, None, None]


def unembed(params: Mapping[str, Any], features: jax.Array) -> jax.Array:
  """Logits `[..., V]` in float32 or wider, by the output head or, where there is none, by the embedding."""
  if 'unembedding' in params:
    return matmul(features, params['unembedding'])
  return matmul(features, params['embedding'], axis=1)


def is_quantized(leaf: Any) -> bool:
  """Tells whether a parameter is a kernel in int8 or in blocks."""
  return is_int8(leaf) or is_in_blocks(leaf)


@functools.partial(jax.jit, static_argnames='types')
def _cast(arrays: list[jax.Array], types: tuple[jnp.dtype, ...]) -> list[jax.Array]:
  return [array.astype(dtype) for array, dtype in zip(arrays, types, strict=True)]


def converted(params: Any, dtype_of: Callable[[Any], DTypeLike]) -> Any:
  """Parameters in the dtypes that `dtype_of` gives, changed by one program; kernels in int8 or in blocks stay."""
  arrays, structure = jax.tree.flatten(params, is_leaf=is_quantized)
  types = {i: jnp.dtype(dtype_of(x)) for i, x in enumerate(arrays) if not is_quantized(x)}
  changed = [i for i, dtype in types.items() if arrays[i].dtype != dtype]
  if changed:
    cast = _cast([arrays[i] for i in changed], tuple(types[i] for i in changed))
    for i, array in zip(changed, cast, strict=True):
      arrays[i] = array
  return jax.tree.unflatten(structure, [jax.device_put(x) if isinstance(x, np.ndarray) else x for x in arrays])


def check_feature_layers(feature_layers: tuple[int, ...], num_layers: int) -> None:
  """Checks layers whose hidden states are asked for, numbered as in `Model.features_fn`; ValueError if none such."""
  num_streams = num_layers + 2
  if any(not -num_streams <= layer < num_streams for layer in feature_layers):
    raise ValueError(
      f'feature layers must be from 0 to {num_streams - 1}, or from -{num_streams} to -1 counted from the last one;'
      f' got {list(feature_layers)}'
    )


def check_params(params: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
  """Checks nested dicts of parameters; ValueError if one is missing, surplus, or of another shape."""

  def shape_of(path, leaf):
    # In blocks an embedding stands as the output head that it may be.
    return leaf.shape[::-1] if is_in_blocks(leaf) and path.split('/')[-1] == 'embedding' else jnp.shape(leaf)

  def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_in_blocks)
    named = [(jax.tree_util.keystr(keys, simple=True, separator='/'), leaf) for keys, leaf in leaves]
    return {path: shape_of(path, leaf) for path, leaf in named}

  given, wanted = by_path(params), by_path(shapes)
  for path in sorted(wanted.keys() | given.keys()):
    if wanted.get(path) != given.get(path):
      raise ValueError(
        f'parameters do not fit the configuration: {path} must be {wanted.get(path, "absent")},'
        f' got {given.get(path, "nothing")}'
      )
