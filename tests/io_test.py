"""Models and tokenizers on disk: what is saved comes back, and what is damaged is refused."""

import argparse
import inspect
import itertools
import json
import os
import re
import shutil

import hostile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hub
import tokenizers
from hub_specs import SPECS

from spectr_jax import Tokenizer, load_model, save_model
from spectr_jax.io import model_files
from spectr_jax.io.model_files import files_of, hash_content
from spectr_jax.models import causal_lm, table, transformer
from spectr_jax.models.causal_lm import lm1b_config

SMALLEST = 259  # 3 special and 256 byte tokens


@pytest.fixture(scope='module')
def tokenizer():
  return Tokenizer.train([inspect.getsource(argparse)], 400)


@pytest.fixture(scope='module')
def model():
  config = lm1b_config(vocab_size=400, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=32, context_length=32)
  params = transformer.init_params(jax.random.key(0), config)
  return causal_lm.causal_lm(params, config)


@pytest.fixture(scope='module')
def saved(model, tokenizer, tmp_path_factory):
  """A saved model; read only."""
  path = tmp_path_factory.mktemp('saved') / 'model'
  save_model(path, model, tokenizer, info={'text': 'argparse'})
  return path


@pytest.fixture
def copy(saved, tmp_path):
  """A copy of `saved` to damage."""
  return shutil.copytree(saved, tmp_path / 'model')


def _logits(model):
  tokens = jnp.arange(12).reshape(2, 6)
  positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
  apply = jax.jit(
    lambda model: model.apply(tokens, positions, jnp.tril(jnp.ones((6, 6), bool)), model.init_cache_fn(2, 6))
  )
  return apply(model).logits


def _rounded(model):
  """The model with parameters as they are stored, in bfloat16."""
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
  return causal_lm.causal_lm(params, causal_lm.config_of(model))


def _edit_description(path, **changes):
  spec = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps({**spec, **changes}))


# Models.


def test_round_trip(model, tokenizer, saved):
  loaded, loaded_tokenizer = load_model(saved)
  assert causal_lm.config_of(loaded) == causal_lm.config_of(model)
  assert loaded_tokenizer.fingerprint == tokenizer.fingerprint
  jax.tree.map(np.testing.assert_array_equal, loaded.params, _rounded(model).params)
  np.testing.assert_array_equal(_logits(loaded), _logits(_rounded(model)))
  assert np.abs(_logits(loaded) - _logits(model)).max() > 0  # rounding did happen
  text = 'def parse(self): return 1\n'
  assert loaded_tokenizer.encode(text) == tokenizer.encode(text)
  spec = json.loads((saved / 'config.json').read_text())
  assert spec['info'] == {'text': 'argparse'}
  assert [p.name for p in saved.parent.iterdir()] == ['model']  # nothing unfinished stays


def test_types_to_compute_in_and_of_weights(saved, tmp_path):
  loaded, _ = load_model(saved, dtype='bfloat16')
  assert loaded.params['embedding'].dtype == jnp.bfloat16
  assert causal_lm.config_of(loaded).dtype == 'bfloat16'
  with pytest.raises(ValueError, match='dtype must be'):
    load_model(saved, dtype='int8')
  model, tokenizer = load_model(saved, weights='int8')
  embedding = model.params['embedding']
  assert embedding.values.dtype == jnp.int8
  wide = load_model(saved)[0].params['embedding']
  assert np.abs(embedding.dequantized('float32') - wide).max() <= 0.51 * embedding.scale.max()
  with pytest.raises(ValueError, match='a model with weights in int8 or in blocks is not saved'):
    save_model(tmp_path / 'model', model, tokenizer)
  with pytest.raises(ValueError, match="^weights must be int8, blocks, or None for .*; got 'int4'$"):
    load_model(saved, weights='int4')


def test_no_model_there(tmp_path):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'file').write_text('text')
  for name in ('nothing', 'empty', 'file'):
    with pytest.raises(ValueError, match=f'no model at .*{name}: expected a directory'):
      load_model(tmp_path / name)


