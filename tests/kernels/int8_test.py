"""Kernels in int8: the rounding is the nearest, products and models are those of the dequantized kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_specs import SPECS

from spectr_jax.io.hub.families import read_spec
from spectr_jax.kernels import products
from spectr_jax.kernels.int8 import Int8Kernel, is_int8, quantize, quantized
from spectr_jax.kernels.matrices import matmul
from spectr_jax.models import layers, transformer
from spectr_jax.models.causal_lm import causal_lm, lm1b_config
from spectr_jax.models.param_shapes import init_params, param_shapes
from spectr_jax.sharding import make_mesh, shardings
from tests.slow import slow

pytestmark = pytest.mark.usefixtures('highest')


def _random(*shape):
  return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _kernel(matrix, channel_axis):
  return Int8Kernel(*map(jnp.asarray, quantize(matrix, channel_axis)), channel_axis)


def _dequantized(params):
  return jax.tree.map(lambda x: x.dequantized('float32') if is_int8(x) else x, params, is_leaf=is_int8)


@pytest.mark.parametrize('channel_axis', [0, 1])
def test_every_number_is_rounded_to_the_nearest_of_its_channel(channel_axis):
  matrix = _random(12, 7) * np.array([1, 3, 0, 1e-30, 1e-44, 50, 1], np.float32)
  values, scale = quantize(matrix if channel_axis else matrix.T.copy(), channel_axis)
  values = values if channel_axis else values.T
  assert (values.dtype, scale.dtype) == (np.int8, np.float32)
  for channel in range(7):
    step = np.abs(matrix[:, channel]).max().astype(np.float64) / 127
    assert abs(float(scale[channel]) - step) <= max(1e-6 * step, 1e-45)
    found = values[:, channel] * np.float64(scale[channel])
    every = np.arange(-127, 128) * np.float64(scale[channel])
    nearest = np.abs(matrix[:, channel, None] - every).min(axis=1)
    np.testing.assert_allclose(np.abs(matrix[:, channel] - found), nearest, rtol=0, atol=1e-6 * step)
    assert nearest.max() <= 0.51 * step or step < 1e-40  # scales below are few
  assert np.abs(values[:, [0, 1, 3, 5, 6]]).max(axis=0).tolist() == [127] * 5


def test_numbers_that_are_not_finite_are_refused():
  with pytest.raises(ValueError, match='weights that are not finite cannot be held in int8'):
    quantize(np.array([[1, np.inf]], np.float32), 1)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('num_channels', [1, 13, 32])
def test_products_are_those_of_the_dequantized_kernel(monkeypatch, dtype, axis, num_channels):
  monkeypatch.setattr(products, '_BLOCK_SIZE', 64)  # 4 channels, the last ones together with some before
  matrix = _random(16, num_channels)
  kernel = _kernel(matrix if axis == 0 else matrix.T.copy(), 1 - axis)
  x = jnp.asarray(_random(2, 3, 16), dtype)
  whole = np.asarray(kernel.values, np.float64) * np.expand_dims(np.asarray(kernel.scale, np.float64), axis)
  exact = np.asarray(x, np.float64) @ (whole if axis == 0 else whole.T)
  found = matmul(x, kernel, axis=axis)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, exact, atol=1e-5)
  np.testing.assert_allclose(matmul(x[:1, :1], kernel, axis=axis), exact[:1, :1], atol=1e-5)


def test_rows_of_an_embedding():
  kernel = _kernel(_random(9, 4), 0)
  rows = jnp.array([[3, 3], [8, 0]])
  np.testing.assert_array_equal(layers.take_rows(kernel, rows), kernel.dequantized('float32')[rows])


def test_no_float_copy_of_a_kernel_stays_in_a_loop():
  """XLA moves what no iteration changes out of a loop, on CPUs also where it becomes four times as large."""
  kernel = _kernel(_random(256, 4096), 1)

  def run(kernel):
    return jax.lax.scan(lambda x, _: (jnp.tanh(matmul(x, kernel)[:, :256]), None), jnp.ones((1, 256)), length=3)

  temporary = jax.jit(run).lower(kernel).compile().memory_analysis().temp_size_in_bytes
  assert temporary < 2 * kernel.values.nbytes  # a copy in float32 has four times as many bytes


def _pair(name, seed=0):
  """A tiny model in int8, and the float32 one of its dequantized matrices."""
  config = dataclasses.replace(read_spec(SPECS[name])[1], weights='int8')
  params = init_params(jax.random.key(seed), config)
  return causal_lm(params, config), causal_lm(_dequantized(params), dataclasses.replace(config, weights=None))


def _transformer_pair():
  config = lm1b_config(32, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=24, context_length=32)
  params = quantized(transformer.init_params(jax.random.key(0), config))
  return causal_lm(params, dataclasses.replace(config, weights='int8')), causal_lm(_dequantized(params), config)


@pytest.mark.parametrize('name', ['qwen2', 'transformer', *(slow(name) for name in ('llama', 'gpt_neox', 'gpt2'))])
def test_logits_are_those_of_the_dequantized_model(name):
  """Tied and not, with biases and without, learned positions."""
  models = _transformer_pair() if name == 'transformer' else _pair(name)
  tokens = jnp.array([[1, 2, 3, 4]])
  call = tokens, jnp.arange(4)[None], jnp.tril(jnp.ones((4, 4), bool))
  found, expected = (
    jax.jit(type(model).apply)(model.for_decoding(), *call, model.init_cache_fn(1, 4)).logits for model in models
  )
  assert expected.std() > 0.1
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize('name', ['qwen2', 'llama'])
def test_a_model_without_weights_has_shapes(name):
  config = dataclasses.replace(read_spec(SPECS[name])[1], weights='int8')
  shapes = param_shapes(config)
  model = jax.eval_shape(lambda params: causal_lm(params, config), shapes)
  drawn = init_params(jax.random.key(0), config)
  assert jax.tree.structure(model.params) == jax.tree.structure(drawn)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
  assert config.num_params == dataclasses.replace(config, weights=None).num_params
  assert {x.dtype for x in jax.tree.leaves(shapes) if len(x.shape) == 2} == {jnp.dtype('int8')}


def test_scales_are_sharded_as_their_channels():
  mesh = make_mesh({}, jax.devices()[:1])
  config = dataclasses.replace(read_spec(SPECS['llama'])[1], weights='int8')
  for params in (param_shapes(config), _transformer_pair()[0].params):
    places = jax.tree.leaves(shardings(mesh, params), is_leaf=is_int8)
    kernels = [place for place in places if is_int8(place)]
    assert len(kernels) > 4
    for kernel in kernels:
      channel, inputs = (kernel.values.spec[axis] for axis in (kernel.channel_axis, 1 - kernel.channel_axis))
      # Scales are whole where devices have inputs of all channels.
      assert kernel.scale.spec == jax.sharding.PartitionSpec(*([] if inputs == 'model' else [channel]))


def test_unknown_weights_are_refused():
  config = read_spec(SPECS['llama'])[1]
  with pytest.raises(ValueError, match="^weights must be int8, blocks, or None for .*; got 'int4'$"):
    dataclasses.replace(config, weights='int4')
