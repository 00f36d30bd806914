"""Products in C++: against NumPy, in every form that this processor has, and as part of a model."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import native, products
from spectr_jax.kernels.int8 import Int8Kernel, quantize, quantized
from spectr_jax.kernels.matrices import PackedKernel, kernels_for_decoding, matmul, params_for_decoding
from spectr_jax.models import causal_lm, transformer
from spectr_jax.models.layers import unembed
from spectr_jax.sharding import make_mesh, shardings
from tests.slow import slow

needs_native = pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')


@pytest.fixture
def all_kernels_are_large(monkeypatch):
  """On a processor without units for bfloat16 products."""
  monkeypatch.setattr(products, 'LARGE', 1)
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: False)


@pytest.fixture
def forms():
  """The forms that this processor has, each of which is used from when it is asked for; then its best again."""
  best = native.form()
  yield (name for name in ('avx512_bf16', 'avx512', 'avx2') if native.use_form(name))
  native.use_form(best)


def _operands(num_rows, num_in, num_out, dtype, kernel_dtype):
  rows, shape = jax.random.normal(jax.random.key(0), (num_rows, num_in), dtype), (num_in, num_out)
  if kernel_dtype == 'int8':
    return rows, jax.random.randint(jax.random.key(1), shape, -127, 128, jnp.int8)
  return rows, jax.random.normal(jax.random.key(1), shape, kernel_dtype)


@needs_native
@pytest.mark.parametrize(
  ('dtype', 'kernel_dtype'),
  [('float32',) * 2, ('bfloat16',) * 2, ('float32', 'bfloat16'), ('float32', 'int8'), ('bfloat16', 'int8')],
)
@pytest.mark.parametrize(('num_in', 'num_out'), [slow(48, 40), (4, 1), slow(64, 32), (132, 100), slow(576, 960)])
def test_products(num_in, num_out, dtype, kernel_dtype, forms):
  """Of one row, of blocks of every size, and of many rows."""
  rows, kernel = _operands(100, num_in, num_out, dtype, kernel_dtype)
  panels, expected = native.pack(kernel), np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64)
  used = []
  for form in forms:
    for num_rows in (1, 2, 3, 4, 5, 7, 13, 25, 100):
      found = native.product(rows[:num_rows], panels, num_out)
      assert found.dtype == jnp.float32
      largest = np.abs(np.asarray(kernel, np.float64)).max() / 4
      np.testing.assert_allclose(found, expected[:num_rows], rtol=0, atol=2e-5 * largest * num_in**0.5)
    used.append(form)
  assert used


@needs_native
@pytest.mark.parametrize(('dtype', 'kernel_dtype'), [('float32',) * 2, ('bfloat16',) * 2, ('float32', 'int8')])
def test_a_row_does_not_depend_on_the_others(dtype, kernel_dtype):
  """Bit for bit: so tokens do not depend on the batch as far as products go."""
  rows, kernel = _operands(33, 576, 1536, dtype, kernel_dtype)
  panels = native.pack(kernel)
  together = np.asarray(native.product(rows, panels, 1536))
  alone = np.concatenate([native.product(rows[i : i + 1], panels, 1536) for i in range(33)])
  np.testing.assert_array_equal(together, alone)


@needs_native
def test_products_beside_each_other_and_in_loops():
  """Threads of several products at a time take no part of another's, however often they are called."""
  rows, kernel = _operands(3, 256, 2048, 'float32', 'float32')
  panels = native.pack(kernel)

  @jax.jit
  def run(rows):
    def body(_, rows):
      left, right = native.product(rows, panels, 2048), native.product(2 * rows, panels, 2048)
      return rows + 0 * (right - 2 * left)[:, :256]

    return jax.lax.fori_loop(0, 200, body, rows), native.product(rows, panels, 2048)

  unchanged, found = run(rows)
  np.testing.assert_array_equal(unchanged, rows)
  np.testing.assert_allclose(found, rows @ kernel, rtol=1e-4, atol=1e-3)


