"""Outputs of commands: checked at the start, no input among them, written wholly, and after what is printed."""

import os
import pathlib
import stat

import pytest

from common.output_files import OutputFiles, check_apart
from decode.experiment.options import SHIPPED_PROMPTS, DecodeOptions
from spectr_jax.io import new_files


def _write(path, content='new'):
  with OutputFiles(output=path) as files:
    files.write(output=content)


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


def test_links_are_followed_and_files_of_others_stay(tmp_path):
  (tmp_path / 'link').symlink_to(tmp_path / 'real')
  _write(tmp_path / 'link')
  assert (tmp_path / 'link').is_symlink()
  assert (tmp_path / 'real').read_text() == 'new'
  path, victim = tmp_path / 'o.json', tmp_path / 'victim'
  for name in ('o.json.unfinished', '.o.json.unfinished', 'o.json.lock', 'o.json~'):
    (tmp_path / name).write_text('mine')
  victim.write_text('mine')
  (tmp_path / 'theirs').symlink_to(victim)
  before = {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)}
  _write(path)
  after = {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)}
  assert after == before | {'o.json': 'new'}


@pytest.mark.parametrize('mode', [0o600, 0o444, 0o640])
def test_modes_stay(tmp_path, mode):
  path = tmp_path / 'o.json'
  path.write_text('old')
  path.chmod(mode)
  _write(path)
  assert path.read_text() == 'new'
  assert stat.S_IMODE(path.stat().st_mode) == mode


def test_long_names_have_room(tmp_path):
  path = tmp_path / ('字' * 80 + '.json')
  _write(path)
  assert os.listdir(tmp_path) == [path.name]


def test_a_second_run_is_refused_at_its_start(tmp_path):
  path = tmp_path / 'o.json'
  with OutputFiles(output=path, generations=tmp_path / 'g') as files:
    with pytest.raises(ValueError, match=r'^picture: .*o\.json is being written by another process'):
      OutputFiles(picture=path).__enter__()
    files.write(output='1')
    files.write(output='2')
  assert path.read_text() == '2'
  assert os.listdir(tmp_path) == ['o.json']


def test_none_is_replaced_unless_all_are_written(tmp_path, monkeypatch):
  paths = {name: tmp_path / name for name in ('output', 'generations')}
  for path in paths.values():
    path.write_text('old')

  def fail(file, content):
    raise ValueError(f'cannot write {file.path}: No space left on device')

  printed = []
  with OutputFiles(**paths) as files:
    write = new_files.NewFile.write
    monkeypatch.setattr(
      new_files.NewFile, 'write', lambda file, content: (write if file.path.name == 'output' else fail)(file, content)
    )
    with pytest.raises(ValueError, match='^generations: cannot write .*generations: No space left on device'):
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
  inputs = DecodeOptions(**fields, acceptance='rates.json').inputs()
  assert list(inputs) == ['target', 'draft', 'prompts', 'lookup_corpus', 'acceptance']
  assert inputs['prompts'] == [SHIPPED_PROMPTS]
  assert inputs['lookup_corpus'] == [tmp_path / 'a.txt']
  for role, path in pair.items():
    for name in ('model.json', 'tokenizer.json', 'params/d/1', 'config.json', 'generation_config.json'):
      with pytest.raises(ValueError, match=f'output would .*{role}/.*which {role} reads'):
        check_apart({'output': f'{path}/{name}'}, inputs)
    check_apart({'output': f'{path}/results.json'}, inputs)
  inputs = DecodeOptions(target='m.gguf', draft=str(tiny_head_file), prompts='humaneval:h.jsonl').inputs()
  for path in ('m.gguf', 'h.jsonl', f'{tiny_head_file}/model.safetensors'):
    with pytest.raises(ValueError, match='output would overwrite'):
      check_apart({'output': path}, inputs)
