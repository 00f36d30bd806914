"""Models written as the hub serves them: the tensors, the configuration and the tokenizer that were read."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_hub
from hub_specs import SPECS

from spectr_jax.io.hub.families import read_spec, spec_of_layers
from spectr_jax.io.hub.hub_model import load_hub_model
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer, load_hub_tokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.io.model_files import load_model
from spectr_jax.kernels.int8 import quantized
from spectr_jax.models.causal_lm import causal_lm, config_of


@pytest.fixture(scope='module')
def tokenizer():
  return HubTokenizer.from_parts(
    tiny_hub.backend(), bos_id=7, eos_ids=[41, 200], add_bos=True, chat_template=tiny_hub.CHAT, pad_id=300
  )


@pytest.mark.parametrize(
  'name', [name for name, spec in SPECS.items() if read_spec(spec)[0].is_saved and name != 'gemma4_mixture']
)
def test_tensors_are_those_that_were_read(name, tokenizer, tmp_path):
  spec = SPECS[name]
  model = load_hub_model(tiny_hub.write_model(tmp_path / 'read', spec))
  save_hub_model(tmp_path / 'written', model, tokenizer, spec, info={'a': 1}, param_dtype='float32')
  found = safetensors.numpy.load_file(tmp_path / 'written' / 'model.safetensors')
  wanted = tiny_hub.tensors_of(spec)
  assert found.keys() == wanted.keys()
  for each, array in wanted.items():
    np.testing.assert_array_equal(found[each], array, err_msg=each)
  again, _ = load_model(tmp_path / 'written')
  assert config_of(again) == config_of(model)
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  content = json.loads((tmp_path / 'written' / 'config.json').read_text())
  assert content['info'] == {'a': 1}
  assert len({path.stat().st_mode for path in (tmp_path / 'written').iterdir()}) == 1  # others may read all or none


@pytest.mark.parametrize('add_bos', [True, False])
@pytest.mark.parametrize(
  ('backend', 'parts'),
  [
    (tiny_hub.backend, {'bos_id': 7, 'eos_ids': [41, 200], 'chat_template': tiny_hub.CHAT, 'pad_id': 300}),
    (tiny_hub.backend, {'bos_id': 7, 'eos_ids': [999, 41]}),  # a model may stop at an id that is no token
    (tiny_hub.spaced_backend, {'bos_id': 1, 'eos_ids': [2]}),
    (lambda: tiny_hub.backend(add_bos=True), {'bos_id': 7, 'eos_ids': []}),
  ],
)
def test_a_tokenizer_is_the_same_again(backend, parts, add_bos, tmp_path):
  written = HubTokenizer.from_parts(backend(), add_bos=add_bos, **parts)
  written.save(tmp_path)
  read = load_hub_tokenizer(tmp_path)
  assert read.fingerprint == written.fingerprint
  assert (read.bos_id, read.pad_id, read.add_bos) == (written.bos_id, written.pad_id, written.add_bos)
  assert set(read.eos_ids) == set(written.eos_ids)
  for text in ('the owl', ' naïve 日本\n', '<s>a'):
    assert read.encode(text) == written.encode(text)
    assert read.encode_prompt(text) == written.encode_prompt(text)
    assert read.decode(read.encode(text)) == written.decode(written.encode(text))
  if written.chat_template is not None:
    messages = [{'role': 'user', 'content': 'the <|im_end|> owl'}]
    assert read.encode_chat(messages) == written.encode_chat(messages)


# Gemma 4's layers need each other.
@pytest.mark.parametrize('name', [name for name in SPECS if 'gemma4' not in name and name != 'nemotron_h'])
def test_some_layers_of_a_model(name):
  num_layers = {'n_layer': 6} if name == 'gpt2' else {'num_hidden_layers': 6}
  spec = SPECS[name] | num_layers
  if 'layer_types' in spec:
    spec['layer_types'] = spec['layer_types'] * 3
  config, layers = read_spec(spec)[1], (0, 3, 5)
  fewer = read_spec(spec_of_layers(spec, layers))[1]
  windows = tuple(config.window(layer) for layer in layers) if config.windows else ()
  experts = config.experts
  if experts is not None and experts.layers:
    experts = dataclasses.replace(experts, layers=(False, True, True))
  recurrence = config.recurrence
  if recurrence is not None and not recurrence.has_attention:  # in layers of their own
    recurrence = dataclasses.replace(recurrence, layers=(True, False, False))
  elif recurrence is not None:
    recurrence = dataclasses.replace(recurrence, layers=(True, True, True))
  assert fewer == dataclasses.replace(config, num_layers=3, windows=windows, experts=experts, recurrence=recurrence)
  if name == 'gemma3':
    assert windows == (4, None, None)
    assert read_spec(spec_of_layers(spec, (1, 3)))[1].windows == ()


def test_some_layers_of_nemotron():
  spec = SPECS['nemotron_h'] | {'num_hidden_layers': 6, 'hybrid_override_pattern': 'ME*-ME'}
  few = SPECS['nemotron_h'] | {'num_hidden_layers': 3, 'hybrid_override_pattern': 'M*E'}
  assert read_spec(spec_of_layers(spec, (0, 2, 5)))[1] == read_spec(few)[1] != read_spec(spec)[1]


def test_what_is_refused(tokenizer, tmp_path):
  spec = SPECS['llama']
  model = load_hub_model(tiny_hub.write_model(tmp_path / 'read', spec))

  def save(model, spec=spec, **options):
    save_hub_model(tmp_path / 'written', model, tokenizer, spec, **options)

  with pytest.raises(ValueError, match='a model with weights in int8 or in blocks is not saved'):
    save(causal_lm(quantized(model.params), dataclasses.replace(config_of(model), weights='int8')))
  for changes in ({'rope_theta': 1e4}, {'num_hidden_layers': 3}, {'tie_word_embeddings': True}):
    with pytest.raises(ValueError, match='config.json would describe another model'):
      save(model, spec | changes)
  mixture = SPECS['gemma4_mixture']
  with pytest.raises(ValueError, match='a model of the family gemma4_text is not saved'):
    save(load_hub_model(tiny_hub.write_model(tmp_path / 'mixture', mixture)), mixture)
  copies = dataclasses.replace(config_of(model), kv_copies=2)
  attention = {name: {'kernel': np.repeat(model.params['layer_0']['attention'][name]['kernel'], 2, 1)} for name in 'kv'}
  layers = {
    f'layer_{i}': model.params[f'layer_{i}'] | {'attention': model.params[f'layer_{i}']['attention'] | attention}
    for i in range(2)
  }
  with pytest.raises(ValueError, match='config.json would describe another model'):
    save(causal_lm(model.params | layers, copies))
  with pytest.raises(ValueError, match='param_dtype must be float32 or bfloat16'):
    save(model, param_dtype='int8')
  assert not (tmp_path / 'written').exists()
  save(model)
  before = (tmp_path / 'written' / 'model.safetensors').read_bytes()
  with pytest.raises(ValueError, match='written exists and is not overwritten'):
    save(model)
  save(model, overwrite=True)
  assert (tmp_path / 'written' / 'model.safetensors').read_bytes() == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ['mixture', 'read', 'written']
