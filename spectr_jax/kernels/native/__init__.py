"""Products of a few rows and a packed kernel on CPUs, in C++ on XLA's own threads.

The bound of speculation is that a call on a few tokens costs what a call on one costs. XLA's products on a CPU are far
from it. Here a kernel is packed once, in the order in which it is read, so that the rows of a tree cost little beside
its bytes. `products.cc` has the call, `panels.h` the loop, `steps.h` what it does for each type.

The library is built at installation, where there is a compiler; `python -m spectr_jax.kernels.native` says whether it
is, and which form this processor takes. Without it everything works by XLA's products.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import logging
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

PANEL = 16  # outputs of a panel, as in product.h
# Inputs that stand beside each other in a panel, by the kernel's type.
_TOGETHER = {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.int8): 4}
_TARGET, _BLOCK_TARGET = 'spectr_product', 'spectr_block_product'
_logger = logging.getLogger(__name__)


class _UnavailableError(RuntimeError):
  """There is no library, or none for this processor or version of JAX; the message says why."""


@functools.cache
def _load() -> ctypes.CDLL:
  """The library, registered with XLA."""
  file = pathlib.Path(__file__).with_name('products.bin')
  if not file.exists():
    raise _UnavailableError('it was not built: there was no C++ compiler, or the processor is not x86-64')
  try:
    library = ctypes.CDLL(str(file))
  except OSError as error:
    raise _UnavailableError(f'{file.name} cannot be loaded: {error}') from None
  library.spectr_form.restype = ctypes.c_char_p
  library.spectr_use_form.restype = ctypes.c_bool
  if library.spectr_form() is None:
    raise _UnavailableError('this processor has neither AVX2 nor AVX-512')
  jax.local_devices(backend='cpu')  # a backend that begins later would fail as a whole where it refuses the library
  try:
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.spectr_product), platform='cpu')
    jax.ffi.register_ffi_target(_BLOCK_TARGET, jax.ffi.pycapsule(library.spectr_block_product), platform='cpu')
  except Exception as error:  # of any kind: XLA refuses in its own ways
    raise _UnavailableError(f'XLA refuses it: {error}') from None
  return library


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
  """The library, compared with NumPy, or None and why."""
  try:
    library = _load()
    _check_products()
  except _UnavailableError as error:
    _logger.info('products on this CPU are those of XLA: %s', error)
    return None, str(error)
  return library, ''


def _check_products() -> None:
  """Compares products with NumPy's, so that no form is used that is wrong here, or made for another XLA."""
  random = np.random.default_rng(0)
  rows, kernel = random.standard_normal((3, 64)), random.standard_normal((64, 40))
  kernels = (jnp.float32, kernel), (jnp.bfloat16, kernel), (jnp.int8, random.integers(-127, 128, (64, 40)))
  operands = [(rows.astype(jnp.promote_types(dtype, jnp.bfloat16)), values.astype(dtype)) for dtype, values in kernels]
  multiply = jax.jit(lambda packed: [product(rows, panels, 40) for rows, panels in packed])
  try:
    with jax.default_device(jax.local_devices(backend='cpu')[0]), jax.ensure_compile_time_eval():
      outputs = multiply([(rows, pack(kernel)) for rows, kernel in operands])
  except Exception as error:  # of any kind: XLA refuses a call in its own ways
    raise _UnavailableError(f'XLA refuses it: {error}') from None
  for (rows, kernel), products in zip(operands, outputs):
    rows, kernel = rows.astype(np.float64), kernel.astype(np.float64)
    if not np.allclose(products, rows @ kernel, rtol=0, atol=1e-6 * np.abs(kernel).max() * len(kernel)):
      raise _UnavailableError('its products differ from those of NumPy')


_is_disabled = contextvars.ContextVar('native_is_disabled', default=False)


def form() -> str | None:
  """The form of products for this processor, `avx512_bf16`, `avx512_vnni`, `avx512`, `avx2` or None."""
  library, _ = _library()
  return None if library is None or _is_disabled.get() else library.spectr_form().decode()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
  """A context in which there is no form, so that models are made for XLA's products, for tests and comparisons."""
  token = _is_disabled.set(True)
  try:
    yield
  finally:
    _is_disabled.reset(token)


def why_not() -> str:
  """Why `form` is None."""
  return _library()[1]


def use_form(name: str) -> bool:
  """Takes a form in place of the processor's best, for tests and comparisons; False if it has none of this name."""
  library, _ = _library()
  return library is not None and library.spectr_use_form(name.encode())


def packs(kernel: jax.Array) -> bool:
  """Whether a kernel `[in, out]` can be packed: float32, an even number of bfloat16 inputs, or 4 n inputs in int8."""
  return kernel.dtype in _TOGETHER and kernel.shape[0] % _TOGETHER[kernel.dtype] == 0


def pack(kernel: ArrayLike) -> jax.Array:
  """A kernel `[in, out]` in the order in which products read it, made on a CPU, for which `packs` is true.

  It is `[ceil(out / 16), in, 16]` in float32, `[ceil(out / 16), in / 2, 16, 2]` in bfloat16, and
  `[ceil(out / 16), in / 4, 16, 4]` in int8, padded with zeros.
  """
  place = kernel.sharding if isinstance(kernel, jax.Array) and kernel.committed else None
  kernel = np.asarray(kernel)
  num_in, num_out = kernel.shape
  dtype, together = kernel.dtype, _TOGETHER[kernel.dtype]
  bits = kernel.view(f'u{dtype.itemsize}')  # NumPy moves numbers of its own types faster than those of ml_dtypes
  padded = np.pad(bits, ((0, 0), (0, -num_out % PANEL)))
  panels = padded.reshape(num_in // together, together, -1, PANEL).transpose(2, 0, 3, 1)
  panels = np.ascontiguousarray(panels if together > 1 else panels[..., 0])
  return jax.device_put(panels.view(dtype), place)


def product(rows: jax.Array, panels: jax.Array, num_out: int) -> jax.Array:
  """The product of rows `[N, in]`, in float32 or bfloat16, and what `pack` returned, summed in float32: `[N, out]`.

  RuntimeError if there is no library, or none for this processor.
  """
  _load()
  out = jax.ShapeDtypeStruct((rows.shape[0], num_out), jnp.float32)
  return jax.ffi.ffi_call(_TARGET, out, vmap_method='sequential')(rows, panels)


def block_product(
  rows: jax.Array, weights: jax.Array, scales: jax.Array, least: jax.Array | None, num_out: int
) -> jax.Array:
  """`block_products.block_product` on a CPU; RuntimeError if there is no library, or none for this processor."""
  _load()
  out = jax.ShapeDtypeStruct((rows.shape[0], num_out), jnp.float32)
  least = jnp.zeros(0, scales.dtype) if least is None else least
  return jax.ffi.ffi_call(_BLOCK_TARGET, out, vmap_method='sequential')(rows, weights, scales, least)
