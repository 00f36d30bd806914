"""Kernels in blocks: the weights are those of the package `gguf`, products those of rounded inputs, in every form."""

import itertools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import native
from spectr_jax.kernels.block_kernel import (
  KINDS,
  BlockKernel,
  block_product,
  fit_side_by_side,
  packed,
  packed_experts,
  rounded_inputs,
  rounded_to_blocks,
  side_by_side,
)
from tests.slow import slow, slow_but

_HALVES = {
  'MXFP4': (),
  'Q4_0': (0,),
  'Q4_1': (0, 2),
  'Q8_0': (0,),
  'Q4_K': (0, 2),
  'Q6_K': (208,),
}  # where a block has float16


def _stored(kind, num_out, num_in, seed=0):
  """Random blocks uint8 `[out, blocks, bytes]`, with scales of all signs and sizes."""
  rng = np.random.default_rng(seed)
  size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
  stored = rng.integers(0, 256, (num_out, num_in // size, num_bytes), dtype=np.uint8)
  if kind == 'MXFP4':  # whose scales are powers of two, of every size that files have
    stored[..., 0] = rng.integers(90, 140, stored.shape[:2])
  for at in _HALVES[kind]:
    halves = rng.normal(size=stored.shape[:2]) * 10.0 ** rng.integers(-3, 0, stored.shape[:2])
    stored[..., at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
  return stored


def _weights(stored, kind):
  return gguf.quants.dequantize(stored.reshape(len(stored), -1), gguf.GGMLQuantizationType[kind])


def _rows(num_rows, num_in):
  return jax.random.normal(jax.random.key(1), (num_rows, num_in), jnp.float32)


@pytest.fixture
def forms():
  """The forms that this processor has, each used from when it is asked for; then its best again."""
  best = native.form()
  yield (name for name in ('avx512_bf16', 'avx512_vnni', 'avx512', 'avx2') if best and native.use_form(name))
  if best:
    native.use_form(best)


@pytest.mark.parametrize('kind', KINDS)
def test_weights_are_those_of_the_file(kind):
  """Bit for bit, also where the last panel is not whole."""
  stored = _stored(kind, 40, 512)
  kernel = packed(stored, kind)
  assert kernel.shape == (512, 40)
  outputs = jnp.array([[0, 39], [17, 16]])
  np.testing.assert_array_equal(kernel.columns(outputs), _weights(stored, kind)[np.asarray(outputs)])
  np.testing.assert_array_equal(kernel.columns(jnp.arange(40)), _weights(stored, kind))


def test_kernels_are_rounded_to_blocks():
  """By half a step at most, zeros exactly; the steps are those of the package `gguf`."""
  kernel = np.random.default_rng(0).normal(size=(64, 40)).astype(np.float32) * np.logspace(-2, 2, 40, dtype=np.float32)
  kernel[:32, 3] = 0
  rounded = rounded_to_blocks(kernel).columns(jnp.arange(40)).T
  steps = np.abs(kernel.reshape(2, 32, 40)).max(axis=1, keepdims=True) / 127
  assert (np.abs(rounded - kernel).reshape(2, 32, 40) <= 0.57 * steps).all()
  theirs = gguf.quants.quantize(np.ascontiguousarray(kernel.T), gguf.GGMLQuantizationType.Q8_0)
  expected = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0).T
  assert (np.abs(rounded - expected).reshape(2, 32, 40) <= 1.01 * steps).all()
  assert np.mean(rounded != expected) < 0.1  # nearly halfway between two numbers
  np.testing.assert_array_equal(rounded[:32, 3], 0)
  with pytest.raises(ValueError, match='a scale of its Q8_0 blocks is not finite'):
    rounded_to_blocks(np.full((32, 16), 1e9, np.float32))


@pytest.mark.parametrize('kind', KINDS)
def test_products_are_those_of_rounded_inputs(kind):
  """Of the plain form, by another route: all weights in float64 times all inputs as they are rounded."""
  stored, rows = _stored(kind, 40, 512), _rows(3, 512)
  kernel = packed(stored, kind)
  values, scale = rounded_inputs(rows, kernel.weights.shape[1])
  rounded = np.asarray(values * scale[..., None], np.float64).reshape(rows.shape)
  block = 512 // kernel.weights.shape[1]
  largest = np.abs(rows).reshape(3, -1, block).max(axis=-1, keepdims=True)
  assert (np.abs(rounded - rows).reshape(3, -1, block) <= largest / 254 * 1.001).all()
  expected = rounded @ _weights(stored, kind).T.astype(np.float64)
  found = block_product.plain(rows, kernel.weights, kernel.scales, kernel.least, 40)
  scale = np.abs(rounded) @ np.abs(_weights(stored, kind)).T
  np.testing.assert_array_less(np.abs(found - expected), 1e-5 * scale)


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
@pytest.mark.parametrize('kind', slow_but(['MXFP4', 'Q4_1', 'Q4_K'], KINDS))
def test_every_form_is_the_plain_one(kind, forms):
  """For blocks of every size and many rows, in both types of inputs; a row does not depend on those beside it."""
  rows, num_forms = _rows(33, 512), 0
  kernel = packed(_stored(kind, 100, 512), kind)
  scale = np.abs(np.asarray(rows)) @ np.abs(_weights(_stored(kind, 100, 512), kind)).T
  for _ in forms:
    for dtype in (jnp.float32, jnp.bfloat16):
      own = rows.astype(dtype)
      expected = np.asarray(block_product.plain(own, kernel.weights, kernel.scales, kernel.least, 100))
      for num_rows in (1, 2, 5, 12, 13, 33):
        found = np.asarray(kernel.product(own[:num_rows]))
        np.testing.assert_array_less(np.abs(found - expected[:num_rows]), 1e-5 * scale[:num_rows] + 1e-30)
      alone = np.concatenate([kernel.product(own[i : i + 1]) for i in range(33)])
      np.testing.assert_array_equal(alone, kernel.product(own))
    num_forms += 1
  assert num_forms


def _experts(kind, num_rows):
  """Kernels of experts, those of each, and rows of which one expert has most, and two have none."""
  each = [_stored(kind, 40, 512, seed) for seed in range(6)]
  rng = np.random.default_rng(3)
  chosen = np.where(rng.random(num_rows) < 0.6, 3, rng.integers(0, 4, num_rows))
  kernel = packed_experts(iter(each), 6, kind)
  return kernel, [packed(stored, kind) for stored in each], _rows(num_rows, 512), jnp.asarray(chosen)


# Blocks of every size, with and without a least value.
_TELLING = ('MXFP4', 0), ('Q4_1', 1), ('Q6_K', 5), ('Q4_K', 33)


@pytest.mark.parametrize(
  ('kind', 'num_rows'),
  [pair if pair in _TELLING else slow(*pair) for pair in itertools.product(KINDS, (0, 1, 5, 33))],
)
def test_products_by_experts_are_those_of_single_kernels(kind, num_rows, forms):
  """Bit for bit, in every form and in both types of inputs."""
  kernel, each, rows, chosen = _experts(kind, num_rows)
  assert kernel.shape == (6, 512, 40)
  with native.disabled():
    expected = [each[expert].product(rows[i : i + 1]) for i, expert in enumerate(chosen)]
    np.testing.assert_allclose(
      kernel.expert_product(rows, chosen), np.reshape(expected, (-1, 40)), rtol=1e-5, atol=1e-5
    )
  for _ in forms:
    for dtype in (jnp.float32, jnp.bfloat16):
      own = rows.astype(dtype)
      expected = [each[expert].product(own[i : i + 1]) for i, expert in enumerate(chosen)]
      np.testing.assert_array_equal(kernel.expert_product(own, chosen), np.reshape(expected, (-1, 40)))


@pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')
def test_experts_that_are_none_are_refused():
  kernel, _, rows, _ = _experts('Q8_0', 3)
  for wrong in (6, -1):
    with pytest.raises(Exception, match='do not fit each other'):
      jax.block_until_ready(kernel.expert_product(rows, jnp.array([0, wrong, 1])))
  with pytest.raises(Exception, match='do not fit each other'):
    jax.block_until_ready(kernel.expert_product(rows, jnp.array([0, 1])))


@pytest.mark.parametrize('kind', ['Q4_1', 'Q6_K'])
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_inputs_that_are_not_finite_give_nan(kind, bad):
  """And zeros give zeros: their blocks have no scale."""
  kernel = packed(_stored(kind, 40, 512), kind)
  rows = jnp.zeros((3, 512)).at[1, 300].set(bad)
  for product in (kernel.product(rows), block_product.plain(rows, kernel.weights, kernel.scales, kernel.least, 40)):
    assert np.isnan(product[1]).all()
    np.testing.assert_array_equal(product[::2], 0)


@pytest.mark.parametrize('largest', [1e-45, 1e-37, 1e-31])
def test_tiny_inputs_are_zeros(largest):
  """The inverse of their scale would be infinite."""
  kernel = packed(_stored('Q8_0', 40, 512), 'Q8_0')
  rows = jnp.full((1, 512), largest, jnp.float32)
  np.testing.assert_allclose(kernel.product(rows), 0, atol=1e-25)
  np.testing.assert_allclose(block_product.plain(rows, kernel.weights, kernel.scales, None, 40), 0, atol=1e-25)


def test_kernels_side_by_side():
  first, second = packed(_stored('Q4_1', 32, 256), 'Q4_1'), packed(_stored('Q4_1', 40, 256, seed=1), 'Q4_1')
  rows = _rows(2, 256)
  assert fit_side_by_side([first, second])
  together = side_by_side([first, second]).product(rows)
  np.testing.assert_array_equal(together, jnp.concatenate([first.product(rows), second.product(rows)], axis=1))
  assert not fit_side_by_side([second, first])  # panels would not be whole
  assert not fit_side_by_side([first, packed(_stored('Q8_0', 32, 256), 'Q8_0')])
  assert not fit_side_by_side([first, rows])


def test_scales_that_are_not_finite_are_refused():
  stored = _stored('Q8_0', 4, 64)
  stored[2, 1, :2] = np.array([np.inf], np.float16).view(np.uint8)
  with pytest.raises(ValueError, match='a scale of its Q8_0 blocks is not finite'):
    packed(stored, 'Q8_0')
  stored = _stored('MXFP4', 4, 64)
  stored[2, 1, 0] = 255
  with pytest.raises(ValueError, match='a scale of its MXFP4 blocks is not finite'):
    packed(stored, 'MXFP4')


def test_a_kernel_is_data_of_a_program():
  """Programs are compiled for shapes, not for weights."""
  traces = []

  @jax.jit
  def product(kernel: BlockKernel, rows):
    traces.append(kernel)
    return kernel.product(rows)

  for seed in range(2):
    kernel = packed(_stored('Q4_1', 32, 256, seed=seed), 'Q4_1')
    np.testing.assert_array_equal(product(kernel, _rows(2, 256)), kernel.product(_rows(2, 256)))
  assert len(traces) == 1
