"""Products of activations and kernels that are arrays."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spectr_jax.kernels.dispatch import operation

LARGE = 2**17  # numbers of a kernel that does not stay in a CPU's caches
# With so many tokens a row they are not joined with the rows. On TPUs attention reads and writes arrays whose minor
# axis in memory is that of tokens, and XLA would copy these twice to join both axes.
MANY_TOKENS = 64
_FEW_ROWS = 12  # that a CPU multiplies as columns; with more the product of rows is as fast
_NUM_PARTS = 8  # of a kernel; a part more costs a CPU the time of a term, a part less traffic of the partial sums
_BLOCK_SIZE = 2**18  # numbers of an int8 kernel that a CPU converts at a time


_CPU_INFO = pathlib.Path('/proc/cpuinfo')


@functools.cache
def multiplies_bfloat16() -> bool:
  """Whether this processor has units for products of bfloat16 matrices (AMX), as far as Linux says so."""
  try:
    return 'amx_bf16' in _CPU_INFO.read_text()
  except OSError:
    return False


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
  """The type of sums over numbers of a type: float32 or wider."""
  return jnp.promote_types(dtype, jnp.float32)


@operation
def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
  """`x` in a type of activations. It is rounded once on CPUs, however XLA joins what stands before and behind."""
  return x.astype(dtype)


@rounded.form('cpu', takes=lambda x, dtype: x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16)
def _rounded_for_certain(x, dtype):
  # XLA leaves out a conversion to bfloat16 and back where both meet in one loop, which depends on the rows of a call.
  return jax.lax.reduce_precision(x, 8, 7).astype(dtype)


@rounded.form('cpu', takes=lambda x, dtype: x.dtype == jnp.dtype(dtype) == jnp.float32)
def _not_fused_with_a_sum(x, dtype):
  # Where a product and a sum meet in one loop, LLVM rounds once for both. What a choice gives is no product.
  return jnp.where(jnp.isnan(x), jnp.nan, x)


@operation
def sum_of(x: jax.Array, y: jax.Array) -> jax.Array:
  """`x + y` of one type, rounded once."""
  return x + y


@sum_of.form('cpu')
def _sum_of_wide(x, y):
  wide = accumulation_dtype(x.dtype)
  return rounded(x.astype(wide) + y.astype(wide), x.dtype)


def inverse_root(variance: jax.Array) -> jax.Array:
  """`rsqrt` for norms: NaN where the variance has overflowed, since 0 would make numbers out of range look sound."""
  return jnp.where(variance < jnp.inf, jax.lax.rsqrt(variance), jnp.nan)


def multiply(x: jax.Array, kernel: jax.Array, axis: int = 0) -> jax.Array:
  """The product `[..., out]`, multiplied in the activations' dtype, accumulated in float32 or wider.

  The kernel is `[in, out]` for axis 0, `[out, in]` for axis 1; of any float dtype, or int8.
  """
  if x.ndim == 3 and x.shape[1] >= MANY_TOKENS:
    return product(x, kernel, axis)
  out = product(x.reshape(-1, x.shape[-1]), kernel, axis)
  return out.reshape(*x.shape[:-1], kernel.shape[1 - axis])


@operation
def product(rows: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
  """`multiply` of rows `[R, in]`, or of `[B, N, in]` with many tokens."""
  if rows.ndim == 2 and len(rows) == 1 and rows.dtype == jnp.bfloat16:  # by itself it takes CPUs 8 times as long
    return _product(jnp.concatenate([rows, rows]), kernel, axis)[:1]
  return _product(rows, kernel, axis)


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
  of_kernel = kernel_gradient(*((rows, gradient) if axis == 0 else (gradient, rows)))
  return _dot(gradient, kernel, (rows.ndim - 1,), (1 - axis,)).astype(rows.dtype), of_kernel.astype(kernel.dtype)


@operation
def kernel_gradient(x: jax.Array, y: jax.Array) -> jax.Array:
  """The sum of the outer products of vectors `[..., in]` and `[..., out]`, `[in, out]`."""
  # XLA's CPU backend would transpose a copy of an operand to join its axes.
  return _sum_of_products(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))


@kernel_gradient.form('tpu')
def _sum_of_products(x, y):
  axes = tuple(range(x.ndim - 1))
  return _dot(x, y, axes, axes)


# The product of `[..., in]` and a kernel, whose gradients are products of the same types. JAX's own multiply in the
# type of the accumulated gradient, float32, which takes a CPU three times as long.
_product = jax.custom_vjp(_product_by_jax, nondiff_argnums=(2,))
_product.defvjp(_product_forward, _product_backward)


def _takes_few_rows(rows, kernel, axis):
  """Whether rows are multiplied as columns of a large kernel `[out, in]`."""
  if axis == 0 or kernel.size < LARGE or rows.ndim > 2 or len(rows) > _FEW_ROWS:
    return False
  return multiplies_bfloat16() if rows.dtype == jnp.bfloat16 else len(rows) > 1


@product.form('cpu', takes=_takes_few_rows)
def _product_of_columns(rows, kernel, axis):
  """The product of a kernel `[out, in]` and few rows as its columns, at least two.

  XLA's CPU backend reads the kernel in order here. Rows become columns one by one, since it turns the product with a
  transposed array into that of rows, which rearranges the kernel.
  """
  columns = [row.reshape(-1, 1) for row in (rows if len(rows) > 1 else [rows[0], rows[0]])]
  out = _dot(kernel.astype(rows.dtype), jnp.concatenate(columns, axis=1), (1,), (0,))
  return jnp.concatenate([out[:, i].reshape(1, -1) for i in range(len(rows))])


def _takes_bfloat16_row(rows, kernel, axis):
  is_row = rows.ndim == 2 and len(rows) == 1 and rows.dtype == kernel.dtype == jnp.bfloat16
  return is_row and axis == 0 and kernel.shape[0] % _NUM_PARTS == 0


@product.form('cpu', takes=_takes_bfloat16_row)
def _product_in_parts(row, kernel, axis):
  """The product of a bfloat16 row and a kernel `[in, out]`, which reads the kernel once and in order.

  XLA's CPU backend rearranges a bfloat16 kernel at every product. Here the kernel's parts are weighted and summed in
  one pass, and a float32 product adds up what is left of the input axis.
  """
  if kernel.size >= LARGE:
    # Bound to the row, the kernel is converted where it is read. XLA would convert all kernels before the loop of
    # decoding, and every step would read a float32 copy of the model, twice the bytes.
    row, kernel = jax.lax.optimization_barrier((row, kernel))
  parts = kernel.reshape(_NUM_PARTS, -1, kernel.shape[1]).astype(jnp.float32)
  weights = row.reshape(_NUM_PARTS, -1, 1).astype(jnp.float32)
  partial = functools.reduce(jnp.add, (weights[i] * parts[i] for i in range(_NUM_PARTS)))
  return _product(jnp.ones((1, partial.shape[0]), jnp.float32), partial, 0)


@operation
def int8_product(x: jax.Array, values: jax.Array, axis: int) -> jax.Array:
  """`multiply` by int8 values, which every float dtype holds."""
  return multiply(x, values, axis)


@int8_product.form('cpu')
def _int8_product_in_blocks(x, values, axis):
  """Some channels at a time.

  XLA's CPU backend converts a whole kernel before it multiplies, and moves this out of the loop of decoding, so that a
  float copy of the model would stay in memory. What it converts here depends on the iteration and fits the caches.
  """
  if x.dtype == jnp.bfloat16 and not multiplies_bfloat16():
    x = x.astype(jnp.float32)  # in bfloat16 a single token takes nine times as long there
  num_inputs, num_channels = values.shape[axis], values.shape[1 - axis]
  # A loop of one iteration would be none.
  size = max(1, min(_BLOCK_SIZE // num_inputs, -(-num_channels // 2)))

  def multiply_block(block, out):
    start = jnp.minimum(block * size, num_channels - size)  # the last block may overlap the one before
    some = jax.lax.dynamic_slice_in_dim(values, start, size, axis=1 - axis)
    return jax.lax.dynamic_update_slice_in_dim(out, multiply(x, some, axis), start, axis=-1)

  out = jnp.zeros((*x.shape[:-1], num_channels), accumulation_dtype(x.dtype))
  return jax.lax.fori_loop(0, -(-num_channels // size), multiply_block, out)
