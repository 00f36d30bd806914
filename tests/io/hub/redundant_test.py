"""Tensors that say again what others or the configuration say: what they hold counts.

Right values are those of Transformers 5.24.0: of a head and an embedding that differ it keeps both and warns, whatever
`tie_word_embeddings` says; equal ones are tied; and one of them is enough.
"""

import json
import warnings

import hostile
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_hub
from hub_specs import SPECS
from safetensors.numpy import save, save_file
from tiny_hub import random_array, tensors_of, write_model

from spectr_jax.io.hub import tensors
from spectr_jax.io.hub.families import FAMILIES, read_spec
from spectr_jax.io.hub.hub_model import load_hub_model
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.hub.save import save_hub_model
from spectr_jax.io.hub.tensors import SafetensorsFolder
from spectr_jax.io.model_files import open_model
from spectr_jax.models.causal_lm import config_of


def _spec(name, **fields):
  return {**SPECS[name], **fields}


def _tied(name):
  """The `config.json` and the tensors of a tied model, and the names of its embedding and of its head."""
  spec = _spec(name, tie_word_embeddings=True)
  family = FAMILIES[spec['architectures'][0]]
  embedding = f'{family.prefix}{family.modules["embedding"]}.weight'
  return spec, tensors_of(spec), embedding, f'{family.head_names[0]}.weight'


