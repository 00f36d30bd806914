"""Operations and their forms: the one place where the library tells platforms apart.

An operation is a function with a plain form, which defines its result, and with forms that are faster on some platform.
Whoever needs it calls it, and nobody else asks for a platform. For example:

    @operation
    def largest(probs):
      return jnp.max(probs, axis=-1)

    largest.register('cpu', native.largest, takes=lambda probs: native.is_built() and probs.dtype == jnp.float32)

The form is chosen when a program is traced: for the default platform, or for that of `tracing_for`. Forms are right
everywhere, so a program that runs on another platform than it was traced for is slower and not wrong. Choosing when it
is lowered, as `jax.lax.platform_dependent` does, would trace every form of each function.

A form may be a kernel in Pallas, for TPUs or GPUs. A kernel is one launch, where XLA would make a launch of every few
operations: on a v5e that takes 1,800 cycles, more than the operations on a few thousand numbers. It can run on its own
platform alone, so elsewhere, and where the compiler divides work over devices, its call is lowered as the plain form.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec

from spectr_jax.sharding import automatic_axes

ACCELERATORS = 'gpu', 'tpu'
PLATFORMS = 'cpu', *ACCELERATORS
OPERATIONS: dict[str, Operation] = {}  # all that have been imported, by name

_P = ParamSpec('_P')
_R = TypeVar('_R')
_F = TypeVar('_F', bound=Callable[..., Any])
# The caches of `jax.jit` tell the values of these apart.
_platform = jax.make_user_context(None)
_is_on_one_device = jax.make_user_context(False)


def default_platform() -> str:
  """The platform of arrays and programs whose devices nobody has named: `cpu`, `gpu` or `tpu`."""
  device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue], which it gets when JAX starts
  if device is None:
    return jax.default_backend()
  return (jax.local_devices(backend=device)[0] if isinstance(device, str) else device).platform


def tracing_for(devices: str | Mesh | None) -> AbstractContextManager[None]:
  """A context in which programs are traced for one platform, by its name or a mesh; None for the default."""
  if isinstance(devices, Mesh):
    devices = devices.devices.flat[0].platform
  return _platform(devices or default_platform())


def round_on_one_device(is_on_one: bool = True) -> AbstractContextManager[None]:
  """A context in which a drafter's calls of a round are traced that one device computes whole, if it does.

  There a network may have a form for all its layers at once, with a cache of its own kind until tokens are committed.
  """
  return _is_on_one_device(is_on_one)


def is_round_on_one_device() -> bool:
  """Tells whether `round_on_one_device` holds where a form is chosen."""
  return _is_on_one_device.value


class Operation(Generic[_P, _R]):
  """A function with forms for platforms, see `operation`; `plain` defines its result, and serves without another."""

  def __init__(self, plain: Callable[_P, _R]):
    functools.update_wrapper(self, plain)
    self.name = plain.__name__.strip('_')
    self.plain = plain
    self._forms: list[tuple[str, Callable[..., _R], Callable[..., bool] | None]] = []

  def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    return self.form_for(*args, **kwargs)(*args, **kwargs)

  def form_for(self, *args: _P.args, **kwargs: _P.kwargs) -> Callable[..., _R]:
    """The form for these arguments, on the platform that programs are traced for."""
    own = _platform.value or default_platform()
    for platform, form, takes in reversed(self._forms):
      if platform == own and (takes is None or takes(*args, **kwargs)):
        return form
    return self.plain

  def register(
    self, platforms: str | tuple[str, ...], form: Callable[..., _R], *, takes: Callable[..., bool] | None = None
  ) -> None:
    """Adds a form for some platforms, with arguments and results of the plain one, and right on every platform.

    Of the forms that take the arguments the one added last is chosen. `takes` says so of their shapes, dtypes and
    static values, and of what is there where the program is traced; None takes all. ValueError for an unknown platform.
    """
    for platform in (platforms,) if isinstance(platforms, str) else platforms:
      if platform not in PLATFORMS:
        raise ValueError(f'the platform must be one of {", ".join(PLATFORMS)}, got {platform!r}')
      self._forms.append((platform, form, takes))

  def form(self, platforms: str | tuple[str, ...], *, takes: Callable[..., bool] | None = None) -> Callable[[_F], _F]:
    """`register` as a decorator."""

    def decorate(form: _F) -> _F:
      self.register(platforms, form, takes=takes)
      return form

    return decorate

  def register_kernel(self, platform: str, name: str, *, takes: Callable[..., bool] | None = None) -> None:
    """Registers the kernel that `lazy(name)` imports, for arrays as arguments and options by name; see `as_kernel`."""

    def form(*arrays, **options):
      plain, own = (functools.partial(each, **options) for each in (self.plain, lazy(name)))
      return as_kernel(plain, own, *arrays, platform=platform)

    self.register(platform, form, takes=takes)

  def platforms(self) -> list[str]:
    """The platforms that have forms."""
    return sorted({platform for platform, *_ in self._forms})


def operation(plain: Callable[_P, _R]) -> Operation[_P, _R]:
  """Makes a function an operation of its name; ValueError if another module has an operation of this name."""
  made = Operation(plain)
  other = OPERATIONS.setdefault(made.name, made)
  if other.plain.__module__ != plain.__module__:
    raise ValueError(f'{other.plain.__module__} has an operation {made.name}, so {plain.__module__} can have none')
  return made


def lazy(name: str) -> Callable[..., Any]:
  """`MODULE:FUNCTION` of `spectr_jax.kernels`, imported by its first call, since Pallas takes seconds to import."""
  module, function = name.split(':')

  def call(*args, **kwargs):
    return getattr(importlib.import_module(f'spectr_jax.kernels.{module}'), function)(*args, **kwargs)

  return call


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
  return mlir.lower_fun(lambda *arrays: jax.tree.leaves(kernel(*arrays)), multiple_results=True)(context, *arrays)


mlir.register_lowering(_kernel_p, _lower_plainly)
for _name, _own in (('tpu', 'tpu'), ('cuda', 'gpu'), ('rocm', 'gpu')):
  mlir.register_lowering(_kernel_p, functools.partial(_lower, _own), platform=_name)


def launch(plain: Callable[..., Any], kernel: Callable[..., Any], *arrays: jax.Array, platform: str = 'tpu') -> Any:
  """`plain(*arrays)` of the arrays of M entries, on one platform by one call of a kernel; entries of rows are entries.

  Both take and return arrays `[M, ...]`, the same up to rounding. `plain` must not close over traced values. The kernel
  may import Pallas, since it is called where programs for its platform are lowered.
  """

  @jax.custom_batching.custom_vmap
  def call(*arrays):
    def bind(*arrays):
      jaxpr, shapes = jax.make_jaxpr(plain, return_shape=True)(*arrays)
      results = _kernel_p.bind(*arrays, plain=jaxpr, kernel=kernel, platform=platform)
      return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return _on_each_device(bind)(*arrays)

  @call.def_vmap
  def of_rows(num_rows, in_batched, *arrays):
    arrays = _batched(num_rows, in_batched, arrays)
    results = launch(plain, kernel, *(x.reshape(-1, *x.shape[2:]) for x in arrays), platform=platform)
    results = jax.tree.map(lambda x: x.reshape(num_rows, -1, *x.shape[1:]), results)
    return results, jax.tree.map(lambda _: True, results)

  return call(*arrays)


def as_kernel(plain: Callable[..., Any], kernel: Callable[..., Any], *arrays: jax.Array, platform: str = 'tpu') -> Any:
  """`plain(*arrays)`; under `vmap`, on one platform, all entries by one call of a kernel, see `launch`.

  On a mesh every device computes all of it. So the arrays should be small, or the same on all devices along the axes
  that the compiler divides work over.
  """

  @jax.custom_batching.custom_vmap
  def one(*arrays):
    return plain(*arrays)

  @one.def_vmap
  def several(num_entries, in_batched, *arrays):
    results = launch(jax.vmap(plain), kernel, *_batched(num_entries, in_batched, arrays), platform=platform)
    return results, jax.tree.map(lambda _: True, results)

  return one(*arrays)


def _batched(num_entries, in_batched, arrays):
  return [
    x if is_batched else jnp.broadcast_to(x, (num_entries, *jnp.shape(x))) for x, is_batched in zip(arrays, in_batched)
  ]


def _on_each_device(function):
  """`function` of arrays that are the same on all devices where the compiler divides work; it divides no kernel."""
  axes = automatic_axes()
  if not axes:
    return function
  whole = PartitionSpec()
  return jax.shard_map(function, in_specs=whole, out_specs=whole, axis_names=set(axes), check_vma=False)
