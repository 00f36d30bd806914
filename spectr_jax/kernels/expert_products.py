"""Products of rows with the kernels of their experts.

A call on few tokens gathers the kernels that it needs. A call on many sorts its rows by their experts, for
`jax.lax.ragged_dot`. On a CPU that costs what all experts cost, whatever is chosen. So `kernels.native` has a product
of its own, which reads the experts that have rows, and those alone. Its sums have one order, whatever rows there are
beside.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from spectr_jax.kernels import native
from spectr_jax.kernels.block_kernel import BlockKernel
from spectr_jax.kernels.int8 import Int8Kernel
from spectr_jax.kernels.products import accumulation_dtype, rounded
from spectr_jax.model import static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedExperts:
  """Kernels `[E, in, out]` in the order in which `native.expert_product` reads them."""

  panels: jax.Array  # what `native.pack_experts` returned
  num_out: int = static_field()
  scale: jax.Array | None = None  # `[E, out]`, the scales of kernels in int8; None for others


ExpertKernel: TypeAlias = jax.Array | Int8Kernel | PackedExperts | BlockKernel


def packed_experts(kernel: Any) -> PackedExperts | None:
  """Kernels `[E, in, out]` packed for a CPU's products; None where these do not take them, or on several devices."""
  values = kernel.values if isinstance(kernel, Int8Kernel) else kernel
  if not isinstance(values, jax.Array) or isinstance(values, Tracer) or len(values.devices()) > 1:
    return None
  if not native.packs(values) or native.form() is None:
    return None
  return PackedExperts(
    native.pack_experts(values), values.shape[2], kernel.scale if isinstance(kernel, Int8Kernel) else None
  )


def expert_product(rows: jax.Array, kernel: ExpertKernel, experts: jax.Array) -> jax.Array:
  """The product of each row and the kernel of its expert.

  Args:
    rows: `[N, in]`.
    kernel: `[E, in, out]`, in any form.
    experts: Integers `[N]`, the expert of each row.

  Returns:
    `[N, out]`, multiplied in the rows' dtype, accumulated in float32 or wider.
  """
  if isinstance(kernel, BlockKernel):
    return kernel.expert_product(rows, experts)
  if isinstance(kernel, PackedExperts):
    products, scale = native.expert_product(rows, kernel.panels, kernel.num_out, experts), kernel.scale
  elif isinstance(kernel, Int8Kernel):
    # Bound to the rows, values are converted where they are read, and not all of them before the loop of decoding.
    some, values = jax.lax.optimization_barrier((rows, kernel.values))
    products, scale = _product(some, values, experts), kernel.scale
  else:
    products, scale = _product(rows, kernel, experts), None
  return products if scale is None else rounded(products * scale[experts], products.dtype)


def _product(rows, kernel, experts):
  gathers = len(rows) < len(kernel)  # so that no more is read than all experts
  return (gathered_product if gathers else ragged_product)(rows, kernel, experts)


def gathered_product(rows: jax.Array, kernel: jax.Array, experts: jax.Array) -> jax.Array:
  """`expert_product` by a copy of each row's kernel."""
  chosen = kernel[experts].astype(rows.dtype)
  return jnp.einsum('ni,nio->no', rows, chosen, preferred_element_type=accumulation_dtype(rows.dtype))


def ragged_product(rows: jax.Array, kernel: jax.Array, experts: jax.Array) -> jax.Array:
  """`expert_product` of rows in the order of their experts."""
  order = jnp.argsort(experts)
  sizes = jnp.bincount(experts, length=len(kernel)).astype(jnp.int32)
  products = jax.lax.ragged_dot(
    rows[order], kernel.astype(rows.dtype), sizes, preferred_element_type=accumulation_dtype(rows.dtype)
  )
  return products[jnp.argsort(order)]
