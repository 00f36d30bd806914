"""Products of a few rows and a packed kernel, attention, and what a round computes beside its networks, on CPUs in C++.

The bound of speculation is that a call on a few tokens costs what a call on one costs. XLA's products on a CPU are far
from it. Here a kernel is packed once, in the order in which it is read, so that the rows of a tree cost little beside
its bytes. `products.cc` has the call, `panels.h` the loop, `steps.h` what it does for each type.

The library is built at installation, where there is a compiler; `python -m spectr_jax.kernels.native` says whether it
is, and which form this processor takes. Without it everything works by XLA's products. With it every sum has one order,
whatever is computed beside it, so that what a network makes of a text does not depend on the call, to the bit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import logging
import pathlib
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.sharding import dividing_axes

PANEL = 16  # outputs of a panel, as in product.h
WIDEST_HEAD = 512  # numbers of a head of attention, as there
# Inputs that stand beside each other in a panel, by the kernel's type.
_TOGETHER = {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.bfloat16): 2, jnp.dtype(jnp.int8): 4}
_TARGET, _BLOCK_TARGET, _ATTENTION_TARGET = 'spectr_product', 'spectr_block_products', 'spectr_attention'
_NORM_TARGET, _TOTALS_TARGET, _SOFTMAX_TARGET = 'spectr_norm', 'spectr_totals', 'spectr_softmax'
_DRAW_TARGET, _WRITE_TARGET, _EXPERT_TARGET = 'spectr_draw', 'spectr_write', 'spectr_expert_product'
_TARGETS = (
  _TARGET, _BLOCK_TARGET, _EXPERT_TARGET, _ATTENTION_TARGET, _NORM_TARGET, _TOTALS_TARGET, _SOFTMAX_TARGET,
  _DRAW_TARGET, _WRITE_TARGET,
)  # fmt: skip
# Of queries, keys and values that are compared: heads of the greatest width, so that no older library is used.
_ATTENTION_SHAPES = (1, 3, 1, WIDEST_HEAD), (1, 1, WIDEST_HEAD, 6), (1, 1, 6, WIDEST_HEAD)
_logger = logging.getLogger(__name__)


class _UnavailableError(RuntimeError):
  """There is no library, or none for this processor; the message says why."""


class _RefusedError(_UnavailableError):
  """There is one, which is of no use here: of another version, say."""


@functools.cache
def _load() -> ctypes.CDLL:
  """The library, registered with XLA."""
  file = pathlib.Path(__file__).with_name('products.bin')
  if not file.exists():
    raise _UnavailableError('it was not built: there was no C++ compiler, or the processor is not x86-64')
  try:
    library = ctypes.CDLL(str(file))
  except OSError as error:
    raise _RefusedError(f'{file.name} cannot be loaded: {error}') from None
  library.spectr_form.restype = ctypes.c_char_p
  library.spectr_use_form.restype = ctypes.c_bool
  if library.spectr_form() is None:
    raise _UnavailableError('this processor has neither AVX2 nor AVX-512')
  jax.local_devices(backend='cpu')  # a backend that begins later would fail as a whole where it refuses the library
  try:
    for target in _TARGETS:
      jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform='cpu')
  except Exception as error:  # of any kind: XLA refuses in its own ways
    raise _RefusedError(f'XLA refuses it: {error}') from None
  return library


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
  """The library, compared with NumPy, or None and why."""
  try:
    library = _load()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # which has nobody's trace around it
      thread.submit(_check_products).result()
  except _UnavailableError as error:
    if isinstance(error, _RefusedError):
      warnings.warn(
        f'install spectr_jax anew: products on this CPU are those of XLA, which are slower; {error}', stacklevel=2
      )
    _logger.info('products on this CPU are those of XLA: %s', error)
    return None, str(error)
  return library, ''


def _check_products() -> None:
  """Compares results with NumPy's, so that no form is used that is wrong here, or made for another XLA."""
  random = np.random.default_rng(0)
  rows, kernel = random.standard_normal((3, 64)), random.standard_normal((64, 40))
  kernels = (jnp.float32, kernel), (jnp.bfloat16, kernel), (jnp.int8, random.integers(-127, 128, (64, 40)))
  operands = [(rows.astype(jnp.promote_types(dtype, jnp.bfloat16)), values.astype(dtype)) for dtype, values in kernels]
  query, keys, values = (random.standard_normal(shape).astype(np.float32) / 4 for shape in _ATTENTION_SHAPES)
  masks = np.ones((1, 3, 2), bool), np.arange(6)[None, None] < 5
  logits, one = rows[None].astype(np.float32), np.ones((1, 1), np.float32)

  @jax.jit
  def compute(packed):
    products = [product(rows, panels, 40) for rows, panels in packed]
    products += [expert_product(rows, panels[None], 40, jnp.zeros(3, jnp.int32)) for rows, panels in packed]
    operands = query, keys[..., :2], values[:, :, :2], masks[0], keys, values, masks[1], np.full((1, 3), 6, np.int32)
    return products, attention(*map(jnp.asarray, operands)), round_parts(jnp.asarray(logits))

  def round_parts(logits):
    probs, places = softmax(logits, one, one < 0), jnp.arange(3, dtype=jnp.int32)[None]
    return probs, draw_several(one[0] / 2, probs[0, 0]), write([logits], [probs], places, places[:, ::-1], [1])[0]

  try:
    with jax.default_device(jax.local_devices(backend='cpu')[0]):
      packed = [(rows, pack(kernel)) for rows, kernel in operands]
      outputs, mixed, (probs, token, written) = jax.device_get(compute(packed))
  except Exception as error:  # of any kind: XLA refuses a call in its own ways
    raise _RefusedError(f'XLA refuses it: {error}') from None
  for (rows, kernel), products in zip(2 * operands, outputs):
    rows, kernel = rows.astype(np.float64), kernel.astype(np.float64)
    if not np.allclose(products, rows @ kernel, rtol=0, atol=1e-6 * np.abs(kernel).max() * len(kernel)):
      raise _RefusedError('its products differ from those of NumPy')
  scores = np.einsum('nd,dm->nm', query[0, :, 0], np.concatenate([keys[0, 0], keys[0, 0, :, :2]], axis=1))
  weights = np.where(np.array([True] * 5 + [False] + [True] * 2), np.exp(scores), 0)
  expected = weights @ np.concatenate([values[0, 0], values[0, 0, :2]]) / weights.sum(axis=1, keepdims=True)
  if not np.allclose(mixed[0, :, 0], expected, rtol=0, atol=1e-5):
    raise _RefusedError('its attention differs from that of NumPy')
  expected = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
  first = np.searchsorted(np.cumsum(expected[0, 0]), 0.5)
  if not np.allclose(probs, expected, rtol=1e-5) or token[0] != first or not np.array_equal(written, probs[:, ::-1]):
    raise _RefusedError('its distributions, draws or writes differ from those of NumPy')