@needs_native
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.usefixtures('all_kernels_are_large')
def test_large_kernels_are_packed_once(dtype):
  kernel = jax.random.normal(jax.random.key(1), (48, 40), dtype)
  fast = kernels_for_decoding({'a': {'kernel': kernel}})
  assert isinstance(fast['a']['kernel'], PackedKernel)
  assert fast['a']['kernel'].shape == (48, 40)
  assert kernels_for_decoding(fast) is fast
  rows = jax.random.normal(jax.random.key(0), (2, 3, 48), dtype)
  np.testing.assert_allclose(matmul(rows, fast['a']['kernel']), matmul(rows, kernel), rtol=1e-4, atol=1e-4)
  # A kernel stays on its device.
  placed = jax.device_put(kernel, jax.devices()[-1])
  assert native.pack(placed).committed
  assert native.pack(placed).devices() == placed.devices()
  assert not native.pack(kernel).committed


@needs_native
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_small_kernels_are_packed_and_tiny_ones_are_not(monkeypatch, dtype):
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: False)
  kernels = {'small': {'kernel': jnp.ones((96, 96), dtype)}, 'tiny': {'kernel': jnp.ones((64, 64), dtype)}}
  fast = kernels_for_decoding(kernels)
  assert isinstance(fast['small']['kernel'], PackedKernel)
  assert not isinstance(fast['tiny']['kernel'], PackedKernel)


@needs_native
@pytest.mark.parametrize('channel_axis', [0, 1])
@pytest.mark.usefixtures('all_kernels_are_large')
def test_kernels_in_int8_are_packed_with_their_scales(channel_axis):
  values, scale = quantize(np.random.default_rng(0).standard_normal((48, 40)).astype(np.float32), channel_axis)
  kernel = Int8Kernel(jnp.asarray(values), jnp.asarray(scale), channel_axis)
  fast = kernels_for_decoding({'a': {'kernel': kernel}})['a']['kernel']
  assert isinstance(fast, PackedKernel)
  assert fast.panels.dtype == jnp.int8
  rows = jax.random.normal(jax.random.key(0), (2, 3, 40 if channel_axis == 0 else 48))
  expected = matmul(rows, kernel.dequantized(jnp.float32), axis=1 - channel_axis)
  np.testing.assert_allclose(matmul(rows, fast), expected, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.usefixtures('all_kernels_are_large')
def test_a_tied_output_head_in_int8_is_packed_once():
  config = causal_lm.lm1b_config(40, 48, 1, 2, 96, 16)
  params = quantized(transformer.init_params(jax.random.key(0), config))
  fast = params_for_decoding(params)
  assert isinstance(fast['unembedding'], PackedKernel)
  assert isinstance(fast['embedding'], Int8Kernel)
  features = jax.random.normal(jax.random.key(1), (2, 3, 48))
  np.testing.assert_allclose(unembed(fast, features), unembed(params, features), rtol=1e-4, atol=1e-4)
  assert params_for_decoding(fast) is fast


@needs_native
@pytest.mark.usefixtures('all_kernels_are_large')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_on_a_mesh_packed_kernels_are_whole(target, dtype):
  model = causal_lm.causal_lm(target.params, dataclasses.replace(causal_lm.config_of(target), dtype=dtype))
  fast = model.for_decoding()
  places = shardings(make_mesh({}), fast.params, fast.sharding_rules)
  packed = [place for keys, place in jax.tree_util.tree_leaves_with_path(places) if 'panels' in str(keys)]
  assert packed
  assert all(place.is_fully_replicated for place in packed)


@needs_native
@pytest.mark.usefixtures('all_kernels_are_large')
def test_what_is_not_packed(monkeypatch):
  odd = {'kernel': jnp.ones((3, 40), jnp.bfloat16)}  # pairs of inputs stand beside each other
  half = {'kernel': jnp.ones((4, 40), jnp.float16)}
  for params in (odd, half, {'kernel': Int8Kernel(jnp.ones((6, 40), jnp.int8), jnp.ones(40))}):
    assert not isinstance(kernels_for_decoding(params)['kernel'], PackedKernel)
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: True)
  assert not isinstance(kernels_for_decoding({'kernel': jnp.ones((4, 40), jnp.bfloat16)})['kernel'], PackedKernel)


@needs_native
def test_operands_that_do_not_fit_are_refused():
  panels = native.pack(jnp.ones((48, 40)))
  for rows, num_out in ((jnp.ones((1, 47)), 40), (jnp.ones((1, 48)), 65), (jnp.ones((1, 48), jnp.float16), 40)):
    with pytest.raises(jax.errors.JaxRuntimeError, match='do not fit'):
      native.product(rows, panels, num_out).block_until_ready()


