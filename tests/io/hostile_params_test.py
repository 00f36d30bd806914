"""Parameters in Orbax's layout, and folders of models, that were made to do harm: each is refused in one line."""

import argparse
import hashlib
import inspect
import json
import os
import pathlib
import shutil

import hostile
import jax
import numpy as np
import pytest
from binary_mutations import SHAPES, write_params

from spectr_jax import Tokenizer, load_model, save_model
from spectr_jax.io.stored_params import StoredParams
from spectr_jax.models import transformer
from spectr_jax.models.transformer import TransformerConfig


def test_params(tmp_path):
  write_params(tmp_path)
  found = StoredParams(tmp_path).read(SHAPES, np.dtype(np.float32))
  assert {name: array.shape for name, array in found.items()} == SHAPES
  np.testing.assert_array_equal(found['embedding'][0], [1, 2, 3, 4])


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'shape': [6, 4], 'chunks': [2**40, 4]}, 'has chunks of shape (1099511627776, 4)'),
    ({'shape': [2**40, 4]}, 'parameter embedding is float32 of shape (1099511627776, 4), expected float32'),
    ({'dtype': '<f8'}, 'is float64 of shape (6, 4)'),
    ({'compressor': {'id': 'blosc'}}, 'is compressed in an unknown way'),
    ({'compressor': None}, 'is compressed in an unknown way'),
  ],
)
def test_descriptions_of_params(changes, problem, tmp_path):
  write_params(tmp_path, **changes)
  assert problem in hostile.refusal(lambda: StoredParams(tmp_path).read(SHAPES, np.dtype(np.float32)), tmp_path)


def test_params_in_too_many_chunks(tmp_path):
  write_params(tmp_path, shape=[2000, 4], chunks=[1, 4])
  shapes = SHAPES | {'embedding': (2000, 4)}
  message = hostile.refusal(lambda: StoredParams(tmp_path).read(shapes, np.dtype(np.float32)), tmp_path)
  assert 'has too many chunks' in message


# Folders that `save_model` wrote.


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  config = TransformerConfig(vocab_size=280, embed_dim=8, num_layers=2, num_heads=2, mlp_dim=8, max_length=16)
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), transformer.param_shapes(config))
  path = tmp_path_factory.mktemp('saved') / 'model'
  save_model(path, transformer.transformer_model(params, config), Tokenizer.train([inspect.getsource(argparse)], 280))
  return path


@pytest.fixture
def folder(saved, tmp_path):
  return pathlib.Path(shutil.copytree(saved, tmp_path / 'model'))


def _describe(folder, change):
  spec = json.loads((folder / 'model.json').read_text())
  change(spec)
  (folder / 'model.json').write_text(json.dumps(spec))


def _rehash(folder):
  files = [folder / 'tokenizer.json', *(path for path in (folder / 'params').rglob('*') if path.is_file())]
  hashes = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
  _describe(folder, lambda spec: spec.update(sha256=hashes))


@pytest.mark.parametrize('kind', ['link to a folder', 'link to a file', 'pipe', 'surplus', 'linked params'])
def test_what_is_not_of_the_model(folder, kind, tmp_path):
  place = folder / 'params' / 'x'
  if kind == 'link to a folder':
    place.symlink_to('/usr/lib')
  elif kind == 'link to a file':
    place.symlink_to('/dev/zero')
  elif kind == 'pipe':
    os.mkfifo(place)
  elif kind == 'surplus':
    place.write_text('x')
  else:
    (folder / 'params').rename(tmp_path / 'elsewhere')
    (folder / 'params').symlink_to(tmp_path / 'elsewhere')
  hostile.refusal(lambda: load_model(folder), folder)


def test_a_large_file_of_params(folder):
  with (folder / 'params' / 'd' / 'x').open('wb') as file:
    file.truncate(2**42)
  _describe(folder, lambda spec: spec['sha256'].update({'params/d/x': '0' * 64}))
  assert 'the most that it may have' in hostile.refusal(lambda: load_model(folder), folder)


@pytest.mark.parametrize('name', ['../../x', '/etc/passwd', 'params/../../x', '', 'params', '\x1b[2J', 'x' * 5000])
def test_names_in_the_description(folder, name):
  _describe(folder, lambda spec: spec['sha256'].update({name: '0' * 64}))
  wanted = 'is missing' if name in ('params', 'x' * 5000) else 'sha256 must be SHA-256 by relative path'
  assert wanted in hostile.refusal(lambda: load_model(folder), folder)


@pytest.mark.parametrize(
  'changes', [{'num_layers': 10**6}, {'num_layers': 1}, {'mlp_dim': 2**30}, {'embed_dim': 2**20}, {'mlp_dim': 16}]
)
def test_sizes_that_the_params_do_not_have(folder, changes):
  _describe(folder, lambda spec: spec['config'].update(changes))
  hostile.refusal(lambda: load_model(folder), folder)


@pytest.mark.slow
def test_damaged_params_with_their_checksums(folder, saved):
  tally = hostile.Tally(folder)
  files = sorted(path.relative_to(saved) for path in (saved / 'params').rglob('*') if path.is_file())
  for rng in hostile.rngs(300):
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)
    name = rng.choice(files)
    (folder / name).write_bytes(hostile.mutated_bytes((saved / name).read_bytes(), rng))
    _rehash(folder)
    tally.read(lambda: load_model(folder), name)
  tally.check(300)