_is_disabled = contextvars.ContextVar('native_is_disabled', default=False)


def form() -> str | None:
  """The form of products for this processor, `avx512_bf16`, `avx512_vnni`, `avx512`, `avx2` or None."""
  library, _ = _library()
  return None if library is None or _is_disabled.get() else library.spectr_form().decode()


def takes(*arrays: jax.Array) -> bool:
  """Whether calls of this library take these arrays: in float32, on one device, on a processor that has a form."""
  return all(array.dtype == jnp.float32 for array in arrays) and not dividing_axes() and form() is not None


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
  """Whether a kernel `[..., in, out]` can be packed: float32, an even number of bfloat16 inputs, or 4 n in int8."""
  return kernel.dtype in _TOGETHER and kernel.shape[-2] % _TOGETHER[kernel.dtype] == 0


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


def pack_experts(kernels: ArrayLike) -> jax.Array:
  """Kernels `[E, in, out]` as `pack` has them, `[E, ...]`, packed one by one."""
  place = kernels.sharding if isinstance(kernels, jax.Array) and kernels.committed else None
  kernels = np.asarray(kernels)
  first = np.asarray(pack(kernels[0]))
  panels = np.empty((len(kernels), *first.shape), first.dtype)
  for i, kernel in enumerate(kernels):
    panels[i] = pack(kernel)
  return jax.device_put(panels, place)


def expert_product(rows: jax.Array, panels: jax.Array, num_out: int, experts: jax.Array) -> jax.Array:
  """`product` of each of the rows `[N, in]` and the kernel of its expert, of which `experts`, integers `[N]`, has the
  number and `pack_experts` returned all. RuntimeError as for `product`.
  """
  _load()
  out = jax.ShapeDtypeStruct((rows.shape[0], num_out), jnp.float32)
  return jax.ffi.ffi_call(_EXPERT_TARGET, out, vmap_method='sequential')(rows, experts.astype(jnp.int32), panels)


def product(rows: jax.Array, panels: jax.Array, num_out: int) -> jax.Array:
  """The product of rows `[N, in]`, in float32 or bfloat16, and what `pack` returned, summed in float32: `[N, out]`.

  RuntimeError if there is no library, or none for this processor.
  """
  _load()
  out = jax.ShapeDtypeStruct((rows.shape[0], num_out), jnp.float32)
  return jax.ffi.ffi_call(_TARGET, out, vmap_method='sequential')(rows, panels)