@pytest.mark.parametrize('has_config', [False, True])
def test_a_folder_of_gguf_files_says_which_to_name(tmp_path, has_config):
  if has_config:
    tiny_hub.write(tmp_path)
    (tmp_path / 'config.json').write_text(json.dumps(SPECS['llama']))
  (tmp_path / 'notes.txt').write_text('')
  with pytest.raises(ValueError, match='no weights in' if has_config else 'no model at') as caught:
    load_model(tmp_path)
  assert '.gguf file in it' not in str(caught.value)
  for name in 'dcba':
    (tmp_path / f'{name}.gguf').touch()
  with pytest.raises(ValueError, match='give the name of the .gguf file in it') as caught:
    load_model(tmp_path)
  message = str(caught.value)
  assert [message.count(f'{name}.gguf') for name in 'abcd'] == [1, 1, 1, 0]
  assert re.search(r"c\.gguf'? or 1 more; ", message)


@pytest.mark.parametrize('piece', ['model.safetensors', 'tokenizer.json'])
@pytest.mark.parametrize('damage', ['flip', 'truncate', 'empty', 'remove'])
def test_damaged_file(copy, piece, damage):
  file = max((path for path in (copy / piece, *(copy / piece).rglob('*')) if path.is_file()), key=os.path.getsize)
  if damage == 'flip':
    data = bytearray(file.read_bytes())
    data[1000 % len(data)] ^= 1
    file.write_bytes(data)
  elif damage == 'truncate':
    file.write_bytes(file.read_bytes()[:-1])
  elif damage == 'empty':
    file.write_bytes(b'')
  else:
    file.unlink()
  with pytest.raises(
    ValueError, match=f'expected .*{file.stem}|no tokenizer at' if damage == 'remove' else f'{file.name} is damaged'
  ):
    load_model(copy)


def test_missing_params_and_damaged_descriptions(copy):
  for content in (b'', b'{', b'[]', b'null', b'{"format": 1}', b'\0\1', b'"text"', b'7', b'\xff\xfe'):
    (copy / 'config.json').write_bytes(content)
    hostile.refusal(lambda: load_model(copy), 'config.json')


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'architectures': ['other']}, 'architecture other is unknown'),
    ({'sha256': [1]}, 'config.json: sha256 must be'),
    ({'num_hidden_layers': 2}, 'the checkpoint lacks 8 tensors'),
    ({'num_hidden_layers': 10**6}, 'num_hidden_layers must be a whole number'),
    ({'intermediate_size': 64}, 'must have shape (16, 64), got (16, 32)'),
    ({'num_attention_heads': 3}, 'embed_dim 16 must be an even multiple of num_heads 3'),
  ],
)
def test_wrong_description(copy, changes, message):
  _edit_description(copy, **changes)
  assert message in hostile.refusal(lambda: load_model(copy), copy)


def test_models_of_older_versions_are_refused_with_what_converts_them(tmp_path):
  (tmp_path / 'model.json').write_text('{}')
  with pytest.raises(ValueError, match='convert it by python -m train.convert'):
    load_model(tmp_path)


def test_tokenizer_of_another_model(copy):
  Tokenizer.train([inspect.getsource(inspect)], 400).save(copy / 'tokenizer.json')
  with pytest.raises(ValueError, match='tokenizer.json is damaged or of another model'):
    load_model(copy)


def test_what_is_there_is_not_overwritten(copy, model, tokenizer):
  before = (copy / 'config.json').read_bytes()
  with pytest.raises(ValueError, match='exists and is not overwritten'):
    save_model(copy, model, tokenizer)
  assert (copy / 'config.json').read_bytes() == before
  doubled = jax.tree.map(lambda x: 2 * x, model)
  save_model(copy, doubled, tokenizer, overwrite=True)
  loaded, _ = load_model(copy)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, _rounded(doubled).params)


