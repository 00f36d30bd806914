"""Functions that a TPU or a GPU runs as a kernel of its own.

A kernel is one launch, where XLA would make a launch of every few operations: on a v5e that takes 1,800 cycles, more
than the operations on a few thousand numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from spectr_jax.sharding import automatic_axes

# Pallas takes seconds to import, so it is not imported before a program for a platform with a kernel is lowered.
# `platform_dependent` would trace the kernel for every platform.
_kernel_p = Primitive('kernel')
_kernel_p.multiple_results = True


@_kernel_p.def_impl
def _run(*arrays, **functions):
  return jax.jit(lambda *arrays: _kernel_p.bind(*arrays, **functions))(*arrays)


@_kernel_p.def_abstract_eval
def _shapes(*arrays, plain, kernel, platform):
  del arrays, kernel, platform
  return plain.out_avals


def _lower_plainly(context, *arrays, plain, kernel, platform):
  del kernel, platform
  return mlir.lower_fun(jaxpr_as_fun(plain), multiple_results=True)(context, *arrays)


def _lower(platform_of_program, context, *arrays, plain, kernel, platform):
  axes = context.module_context.axis_context
  # Where the compiler divides work over devices, it cannot divide a kernel.
  is_divided = not hasattr(axes, 'manual_axes') and getattr(axes, 'num_devices', 1) > 1
  if platform != platform_of_program or is_divided:
    return _lower_plainly(context, *arrays, plain=plain, kernel=kernel, platform=platform)
  return mlir.lower_fun(lambda *arrays: kernel(*arrays), multiple_results=True)(context, *arrays)


mlir.register_lowering(_kernel_p, _lower_plainly)
for _name, _platform in (('tpu', 'tpu'), ('cuda', 'gpu'), ('rocm', 'gpu')):
  mlir.register_lowering(_kernel_p, functools.partial(_lower, _platform), platform=_name)


def as_kernel(
  plain: Callable[..., tuple[jax.Array, ...]], kernel: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
  """`plain(*arrays)`; under `vmap`, on a TPU, all entries by one call of a kernel.

  On a mesh every device computes all of it. So the arrays should be small, or the same on all devices along the axes
  that the compiler divides work over.

  Args:
    plain: A function of arrays that returns a tuple of arrays.
    kernel: Takes the arrays of M entries, `[M, ...]`, and returns the results of `plain` for each, up to rounding. It
      may import Pallas, since it is called for programs for TPUs alone.
    *arrays: The arguments of `plain`.
  """

  @jax.custom_batching.custom_vmap
  def one(*arrays):
    return tuple(plain(*arrays))

  @one.def_vmap
  def several(num_entries, in_batched, *arrays):
    results = launch(jax.vmap(plain), kernel, *_batched(num_entries, in_batched, arrays))
    return results, (True,) * len(results)

  return one(*arrays)


def _batched(num_entries, in_batched, arrays):
  return [
    x if is_batched else jnp.broadcast_to(x, (num_entries, *jnp.shape(x))) for x, is_batched in zip(arrays, in_batched)
  ]


def launch(plain, kernel, *arrays, platform='tpu'):
  """`plain(*arrays)` of the arrays of M entries, on one platform by one call of a kernel; entries of rows are entries.

  Args:
    plain: Takes arrays `[M, ...]` and returns a tuple of arrays `[M, ...]`. It must not close over traced values.
    kernel, *arrays: As of `as_kernel`.
    platform: That of the kernel, `tpu` or `gpu`.
  """

  @jax.custom_batching.custom_vmap
  def call(*arrays):
    def bind(*arrays):
      return tuple(_kernel_p.bind(*arrays, plain=jax.make_jaxpr(plain)(*arrays), kernel=kernel, platform=platform))

    return _on_each_device(bind)(*arrays)

  @call.def_vmap
  def of_rows(num_rows, in_batched, *arrays):
    arrays = _batched(num_rows, in_batched, arrays)
    results = launch(plain, kernel, *(x.reshape(-1, *x.shape[2:]) for x in arrays), platform=platform)
    return tuple(x.reshape(num_rows, -1, *x.shape[1:]) for x in results), (True,) * len(results)

  return call(*arrays)


def _on_each_device(function):
  """`function` of arrays that are the same on all devices where the compiler divides work; it divides no kernel."""
  axes = automatic_axes()
  if not axes:
    return function
  whole = PartitionSpec()
  return jax.shard_map(function, in_specs=whole, out_specs=whole, axis_names=set(axes), check_vma=False)


def expm1(x: jax.Array) -> jax.Array:
  """e^x - 1 for kernels, where `jnp.expm1` is not available; with a relative error of a few units in the last place."""
  # x (1 + x/2 (1 + x/3 (...))) to x^9, which is below 1e-9 of the sum for |x| < .5.
  series = jnp.ones_like(x)
  for i in range(9, 1, -1):
    series = 1 + x / i * series
  return jnp.where(jnp.abs(x) < 0.5, x * series, jnp.exp(x) - 1)