def block_product(
  rows: jax.Array,
  weights: jax.Array,
  scales: jax.Array,
  least: jax.Array | None,
  num_out: int,
  experts: jax.Array | None = None,
) -> jax.Array:
  """`block_kernel.block_product` on a CPU, or with `experts` `block_kernel.expert_block_product`; RuntimeError if there
  is no library, or none for this processor.
  """
  _load()
  out = jax.ShapeDtypeStruct((rows.shape[0], num_out), jnp.float32)
  call, least = (
    jax.ffi.ffi_call(_BLOCK_TARGET, out, vmap_method='sequential'),
    jnp.zeros(0, scales.dtype) if least is None else least,
  )
  if experts is None:
    return call(rows, jnp.zeros(0, jnp.int32), *(kernel[None] for kernel in (weights, scales, least)))
  return call(rows, experts.astype(jnp.int32), weights, scales, least)


def attention(
  query: jax.Array,
  new_keys: jax.Array,
  new_values: jax.Array,
  mask: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  visible: jax.Array,
  places: jax.Array,
  *,
  sinks: jax.Array | None = None,
  soft_cap: float | None = None,
) -> jax.Array:
  """`attention.tree_attention` on a CPU, float32 `[B, N, H, head_dim]`, added in the order of the text.

  A result depends on nothing but the tokens before it, to the bit, as long as what a query sees of the pending tokens
  is the end of its text.

  Args:
    query: In float32 or bfloat16, with a `head_dim` that is a multiple of 16 and at most `WIDEST_HEAD`.
    new_keys, new_values, keys, values: In float32.
    mask: The pending tokens that each query sees.
    visible: The slots that each query sees.
    places: int32 `[B, N]`, the slot that each query's own token will take.
    sinks: float32 `[H]`, scores of what is mixed with no value; None for none.
    soft_cap: The bound of scores; None for none.

  Raises:
    RuntimeError: There is no library, or none for this processor.
  """
  _load()
  out = jax.ShapeDtypeStruct(query.shape, jnp.float32)
  call = jax.ffi.ffi_call(_ATTENTION_TARGET, out, vmap_method='sequential')
  cap, sinks = np.float32(soft_cap or 0), jnp.zeros(0, jnp.float32) if sinks is None else sinks
  return call(query, new_keys, new_values, mask, keys, values, visible, places.astype(jnp.int32), sinks, soft_cap=cap)


def norm(rows: jax.Array, gain: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
  """Root-mean-square norms, or with a bias layer norms, of rows `[N, D]` in float32 or bfloat16, which results have.

  `gain` and `bias` are float32 `[D]`. The sums of a row have one order, whatever rows there are beside. RuntimeError
  if there is no library, or none for this processor.
  """
  _load()
  out = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
  bias = jnp.zeros(0, jnp.float32) if bias is None else bias
  return jax.ffi.ffi_call(_NORM_TARGET, out, vmap_method='sequential')(rows, gain, bias, epsilon=np.float32(epsilon))


def softmax(logits: jax.Array, scale: ArrayLike, is_greedy: ArrayLike) -> jax.Array:
  """`softmax.softmax` on a CPU, in float32; RuntimeError if there is no library, or none for this processor."""
  _load()
  out = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
  return jax.ffi.ffi_call(_SOFTMAX_TARGET, out, vmap_method='sequential')(logits, scale, is_greedy)


def draw_several(uniforms: jax.Array, weights: jax.Array) -> jax.Array:
  """`draws.draw_several` on a CPU, in float32; RuntimeError if there is no library, or none for this processor."""
  _load()
  out = jax.ShapeDtypeStruct(uniforms.shape, jnp.int32)
  return jax.ffi.ffi_call(_DRAW_TARGET, out, vmap_method='broadcast_all')(uniforms, weights)


def write(
  arrays: Sequence[jax.Array], pending: Sequence[jax.Array], path: jax.Array, slots: jax.Array, axes: Sequence[int]
) -> list[jax.Array]:
  """`cache_writes.write_slots` on a CPU, in place; RuntimeError if there is no library, or none for this processor."""
  _load()
  out = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
  call = jax.ffi.ffi_call(
    _WRITE_TARGET, out, vmap_method='sequential', input_output_aliases={2 + i: i for i in range(len(arrays))}
  )
  places = path.astype(jnp.int32), slots.astype(jnp.int32)
  return list(call(*places, *arrays, *pending, axes=np.array(axes, np.int64)))


def totals(rows: jax.Array) -> jax.Array:
  """The sums `[N]` of float32 rows `[N, D]`, each in one order; RuntimeError as for `norm`."""
  _load()
  out = jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32)
  return jax.ffi.ffi_call(_TOTALS_TARGET, out, vmap_method='sequential')(rows)
