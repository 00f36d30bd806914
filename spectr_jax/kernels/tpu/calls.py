"""Calls of kernels in Pallas for TPUs; importing it takes seconds, as Pallas does."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

ROWS, LANES = 8, 128  # of a register
_MEMORY = 64 * 2**20
_is_interpreted = contextvars.ContextVar('kernels_are_interpreted', default=False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
  """A context in which the operations of kernels run one by one on any backend, for tests."""
  token = _is_interpreted.set(True)
  try:
    yield
  finally:
    _is_interpreted.reset(token)


def call_kernel(kernel: Callable[..., None], *arrays: jax.Array, needs_memory: bool = False, **options: Any) -> Any:
  """The results of a kernel; `needs_memory` if it may need more vector memory than kernels get by default."""
  if needs_memory:
    options['compiler_params'] = pltpu.CompilerParams(vmem_limit_bytes=_MEMORY)
  return pl.pallas_call(kernel, interpret=_is_interpreted.get(), **options)(*arrays)


def call_by_rows(
  kernel: Callable[..., None],
  *arrays: jax.Array,
  results: Sequence[tuple[int, DTypeLike]],
  fewest: int = 1,
  **options: Any,
) -> list[jax.Array]:
  """The results `[M, width]` of a kernel that takes eight rows of arrays `[M, ...]` of rank 2 at a time.

  The last eight may have rows beyond the end, of any values, which are not written. Rows of zeros make up for `fewest`,
  as fewer than eight are in a layout of their own. `results` are widths and types; options are those of `call_kernel`.
  """
  num_rows = len(arrays[0])
  size = max(num_rows, fewest)
  if size > num_rows:
    arrays = tuple(jnp.pad(x, ((0, size - num_rows), (0, 0))) for x in arrays)

  def rows(width):
    return pl.BlockSpec((ROWS, width), lambda i: (i, 0))

  padded = call_kernel(
    kernel,
    *arrays,
    grid=(pl.cdiv(size, ROWS),),
    in_specs=[rows(x.shape[1]) for x in arrays],
    out_specs=[rows(width) for width, _ in results],
    out_shape=[jax.ShapeDtypeStruct((size, width), dtype) for width, dtype in results],
    **options,
  )
  return [x[:num_rows] for x in padded]