def _load(folder, **options):
  """The parameters, and the one warning or None."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    model = load_hub_model(folder, **options)
  assert len(caught) <= 1
  return model, str(caught[0].message) if caught else None


@pytest.mark.parametrize('name', SPECS)
def test_a_stored_head_counts_where_it_differs(tmp_path, name):
  spec, arrays, embedding, head = _tied(name)
  other = arrays[embedding].copy()
  other[-1, -1] += 1
  folder = write_model(tmp_path, spec, arrays | {head: other})
  model, warning = _load(folder)
  np.testing.assert_array_equal(model.params['unembedding'], other.T)
  np.testing.assert_array_equal(model.params['embedding'], arrays[embedding])
  assert not config_of(model).is_tied
  expected = f'tie_word_embeddings is true, but {head} and {embedding} hold different numbers: {head} is used'
  assert expected in warning
  assert str(folder) in warning
  # Who asks for the configuration learns it as well.
  with pytest.warns(UserWarning, match='hold different numbers'):
    assert not read_spec(open_model(folder).spec)[1].is_tied


@pytest.mark.parametrize('name', SPECS)
def test_an_equal_head_is_tied_and_one_of_both_is_enough(tmp_path, name):
  spec, arrays, embedding, head = _tied(name)
  alone = {other: array for other, array in arrays.items() if other != embedding}
  for found in (arrays, arrays | {head: arrays[embedding]}, alone | {head: arrays[embedding]}):
    model, warning = _load(write_model(tmp_path, spec, found))
    assert warning is None
    assert config_of(model).is_tied
    assert 'unembedding' not in model.params
    np.testing.assert_array_equal(model.params['embedding'], arrays[embedding])


def test_the_head_of_a_file_without_prefixes(tmp_path):
  spec, arrays, embedding, head = _tied('gpt2')
  arrays = {name.removeprefix('transformer.'): array for name, array in arrays.items()}
  model, warning = _load(write_model(tmp_path, spec, arrays | {head: arrays['wte.weight'] * 2}))
  assert 'lm_head.weight and wte.weight hold different numbers' in warning
  np.testing.assert_array_equal(model.params['unembedding'], 2 * arrays['wte.weight'].T)
  del arrays['wte.weight']
  model, warning = _load(write_model(tmp_path, spec, arrays | {head: random_array(32, 16)}))
  assert (warning, config_of(model).is_tied) == (None, True)


def test_a_model_with_a_head_of_its_own_is_written_as_such(tmp_path):
  spec, arrays, embedding, head = _tied('qwen2')
  folder = write_model(tmp_path / 'read', spec, arrays | {head: arrays[embedding] * 2})
  tokenizer = HubTokenizer.from_parts(tiny_hub.backend(), bos_id=7, eos_ids=[2], add_bos=False)
  with pytest.warns(UserWarning, match='hold different numbers'):
    model, spec = load_hub_model(folder), open_model(folder).spec
  save_hub_model(tmp_path / 'written', model, tokenizer, spec, param_dtype='float32')
  written, warning = _load(tmp_path / 'written')
  assert warning is None
  jax.tree.map(np.testing.assert_array_equal, written.params, model.params)


def test_numbers_are_compared_as_the_checkpoint_computes_with_them(tmp_path, monkeypatch):
  monkeypatch.setattr(tensors, '_MOST_AT_ONCE', 40)  # two rows
  spec, arrays, embedding, head = _tied('llama')
  spec['torch_dtype'] = 'bfloat16'
  rounded = arrays[embedding].astype(ml_dtypes.bfloat16)
  model, warning = _load(write_model(tmp_path, spec, arrays | {head: rounded}))
  assert warning is None
  assert config_of(model).is_tied
  spec['torch_dtype'] = 'float32'
  _, warning = _load(write_model(tmp_path, spec, arrays | {head: rounded}), dtype='bfloat16')
  assert 'hold different numbers' in warning
  wrong = np.full_like(arrays[embedding], np.nan)
  _, warning = _load(write_model(tmp_path, spec, arrays | {head: wrong, embedding: wrong}))
  assert 'hold different numbers' in warning  # as torch.equal says


def test_a_head_of_another_shape_is_refused(tmp_path):
  spec, arrays, _, head = _tied('llama')
  folder = write_model(tmp_path, spec, arrays | {head: random_array(31, 16)})
  message = r'lm_head.weight must have shape \(32, 16\), got \(31, 16\)'
  with pytest.warns(UserWarning, match='different numbers'), pytest.raises(ValueError, match=message):
    load_hub_model(folder)


def test_two_heads_of_gpt_neox(tmp_path):
  arrays = tensors_of(SPECS['gpt_neox'])
  head = arrays['embed_out.weight']
  model, _ = _load(write_model(tmp_path, SPECS['gpt_neox'], arrays | {'lm_head.weight': head}))
  np.testing.assert_array_equal(model.params['unembedding'], head.T)
  folder = write_model(tmp_path, SPECS['gpt_neox'], arrays | {'lm_head.weight': head + 1})
  with pytest.raises(ValueError, match=r'embed_out\.weight and lm_head\.weight hold different numbers, and each is'):
    load_hub_model(folder)


@pytest.mark.parametrize(('name', 'prefix'), [('llama', 'model.'), ('gpt2', 'transformer.'), ('gpt_neox', 'gpt_neox.')])
def test_names_with_and_without_the_prefix_are_refused(tmp_path, name, prefix):
  arrays = tensors_of(SPECS[name])
  first = min(other for other in arrays if other.startswith(prefix))
  folder = write_model(tmp_path, SPECS[name], arrays | {first.removeprefix(prefix): arrays[first]})
  with pytest.raises(ValueError, match='1 tensors too many, the first of them ' + first.removeprefix(prefix)):
    load_hub_model(folder)


# Buffers.


def _rotary(base, width, dtype=np.float32):
  return (base ** -(np.arange(0, width, 2) / width)).astype(dtype)


_NEOX_ROPE = 'gpt_neox.layers.1.attention.rotary_emb.inv_freq'
_LLAMA_ROPE = 'model.layers.0.self_attn.rotary_emb.inv_freq'
_TRIL = np.tri(32, dtype=bool)[None, None]


@pytest.mark.parametrize(
  ('name', 'fields', 'tensor', 'right', 'wrong'),
  [
    ('llama', {}, _LLAMA_ROPE, _rotary(5e5, 4), _rotary(1e4, 4)),
    ('llama', {}, _LLAMA_ROPE, _rotary(5e5, 4, np.float16), _rotary(5e5, 4)[:1]),
    ('llama', {}, _LLAMA_ROPE, _rotary(5e5, 4, ml_dtypes.bfloat16).astype(np.float16), _rotary(5.2e5, 4)),
    ('llama', {}, 'model.rotary_emb.inv_freq', _rotary(5e5, 4), _rotary(5e5, 4)[None]),
    # Transformers 4.31 and before divided positions in place of these.
    ('llama', {'rope_scaling': {'type': 'linear', 'factor': 4.0}}, _LLAMA_ROPE, _rotary(5e5, 4), _rotary(5e5, 4) / 2),
    ('gpt_neox', {}, _NEOX_ROPE, _rotary(1e4, 2), _rotary(1e4, 2) * 2),
    ('gpt_neox', {}, 'gpt_neox.layers.0.attention.bias', _TRIL, np.ones_like(_TRIL)),
    ('gpt_neox', {}, 'gpt_neox.layers.0.attention.bias', _TRIL.astype(np.uint8), _TRIL.astype(np.uint8)[..., :31]),
    ('gpt_neox', {}, 'gpt_neox.layers.0.attention.masked_bias', np.float32(-1e9), np.float32(0)),
    ('gpt_neox', {}, 'gpt_neox.layers.0.attention.masked_bias', np.float16(-np.inf), np.zeros(2, np.float32)),
    ('gpt2', {}, 'transformer.h.0.attn.bias', _TRIL.astype(np.float32), _TRIL & ~np.tri(32, k=-8, dtype=bool)),
    ('gpt2', {}, 'transformer.h.1.attn.masked_bias', np.float32(-1e4), np.float32(np.nan)),
  ],
)
def test_buffers_hold_what_the_configuration_says(tmp_path, monkeypatch, name, fields, tensor, right, wrong):
  monkeypatch.setattr(tensors, '_MOST_AT_ONCE', 100)  # three rows of a mask
  spec = _spec(name, **fields)
  arrays = tensors_of(spec)
  model, _ = _load(write_model(tmp_path, spec, arrays | {tensor: np.asarray(right)}))
  expected, _ = _load(write_model(tmp_path, spec, arrays))
  jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
  folder = write_model(tmp_path, spec, arrays | {tensor: np.asarray(wrong)})
  message = f'config.json: tensor {tensor} (holds other|holds another|must be one)'
  hostile.refusal(lambda: load_hub_model(folder), folder, message)


# Several files.


def _shards(folder, first, second, weight_map):
  folder.mkdir(exist_ok=True)
  for name, arrays in (('a', first), ('b', second)):
    save_file(arrays, folder / f'{name}.safetensors')
  index = weight_map if isinstance(weight_map, str) else json.dumps({'weight_map': weight_map})
  (folder / 'model.safetensors.index.json').write_text(index)
  return folder


def test_a_name_in_two_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(tensors, '_MOST_AT_ONCE', 8)
  x, y = random_array(5, 4), random_array(7)
  changed = x.copy()
  changed[4, 3] += 1
  weight_map = {'x': 'a.safetensors', 'y': 'b.safetensors'}
  found = SafetensorsFolder(_shards(tmp_path, {'x': x}, {'x': x.copy(), 'y': y}, weight_map))
  np.testing.assert_array_equal(found.read('x', (slice(5), slice(4))), x)
  for other in (changed, x[:4].copy(), x.astype(np.float16)):
    with pytest.raises(ValueError, match='a.safetensors and .*b.safetensors hold different numbers as tensor x$'):
      SafetensorsFolder(_shards(tmp_path, {'x': x}, {'x': other, 'y': y}, weight_map))
  twice = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "x": "b.safetensors"}}'
  with pytest.raises(ValueError, match="index.json is damaged: 'x' is there twice"):
    SafetensorsFolder(_shards(tmp_path, {'x': x}, {'x': x, 'y': y}, twice))


def test_what_an_index_leaves_out_and_one_file_beside_it(tmp_path):
  """As Transformers reads them: all tensors of the files, and the one file before the index."""
  x, y = random_array(5, 4), random_array(7)
  folder = _shards(tmp_path, {'x': x}, {'y': y}, {'x': 'a.safetensors', 'y': 'b.safetensors'})
  save_file({'x': x, 'head': y}, folder / 'a.safetensors')
  assert SafetensorsFolder(folder).names() == {'x', 'y', 'head'}
  save_file({'x': x + 1}, folder / 'model.safetensors')
  found = SafetensorsFolder(folder)
  assert found.names() == {'x'}
  np.testing.assert_array_equal(found.read('x', (slice(5), slice(4))), x + 1)


def test_a_name_twice_in_one_file(tmp_path):
  content = save({'a': random_array(2), 'b': random_array(2)})
  (tmp_path / 'model.safetensors').write_bytes(content.replace(b'"b"', b'"a"'))
  with pytest.raises(ValueError, match='model.safetensors is damaged'):
    SafetensorsFolder(tmp_path)
