"""Bounded reads and checked JSON of files that somebody else wrote."""

import bz2
import gzip
import json
import os

import hostile
import pytest

from spectr_jax import Tokenizer
from spectr_jax.io import untrusted
from spectr_jax.io.checksums import file_hash
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.tensors import SafetensorsFolder
from spectr_jax.io.hub.torch_file import TorchFile
from spectr_jax.io.tokenizer_file import read_backend
from spectr_jax.unicode import check_unicode


def test_reads_what_is_there(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('{"size": 3, "unknown": [1], "absent": null}')
  fields = {'size': untrusted.whole(1, 9), 'absent': untrusted.TEXT, 'missing': untrusted.FLAG}
  assert untrusted.read_object(path, fields) == {'size': 3, 'unknown': [1], 'absent': None}
  link = tmp_path / 'link'  # as in the hub's cache
  link.symlink_to(path)
  assert untrusted.read_bytes(link) == path.read_bytes()


@pytest.mark.parametrize('kind', ['missing', 'folder', 'pipe', 'device', 'dangling'])
def test_what_is_no_file_is_refused_by_every_reader(tmp_path, kind):
  path = tmp_path / 'model.safetensors'
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind != 'missing':
    path.symlink_to('/dev/zero' if kind == 'device' else 'nowhere')
  readers = untrusted.read_bytes, file_hash, read_backend, Tokenizer.load, read_header, TorchFile
  for read in (*readers, lambda path: SafetensorsFolder(path.parent)):
    hostile.refusal(lambda read=read: read(path), tmp_path)


def test_size_is_bounded(tmp_path):
  path = tmp_path / 'big'
  with path.open('wb') as file:
    file.truncate(2**40)  # a sparse file of a terabyte
  hostile.refusal(lambda: untrusted.read_bytes(path), path, 'big is larger than 4,194,304 bytes')
  path.write_bytes(b'12345')
  assert untrusted.read_bytes(path, 5) == b'12345'
  with pytest.raises(ValueError, match='larger than 4 bytes'):
    untrusted.read_bytes(path, 4)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (b'{', 'damaged'),
    (b'\xff{}', 'byte 0 is not UTF-8'),
    (b'[' * 10**6, 'nested too deeply'),
    (b'{"a":' * 10**5 + b'1' + b'}' * 10**5, 'nested too deeply'),
    (b'[1]', r'must hold an object, got \[1\]'),
    (b'{"size": ' + b'9' * 5000 + b'}', 'damaged'),
    (b'{"size": true}', 'size must be a whole number from 1 to 9, got True'),
    (b'{"size": 2.0}', 'size must be'),
    (b'{"size": NaN}', 'size must be'),
    (b'{"size": 10}', 'size must be'),
    (b'{"size": ' + json.dumps('x' * 10**6).encode() + b'}', 'size must be'),
  ],
)
def test_faults_are_one_short_line(tmp_path, text, message):
  path = tmp_path / 'a.json'
  path.write_bytes(text)
  assert len(hostile.refusal(lambda: untrusted.read_object(path, {'size': untrusted.whole(1, 9)}), path, message)) < 300


@pytest.mark.parametrize(
  ('kind', 'right', 'wrong'),
  [
    (untrusted.real(above=0), [1, 0.5, 1e20], [0, -1, float('inf'), float('nan'), True, '1', 10**400]),
    (untrusted.real(0, 1), [0, 1, 0.5], [1.1, -0.1]),
    (untrusted.TEXT, ['', 'é'], [1, None, '\ud800']),
    (untrusted.FLAG, [True, False], [0, 'true']),
    (untrusted.one_of('a', 1), ['a', 1], [True, 1.0, 'b']),
    (untrusted.list_of(untrusted.whole(0, 2), 2), [[], [0, 2]], [[3], [0, 0, 0], (0,), {}]),
    (untrusted.object_of({'a': untrusted.FLAG}), [{}, {'a': True}, {'a': None, 'b': 1}], [{'a': 1}, [], None]),
    (untrusted.map_of(untrusted.TEXT), [{}, {'a': 'b'}], [{'a': 1}, 'a']),
    (untrusted.either(untrusted.TEXT, untrusted.FLAG), ['a', True], [0, None]),
  ],
)
def test_kinds(kind, right, wrong):
  assert all(map(kind.is_valid, right))
  assert not any(map(kind.is_valid, wrong))


@pytest.mark.parametrize('module', [gzip, bz2])
def test_archives_are_unpacked_as_far_as_they_are_read(tmp_path, module):
  path = tmp_path / ('a.gz' if module is gzip else 'a.bz2')
  path.write_bytes(module.compress(bytes(2**20)) * 10_000)
  with hostile.time_limit(), untrusted.open_unpacked(path) as file:
    assert file.read(100) == bytes(100)
  for content in (module.compress(b'text')[:-9], b'text', module.compress(b'text') + b'more', b'', b'\x1f\x8b\x08'):
    path.write_bytes(content)
    try:
      with untrusted.open_unpacked(path) as file:
        assert file.read() in (b'', b'text')
    except ValueError as error:
      assert str(error).startswith(f'cannot read {path}: ')  # noqa: PT017 - some are read up to what is damaged


def test_remote_files_that_cannot_be_read_are_one_line():
  with pytest.raises(ValueError, match="^'foo://a/b' is not a path: remote ones begin with gs://"):
    untrusted.open_file('foo://a/b')
  with pytest.raises(ValueError, match='cannot read gs://a/b: .*gcsfs'):
    untrusted.open_file('gs://a/b')


def test_lone_surrogates_are_named():
  check_unicode('字\U0001f989\0', 'it')
  for text, what in (('a\udcff', 'byte 0xff is not UTF-8'), ('\ud800\ud800', r'U\+D800 is no character')):
    with pytest.raises(ValueError, match=f'^it is not valid Unicode: {what}$'):
      check_unicode(text, 'it')