def test_failed_saves_change_nothing(model, tokenizer, tmp_path):
  with pytest.raises(ValueError, match='the tokenizer has 300 tokens, the model 400'):
    save_model(tmp_path / 'model', model, Tokenizer.train([inspect.getsource(argparse)], 300))
  for param_dtype in ('int8', 'none'):
    with pytest.raises(ValueError, match=f"param_dtype must be float32 or bfloat16, got '{param_dtype}'"):
      save_model(tmp_path / 'model', model, tokenizer, param_dtype=param_dtype)
  with pytest.raises(ValueError, match='not a model made by causal_lm'):
    save_model(tmp_path / 'model', table.table_model(jnp.zeros((400, 400))), tokenizer)
  assert not list(tmp_path.iterdir())
  # What a save that was killed left behind does not matter either.
  leavings = tmp_path / '.model.0123456789abcdef.unfinished' / 'params'
  leavings.mkdir(parents=True)
  (leavings / 'piece').write_text('half')
  with pytest.raises(ValueError, match='no model at'):
    load_model(tmp_path / 'model')
  save_model(tmp_path / 'model', model, tokenizer)
  assert load_model(tmp_path / 'model')[0].vocab_size == 400
  # It may be a file of somebody else, or of a save that goes on.
  assert sorted(p.name for p in tmp_path.iterdir()) == ['.model.0123456789abcdef.unfinished', 'model']


# Tokenizers.


def _texts():
  rng = np.random.default_rng(0)
  characters = np.concatenate([np.arange(0xD800), np.arange(0xE000, 0x110000)])  # all but surrogates
  yield from (''.join(map(chr, rng.choice(characters, size))) for size in (1, 2, 50, 2000))
  yield ''.join(map(chr, range(0x250)))
  yield from ('', ' ', '  \n\t\r\n ', 'a', 'a  b   c\n\n\nd', '\x00\x7f\u2028\ufeff\ufffd', 'naïve café e\u0301')
  yield from ('日本語 العربية हिन्दी 🙂👩‍👩‍👧 \U0010ffff', '12345 3.14', "don't; x==y", '▁ Ġ ##a')
  yield from ('<pad><bos><eos>', 'a <eos> b', '<0x41><0xFF>', '</s> [CLS] <unk>')


@pytest.mark.parametrize('text', list(_texts()), ids=itertools.count())
def test_every_text_comes_back(tokenizer, text):
  ids = tokenizer.encode(text)
  assert all(SMALLEST > i > 2 or SMALLEST <= i < 400 for i in ids)
  assert tokenizer.decode(ids) == text
  assert tokenizer.encode_batch([text, 'other'])[0] == ids


def test_special_names_are_text_and_unseen_characters_bytes(tokenizer):
  ids = tokenizer.encode('<bos>x<eos><pad>')
  assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)
  ids = tokenizer.encode('x', add_bos=True)
  assert ids[0] == tokenizer.bos_id == 1
  assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == 'x'
  ids = tokenizer.encode('語')
  assert ids == [3 + byte for byte in '語'.encode()]
  assert tokenizer.decode(ids[:2]) == '\ufffd' * len(tokenizer.decode(ids[:2]))  # incomplete: replaced, not lost


def test_tokenizer_round_trip(tokenizer, tmp_path):
  tokenizer.save(tmp_path / 'tokenizer.json')
  loaded = Tokenizer.load(tmp_path / 'tokenizer.json')
  assert (loaded.fingerprint, loaded.vocab_size) == (tokenizer.fingerprint, 400)
  assert all(loaded.encode(text) == tokenizer.encode(text) for text in _texts())


