"""Weights of 8 bits with scales: every number is that of the closed form, and what does not fit is named."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from hub_specs import SPECS
from safetensors.numpy import save_file
from tiny_hub import Recorded, backend, tensors_of, write_model

from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_model import load_hub_model, make_model
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.io.hub.scaled_tensors import ScaledTensors, with_scales
from spectr_jax.io.hub.sources import source_of
from spectr_jax.io.hub.tensors import SafetensorsFolder
from spectr_jax.kernels.int8 import quantized

_E4M3 = ml_dtypes.float8_e4m3fn
_FP8 = {'quant_method': 'fp8', 'activation_scheme': 'dynamic', 'fmt': 'e4m3'}
_WEIGHTS = {'num_bits': 8, 'type': 'float', 'symmetric': True}


def _compressed(**weights):
  groups = {'group_0': {'targets': ['Linear'], 'weights': _WEIGHTS | weights}}
  return {'quant_method': 'compressed-tensors', 'format': 'float-quantized', 'config_groups': groups}


# Quantization and the shape of the scales of `[out, in]`.
KINDS = {
  'blocks': (_FP8 | {'weight_block_size': [8, 5]}, lambda out, inner: (-(-out // 8), -(-inner // 5))),
  'matrices': (_FP8, lambda out, inner: ()),
  'matrices of one': (_compressed(strategy='tensor'), lambda out, inner: (1,)),
  'channels': (_compressed(strategy='channel'), lambda out, inner: (out, 1)),
  'flat channels': (_compressed(strategy='channel'), lambda out, inner: (out,)),
  'compressed blocks': (
    _compressed(strategy='block', block_structure=[16, 7]), lambda out, inner: (-(-out // 16), -(-inner // 7)),
  ),
}  # fmt: skip


def _scaled(spec, kind, scale_dtype=np.float32):
  """Tensors of which all kernels of blocks have scales, and the numbers that they stand for."""
  (quantization, shape_of), rng = KINDS[kind], np.random.default_rng(0)
  stored, numbers = {}, {}
  for name, x in tensors_of(spec).items():
    stored[name] = numbers[name] = x
    if not name.endswith('proj.weight'):
      continue
    values = rng.integers(0, 256, x.shape, np.uint8)
    values[values & 127 == 127] = 0  # no number
    scales = (2 ** rng.uniform(-3, 3, shape_of(*x.shape))).astype(scale_dtype)
    ending = '_scale_inv' if quantization['quant_method'] == 'fp8' else '_scale'
    stored |= {name: values.view(_E4M3), f'{name}{ending}': np.asarray(scales)}
    stored[f'{name.removesuffix(".weight")}.input_scale'] = np.ones(1, np.float32)
    # sign, exponent and mantissa
    exponents, digits = values >> 3 & 15, values & 7
    value = np.where(exponents > 0, (1 + digits / 8) * 2.0 ** (exponents - 7.0), digits / 8 * 2.0**-6)
    expected, wide = np.empty(x.shape), np.asarray(scales, np.float64)
    for (row, column), number in np.ndenumerate(np.where(values > 127, -value, value)):
      if 'blocks' in kind:
        step = quantization.get('weight_block_size') or [16, 7]
        factor = wide[row // step[0], column // step[1]]
      else:
        factor = wide.reshape(-1)[row if 'channels' in kind else 0]
      expected[row, column] = number * factor
    numbers[name] = expected
  return quantization, stored, numbers


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', ['llama', 'glm4_moe'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_every_number_is_that_of_the_closed_form(kind, name, dtype, tmp_path):
  spec = SPECS[name]
  quantization, stored, numbers = _scaled(spec, kind, ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.float32)
  folder = write_model(tmp_path / 'model', spec | {'quantization_config': quantization, 'dtype': dtype}, stored, 2)
  params, num_compared = load_hub_model(folder).params, 0
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = jax.tree_util.keystr(keys, simple=True, separator='/')
    source = source_of(path, leaf.shape, *read_spec(spec), {'model.'})
    if not source.name.endswith('proj.weight'):
      continue
    assert leaf.dtype == dtype
    for of_file, kernel in zip(source.names, np.asarray(leaf, np.float64).reshape(-1, *leaf.shape[-2:]), strict=True):
      num_compared += 1
      np.testing.assert_allclose(kernel, numbers[of_file].T, rtol=2**-8 if dtype == 'bfloat16' else 1e-6)
  assert num_compared == sum(name.endswith('proj.weight') for name in stored)


@pytest.mark.parametrize('kind', KINDS)
def test_a_part_is_that_of_the_whole_and_reads_no_more(kind):
  quantization, stored, numbers = _scaled(SPECS['llama'], kind)
  name = 'model.layers.1.mlp.down_proj.weight'  # [16, 24]
  tensors = with_scales(Recorded(stored), quantization)
  for rows, columns in ((slice(None), slice(None)), (slice(3, 9), slice(5, 24)), (slice(8, 16), slice(0, 5)),
                        (slice(15, 16), slice(4, 6)), (slice(2, 2), slice(0, 4))):  # fmt: skip
    np.testing.assert_allclose(tensors.read(name, (rows, columns)), numbers[name][rows, columns], rtol=1e-6)
  assert max(size for of, size in tensors._tensors.reads[-2:] if 'scale' in of) <= 2


def test_weights_in_int8_and_saved_ones(tmp_path):
  quantization, stored, numbers = _scaled(SPECS['qwen3_moe'], 'channels')
  spec = SPECS['qwen3_moe'] | {'quantization_config': quantization}
  folder = write_model(tmp_path / 'model', spec, stored)
  plain = make_model(SPECS['qwen3_moe'], Recorded({k: np.asarray(x, np.float32) for k, x in numbers.items()}))
  found, expected = (x['layer_1']['mlp']['experts']['up']['kernel'] for x in (
    load_hub_model(folder, weights='int8').params, quantized(plain.params)
  ))  # fmt: skip
  np.testing.assert_array_equal(found.values, expected.values)
  tokenizer = HubTokenizer.from_parts(backend(), bos_id=7, eos_ids=[41], add_bos=False)
  save_hub_model(tmp_path / 'saved', load_hub_model(folder), tokenizer, spec, param_dtype='float32')
  saved = load_hub_model(tmp_path / 'saved')
  np.testing.assert_array_equal(
    saved.params['layer_0']['mlp']['down']['kernel'], plain.params['layer_0']['mlp']['down']['kernel']
  )
  assert 'quantization_config' not in json.loads((tmp_path / 'saved' / 'config.json').read_text())


_NAME = 'model.layers.1.mlp.down_proj.weight'


@pytest.mark.parametrize(
  ('kind', 'ending', 'change', 'problem'),
  [
    ('blocks', '_scale_inv', lambda x: x[:1], r'down_proj.weight \(16, 24\) and .*_inv \(1, 5\) do not fit each other'),
    ('blocks', '_scale_inv', lambda x: x[0, 0], 'expected a scale for each block of'),
    ('blocks', '_scale_inv', lambda x: np.tile(x, (1, 1, 1)), 'do not fit each other'),
    ('channels', '_scale', lambda x: x[:15], 'do not fit each other: expected a scale for each matrix or output'),
    ('channels', '_scale', lambda x: np.ones((10**6, 1)), 'do not fit each other'),
    ('channels', '_scale', lambda x: np.ones((1, 16)), 'do not fit each other'),
    ('channels', '_scale', lambda x: x.astype(np.int32), 'must be of float8_e4m3fn and of a larger type, got .* int32'),
    ('channels', '_scale', lambda x: x.astype(_E4M3), 'got float8_e4m3fn and float8_e4m3fn'),
    ('channels', '_scale', lambda x: np.where(np.arange(16)[:, None] == 7, np.nan, x), f'{_NAME}_scale is not finite'),
    ('blocks', '_scale_inv', lambda x: np.where(x == x[1, 2], np.inf, x), f'{_NAME}_scale_inv is not finite'),
    ('matrices', '', lambda x: x.astype(np.float32), 'must be of float8_e4m3fn and of a larger type, got float32'),
    ('matrices', '', lambda x: None, 'down_proj.weight_scale_inv is there without its weights'),
    ('matrices', '', lambda x: x.reshape(16, 4, 6), 'do not fit each other'),
    ('matrices', '_scale_inv', lambda x: None, 'down_proj.weight is of float8_e4m3fn without scales'),
  ],
)  # fmt: skip
def test_scales_that_are_refused(kind, ending, change, problem):
  quantization, stored, _ = _scaled(SPECS['llama'], kind)
  stored[f'{_NAME}{ending}'] = change(stored[f'{_NAME}{ending}'])
  recorded = Recorded({name: np.asarray(x) for name, x in stored.items() if x is not None})
  with pytest.raises(ValueError, match=problem):
    make_model(SPECS['llama'], with_scales(recorded, quantization))


@pytest.mark.parametrize(
  ('quantization', 'problem'),
  [
    ({'quant_method': 'gptq'}, 'by gptq are not read; known are fp8, compressed-tensors, unquantized weights'),
    ({'quant_method': 'awq'}, 'quantized by awq are not read'),
    ({'quant_method': 'modelopt', 'quant_algo': 'NVFP4'}, 'quantized by modelopt are not read'),
    ({'bits': 4}, 'quantized by an unnamed method are not read'),
    (_compressed() | {'format': 'nvfp4-pack-quantized'}, "as 'nvfp4-pack-quantized and dense' are not read; known are"),
    (_compressed() | {'format': 'int-quantized'}, "as 'int-quantized and dense' are not read"),
    (_compressed() | {'sparsity_config': {'format': 'sparse-24-bitmask'}}, 'sparse-24-bitmask'),
    (_compressed() | {'format': 7}, 'format must be a text'),
    (_compressed() | {'config_groups': {'group_0': [1]}}, 'config_groups must be'),
    (_FP8 | {'weight_block_size': [128]}, 'blocks of weights must have two sizes'),
    (_FP8 | {'weight_block_size': [0, 128]}, 'weight_block_size must be'),
    (_FP8 | {'weight_block_size': [1e9, 128]}, 'weight_block_size must be'),
    (_FP8 | {'weight_block_size': 128}, 'weight_block_size must be'),
  ],
)  # fmt: skip
def test_methods_that_are_refused_before_tensors_are_opened(quantization, problem, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(SPECS['llama'] | {'quantization_config': quantization}))
  (tmp_path / 'model.safetensors').write_bytes(b'no tensors')
  with pytest.raises(ValueError, match=problem):
    load_hub_model(tmp_path)


def test_unscaled_weights_of_8_bits_are_refused(tmp_path):
  tensors = {name: x.astype(_E4M3) if 'proj' in name else x for name, x in tensors_of(SPECS['llama']).items()}
  with pytest.raises(ValueError, match='is of float8_e4m3fn without scales that the configuration announces'):
    load_hub_model(write_model(tmp_path / 'model', SPECS['llama'], tensors))


def test_a_truncated_file_is_refused(tmp_path):
  quantization, stored, _ = _scaled(SPECS['llama'], 'blocks')
  folder = write_model(tmp_path / 'model', SPECS['llama'] | {'quantization_config': quantization}, stored)
  path = folder / 'model.safetensors'
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(ValueError, match='model.safetensors is damaged'):
    load_hub_model(folder)


def test_files_of_a_mesh_read_their_parts(tmp_path):
  """A tensor of 8 bits in a file is that in memory, in every part."""
  _, stored, _ = _scaled(SPECS['llama'], 'blocks')
  save_file({name: np.ascontiguousarray(x) for name, x in stored.items()}, tmp_path / 'model.safetensors')
  folder = SafetensorsFolder(tmp_path)
  assert folder.dtype(_NAME) == _E4M3
  for index in ((slice(0, 16), slice(0, 24)), (slice(3, 7), slice(5, 6)), (slice(2, 2), slice(0, 3))):
    np.testing.assert_array_equal(folder.read(_NAME, index).view(np.uint8), stored[_NAME][index].view(np.uint8))


def test_configurations_keep_their_type():
  _, config = read_spec(SPECS['llama'] | {'quantization_config': _FP8, 'torch_dtype': 'bfloat16'})
  assert config.dtype == 'bfloat16'
  assert isinstance(with_scales(Recorded({}), _FP8), ScaledTensors)
  assert isinstance(with_scales(Recorded({}), None), Recorded)
