"""Products of activations and kernels of every type that parameters have."""

from __future__ import annotations

from typing import TypeAlias

import jax

from spectr_jax.kernels import native
from spectr_jax.kernels.products import MANY_TOKENS, int8_product, multiply
from spectr_jax.models.block_kernel import BlockKernel
from spectr_jax.models.decoding_form import PackedKernel, TransposedKernel
from spectr_jax.models.int8 import Int8Kernel

Kernel: TypeAlias = jax.Array | Int8Kernel | BlockKernel | TransposedKernel | PackedKernel


def matmul(x: jax.Array, kernel: Kernel, *, axis: int = 0) -> jax.Array:
  """The product of activations and a kernel, multiplied in the activations' dtype, accumulated in float32 or wider.

  Args:
    x: `[..., in]`.
    kernel: `[in, out]` for axis 0, `[out, in]` for axis 1; of any float dtype, or in int8; or a `BlockKernel`,
      `TransposedKernel` or `PackedKernel`.
    axis: The kernel's input axis, where the kernel does not say.

  Returns:
    `[..., out]` in the accumulation's dtype.
  """
  if isinstance(kernel, BlockKernel):
    return kernel.product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], kernel.num_out)
  if isinstance(kernel, PackedKernel):
    out = native.product(x.reshape(-1, x.shape[-1]), kernel.panels, kernel.num_out)
    return _scaled(out.reshape(*x.shape[:-1], kernel.num_out), kernel.scale)
  if isinstance(kernel, TransposedKernel):
    has_many_tokens = x.ndim == 3 and x.shape[1] >= MANY_TOKENS
    if kernel.in_out is not None and (x.size == x.shape[-1] or has_many_tokens):
      return matmul(x, kernel.in_out)
    return matmul(x, kernel.out_in, axis=1)
  if isinstance(kernel, Int8Kernel):
    return _scaled(int8_product(x, kernel.values, axis), kernel.scale)
  return multiply(x, kernel, axis)


def _scaled(sums, scale):
  return sums if scale is None else sums * scale  # a channel's scale is a factor of its sums
