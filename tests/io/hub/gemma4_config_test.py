"""Configurations of Gemma 4 and of multimodal folders: what a file does not say, and what is refused by name."""

import json
import types

import hostile
import numpy as np
import pytest
from hub_specs import SPECS
from tiny_hub import tensors_of, write, write_model

from spectr_jax import load_model
from spectr_jax.io.heads.head_sizes import block_config
from spectr_jax.io.hub.families import read_spec
from spectr_jax.io.hub.hub_model import load_hub_model, read_hub_config

_SPEC = SPECS['gemma4']
_MIXTURE = {'enable_moe_block': True, 'num_experts': 5, 'top_k_experts': 2, 'moe_intermediate_size': 12}
_WHERE = 'there/config.json'
_BARE = {
  'architectures': ['Gemma4ForCausalLM'], 'vocab_size': 262_144, 'hidden_size': 128, 'intermediate_size': 24,
  'num_hidden_layers': 7, 'num_attention_heads': 8, 'max_position_embeddings': 8192,
}  # fmt: skip


def test_fields_that_are_not_there():
  """As the configuration classes of Transformers 5.19 have them."""
  config = read_spec(_BARE)[1]
  assert config.windows == (512,) * 5 + (None, None)  # the last layer has none in any case
  assert (config.num_kv_heads, config.head_dim, config.full_kv_heads, config.full_head_dim) == (4, 256, 4, 512)
  assert (config.layer_input_dim, config.layer_vocab_size, config.num_shared_layers) == (256, 262_144, 0)
  assert (config.logit_soft_cap, config.query_scale, config.gain_offset, config.is_tied) == (None, 1, 0, True)
  assert len(config.rope.frequencies) == 256
  assert config.rope.frequencies[63] == pytest.approx(1e6 ** (-126 / 512))
  assert config.rope.frequencies[64] == 0
  assert config.window_rope.frequencies[1] == pytest.approx(1e4 ** (-2 / 256))
  assert read_spec(_BARE | {'hidden_size_per_layer_input': None})[1].layer_input_dim == 0
  unified = read_spec(_BARE | {'architectures': ['Gemma4UnifiedForCausalLM'], 'model_type': 'gemma4_unified_text'})[1]
  assert (unified.layer_input_dim, unified.window(0)) == (0, 1024)


