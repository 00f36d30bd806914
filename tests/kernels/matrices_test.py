"""Parameters in the form that CPUs and GPUs decode fastest: products, joined kernels, shardings."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS
from jax.sharding import PartitionSpec

from spectr_jax.io.hub.families import read_spec
from spectr_jax.kernels import dispatch, matrices, products
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.int8 import is_int8, quantized
from spectr_jax.kernels.matrices import JOINED, TransposedKernel, kernels_for_decoding, matmul, params_for_decoding
from spectr_jax.models.causal_lm import causal_lm
from spectr_jax.models.param_shapes import init_params
from spectr_jax.sharding import CAUSAL_LM_RULES, make_mesh, shardings


@pytest.fixture(autouse=True)
def all_kernels_are_large(monkeypatch):
  monkeypatch.setattr(products, 'LARGE', 1)


pytestmark = pytest.mark.usefixtures('products_of_xla')  # tests/native_test.py has the others


# Processors with units for bfloat16 products, and others.
@pytest.mark.parametrize(('dtype', 'has_units'), [('float32', False), ('bfloat16', True), ('bfloat16', False)])
@pytest.mark.parametrize('num_rows', [1, 2, 5, 12, 13, 100])
def test_a_product_is_that_of_the_kernel_in_the_other_order(num_rows, dtype, has_units, monkeypatch):
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: has_units)
  rows = jax.random.normal(jax.random.key(0), (num_rows, 48), dtype)
  kernel = jax.random.normal(jax.random.key(1), (48, 40), dtype)
  found = jax.jit(lambda *operands: matmul(*operands))(rows, TransposedKernel(kernel.T))  # traced anew
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64), rtol=1e-4, atol=1e-4)
  params = quantized({'kernel': kernel.astype('float32')})
  fast = kernels_for_decoding(params)['kernel']
  assert fast.shape == (48, 40)
  found = matmul(rows, fast)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, matmul(rows, params['kernel']), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('num_rows', [1, 3, 20])
def test_gradients_of_a_product_are_those_of_the_other_order(num_rows):
  rows = jax.random.normal(jax.random.key(0), (num_rows, 48))
  kernel = jax.random.normal(jax.random.key(1), (48, 40))

  def loss(rows, kernel, is_transposed):
    return jnp.sin(matmul(rows, TransposedKernel(kernel.T) if is_transposed else kernel)).sum()

  found, expected = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(rows, kernel, is_it) for is_it in (True, False))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize('has_units', [True, False])
def test_units_for_bfloat16_decide_how_products_are_made(has_units, monkeypatch):
  """Integers become bfloat16, and a bfloat16 kernel is the first factor, only where there are units for it."""
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: has_units)
  rows = jnp.ones((3, 48), jnp.bfloat16)
  integers = quantized({'kernel': jnp.ones((48, 40))})['kernel']
  transposed = TransposedKernel(jnp.ones((40, 48), jnp.bfloat16))
  with tracing_for('cpu'):
    of_integers, of_bfloat16 = (
      str(jax.make_jaxpr(lambda *operands: matmul(*operands))(rows, kernel)) for kernel in (integers, transposed)
    )
  assert re.findall(r'(\w+)\[48,20\] = convert_element_type', of_integers) == ['bf16' if has_units else 'f32']
  assert re.findall(r'(f32\[\d+,\d+\]) = dot_general', of_bfloat16) == ['f32[40,3]' if has_units else 'f32[3,40]']


def test_products_of_one_input_are_joined_where_they_have_the_same_parameters():
  def linear(has_bias):
    return {'kernel': jnp.ones((4, 2))} | ({'bias': jnp.ones(2)} if has_bias else {})

  fast = kernels_for_decoding({name: linear(True) for name in 'qkv'} | {'gate': linear(True), 'up': linear(False)})
  assert fast.keys() == {'qkv', 'gate', 'up'}
  assert fast['qkv']['kernel'].out_in.shape == (6, 4)
  assert fast['qkv']['bias'].shape == (6,)


@pytest.mark.parametrize('weights', [None, 'int8'])
def test_for_a_gpu_products_of_one_input_are_joined(weights, monkeypatch):
  monkeypatch.setattr(dispatch, 'default_platform', lambda: 'gpu')
  config = dataclasses.replace(read_spec(SPECS['qwen2'])[1], weights=weights)  # with biases
  model = causal_lm(init_params(jax.random.key(0), config), config)
  fast = model.for_decoding()
  assert fast.params['layer_0']['attention'].keys() == {'qkv', 'out'}
  assert fast.params['layer_0']['mlp'].keys() == {'gate_up', 'down'}
  assert fast.for_decoding() is fast
  tokens, positions = jnp.arange(6).reshape(2, 3), jnp.broadcast_to(jnp.arange(3), (2, 3))

  def logits(model):
    return model.apply(tokens, positions, jnp.tril(jnp.ones((3, 3), bool)), model.init_cache_fn(2, 8)).logits

  with tracing_for('gpu'):
    np.testing.assert_allclose(jax.jit(logits)(fast), jax.jit(logits)(model), rtol=1e-4, atol=1e-4)
  monkeypatch.setattr(matrices, '_has_room_twice', lambda arrays: False)
  assert model.for_decoding() is model


@pytest.mark.parametrize(
  ('num_devices', 'stats', 'has_room'),
  [(1, None, True), (1, {'bytes_limit': 48}, True), (1, {'bytes_limit': 47}, False), (2, None, False)],
)
def test_room_is_that_of_one_device(num_devices, stats, has_room):
  class Device:
    def memory_stats(self):
      return stats

  devices = [Device() for _ in range(num_devices)]
  arrays = [types.SimpleNamespace(devices=lambda device=device: {device}, nbytes=8) for device in (devices * 3)[:3]]
  assert matrices._has_room_twice(arrays) == has_room


@pytest.mark.parametrize(('weights', 'dtype'), [(None, 'float32'), ('int8', 'float32'), (None, 'bfloat16')])
def test_every_parameter_is_sharded_as_the_one_that_it_is_made_of(weights, dtype, monkeypatch):
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: False)
  mesh = make_mesh({}, jax.devices()[:1])
  config = dataclasses.replace(read_spec(SPECS['qwen2'])[1], weights=weights)  # with biases
  params = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.float32 and x.ndim > 1 else x, init_params(jax.random.key(0), config)
  )

  def specs(params):
    found = jax.tree_util.tree_leaves_with_path(shardings(mesh, params, CAUSAL_LM_RULES))
    return {jax.tree_util.keystr(keys, simple=True, separator='/'): place.spec for keys, place in found}

  plain, fast = specs(params), specs(params_for_decoding(params))
  checked = 0
  for path, spec in fast.items():
    original = re.sub('/(out_in|in_out)', '', path)
    for names, joined in JOINED.items():
      original = original.replace(f'/{joined}/', f'/{names[0]}/')
    is_matrix = '/out_in' in path and not path.endswith('scale')
    is_reversed = is_matrix
    if original not in plain:  # a tied output head, whose original is stored as `[out, in]`
      original, is_reversed = 'embedding', not is_matrix
    expected = PartitionSpec(*reversed(plain[original])) if is_reversed else plain[original]
    assert spec == expected, path
    checked += is_matrix
  assert checked == 4 * config.num_layers + (not config.is_tied or dtype == 'bfloat16')


def test_bfloat16_kernels_are_in_both_orders_on_processors_without_units_for_them(monkeypatch):
  monkeypatch.setattr(products, 'multiplies_bfloat16', lambda: False)
  params = {'a': {'kernel': jnp.ones((3, 4), jnp.bfloat16)}, 'unembedding': jnp.ones((3, 4))}
  fast = kernels_for_decoding(params)
  assert fast['a']['kernel'].in_out is params['a']['kernel']
  assert fast['a']['kernel'].out_in.shape == (4, 3)
  assert fast['unembedding'].in_out is None
  assert kernels_for_decoding(fast) is fast
  monkeypatch.setattr(matrices, 'MOST_DOUBLED', 3 * 4 * 2 - 1)
  large = kernels_for_decoding(params)
  assert large['a']['kernel'] is params['a']['kernel']
  assert isinstance(large['unembedding'], TransposedKernel)
  assert kernels_for_decoding(large) is large
  # Small kernels stay as they are.
  monkeypatch.setattr(products, 'LARGE', 48 * 40)
  params = {'a': {'kernel': jnp.ones((48, 40))}, 'b': {'kernel': jnp.ones((48, 39))}}
  fast = kernels_for_decoding(params)
  assert fast['a']['kernel'].out_in.shape == (40, 48)
  assert fast['b'] == params['b']
  assert kernels_for_decoding(params['b']) is params['b']


@pytest.mark.parametrize(
  ('shape', 'factor'), [((1, 1, 48), 1), ((1, 48), 1), ((2, 48), 2), ((1, 3, 48), 2), ((2, 64, 48), 1)]
)
def test_a_single_token_and_prompts_are_multiplied_in_the_order_that_is_fast_for_them(shape, factor):
  kernel = jax.random.normal(jax.random.key(1), (48, 40), jnp.bfloat16)
  rows = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
  found = matmul(rows, TransposedKernel(2 * kernel.T, kernel))
  np.testing.assert_allclose(found, factor * matmul(rows, kernel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(('text', 'has_units'), [('flags : fpu amx_bf16 avx', True), ('flags : fpu avx512f', False)])
def test_linux_says_whether_there_are_units_for_bfloat16_products(text, has_units, tmp_path, monkeypatch):
  (tmp_path / 'cpuinfo').write_text(text)
  monkeypatch.setattr(products, '_CPU_INFO', tmp_path / 'cpuinfo')
  assert products.multiplies_bfloat16.__wrapped__() == has_units
  monkeypatch.setattr(products, '_CPU_INFO', tmp_path / 'nothing')  # another system
  assert not products.multiplies_bfloat16.__wrapped__()


def test_other_backends_keep_their_parameters(monkeypatch):
  config = read_spec(SPECS['llama'])[1]
  model = causal_lm(init_params(jax.random.key(0), config), config)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert model.for_decoding() is model
  assert not any(map(is_int8, jax.tree.leaves(model.params, is_leaf=is_int8)))


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_of_a_product_are_products(axis, dtype):
  """Against JAX's own, which are of the accumulation's type; the kernel's gradient is as wide as the kernel."""
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(5, 6)), dtype)
  kernel = jnp.asarray(rng.normal(size=(6, 3) if axis == 0 else (3, 6)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)

  def loss(product):
    return lambda x, kernel: jnp.sum(weights * product(x, kernel))

  def plain(x, kernel):
    kernel = kernel.astype(x.dtype)
    return jnp.matmul(x, kernel if axis == 0 else kernel.T, preferred_element_type=jnp.float32)

  found = jax.grad(loss(lambda x, kernel: matmul(x, kernel, axis=axis)), (0, 1))(x, kernel)
  expected = jax.grad(loss(plain), (0, 1))(x, kernel)
  tolerance = 1e-6 if dtype == 'float32' else 3e-2
  for ours, theirs in zip(found, expected, strict=True):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    np.testing.assert_allclose(ours.astype('float32'), theirs.astype('float32'), rtol=tolerance, atol=tolerance)


def test_a_loop_of_products_with_a_bfloat16_row_keeps_no_float32_copy_of_the_kernel():
  kernel = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

  @jax.jit
  def multiply(row, kernel, num_steps):
    return jax.lax.fori_loop(0, num_steps, lambda _, row: matmul(row, kernel).astype(row.dtype), row)

  # With the pass that moves code out of loops, which the tests do without.
  compiled = multiply.lower(jax.ShapeDtypeStruct((1, 512), jnp.bfloat16), kernel, 8).compile(
    {'xla_disable_hlo_passes': ''}
  )
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * kernel.size