def test_the_command_says_which_form():
  found = subprocess.run([sys.executable, '-m', 'spectr_jax.kernels.native'], capture_output=True, text=True)
  expected = f'products: {native.form()}\n' if native.form() else f'products: those of XLA, since {native.why_not()}\n'
  assert (found.stdout, found.returncode) == (expected, 0 if native.form() else 1)


def test_without_a_library_products_are_those_of_xla(monkeypatch, tmp_path):
  monkeypatch.setattr(native, '__file__', str(tmp_path / '__init__.py'))
  with pytest.raises(native._UnavailableError, match='it was not built'):
    native._load.__wrapped__()
  (tmp_path / 'products.bin').write_bytes(b'no library')
  with pytest.raises(native._UnavailableError, match='cannot be loaded'):
    native._load.__wrapped__()


def test_a_library_that_is_of_no_use_is_said(monkeypatch):
  def refuse():
    raise native._RefusedError('undefined symbol')

  monkeypatch.setattr(native, '_load', refuse)
  with pytest.warns(UserWarning, match='install spectr_jax anew.*undefined symbol'):
    assert native._library.__wrapped__() == (None, 'undefined symbol')


@needs_native
@pytest.mark.parametrize('width', [5, 64, 577])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_norms_and_sums_of_a_row_do_not_depend_on_others(forms, width, dtype):
  """Of 1,600 rows by themselves and eight at a time; against NumPy's in float64."""
  rng = np.random.default_rng(width)
  rows = jnp.asarray(rng.normal(size=(1600, width)) * np.exp(rng.normal(size=(1600, 1))), dtype)
  gain, bias = (jnp.asarray(rng.normal(size=width), jnp.float32) for _ in range(2))

  @functools.partial(jax.jit, static_argnames='size')
  def compute(rows, *, size):
    def some(rows):
      norms = [native.norm(rows.astype(dtype), gain, each, epsilon=1e-5) for each in (None, bias)]
      return *(each.astype(jnp.float32) for each in norms), native.totals(rows)

    found = jax.lax.map(some, rows.astype(jnp.float32).reshape(-1, size, width))
    return [part.reshape(len(rows), -1) for part in found]

  wide = np.asarray(rows, np.float64)
  centered = wide - wide.mean(axis=1, keepdims=True)
  gains, biases = np.asarray(gain, np.float64), np.asarray(bias, np.float64)
  expected = [
    wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gains,
    centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5) * gains + biases,
    wide.sum(axis=1, keepdims=True),
  ]
  tolerance = 2**-8 if dtype == 'bfloat16' else 1e-6
  scales = (1 + np.abs(expected[0]), 1 + np.abs(expected[1]), np.abs(wide).sum(axis=1, keepdims=True))
  num_forms = 0
  for _ in forms:
    alone, together = compute(rows, size=1), compute(rows, size=8)
    for one, other, exact, scale in zip(alone, together, expected, scales, strict=True):
      np.testing.assert_array_equal(one, other)
      assert (np.abs(np.asarray(one, np.float64) - exact) <= tolerance * scale).all()
    num_forms += 1
  assert num_forms


@needs_native
def test_norms_of_squares_that_overflow_are_nan():
  rows = jnp.asarray([[1e30, 1.0], [1.0, 2.0]])
  found = native.norm(rows, jnp.ones(2), None, epsilon=1e-5)
  assert np.isnan(found[0]).all()
  assert np.isfinite(found[1]).all()


@needs_native
def test_a_product_is_rounded_before_it_is_added(optimized):
  """LLVM would round a product and a sum once, in some loops and not in others."""
  x, y, z = np.random.default_rng(0).normal(size=(3, 8, 576)).astype(np.float32)

  @jax.jit
  def compute(x, y, z):
    return products.rounded(x * y, jnp.float32) + z

  np.testing.assert_array_equal(compute(x, y, z), x * y + z)
  odd = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)
  found = np.asarray(products.rounded(jnp.asarray(odd), jnp.float32))
  np.testing.assert_array_equal(found.view(np.int32), odd.view(np.int32))