def test_sizes_by_layer_are_those_of_older_files():
  """Newer files name them layer by layer; keys are shared with values only where a file says so."""
  spec = {name: value for name, value in SPECS['gemma4_keys'].items() if 'global' not in name}
  by_layer = {'1': {'head_dim': 8, 'num_key_value_heads': 1}, '3': {'head_dim': 8, 'num_key_value_heads': 1}}
  assert read_spec(spec | {'per_layer_config': by_layer}) == read_spec(SPECS['gemma4_keys'])
  assert read_spec(_SPEC | {'num_global_key_value_heads': 1})[1].full_kv_heads == 2


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'num_kv_shared_layers': 4}, 'num_kv_shared_layers 4 must be below num_hidden_layers 4'),
    ({'num_kv_shared_layers': 3}, 'the last 3 layers share keys and values, but none before is of their kind'),
    ({'num_kv_shared_layers': -1}, 'num_kv_shared_layers must be a whole number from 0 to 10000'),
    ({'num_kv_shared_layers': 10**9}, 'num_kv_shared_layers must be a whole number'),
    ({'sliding_window': -4}, 'sliding_window must be a whole number from 1 to'),
    ({'sliding_window': None}, 'there is no sliding_window'),
    ({'global_head_dim': 10**9}, 'global_head_dim must be a whole number from 1 to 16384'),
    ({'global_head_dim': 7}, 'rotary frequencies need heads of twice that; got 7'),
    ({'hidden_size_per_layer_input': 10**9}, 'hidden_size_per_layer_input must be a whole number'),
    ({'vocab_size_per_layer_input': 31}, 'layer_vocab_size 31 must be at least vocab_size 32'),
    ({'enable_moe_block': True}, 'the configuration of Gemma4ForCausalLM has no num_experts'),
    ({'num_experts': 128}, 'num_experts 128 is not supported without enable_moe_block'),
    (_MIXTURE | {'num_experts': 4097}, 'num_experts must be a whole number from 0 to 4096'),
    (_MIXTURE | {'num_experts': 0}, 'num of experts must be from 1 to 4096, got 0'),
    (_MIXTURE | {'top_k_experts': 6}, 'num_chosen of experts must be from 1 to 5, got 6'),
    (_MIXTURE | {'top_k_experts': 10**9}, 'top_k_experts must be a whole number'),
    (_MIXTURE | {'moe_intermediate_size': 10**9}, 'moe_intermediate_size must be a whole number'),
    (_MIXTURE | {'enable_moe_block': 'yes'}, 'enable_moe_block must be'),
    (_MIXTURE | {'num_local_experts': 5}, 'num_local_experts 5 is not supported'),
    ({'use_bidirectional_attention': 'all'}, "use_bidirectional_attention 'all' is not supported"),
    ({'layer_types': ['chunked_attention'] * 4}, "layer_types: 'chunked_attention' is not supported"),
    ({'layer_types': ['full_attention'] * 5}, 'layer_types names 5 layers, but there are 4'),
    ({'rope_parameters': {'full_attention': {'rope_theta': 1e4}}}, 'rope_parameters has no sliding_attention'),
    ({'rope_parameters': {'full_attention': {}, 'sliding_attention': {}}}, 'has no rope_theta'),
    ({'per_layer_config': {'1': {'head_dim': 0}}}, 'per_layer_config must be an object'),
    ({'per_layer_config': {'9': {'head_dim': 8}}}, "per_layer_config: '9' is not supported"),
    ({'per_layer_config': {'1': {'hidden_size': 8}}}, "per_layer_config: 'hidden_size' is not supported"),
    ({'per_layer_config': {'0': {'head_dim': 8}}}, 'other sizes for layer 0 than for others of sliding_attention'),
    ({'per_layer_config': {'1': {'head_dim': 8}}}, 'other sizes for layer 3 than for others of full_attention'),
    ({'num_attention_heads': 3}, 'num_heads 3 must be a multiple of the 2 heads'),
  ],
)
def test_what_is_refused(fields, message):
  hostile.refusal(lambda: read_spec(_SPEC | fields, _WHERE), _WHERE, f'^there/.*{message}')


@pytest.mark.parametrize(('field', 'value'), [('num_kv_shared_layers', 2), ('attention_k_eq_v', True)])
def test_other_families_refuse_its_fields(field, value):
  hostile.refusal(lambda: read_spec(SPECS['llama'] | {field: value}, _WHERE), _WHERE, f'{field} .* is not supported')


@pytest.mark.parametrize(
  'fields',
  [
    {'num_hidden_layers': 10_000, 'layer_types': None, 'num_kv_shared_layers': 9_000},
    {'hidden_size_per_layer_input': 2**22, 'vocab_size_per_layer_input': 2**22},
    {'global_head_dim': 2**14},
    _MIXTURE | {'num_experts': 4096},
    _MIXTURE | {'moe_intermediate_size': 2**20},
  ],
)
def test_sizes_are_those_of_the_tensors(tmp_path, fields):
  write_model(tmp_path, _SPEC)
  (tmp_path / 'config.json').write_text(json.dumps(_SPEC | fields))
  message = hostile.refusal(lambda: load_hub_model(tmp_path), tmp_path)
  assert 'checkpoint' in message or 'must have shape' in message or 'must be a whole number' in message


def test_no_head_is_trained_for_layers_that_differ():
  sizes = types.SimpleNamespace(vocab_size=32, mlp_dim=0, dtype='float32')
  with pytest.raises(ValueError, match='those of this one .Gemma 4. differ from each other'):
    block_config(sizes, read_spec(SPECS['gemma4_keys'])[1], num_layers=1)


# Multimodal folders.

_CLASS = 'Gemma4ForConditionalGeneration'


