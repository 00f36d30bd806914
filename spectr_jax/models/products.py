"""Products of activations and kernels, in the form that is fast for the kernel's type, the rows and the platform."""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spectr_jax import native
from spectr_jax.models import decoding_form
from spectr_jax.models.decoding_form import PackedKernel, TransposedKernel
from spectr_jax.models.int8 import Int8Kernel
from spectr_jax.ops.platforms import by_platform

Kernel: TypeAlias = jax.Array | Int8Kernel | TransposedKernel | PackedKernel
# With so many tokens a row they are not joined with the rows. On TPUs attention reads and writes arrays whose minor
# axis in memory is that of tokens, and XLA would copy these twice to join both axes.
_MANY_TOKENS = 64
_FEW_ROWS = 12  # that a CPU multiplies as columns; with more the product of rows is as fast
_NUM_PARTS = (
  8  # of a kernel; a part more costs a CPU the time of a term, a part less memory traffic of the partial sums
)
_BLOCK_SIZE = 2**18  # numbers of an int8 kernel that a CPU converts at a time


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
  """The type of sums over numbers of a type: float32 or wider."""
  return jnp.promote_types(dtype, jnp.float32)


def matmul(x: jax.Array, kernel: Kernel, *, axis: int = 0) -> jax.Array:
  """The product of activations and a kernel, multiplied in the activations' dtype, accumulated in float32 or wider.

  Args:
    x: `[..., in]`.
    kernel: `[in, out]` for axis 0, `[out, in]` for axis 1; of any float dtype, or in int8; or a
      `TransposedKernel`.
    axis: The kernel's input axis, where the kernel does not say.

  Returns:
    `[..., out]` in the accumulation's dtype.
  """
  has_many_tokens = x.ndim == 3 and x.shape[1] >= _MANY_TOKENS
  if isinstance(kernel, PackedKernel):
    out = native.product(x.reshape(-1, x.shape[-1]), kernel.panels, kernel.num_out)
    return out.reshape(*x.shape[:-1], kernel.num_out)
  if isinstance(kernel, TransposedKernel):
    if kernel.in_out is not None and (x.size == x.shape[-1] or has_many_tokens):
      return matmul(x, kernel.in_out)
    return matmul(x, kernel.out_in, axis=1)
  if isinstance(kernel, Int8Kernel):
    in_blocks = functools.partial(_matmul_in_blocks, axis=axis)
    whole = functools.partial(matmul, axis=axis)
    # A channel's scale is a factor of its sums, so that the integers, which every float dtype holds, are multiplied.
    return by_platform(x, kernel.values, cpu=in_blocks, default=whole) * kernel.scale
  rows = x.reshape(-1, x.shape[-1])
  is_row = rows.shape[0] == 1
  plain = functools.partial(_product_of_two if is_row and x.dtype == jnp.bfloat16 else _product_of_rows, axis=axis)
  by_columns = axis == 1 and kernel.size >= decoding_form.LARGE and rows.shape[0] <= _FEW_ROWS
  if by_columns and (decoding_form.multiplies_bfloat16() if x.dtype == jnp.bfloat16 else not is_row):
    out = by_platform(rows, kernel, cpu=_product_of_columns, default=plain)
  elif axis == 0 and is_row and x.dtype == kernel.dtype == jnp.bfloat16 and kernel.shape[0] % _NUM_PARTS == 0:
    out = by_platform(rows, kernel, cpu=_product_in_parts, default=plain)
  elif has_many_tokens:
    return plain(x, kernel)
  else:
    out = plain(rows, kernel)
  return out.reshape(*x.shape[:-1], kernel.shape[1 - axis])


def _dot(x, y, x_axes, y_axes) -> jax.Array:
  wide = accumulation_dtype(x.dtype)
  return jax.lax.dot_general(x, y.astype(x.dtype), ((x_axes, y_axes), ((), ())), preferred_element_type=wide)


def _product_by_jax(rows, kernel, axis) -> jax.Array:
  return _dot(rows, kernel, (rows.ndim - 1,), (axis,))


def _product_forward(rows, kernel, axis):
  return _product_by_jax(rows, kernel, axis), (rows, kernel)


