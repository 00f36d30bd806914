"""Kernels in blocks of 4 or 8 bits, with the numbers that a `.gguf` file has for them, and their products.

Inputs are rounded to 8 bits, each block of a row with a scale of its own, as llama.cpp does: sums over a block are then
sums of integers, which are exact. A row's product does not depend on the rows beside it, bit by bit. But what stands
between products may differ in its last bit where another number of tokens is computed, and then a rounding to 8 bits
may go the other way: results are equal up to the rounding of inputs, not of floats.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels import native
from spectr_jax.kernels.dispatch import operation
from spectr_jax.model import static_field

_LARGEST = 127  # magnitude of a rounded input
_LEAST = 1e-30  # largest input of a block below which all are 0; their scale would have no inverse


def rounded_inputs(rows: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
  """Inputs as 8 bits.

  Args:
    rows: `[N, in]`.
    num_blocks: Blocks of a row, which divide it.

  Returns:
    float32 `[N, num_blocks, block]`, integers from -127 to 127, and float32 `[N, num_blocks]`, what they are multiplied
    with: NaN where an input of the block is not finite.
  """
  blocks = rows.astype(jnp.float32).reshape(rows.shape[0], num_blocks, -1)
  largest = jnp.max(jnp.abs(blocks), axis=-1)
  factor = jnp.where(largest > _LEAST, _LARGEST / largest, 0)
  scale = jnp.where(jnp.isfinite(largest), largest / _LARGEST, jnp.nan)
  return jnp.round(blocks * factor[..., None]), scale


def block_values(weights: jax.Array, num_bits: int) -> jax.Array:
  """The integers of a kernel in blocks.

  Args:
    weights: uint8 `[..., lines, 16, 4]`, as of `BlockKernel`.
    num_bits: 4 or 8.

  Returns:
    float32 `[..., block, 16]`: from 0 to 15 in 4 bits, from -128 to 127 in 8.
  """
  if num_bits == 4:
    weights = jnp.concatenate([weights & 15, weights >> 4], axis=-3)
  else:
    weights = jax.lax.bitcast_convert_type(weights, jnp.int8)
  inputs_last = jnp.moveaxis(weights, -1, -2)  # [..., lines, 4, 16]
  return inputs_last.reshape(*weights.shape[:-3], -1, weights.shape[-2]).astype(jnp.float32)


@operation
def block_product(
  rows: jax.Array, weights: jax.Array, scales: jax.Array, least: jax.Array | None, num_out: int
) -> jax.Array:
  """The product of rows, rounded to 8 bits, and a kernel in blocks.

  Args:
    rows: `[N, in]` in float32 or bfloat16.
    weights: uint8 `[P, blocks, lines, 16, 4]`, the kernel's integers in panels of 16 outputs, see `BlockKernel`.
    scales: float16 or float32 `[P, blocks, 16]`, what the integers are multiplied with.
    least: Likewise, what is added to their products in 4 bits; None in 8 bits.
    num_out: The kernel's outputs.

  Returns:
    float32 `[N, num_out]`.
  """
  num_blocks = weights.shape[1]
  inputs, input_scales = rounded_inputs(rows, num_blocks)

  def add(block, sums):
    own = jax.lax.dynamic_index_in_dim(weights, block, axis=1, keepdims=False)
    values = block_values(own, 8 if least is None else 4)
    some = jax.lax.dynamic_index_in_dim(inputs, block, axis=1, keepdims=False)
    scale = jax.lax.dynamic_index_in_dim(input_scales, block, axis=1, keepdims=False)[:, None, None]
    products = jnp.einsum('ni,pio->npo', some, values, precision='highest')
    sums += products * (scale * jax.lax.dynamic_index_in_dim(scales, block, axis=1, keepdims=False).astype(jnp.float32))
    if least is None:
      return sums
    total = scale * jnp.sum(some, axis=-1)[:, None, None]
    return sums + total * jax.lax.dynamic_index_in_dim(least, block, axis=1, keepdims=False).astype(jnp.float32)

  zeros = jnp.zeros((rows.shape[0], weights.shape[0], native.PANEL), jnp.float32)
  sums = jax.lax.fori_loop(0, num_blocks, add, zeros)
  return sums.reshape(rows.shape[0], -1)[:, :num_out]


@block_product.form('cpu', takes=lambda *operands: native.form() is not None)
def _native(rows, weights, scales, least, num_out):
  return native.block_product(rows, weights, scales, least, num_out)


@operation
def expert_block_product(
  rows: jax.Array, experts: jax.Array, weights: jax.Array, scales: jax.Array, least: jax.Array | None, num_out: int
) -> jax.Array:
  """`block_product` of each row and the kernel of its expert, whose number `experts` has, integers `[N]`; the kernels
  have a first axis E.
  """

  def one(of_row):  # one after the other: to gather the kernels of all rows could take more than the model
    row, expert = of_row
    lowest = None if least is None else least[expert]
    return block_product(row[None], weights[expert], scales[expert], lowest, num_out)[0]

  return jax.lax.map(one, (rows, experts))


@expert_block_product.form('cpu', takes=lambda *operands: native.form() is not None)
def _native_by_experts(rows, experts, weights, scales, least, num_out):
  return native.block_product(rows, weights, scales, least, num_out, experts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockKernel:
  """A kernel `[in, out]` in panels of 16 outputs, each of which has blocks of 32 or 16 inputs; or those of experts,
  with a first axis E of all arrays.

  A weight is `scale * value`, with the value from -128 to 127, or in 4 bits `scale * value + least`, from 0 to 15.

  Attributes:
    weights: uint8 `[P, blocks, lines, 16, 4]`. In 8 bits line i has the inputs 4 i to 4 i + 3 of a block. In 4 bits its
      lower halves have these, and the upper ones those of the second half of the block.
    scales: float16 or float32 `[P, blocks, 16]`.
    least: Likewise in 4 bits, None in 8.
    num_out: The number of outputs.
  """

  weights: Any
  scales: Any
  least: Any
  num_out: int = static_field()

  @property
  def num_bits(self) -> int:
    """Bits of an integer."""
    return 8 if self.least is None else 4

  @property
  def shape(self) -> tuple[int, ...]:
    """`(in, out)`, or `(E, in, out)`."""
    *experts, _, num_blocks, num_lines, _, _ = self.weights.shape
    return *experts, num_blocks * num_lines * 32 // self.num_bits, self.num_out

  @property
  def size(self) -> int:
    """The number of weights."""
    return math.prod(self.shape)

  def product(self, rows: jax.Array) -> jax.Array:
    """The product of rows `[N, in]`, rounded to 8 bits, and the kernel; float32 `[N, out]`."""
    return block_product(rows, self.weights, self.scales, self.least, self.num_out)

  def expert_product(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
    """Likewise of each row and the kernel of its expert, integers `[N]`."""
    return expert_block_product(rows, experts, self.weights, self.scales, self.least, self.num_out)

  def columns(self, outputs: jax.Array) -> jax.Array:
    """The weights of some outputs, exact: rows of an embedding whose output head this is.

    Args:
      outputs: Integers `[...]`.

    Returns:
      float32 `[..., in]`.
    """
    panel, lane = outputs // native.PANEL, outputs % native.PANEL
    weights = self.weights[panel, :, :, lane][..., None, :]  # [..., blocks, lines, 1, 4]
    values = block_values(weights, self.num_bits)[..., 0]
    found = values * self.scales[panel, :, lane].astype(jnp.float32)[..., None]
    if self.least is not None:
      found += self.least[panel, :, lane].astype(jnp.float32)[..., None]
    return found.reshape(*outputs.shape, -1)


def is_in_blocks(leaf: Any) -> bool:
  """Tells whether a parameter is a kernel in blocks; the `is_leaf` of trees of kernels."""
  return isinstance(leaf, BlockKernel)


def has_blocks(params: Any) -> bool:
  """Whether some parameter of a tree is a kernel in blocks."""
  return any(map(is_in_blocks, jax.tree.leaves(params, is_leaf=is_in_blocks)))


def side_by_side(kernels: Sequence[BlockKernel]) -> BlockKernel:
  """Kernels of the same inputs as one. All but the last must have whole panels, and all blocks of one kind."""
  weights, scales, least = zip(*((each.weights, each.scales, each.least) for each in kernels), strict=True)
  return BlockKernel(
    jnp.concatenate(weights),
    jnp.concatenate(scales),
    None if least[0] is None else jnp.concatenate(least),
    sum(each.num_out for each in kernels),
  )


def fit_side_by_side(kernels: Sequence[Any]) -> bool:
  """Whether `side_by_side` takes them."""
  if not all(map(is_in_blocks, kernels)):
    return False
  kinds = {(each.weights.shape[1:], each.scales.dtype, each.least is None) for each in kernels}
  return len(kinds) == 1 and all(each.num_out % native.PANEL == 0 for each in kernels[:-1])


# What the blocks of each type hold, from `[out, blocks, bytes]`: integers, which in 4 bits stand two in a byte; scales;
# and in 4 bits what is added.


def _halves(stored: np.ndarray) -> np.ndarray:
  return stored.view(np.float16).astype(np.float32)


def _q4_0(stored):
  scales = stored[..., :2].view(np.float16)
  with np.errstate(over='ignore'):
    return stored[..., 2:], scales, scales * np.float16(-8)


def _q4_1(stored):
  return stored[..., 4:], stored[..., :2].view(np.float16), stored[..., 2:4].view(np.float16)


def _q8_0(stored):
  return stored[..., 2:], stored[..., :2].view(np.float16), None


def _q4_k(stored):
  """256 weights: eight blocks of 32, whose 6-bit factors stand in 12 bytes."""
  factors, lows = np.empty((2, *stored.shape[:-1], 8), np.uint8)
  packed = stored[..., 4:16]
  first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
  factors[..., :4], lows[..., :4] = first & 63, second & 63
  factors[..., 4:] = (last & 15) | (first >> 6) << 4
  lows[..., 4:] = (last >> 4) | (second >> 6) << 4
  scales, least = _halves(stored[..., :2]) * factors, -_halves(stored[..., 2:4]) * lows
  # 32 bytes have two blocks, one in the lower halves. Here the halves of a byte are of one block.
  pairs = stored[..., 16:].reshape(*stored.shape[:-1], 4, 2, 16)
  low, high = pairs & 15, pairs >> 4
  own = np.stack([low[..., 0, :] | low[..., 1, :] << 4, high[..., 0, :] | high[..., 1, :] << 4], axis=-2)
  return _blocks(own, 16), _blocks(scales, 1), _blocks(least, 1)


def _q6_k(stored):
  """256 weights: sixteen blocks of 16."""
  low = stored[..., :128].reshape(*stored.shape[:-1], 2, 1, 64)
  high = stored[..., 128:192].reshape(*stored.shape[:-1], 2, 1, 32)
  low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*stored.shape[:-1], 2, 4, 32)
  high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
  values = ((low | high << 4).astype(np.int8) - np.int8(32)).view(np.uint8)
  scales = _halves(stored[..., 208:]) * stored[..., 192:208].view(np.int8)
  return _blocks(values, 16), _blocks(scales, 1), None


def _blocks(parts: np.ndarray, size: int) -> np.ndarray:
  """What larger blocks hold, `[out, larger blocks, ...]`, as `[out, blocks, size]`."""
  return parts.reshape(len(parts), -1, size)


def _mxfp4(stored):
  """Numbers of 4 bits without even steps, as twice their value in 8 bits; scales are powers of two."""
  exponents = stored[..., :1].astype(np.int32)
  scales = np.where(exponents < 255, np.ldexp(np.float32(1), exponents - 128), np.float32(np.nan))
  values = np.concatenate([stored[..., 1:] & 15, stored[..., 1:] >> 4], axis=-1)
  return _TWICE[values].view(np.uint8), scales, None


_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
KINDS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]] = {
  'Q4_0': _q4_0,
  'Q4_1': _q4_1,
  'Q8_0': _q8_0,
  'Q4_K': _q4_k,
  'Q6_K': _q6_k,
  'MXFP4': _mxfp4,
}


def rounded_to_blocks(kernel: np.ndarray) -> BlockKernel:
  """A kernel rounded to 8 bits, with a scale for every 32 weights of an output, as in blocks of type Q8_0.

  Args:
    kernel: float32 `[in, out]`, with `in` a multiple of 32.

  Raises:
    ValueError: A scale is not finite in float16.
  """
  blocks = kernel.T.reshape(kernel.shape[1], -1, 32)
  with np.errstate(over='ignore'):
    scales = (np.abs(blocks).max(axis=-1, keepdims=True) / _LARGEST).astype(np.float16)
  steps = scales.astype(np.float32)
  values = np.divide(blocks, steps, out=np.zeros_like(blocks), where=np.isfinite(steps) & (steps > 0))
  values = values.round().clip(-_LARGEST, _LARGEST).astype(np.int8)
  return packed(np.concatenate([scales.view(np.uint8), values.view(np.uint8)], axis=-1), 'Q8_0')


def packed_experts(each: Iterable[np.ndarray], num: int, kind: str) -> BlockKernel:
  """The kernels of `num` experts from what `packed` takes of each."""
  kernels = (packed(stored, kind) for stored in each)
  leaves, structure = jax.tree.flatten(next(kernels))
  arrays = [np.empty((num, *leaf.shape), leaf.dtype) for leaf in leaves]
  for i, own in enumerate(itertools.chain([leaves], map(jax.tree.leaves, kernels))):
    for place, leaf in zip(arrays, own, strict=True):
      place[i] = leaf
  return jax.tree.unflatten(structure, map(jnp.asarray, arrays))


def packed(stored: np.ndarray, kind: str) -> BlockKernel:
  """A kernel in the order in which products read it, made on the host.

  Args:
    stored: uint8 `[out, blocks, bytes]`, the blocks of each output as they are in the file.
    kind: Their type, of `KINDS`.

  Raises:
    ValueError: A scale is not finite.
  """
  values, scales, least = KINDS[kind](np.ascontiguousarray(stored))
  if not (np.isfinite(scales).all() and (least is None or np.isfinite(least).all())):
    raise ValueError(f'a scale of its {kind} blocks is not finite')

  num_out, num_blocks, _ = values.shape
  num_padded = -num_out % native.PANEL

  def panels(array):  # [out, blocks, n] as [P, blocks, n, 16]
    array = np.pad(array, ((0, num_padded), (0, 0), (0, 0)))
    return array.reshape(-1, native.PANEL, num_blocks, array.shape[-1]).transpose(0, 2, 3, 1)

  fours = panels(values).reshape(-1, num_blocks, values.shape[-1] // 4, 4, native.PANEL)
  return BlockKernel(
    jnp.asarray(np.ascontiguousarray(fours.swapaxes(-1, -2))),
    jnp.asarray(np.ascontiguousarray(panels(scales)[:, :, 0])),
    None if least is None else jnp.asarray(np.ascontiguousarray(panels(least)[:, :, 0])),
    num_out,
  )
