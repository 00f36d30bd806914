"""The content of models on disk: every byte that is read counts, and nothing else does."""

import json
import shutil

import pytest

from spectr_jax.io import load
from spectr_jax.io.load import files_of, hash_content


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
  monkeypatch.setattr(load, '_PART', part)
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
  path = tmp_path / 'm.gguf'
  path.write_bytes(b'abc')
  before = hash_content(path)
  assert files_of(path) == [path]
  path.rename(tmp_path / 'n.gguf')
  assert hash_content(tmp_path / 'n.gguf') == before
  # The latter is what its hashes say.
  (tmp_path / 'model.json').write_text('{"sha256": {}}')
  before = hash_content(tmp_path)
  (tmp_path / 'model.json').write_text('{"sha256": {"a": "b"}}')
  assert hash_content(tmp_path) != before
