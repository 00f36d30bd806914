"""Files of mixtures: every expert comes to its place, in every layout, and what does not fit is refused by name."""

import json
import time

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hub_specs import SPECS
from safetensors.numpy import save_file
from tiny_hub import Recorded, backend, random_array, tensors_of, write_model

from spectr_jax.io.hub.families import read_spec, spec_of_layers
from spectr_jax.io.hub.hub_model import load_hub_model, make_model
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.io.model_files import GgufFile
from spectr_jax.kernels.int8 import quantized

_GPT_OSS = {**SPECS['gpt_oss'], 'hidden_size': 64, 'intermediate_size': 32}
_MXFP4 = _GPT_OSS | {'quantization_config': {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}}
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_EXPERTS = 'model.layers.1.mlp.experts'


def _fused(tensors):
  """Tensors of gpt-oss as its floating point files have them: all experts of a layer in one."""
  fused = {name: x for name, x in tensors.items() if '.experts.' not in name}
  for layer in range(2):
    own = f'model.layers.{layer}.mlp.experts'
    for ours, leaf, suffix in (('weight', (0, 2, 1), ''), ('bias', (0, 1), '_bias')):
      gate, up, down = (
        np.stack([tensors[f'{own}.{i}.{part}_proj.{ours}'] for i in range(4)]).transpose(leaf)
        for part in ('gate', 'up', 'down')
      )
      both = np.empty((*gate.shape[:-1], 2 * gate.shape[-1]), np.float32)
      both[..., ::2], both[..., 1::2] = gate, up
      fused |= {f'{own}.gate_up_proj{suffix}': both, f'{own}.down_proj{suffix}': down}
  return fused


def _joined(tensors, experts, num):
  """All gates before all ups of a layer's experts, and their last matrices."""
  gate, up, down = (
    np.stack([tensors[f'{experts}.{i}.{part}_proj.weight'] for i in range(num)]) for part in ('gate', 'up', 'down')
  )
  return np.concatenate([gate, up], axis=1), down


def _fused_halves(tensors):
  """Tensors of Gemma 4 as its files have them: all experts of a layer in one, all gates before all ups."""
  fused = {name: x for name, x in tensors.items() if '.experts.' not in name}
  for layer in range(4):
    own = f'model.layers.{layer}.experts'
    fused[f'{own}.gate_up_proj'], fused[f'{own}.down_proj'] = _joined(tensors, own, 5)
  return fused