def _whole(folder, change=lambda spec, tensors: None, **fields):
  """A folder with the text model of `_SPEC` and a tower beside it."""
  text = {name: value for name, value in _SPEC.items() if name != 'architectures'} | {'model_type': 'gemma4_text'}
  spec = {'architectures': [_CLASS], 'model_type': 'gemma4', 'text_config': text, 'vision_config': {}, **fields}
  tensors = {f'model.language_model.{name.removeprefix("model.")}': x for name, x in tensors_of(_SPEC).items()}
  tensors |= {'model.vision_tower.kernel': np.ones((2, 2), np.float32), 'model.embed_vision.kernel': np.ones(3)}
  change(spec, tensors)
  return write_model(folder, spec, tensors)


def test_the_text_model_is_that_of_a_folder_of_its_own(tmp_path):
  with pytest.warns(UserWarning, match='alone is read; left out are model.embed_vision, model.vision_tower'):
    whole = load_hub_model(_whole(tmp_path / 'whole'))
  alone = load_hub_model(write_model(tmp_path / 'alone', _SPEC))
  assert read_hub_config(tmp_path / 'whole') == read_hub_config(tmp_path / 'alone')
  np.testing.assert_array_equal(whole.params['per_layer']['embedding'], alone.params['per_layer']['embedding'])
  assert whole.apply_fn == alone.apply_fn


def test_names_of_older_files(tmp_path):
  def rename(spec, tensors):
    for name in list(tensors):
      tensors[name.replace('model.language_model.', 'language_model.model.')] = tensors.pop(name)

  with pytest.warns(UserWarning, match='left out'):
    assert load_hub_model(_whole(tmp_path, rename)).vocab_size == 32


def test_texts_end_as_the_text_model_says(tmp_path):
  with pytest.warns(UserWarning, match='left out'):
    _, tokenizer = load_model(
      write(_whole(tmp_path, lambda spec, tensors: spec['text_config'].update(eos_token_id=[3, 5], vocab_size=32)))
    )
  assert tokenizer.eos_ids == (3, 5)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'text_config': None}, f'{_CLASS} has no text_config'),
    ({'text_config': 3}, 'text_config must be an object'),
    ({'text_config': {'model_type': 'bamba'}}, 'text_config has model_type bamba; known are llama, '),
    ({'model_type': 'gemma3'}, f'model_type gemma3 is not gemma4, that of {_CLASS}'),
    ({'architectures': [_CLASS, 3]}, 'architectures must be a list'),
    ({'quantization_config': {'quant_method': 'gptq'}}, 'quantized by gptq are not read'),
  ],
)
def test_whole_models_that_are_refused(tmp_path, fields, message):
  hostile.refusal(lambda: load_hub_model(_whole(tmp_path, **fields)), tmp_path, message)


def test_what_the_text_model_needs_is_there(tmp_path):
  def lose(spec, tensors):
    del tensors['model.language_model.layers.1.self_attn.k_norm.weight']

  with pytest.warns(UserWarning, match='left out'):
    hostile.refusal(
      lambda: load_hub_model(_whole(tmp_path / 'a', lose)), tmp_path, 'lacks 1 .* model.layers.1.self_attn'
    )

  def repeat(spec, tensors):
    tensors['language_model.model.norm.weight'] = tensors['model.language_model.norm.weight']

  hostile.refusal(lambda: load_hub_model(_whole(tmp_path / 'b', repeat)), tmp_path, 'are the same of the text model')


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:.*the text model alone is read')
def test_mutated_configurations(tmp_path):
  tally, folder = hostile.Tally(tmp_path), _whole(tmp_path)
  spec = json.loads((folder / 'config.json').read_text())
  spec['text_config']['per_layer_config'] = {i: {'head_dim': 8, 'num_key_value_heads': 2} for i in '13'}
  for rng in hostile.rngs(300, 'multimodal'):
    content = hostile.mutated_json_text(spec, rng)
    (folder / 'config.json').write_bytes(content)
    tally.read(lambda: load_hub_model(folder), content)
  tally.check(300)
