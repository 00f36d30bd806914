"""The floor of a call on several tokens: its weights at the memory's rate, or its products at the processor's."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from spectr_jax import Model
from spectr_jax.auto.timing import time_in_turns
from spectr_jax.kernels.block_kernel import is_in_blocks
from spectr_jax.kernels.matrices import PackedKernel, TransposedKernel, matmul

_NUM_TOKENS = 1, 4, 16, 64, 128  # of the products whose fastest sets the rate
_IN_CACHE = 2**20  # bytes of a kernel that stays in the cache of each core
_REPEATS = 100  # products in one program


@dataclasses.dataclass(frozen=True)
class Floor:
  """What bounds a call of a model on this device from below."""

  num_bytes: int  # of all kernels, which are read once
  num_products: int  # multiplications of weights for one token
  bytes_per_second: float  # of the memory, see `timing.read_rate`
  products_per_second: float  # with a kernel that stays in the caches, at the best number of tokens

  def milliseconds(self, num_tokens: int) -> float:
    """The floor of a call: the longer of reading all kernels and of multiplying by them. Attention is not counted."""
    products = num_tokens * self.num_products / self.products_per_second
    return 1e3 * max(self.num_bytes / self.bytes_per_second, products)


def _kernels(params: Any) -> list[Any]:
  """The kernels that a call multiplies by: all matrices, and the embedding where it is the output head as well."""

  def is_kernel(node):
    return is_in_blocks(node) or isinstance(node, (PackedKernel, TransposedKernel))

  leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kernel)
  names = {'kernel', 'unembedding'} if 'unembedding' in params else {'kernel', 'embedding'}
  return [leaf for keys, leaf in leaves if getattr(keys[-1], 'key', None) in names and len(leaf.shape) == 2]


def _num_bytes(kernel: Any) -> int:
  if isinstance(kernel, TransposedKernel):  # of two orders a call reads one
    kernel = kernel.out_in
  return sum(leaf.nbytes for leaf in jax.tree.leaves(kernel))


def _products_per_second(kernel: Any, num_runs: int) -> float:
  num_in, num_out = kernel.shape

  @jax.jit
  def repeat(kernel, rows):
    # Each product needs the one before.
    return jax.lax.fori_loop(
      0, _REPEATS, lambda _, rows: rows + 1e-9 * matmul(rows, kernel)[:, :1].astype(rows.dtype), rows
    )

  rates = []
  for num_tokens in _NUM_TOKENS:
    rows = jnp.ones((num_tokens, num_in), jnp.bfloat16)
    seconds = time_in_turns({'': lambda rows=rows: repeat(kernel, rows)}, num_runs)['']
    rates.append(_REPEATS * num_tokens * num_in * num_out / seconds.min())
  return max(rates)


def floor_of(model: Model, num_runs: int) -> Floor:
  """The floor of a model's calls, in the form that it decodes in, by rates measured now."""
  kernels = _kernels(model.params)
  in_cache = [kernel for kernel in kernels if _num_bytes(kernel) <= _IN_CACHE * (os.cpu_count() or 1)]
  largest = max(in_cache or kernels, key=lambda kernel: kernel.shape[0] * kernel.shape[1])
  return Floor(
    sum(map(_num_bytes, kernels)),
    sum(kernel.shape[0] * kernel.shape[1] for kernel in kernels),
    timing.read_rate(),
    _products_per_second(largest, num_runs),
  )