def _in_mxfp4(fused, rng):
  """Such tensors with kernels of 4 bits, and their numbers."""
  found, numbers = {}, {}
  for name, x in fused.items():
    if not name.endswith('gate_up_proj') and not name.endswith('down_proj'):
      found[name] = x
      continue
    num, inputs, outputs = x.shape
    codes = rng.integers(0, 16, (num, outputs, inputs // 32, 32), np.uint8)
    scales = rng.integers(118, 130, codes.shape[:3], np.uint8)
    found |= {f'{name}_blocks': codes[..., ::2] | codes[..., 1::2] << 4, f'{name}_scales': scales}
    whole = _VALUES[codes] * 2.0 ** (scales.astype(int) - 127)[..., None]
    numbers[name] = whole.reshape(num, outputs, inputs).swapaxes(1, 2)
  return found, numbers


def _assert_layer(params, numbers):
  both, down = numbers[f'{_EXPERTS}.gate_up_proj'], numbers[f'{_EXPERTS}.down_proj']
  for name, expected in (('gate', both[..., ::2]), ('up', both[..., 1::2]), ('down', down)):
    np.testing.assert_array_equal(np.asarray(params['layer_1']['mlp']['experts'][name]['kernel'], np.float32), expected)


@pytest.mark.parametrize('name', ['mixtral', 'qwen3_moe', 'olmoe', 'glm4_moe'])
def test_experts_come_to_their_places(name):
  tensors = tensors_of(SPECS[name])
  own = make_model(SPECS[name], Recorded(tensors)).params['layer_1']['mlp']
  family, config = read_spec(SPECS[name])
  for ours in ('gate', 'up', 'down'):
    assert len(own['experts'][ours]['kernel']) == config.experts.num
    for i, kernel in enumerate(own['experts'][ours]['kernel']):
      stored = f'model.layers.1.{family.modules[f"mlp/experts/{ours}"]}.weight'.replace('{}', str(i))
      np.testing.assert_array_equal(kernel, tensors[stored].T)
  np.testing.assert_array_equal(
    own['router']['kernel'], tensors[f'model.layers.1.{family.modules["mlp/router"]}.weight'].T
  )


def test_weights_in_int8_are_those_of_whole_kernels():
  tensors = Recorded(tensors_of(SPECS['mixtral']))
  model = make_model(SPECS['mixtral'], tensors, weights='int8')
  plain = quantized(make_model(SPECS['mixtral'], Recorded(tensors.tensors)).params)
  for ours in ('gate', 'up', 'down'):
    found, expected = (x['layer_0']['mlp']['experts'][ours]['kernel'] for x in (model.params, plain))
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert found.scale.shape == (4, found.values.shape[2])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gpt_oss_in_floating_point_and_in_mxfp4(dtype, tmp_path):
  fused = _fused(tensors_of(_GPT_OSS))
  params = load_hub_model(write_model(tmp_path / 'plain', _GPT_OSS, fused)).params
  _assert_layer(params, fused)
  biases = params['layer_1']['mlp']['experts']
  np.testing.assert_array_equal(biases['up']['bias'], fused[f'{_EXPERTS}.gate_up_proj_bias'][:, 1::2])
  np.testing.assert_array_equal(biases['down']['bias'], fused[f'{_EXPERTS}.down_proj_bias'])
  tensors, numbers = _in_mxfp4(fused, np.random.default_rng(0))
  folder = tmp_path / 'mxfp4'
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(_MXFP4))
  stored = {
    k: x if x.dtype == np.uint8 else np.ascontiguousarray(x).astype(ml_dtypes.bfloat16) for k, x in tensors.items()
  }
  save_file(stored, folder / 'model.safetensors')
  found = load_hub_model(folder, dtype=dtype).params
  assert found['layer_1']['mlp']['experts']['up']['kernel'].dtype == dtype
  _assert_layer(found, numbers)  # which bfloat16 holds exactly


@pytest.mark.parametrize('weights', [None, 'int8'])
def test_gemma_4_in_one_tensor_and_in_one_for_each_expert(weights):
  spec, tensors = SPECS['gemma4_mixture'], tensors_of(SPECS['gemma4_mixture'])
  recorded = Recorded(_fused_halves(tensors))
  found, expected = (make_model(spec, stored, weights=weights).params for stored in (recorded, Recorded(tensors)))
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert max(size for name, size in recorded.reads if '.experts.' in name) == 16 * 12
  if weights is None:
    own = found['layer_3']['mixture']
    np.testing.assert_array_equal(
      own['experts']['up']['kernel'][4], tensors['model.layers.3.experts.4.up_proj.weight'].T
    )
    np.testing.assert_array_equal(own['router']['gain'], tensors['model.layers.3.router.scale'])


@pytest.mark.parametrize(
  ('name', 'change', 'problem'),
  [
    ('gate_up_proj', lambda x: x[:, :-1], 'has gates without an up'),
    ('gate_up_proj', lambda x: x[:, 2:], r'experts.0.gate_proj.weight must have shape \(12, 16\), got \(11, 16\)'),
    ('gate_up_proj', lambda x: x[0], 'has 2 axes, expected 3'),
    ('gate_up_proj', lambda x: x.swapaxes(1, 2), 'must have shape'),
    ('down_proj', lambda x: x[:4], 'has 4 experts, the configuration 5'),
    ('down_proj', lambda x: x[:, :, :0], 'must have shape'),
  ],
)
def test_tensors_of_gemma_4_that_are_refused(name, change, problem):
  tensors, name = _fused_halves(tensors_of(SPECS['gemma4_mixture'])), f'model.layers.1.experts.{name}'
  with pytest.raises(ValueError, match=problem):
    make_model(SPECS['gemma4_mixture'], Recorded(tensors | {name: change(tensors[name])}))


def test_experts_of_qwen_in_one_tensor():
  """All gates before all ups, in tensors of the name that gpt-oss has for pairs that take turns."""
  spec = SPECS['qwen3_5_moe']
  tensors = tensors_of(spec)
  fused = {name: x for name, x in tensors.items() if '.experts.' not in name}
  for layer in range(2):
    own = f'model.layers.{layer}.mlp.experts'
    fused[f'{own}.gate_up_proj'], fused[f'{own}.down_proj'] = _joined(tensors, own, 5)
  found, expected = (make_model(spec, Recorded(stored)).params for stored in (fused, tensors))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_no_read_is_larger_than_both_matrices_of_an_expert():
  fused = _fused(tensors_of(_GPT_OSS))
  for tensors in (fused, _in_mxfp4(fused, np.random.default_rng(0))[0]):
    recorded = Recorded(tensors)
    make_model(_GPT_OSS, recorded)
    assert max(size for name, size in recorded.reads if '.experts.' in name) <= 64 * 64


_GRANITE = 'model.layers.1.block_sparse_moe'


def _granite():
  """Tensors of Granite as its files have them."""
  tensors = tensors_of(SPECS['granitemoe'])
  fused = {name: x for name, x in tensors.items() if '.experts.' not in name}
  for layer in range(2):
    own = f'model.layers.{layer}.block_sparse_moe'
    into, down = _joined(tensors, f'{own}.experts', 4)
    fused |= {f'{own}.input_linear.weight': into, f'{own}.output_linear.weight': down}
  return tensors, fused


def test_experts_of_granite_come_to_their_places(tmp_path):
  tensors, fused = _granite()
  expected = make_model(SPECS['granitemoe'], Recorded(tensors)).params
  recorded = Recorded(fused)
  jax.tree.map(np.testing.assert_array_equal, make_model(SPECS['granitemoe'], recorded).params, expected)
  assert max(size for name, size in recorded.reads if 'linear' in name) == 24 * 16  # one matrix of one expert
  loaded = load_hub_model(write_model(tmp_path / 'granite', SPECS['granitemoe'], fused)).params
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize(
  ('name', 'change', 'problem'),
  [
    ('input_linear', lambda x: x[:3], 'has 3 experts, the configuration 4'),
    ('input_linear', lambda x: x[:, :-1], 'has gates without an up'),
    ('input_linear', lambda x: x[0], 'has 2 axes, expected 3'),
    ('output_linear', lambda x: x[:, :-1], r'experts.0.down_proj.weight must have shape \(16, 24\), got \(15, 24\)'),
  ],
)
def test_fused_tensors_of_granite_that_are_refused(name, change, problem):
  _, fused = _granite()
  fused[f'{_GRANITE}.{name}.weight'] = change(fused[f'{_GRANITE}.{name}.weight'])
  with pytest.raises(ValueError, match=problem):
    make_model(SPECS['granitemoe'], Recorded(fused))


def _changed(name, change):
  fused, _ = _in_mxfp4(_fused(tensors_of(_GPT_OSS)), np.random.default_rng(0))
  fused[name] = change(fused[name])
  return {key: x for key, x in fused.items() if x is not None}


def _with_infinity(scales):
  scales = scales.copy()
  scales[2, 3, 0] = 255
  return scales


@pytest.mark.parametrize(
  ('name', 'change', 'problem'),
  [
    ('gate_up_proj_scales', _with_infinity, 'a scale of tensor .*gate_up_proj_blocks is 255'),
    ('gate_up_proj_scales', lambda x: None, 'gate_up_proj_blocks is there without its scales'),
    ('gate_up_proj_blocks', lambda x: None, 'gate_up_proj_scales is there without its blocks'),
    ('down_proj_blocks', lambda x: x[..., :8], 'are no MXFP4'),
    ('down_proj_blocks', lambda x: x.astype(np.float32), 'must hold bytes, got float32'),
    ('down_proj_bias', lambda x: x[:3], 'has 3 experts, the configuration 4'),
    ('gate_up_proj_bias', lambda x: x[:, :-1], 'has gates without an up'),
    ('gate_up_proj_bias', lambda x: x[0], 'has 1 axes, expected 2'),
    ('down_proj_bias', lambda x: x[:, :0], 'must have shape'),
    ('0.gate_proj.weight', None, 'is there as a part of'),
  ],
)
def test_fused_tensors_that_are_refused(name, change, problem):
  if change is None:
    tensors = _changed('model.norm.weight', lambda x: x) | {f'{_EXPERTS}.{name}': random_array(32, 64)}
  else:
    tensors = _changed(f'{_EXPERTS}.{name}', change)
  with pytest.raises(ValueError, match=problem):
    make_model(_MXFP4, Recorded(tensors))


@pytest.mark.parametrize(
  ('name', 'fields', 'problem'),
  [
    ('mixtral', {'num_local_experts': 10**9}, 'num_local_experts must be a whole number from 0 to 4096'),
    ('mixtral', {'num_local_experts': 0}, 'num of experts must be from 1'),
    ('mixtral', {'num_local_experts': 4096, 'num_hidden_layers': 33}, '33 layers of 4096 experts are too many'),
    ('mixtral', {'num_local_experts': 4096}, 'the configuration has 8192 experts, but the checkpoint'),
    ('mixtral', {'num_experts_per_tok': 5}, 'num_chosen of experts must be from 1 to 4, got 5'),
    ('mixtral', {'num_experts_per_tok': 10**9}, 'num_experts_per_tok must be'),
    ('mixtral', {'num_experts': 8}, 'num_experts and num_local_experts contradict each other'),
    (
      'mixtral',
      {'num_local_experts': 5},
      'lacks 6 tensors, the first of them .*experts.4',
    ),
    ('mixtral', {'num_local_experts': 3}, 'has 6 tensors too many, the first of them model.layers.0.block_sparse_moe'),
    ('mixtral', {'intermediate_size': 2**20}, r'experts.0.w2.weight must have shape \(16, 1048576\)'),
    ('qwen3_moe', {'mlp_only_layers': [10**9]}, 'mlp_only_layers must be'),
    ('qwen3_moe', {'decoder_sparse_step': 0}, 'decoder_sparse_step must be'),
    ('qwen3_moe', {'moe_intermediate_size': 10**9}, 'moe_intermediate_size must be'),
    ('qwen3_moe', {'n_routed_experts': 8}, 'n_routed_experts 8 is not supported'),
    ('olmoe', {'clip_qkv': 8.0}, 'clip_qkv 8.0 is not supported'),
    ('gpt_oss', {'swiglu_limit': -1}, 'swiglu_limit must be'),
    ('glm4_moe', {'n_routed_experts': 10**9}, 'n_routed_experts must be a whole number from 0 to 4096'),
    ('glm4_moe', {'n_shared_experts': 10**9}, 'n_shared_experts must be a whole number from 0 to 4096'),
    ('glm4_moe', {'n_shared_experts': 4096, 'moe_intermediate_size': 2**20}, 'shared_dim of experts must be'),
    ('glm4_moe', {'n_shared_experts': 4096}, r'shared_experts.down_proj.weight must have shape \(16, 49152\)'),
    ('glm4_moe', {'n_group': 16}, 'num_groups of experts must be from 1 to 8, got 16'),
    ('glm4_moe', {'n_group': 0}, 'num_groups of experts must be from 1 to 8, got 0'),
    ('glm4_moe', {'topk_group': 5}, 'num_chosen_groups of experts must be from 1 to 4, got 5'),
    ('glm4_moe', {'topk_group': 1}, '1 groups of 2 experts are too few to choose 3'),
    ('glm4_moe', {'first_k_dense_replace': -1}, 'first_k_dense_replace must be a whole number from 0'),
    ('glm4_moe', {'first_k_dense_replace': 10**9}, 'first_k_dense_replace must be a whole number from 0'),
    ('glm4_moe', {'first_k_dense_replace': 2}, 'lacks 3 tensors, the first of them model.layers.1.mlp.down_proj'),
    ('glm4_moe', {'routed_scaling_factor': float('nan')}, 'routed_scaling_factor must be'),
    ('glm4_moe', {'num_nextn_predict_layers': 10**9}, 'num_nextn_predict_layers must be'),
    ('glm4_moe', {'num_local_experts': 4}, 'num_local_experts and n_routed_experts contradict each other'),
    (
      'gpt_oss',
      {'quantization_config': {'quant_method': 'gptq'}},
      'quantized by gptq are not read; known are mxfp4, fp8,',
    ),
    ('granitemoe', {'residual_multiplier': 0}, 'residual_multiplier must be'),
    ('granitemoe', {'logits_scaling': 1e300}, 'logits_scaling must be'),
    ('granitemoe', {'num_experts_per_tok': 5}, 'num_chosen of experts must be from 1 to 4, got 5'),
    ('llama', {'residual_multiplier': 0.5}, 'residual_multiplier 0.5 is not supported'),
    ('llama', {'num_experts': 8}, 'num_experts 8 is not supported'),
    ('llama', {'quantization_config': {'quant_method': 'mxfp4'}}, 'quantized by mxfp4 are not read'),
  ],
)
def test_configurations_that_are_refused(name, fields, problem):
  tensors, began = Recorded(tensors_of(SPECS[name])), time.monotonic()
  with pytest.raises(ValueError, match=problem):
    make_model(SPECS[name] | fields, tensors)
  assert not tensors.reads
  assert time.monotonic() - began < 5


@pytest.mark.parametrize(
  'name', ['DeepseekV2ForCausalLM', 'DeepseekV3ForCausalLM', 'DeepseekV32ForCausalLM', 'Glm4MoeLiteForCausalLM']
)
def test_latent_attention_is_refused_before_tensors_are_opened(name, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(SPECS['glm4_moe'] | {'architectures': [name]}))
  (tmp_path / 'model.safetensors').write_bytes(b'no tensors')
  with pytest.raises(ValueError, match=f'config.json: {name} has multi-head latent attention') as error:
    load_hub_model(tmp_path)
  assert '\n' not in str(error.value)


def _with_layers(tensors, *more):
  last = {name: x for name, x in tensors.items() if name.startswith('model.layers.1.')}
  return tensors | {name.replace('.1.', f'.{layer}.', 1): x + 1 for name, x in last.items() for layer in more}


def test_layers_that_guess_are_not_read():
  """As many as the configuration says, one where it says nothing."""
  tensors = tensors_of(SPECS['glm4_moe'])
  others = {
    'model.layers.2.eh_proj.weight': random_array(16, 32),
    'model.layers.2.embed_tokens.weight': random_array(32),
  }
  expected = make_model(SPECS['glm4_moe'], Recorded(tensors)).params
  recorded = Recorded(_with_layers(tensors, 2) | others)
  jax.tree.map(np.testing.assert_array_equal, make_model(SPECS['glm4_moe'], recorded).params, expected)
  assert {name for name, _ in recorded.reads} == set(tensors)
  for num, layers, problem in ((0, [2], '40 tensors too many'), (2, [2, 4], r'too many, .* model.layers.4')):
    spec = SPECS['glm4_moe'] | {'num_nextn_predict_layers': num}
    with pytest.raises(ValueError, match=problem):
      make_model(spec, Recorded(_with_layers(tensors, *layers)))
  for name in (
    'model.layers.٢.mlp.gate.weight',
    'model.layers.-2.mlp.gate.weight',
    f'model.layers.{"2" * 99}.a',
  ):
    with pytest.raises(ValueError, match='1 tensors too many'):
      make_model(SPECS['glm4_moe'], Recorded(tensors | {name: random_array(1)}))


def test_biases_of_the_choice_are_not_rounded(tmp_path):
  spec, name = SPECS['glm4_moe'], 'model.layers.1.mlp.gate.e_score_correction_bias'
  tensors = tensors_of(spec)
  tensors[name] = np.float32(7) + random_array(8) / 1000
  model = make_model(spec, Recorded(tensors), dtype='bfloat16')
  np.testing.assert_array_equal(model.params['layer_1']['mlp']['router']['choice_bias'], tensors[name])
  save_hub_model(
    tmp_path / 'saved', model, HubTokenizer.from_parts(backend(), bos_id=7, eos_ids=[41], add_bos=False), spec
  )
  saved = load_hub_model(tmp_path / 'saved').params['layer_1']['mlp']
  np.testing.assert_array_equal(saved['router']['choice_bias'], tensors[name])
  assert saved['router']['kernel'].dtype == jnp.bfloat16


def test_some_layers_of_a_mixture_keep_their_kinds():
  spec = SPECS['qwen3_moe'] | {'num_hidden_layers': 4, 'mlp_only_layers': [0, 3]}
  kinds = read_spec(spec_of_layers(spec, (3, 1)))[1].experts
  assert kinds.layers == (False, True)
  spec = SPECS['glm4_moe'] | {'num_hidden_layers': 4, 'first_k_dense_replace': 2}
  assert read_spec(spec_of_layers(spec, (0, 3)))[1].experts.layers == (False, True)
  assert read_spec(spec_of_layers(spec, (2, 3)))[1].experts.layers == ()
  with pytest.raises(ValueError, match='those without experts come first'):
    spec_of_layers(spec, (3, 0))


# GGUF.


@pytest.mark.parametrize('architecture', ['mixtral', 'qwen3moe', 'olmoe', 'gpt-oss', 'gemma4 mixture'])
@pytest.mark.parametrize('kind', ['Q8_0', 'MXFP4'])
def test_gguf_files_of_experts_in_blocks(architecture, kind, tmp_path):
  kind = gguf.GGMLQuantizationType[kind]
  file = GgufFile(gguf_files.write_model(tmp_path / 'model.gguf', architecture, kind))
  hub = gguf_files.tensors_of(architecture)
  assert file.tensors.names() == set(hub)
  for name, tensor in hub.items():
    if '.experts.' in name and tensor.ndim == 2:
      expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
      np.testing.assert_array_equal(file.tensors.read(name, (slice(None), slice(None))), expected)
      np.testing.assert_array_equal(file.tensors.read(name, (slice(2, 9), slice(5, 30))), expected[2:9, 5:30])
  own = load_plain(file).params['layer_0']
  assert own.get('mixture', own['mlp'])['experts']['up']['kernel'].ndim == 3


def load_plain(file):
  return make_model(file.spec, file.tensors)


@pytest.mark.parametrize(
  ('metadata', 'problem'),
  [
    (
      {'gpt-oss.expert_count': 3},
      'it has 4 experts, and the metadata 3',
    ),
    ({'gpt-oss.expert_used_count': 5}, 'num_chosen of experts must be from 1 to 4, got 5'),
    ({'gpt-oss.expert_weights_norm': True}, 'gpt-oss.expert_weights_norm must be False'),
    ({'gpt-oss.expert_group_count': 4}, 'gpt-oss.expert_group_count 4 is not supported'),
  ],
)
def test_gguf_metadata_that_is_refused(metadata, problem, tmp_path):
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'gpt-oss', metadata=metadata)
  with pytest.raises(ValueError, match=problem):
    load_plain(GgufFile(path))


def test_a_scale_of_no_number_in_a_gguf_file_is_refused(tmp_path):
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'gpt-oss', gguf.GGMLQuantizationType.MXFP4)
  reader = gguf.GGUFReader(path, 'r+')
  next(tensor for tensor in reader.tensors if tensor.name == 'blk.1.ffn_up_exps.weight').data[1, 2, 17] = 255
  reader.data.flush()
  with pytest.raises(ValueError, match='a scale of MXFP4 blocks is 255'):
    load_plain(GgufFile(path))


def test_a_mixture_of_another_architecture_is_refused(tmp_path):
  path = gguf_files.write_model(tmp_path / 'model.gguf', 'qwen2', metadata={'qwen2.expert_count': 4})
  with pytest.raises(ValueError, match='a mixture of experts, which qwen2 is not'):
    GgufFile(path)