def test_fingerprint_names_the_vocabulary(tokenizer):
  source = inspect.getsource(argparse)
  assert len(tokenizer.encode(source[:5000])) < 3500
  assert Tokenizer.train([source], 400).fingerprint == tokenizer.fingerprint  # training is deterministic
  assert Tokenizer.train([source], 401).fingerprint != tokenizer.fingerprint
  assert Tokenizer.train([source[: len(source) // 2]], 400).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
  ('vocab_size', 'message'),
  [
    *((size, f'vocab_size must be above {SMALLEST}') for size in (0, SMALLEST)),
    (1000, 'the text yields only'),
    (10**9, 'vocab_size must be at most 1048576'),
  ],
)
def test_vocabularies_that_cannot_be_trained(vocab_size, message):
  with pytest.raises(ValueError, match=message):
    Tokenizer.train(['few words'], vocab_size)


def test_what_is_no_tokenizer_of_this_project_is_refused(tmp_path):
  path = tmp_path / 'tokenizer.json'
  hostile.refusal(lambda: Tokenizer.load(path), path, 'no tokenizer at')
  path.write_text('{"version": "1.0"')
  hostile.refusal(lambda: Tokenizer.load(path), path, 'tokenizer.json is damaged')
  tokenizers.Tokenizer(tokenizers.models.BPE({'a': 0}, [])).save(str(path))
  hostile.refusal(lambda: Tokenizer.load(path), path, 'not a tokenizer of this project')


# The content of models on disk: every byte that is read counts, and nothing else does.


@pytest.fixture
def folder(tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  (folder / 'config.json').write_text('{}')
  (folder / 'tokenizer.json').write_text('{"a": 1}')
  (folder / 'model.safetensors').write_bytes(bytes(range(256)) * 10)
  return folder


@pytest.mark.parametrize('part', [2**26, 1000, 1])
def test_every_byte_counts_whatever_its_part(folder, monkeypatch, part):
  monkeypatch.setattr(model_files, '_PART', part)
  before = hash_content(folder)
  assert len(before) == 16
  path = folder / 'model.safetensors'
  whole = path.read_bytes()
  for place in (0, 999, 1000, len(whole) - 1):
    changed = bytearray(whole)
    changed[place] ^= 1
    path.write_bytes(changed)
    assert hash_content(folder) != before
  for changed in (whole[:-1], whole + b'\0', whole[1000:2000] + whole[:1000] + whole[2000:], b''):
    path.write_bytes(changed)
    assert hash_content(folder) != before
  path.write_bytes(whole)
  assert hash_content(folder) == before


def test_every_file_that_is_read_counts_and_no_other(folder, tmp_path):
  before = hash_content(folder)
  (folder / 'README.md').write_text('x')
  (folder / 'results.json').write_text('x')
  (folder / 'onnx').mkdir()
  (folder / 'onnx' / 'config.json').write_text('x')
  assert hash_content(folder) == before
  for name in ('generation_config.json', 'tokenizer_config.json', 'special_tokens_map.json', 'chat_template.jinja'):
    (folder / name).write_text('{}')
    assert hash_content(folder) != before
    (folder / name).unlink()
  shutil.move(folder, tmp_path / 'moved')
  assert hash_content(tmp_path / 'moved') == before


def test_shards_count_with_their_names(folder):
  (folder / 'model.safetensors').rename(folder / 'b.safetensors')
  (folder / 'a.safetensors').write_text('a')
  weights = {'weight_map': {'x': 'a.safetensors', 'y': 'b.safetensors'}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(weights))
  assert {folder / 'a.safetensors', folder / 'b.safetensors'} <= set(files_of(folder))
  before = hash_content(folder)
  (folder / 'a.safetensors').rename(folder / 'c')
  (folder / 'b.safetensors').rename(folder / 'a.safetensors')
  (folder / 'c').rename(folder / 'b.safetensors')
  assert hash_content(folder) != before
  for damaged in ('[]', '{"weight_map": [1]}', '{"weight_map": {"x": 1}}', '['):
    (folder / 'model.safetensors.index.json').write_text(damaged)
    with pytest.raises(ValueError, match=r'model\.safetensors\.index\.json'):
      files_of(folder)


def test_one_file_and_a_folder_of_ours(tmp_path):
  for nothing in (tmp_path, tmp_path / 'm.gguf'):
    with pytest.raises(ValueError, match=f'^no model at {nothing}: none of the files'):
      hash_content(nothing)
  path = tmp_path / 'm.gguf'
  path.write_bytes(b'abc')
  before = hash_content(path)
  assert files_of(path) == [path]
  path.rename(tmp_path / 'n.gguf')
  assert hash_content(tmp_path / 'n.gguf') == before
  # The latter is what its hashes say.
  (tmp_path / 'config.json').write_text('{"sha256": {}}')
  before = hash_content(tmp_path)
  (tmp_path / 'config.json').write_text('{"sha256": {"a": "b"}}')
  assert hash_content(tmp_path) != before
