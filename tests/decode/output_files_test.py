"""Outputs of commands: checked at the start, no input among them, written wholly, and after what is printed."""

import os
import pathlib

import pytest

from common.output_files import OutputFiles, check_apart
from decode.experiment.options import DecodeOptions
from decode.experiment.prompt_options import SHIPPED_PROMPTS
from spectr_jax.io import new_files


def test_files_appear_whole_or_not_at_all(tmp_path):
  path = tmp_path / 'results.json'
  path.write_text('old')
  for error in (ValueError, KeyboardInterrupt):
    with pytest.raises(error), OutputFiles(output=path):
      raise error
    assert path.read_text() == 'old'
  with OutputFiles(output=path, generations=None) as files:
    assert path.read_text() == 'old'
    files.write(output='new', generations='not asked for')
  assert path.read_text() == 'new'
  assert os.listdir(tmp_path) == [path.name]
  for path in (tmp_path, tmp_path / 'none' / 'x', '/dev/null', 'gs://nowhere/o.json'):
    with pytest.raises(ValueError, match=f'^output: cannot write {path}: '), OutputFiles(output=path):
      pass


def test_links_are_followed_and_long_names_have_room(tmp_path):
  (tmp_path / 'link').symlink_to(tmp_path / 'real')
  long = tmp_path / ('字' * 80 + '.json')
  with OutputFiles(output=tmp_path / 'link', picture=long) as files:
    files.write(output='new', picture='new')
  assert (tmp_path / 'link').is_symlink()
  assert (tmp_path / 'real').read_text() == long.read_text() == 'new'
  assert sorted(os.listdir(tmp_path)) == sorted(['link', 'real', long.name])


def test_none_is_replaced_unless_all_are_written(tmp_path, monkeypatch):
  paths = {name: tmp_path / name for name in ('output', 'generations')}
  for path in paths.values():
    path.write_text('old')

  def fail(_):
    raise OSError(28, 'No space left on device')

  printed = []
  with OutputFiles(**paths) as files:
    monkeypatch.setattr(new_files.os, 'fsync', fail)
    with pytest.raises(ValueError, match='cannot write .*: No space left on device'):
      files.write_after(lambda: printed.append('table'), output='new', generations='new')
  assert printed == ['table']
  assert {name: path.read_text() for name, path in paths.items()} == dict.fromkeys(paths, 'old')
  assert sorted(os.listdir(tmp_path)) == ['generations', 'output']


def test_what_cannot_be_printed_is_written(tmp_path):
  def show():
    raise BrokenPipeError

  with pytest.raises(BrokenPipeError), OutputFiles(output=tmp_path / 'o') as files:
    files.write_after(show, output='new')
  assert (tmp_path / 'o').read_text() == 'new'


@pytest.mark.parametrize('kind', ['same', 'dots', 'link', 'hard link', 'link to folder'])
def test_an_output_is_no_other_output_and_no_input(tmp_path, kind):
  file, other = tmp_path / 'file', tmp_path / 'other'
  file.write_text('mine')
  if kind == 'same':
    other = file
  elif kind == 'dots':
    other = pathlib.Path(f'{tmp_path}/./x/../file')
    (tmp_path / 'x').mkdir()
  elif kind == 'link':
    other.symlink_to('file')
  elif kind == 'hard link':
    os.link(file, other)
  else:
    other.symlink_to(tmp_path)
    other = other / 'file'
  with pytest.raises(ValueError, match='^output and generations name the same file'):
    check_apart({'output': other, 'picture': None, 'generations': file})
  with pytest.raises(ValueError, match='^output would overwrite .*, which prompts reads'):
    OutputFiles(output=other, generations=tmp_path / 'g').apart_from({'prompts': [file]})
  assert file.read_text() == 'mine'


def test_an_output_is_no_other_output_and_no_input_before_it_exists(tmp_path, pair, tiny_head_file):
  (tmp_path / 'link').symlink_to('new')
  with pytest.raises(ValueError, match='name the same file'):
    check_apart({'output': tmp_path / 'link', 'generations': tmp_path / 'new'})
  with pytest.raises(ValueError, match='output would write .* into .*params, which target reads'):
    check_apart({'output': tmp_path / 'params' / 'd' / 'x'}, {'target': [tmp_path / 'params']})
  check_apart({'output': 'gs://a/b', 'generations': 'gs://a/c'}, {'prompts': ['gs://a/d']})
  with pytest.raises(ValueError, match='name the same file'):
    check_apart({'output': 'gs://a/b', 'generations': 'gs://a/b'})
  (tmp_path / 'a.txt').write_text('a')
  fields = pair | {'draft': f'lookup+{pair["draft"]}', 'method': ('race',), 'lookup_corpus': (f'{tmp_path}/*.txt',)}
  inputs = DecodeOptions.of(**fields, acceptance='rates.json').inputs()
  assert list(inputs) == ['target', 'draft', 'prompts', 'lookup_corpus', 'acceptance']
  assert inputs['prompts'] == [SHIPPED_PROMPTS]
  assert inputs['lookup_corpus'] == [tmp_path / 'a.txt']
  for role, path in pair.items():
    for name in ('config.json', 'tokenizer.json', 'model.safetensors', 'generation_config.json'):
      with pytest.raises(ValueError, match=f'output would .*{role}/.*which {role} reads'):
        check_apart({'output': f'{path}/{name}'}, inputs)
    check_apart({'output': f'{path}/results.json'}, inputs)
  inputs = DecodeOptions.of(target='m.gguf', draft=str(tiny_head_file), prompts='humaneval:h.jsonl').inputs()
  for path in ('m.gguf', 'h.jsonl', f'{tiny_head_file}/model.safetensors'):
    with pytest.raises(ValueError, match='output would overwrite'):
      check_apart({'output': path}, inputs)