def _product_backward(axis, operands, gradient):
  rows, kernel = operands
  gradient = gradient.astype(rows.dtype)

  def by_kernel(x, y):
    axes = tuple(range(x.ndim - 1))
    return _dot(x, y, axes, axes)

  def by_kernel_of_joined(x, y):
    return by_kernel(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))

  operands = (rows, gradient) if axis == 0 else (gradient, rows)
  # XLA's CPU backend would transpose a copy of an operand to join its axes.
  of_kernel = by_platform(*operands, tpu=by_kernel, default=by_kernel_of_joined)
  return _dot(gradient, kernel, (rows.ndim - 1,), (1 - axis,)).astype(rows.dtype), of_kernel.astype(kernel.dtype)


# The product of `[..., in]` and a kernel, whose gradients are products of the same types. JAX's own multiply in the
# type of the accumulated gradient, float32, which takes a CPU three times as long.
_product = jax.custom_vjp(_product_by_jax, nondiff_argnums=(2,))
_product.defvjp(_product_forward, _product_backward)


def _product_of_rows(rows, kernel, *, axis):
  return _product(rows, kernel, axis)


def _product_of_columns(rows, kernel):
  """The product of a kernel `[out, in]` and few rows as its columns, at least two.

  XLA's CPU backend reads the kernel in order here. Rows become columns one by one, since it turns the product with a
  transposed array into that of rows, which rearranges the kernel.
  """
  columns = [row.reshape(-1, 1) for row in (rows if len(rows) > 1 else [rows[0], rows[0]])]
  out = _dot(kernel.astype(rows.dtype), jnp.concatenate(columns, axis=1), (1,), (0,))
  return jnp.concatenate([out[:, i].reshape(1, -1) for i in range(len(rows))])


def _product_of_two(row, kernel, *, axis):
  """The product of a bfloat16 row, computed twice: by itself it takes CPUs 8 times as long."""
  return _product(jnp.concatenate([row, row]), kernel, axis)[:1]


def _product_in_parts(row, kernel):
  """The product of a bfloat16 row and a kernel `[in, out]`, which reads the kernel once and in order.

  XLA's CPU backend rearranges a bfloat16 kernel at every product. Here the kernel's parts are weighted and summed in
  one pass, and a float32 product adds up what is left of the input axis.
  """
  if kernel.size >= decoding_form.LARGE:
    # Bound to the row, the kernel is converted where it is read. XLA would convert all kernels before the loop of
    # decoding, and every step would read a float32 copy of the model, twice the bytes.
    row, kernel = jax.lax.optimization_barrier((row, kernel))
  parts = kernel.reshape(_NUM_PARTS, -1, kernel.shape[1]).astype(jnp.float32)
  weights = row.reshape(_NUM_PARTS, -1, 1).astype(jnp.float32)
  partial = functools.reduce(jnp.add, (weights[i] * parts[i] for i in range(_NUM_PARTS)))
  return _product(jnp.ones((1, partial.shape[0]), jnp.float32), partial, 0)


def _matmul_in_blocks(x: jax.Array, values: jax.Array, *, axis: int) -> jax.Array:
  """`matmul` by int8 values, some channels at a time.

  XLA's CPU backend converts a whole kernel before it multiplies, and moves this out of the loop of decoding, so that a
  float copy of the model would stay in memory. What it converts here depends on the iteration and fits the caches.

  Args:
    x: `[..., in]`.
    values: int8, `[in, out]` for axis 0, `[out, in]` for axis 1.
    axis: The input axis of the values.

  Returns:
    `[..., out]` in the accumulation's dtype.
  """
  if x.dtype == jnp.bfloat16 and not decoding_form.multiplies_bfloat16():
    x = x.astype(jnp.float32)  # in bfloat16 a single token takes nine times as long there
  num_inputs, num_channels = values.shape[axis], values.shape[1 - axis]
  # A loop of one iteration would be none.
  size = max(1, min(_BLOCK_SIZE // num_inputs, -(-num_channels // 2)))

  def multiply(block, out):
    start = jnp.minimum(block * size, num_channels - size)  # the last block may overlap the one before
    some = jax.lax.dynamic_slice_in_dim(values, start, size, axis=1 - axis)
    return jax.lax.dynamic_update_slice_in_dim(out, matmul(x, some, axis=axis), start, axis=-1)

  out = jnp.zeros((*x.shape[:-1], num_channels), accumulation_dtype(x.dtype))
  return jax.lax.fori_loop(0, -(-num_channels // size), multiply, out)
