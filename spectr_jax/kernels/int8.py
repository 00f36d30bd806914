"""Kernels in int8: a symmetric scale per output channel, weights only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spectr_jax.model import static_field

INT8 = 'int8'
BLOCKS = 'blocks'  # of `block_kernel`
# The axis of the output channels, by the name of a parameter that is held in int8. A row of an embedding is a channel
# of the output head that it may also be.
CHANNEL_AXES = {'kernel': 1, 'unembedding': 1, 'embedding': 0}
_LARGEST = 127  # of 127 and -128, the one whose negative exists as well


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Kernel:
  """A matrix of `values` times the `scale` of their channel.

  Attributes:
    values: int8 `[in, out]` for channel axis 1, `[out, in]` for 0; an array, or its shape or sharding. Experts have
      `[E, in, out]`.
    scale: `[out]`, float32 or wider, `[E, out]` of experts; likewise.
    channel_axis: The axis of a matrix's output channels.
  """

  values: Any
  scale: Any
  channel_axis: int = static_field(1)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the matrix."""
    return self.values.shape

  @property
  def size(self) -> int:
    """The number of entries of the matrix."""
    return self.values.size

  def dequantized(self, dtype: DTypeLike) -> jax.Array:
    """The matrix in a float dtype."""
    return (self.values * jnp.expand_dims(self.scale, -1 - self.channel_axis)).astype(dtype)


def is_int8(leaf: Any) -> bool:
  """Tells whether a parameter is a kernel in int8; the `is_leaf` of trees of kernels."""
  return isinstance(leaf, Int8Kernel)


def check_weights(weights: str | None) -> None:
  """ValueError if weights are to be held in another way than None, `int8` or `blocks`."""
  if weights not in (None, INT8, BLOCKS):
    raise ValueError(f'weights must be {INT8}, {BLOCKS}, or None for floating point numbers; got {weights!r}')


def check_savable(params: Any) -> None:
  """ValueError if some parameters are in int8 or in blocks, which are not written."""
  if any(array.dtype in (jnp.int8, jnp.uint8) for array in jax.tree.leaves(params)):
    raise ValueError(f'a model with weights in {INT8} or in blocks is not saved; load it with weights=None to save it')


def quantize(matrix: np.ndarray, channel_axis: int) -> tuple[np.ndarray, np.ndarray]:
  """Rounds every channel of a matrix to 255 numbers from minus to plus its largest magnitude: int8, and scales `[out]`.

  Channels lie along `channel_axis` of the last two, whole and in float32 or float64. An entry is off by half a scale at
  most. ValueError for numbers that are not finite.
  """
  scale = np.abs(matrix).max(axis=-1 - channel_axis) / matrix.dtype.type(_LARGEST)
  if not np.isfinite(scale).all():
    raise ValueError(f'weights that are not finite cannot be held in {INT8}')
  # A channel of zeros has scale 0 and values 0.
  divisor = np.expand_dims(np.where(scale, scale, 1).astype(matrix.dtype), -1 - channel_axis)
  # Division by a scale that underflows may exceed the range.
  return np.clip(np.rint(matrix / divisor), -_LARGEST, _LARGEST).astype(np.int8), scale


def quantized(params: Any) -> Any:
  """Parameters with every kernel, embedding and output head in int8.

  Those of `CHANNEL_AXES` are quantized, in a nested dict of arrays, but for routers.
  """

  def convert(keys, array):
    axis = CHANNEL_AXES.get(keys[-1].key)
    if axis is None or keys[-2:-1] and keys[-2].key == 'router':
      return array
    values, scale = quantize(np.asarray(array).astype(jnp.promote_types(array.dtype, jnp.float32)), axis)
    return Int8Kernel(jnp.asarray(values), jnp.asarray(scale), axis)

  return jax.tree_util.tree_map_with_path(convert, params)
