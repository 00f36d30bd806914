"""Binary files that were made to do harm: each is refused in one line, soon and in little memory."""

import json
import os
import pathlib
import pwd
import struct
import subprocess
import sys

import binary_mutations
import gguf_files
import hostile
import numpy as np
import pytest
import safetensors.numpy
from binary_mutations import write_gguf

from spectr_jax import load_drafter, load_model
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.tensors import SafetensorsFolder


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['torch', 'safetensors', 'gguf'])
def test_mutations(kind, tmp_path):
  """In a process of its own, which must not end by a signal."""
  tests = pathlib.Path(__file__).parents[1]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{tests.parent}{os.pathsep}{tests}'}
  command = [sys.executable, binary_mutations.__file__, kind, str(tmp_path), str(hostile.NUM_MUTATIONS)]
  ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
  assert ran.returncode == 0, (ran.returncode, ran.stderr[-3000:])
  print(kind, ran.stdout)


# Safetensors.


def _with_header(path, header, data=b''):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)


@pytest.mark.parametrize(
  ('header', 'data', 'problem'),
  [
    ({'a': {'dtype': 'F32', 'shape': [1] * 10**5, 'data_offsets': [0, 4]}}, b'1234', 'has 100000 axes'),
    ({'a': {'dtype': 'F32', 'shape': [0, 2**60], 'data_offsets': [0, 0]}}, b'', 'has too many numbers'),
    ({'a': {'dtype': 'F32', 'shape': [2**33, 2**33], 'data_offsets': [0, 4]}}, b'1234', 'is damaged'),
    ({'a': {'dtype': 'F8_E5M2', 'shape': [4], 'data_offsets': [0, 4]}}, b'1234', 'of type F8_E5M2; known are'),
    ({'\x1b[2J' * 10**4: {'dtype': 'I8', 'shape': [4], 'data_offsets': [0, 4]}}, b'1234', 'of type I8'),
    (b'{"a":' * 10**5, b'', 'is damaged'),
    (b' ' * (2**24 + 1), b'', 'a header of 16,777,217 bytes'),
    (b'{"' + b'a' * 2**23 + b'": 1}', b'', 'is damaged'),
  ],
)
def test_safetensors_headers(header, data, problem, tmp_path):
  path = tmp_path / 'model.safetensors'
  _with_header(path, header, data)

  def read():
    found = SafetensorsFolder(tmp_path)
    [found.dtype(name) for name in found.names()]

  assert problem in hostile.refusal(read, tmp_path)


def test_short_safetensors(tmp_path):
  path = tmp_path / 'model.safetensors'
  for size in (0, 7, 8, 9):
    path.write_bytes(safetensors.numpy.save({'a': np.ones(3)})[:size])
    hostile.refusal(lambda: SafetensorsFolder(tmp_path), path, 'is damaged')


def test_indices_name_files_beside_them(tmp_path):
  index = tmp_path / 'model.safetensors.index.json'
  names = '../x', '/dev/zero', '..', '.', '', 'a/b', 'a\\b', 'x' * 300, 'a\0b', '\x1b[2J', '\ud800', 1, None, [], {}
  texts = '{}', '[]', '{"weight_map": null}', '{"weight_map": []}', '[' * 10**5, '\xff'
  for text in (*texts, *(json.dumps({'weight_map': {'a': name}}) for name in names)):
    index.write_bytes(text.encode('latin-1'))
    hostile.refusal(lambda: SafetensorsFolder(tmp_path), index)


# GGUF.


def _gguf(*parts):
  """A header with one value, `parts` of its type and content."""
  return b'GGUF' + struct.pack('<IQQQ1s', 3, 0, 1, 1, b'a') + b''.join(parts)


def _array(kind, length):
  return struct.pack('<IIQ', 9, kind, length)


def _with_tensor(*shape, kind=0, offset=0, name=b'output_norm.weight', num=1):
  entry = struct.pack(f'<Q{len(name)}sI{len(shape)}QIQ', len(name), name, len(shape), *shape, kind, offset)
  return b'GGUF' + struct.pack('<IQQ', 3, num, 0) + entry * num + bytes(200)


@pytest.mark.parametrize(
  ('content', 'problem'),
  [
    (b'', 'is not a GGUF file'),
    (b'PK\x03\x04' + bytes(100), 'is not a GGUF file'),
    (b'GGUF', 'is truncated: its header is longer than the 4 bytes of the file'),
    (b'GGUF' + struct.pack('<IQQ', 1, 0, 0), 'version 1; versions 2 and 3'),
    (b'GGUF' + struct.pack('>IQQ', 3, 0, 0), 'big-endian numbers; versions 2 and 3'),
    (b'GGUF' + struct.pack('<IQQQ', 3, 0, 1, 2**60), 'is truncated'),
    (_gguf(struct.pack('<I', 99)), 'unknown type 99 of a value'),
    (b'GGUF' + struct.pack('<IQQQ1s', 3, 0, 1, 1, b'\xff'), 'is not a readable GGUF file'),
    (_gguf(_array(8, 2**40)), 'values together; at most 4,194,304'),
    (_gguf(_array(0, 2**33)), 'values together'),
    (_gguf(_array(8, 2**21), bytes(100)), 'is truncated'),
    (_gguf(_array(9, 1), struct.pack('<IQ', 9, 1) * 10**4), 'unknown type 9 of the values of an array'),
    (_gguf(struct.pack('<IQ', 8, 2**63), b'abc'), 'is truncated'),
    (b'GGUF' + struct.pack('<IQQ', 3, 2**60, 0) + bytes(1000), 'is there twice'),
    (b'GGUF' + struct.pack('<IQQ', 3, 0, 2**60) + bytes(1000), 'twice'),
    (_with_tensor(8, num=2), 'tensor output_norm.weight is there twice'),
    (_with_tensor(2**31, 0), 'has no numbers'),
    (_with_tensor(2**33, 2**33), 'the file is truncated'),
    (_with_tensor(2**63, 2), 'the file is truncated'),
    (_with_tensor(*[1] * 5), 'has 5 axes; at most 4'),
    (b'GGUF' + struct.pack('<IQQQ1sI', 3, 1, 0, 1, b'a', 2**31), 'has 2147483648 axes'),
    (_with_tensor(8, offset=1), 'does not begin at a multiple of 32'),
    (_with_tensor(8, offset=2**63), 'the file is truncated'),
    (_with_tensor(8, kind=2**31), 'unknown type number 2147483648'),
    (_with_tensor(8, name=b'\x1b[2J' * 1000), 'unknown for this architecture'),
    (_with_tensor(8, name=b'weight'), 'unknown for this architecture'),
    (_with_tensor(7, name=b'blk.' + b'9' * 9999 + b'.attn_q.weight'), 'rows, expected'),
  ],
)
def test_gguf_headers(content, problem, tmp_path):
  path = tmp_path / 'x.gguf'
  path.write_bytes(content)
  assert problem in hostile.refusal(lambda: binary_mutations.read_gguf(path), path)


@pytest.mark.parametrize(
  ('key', 'value', 'problem'),
  [
    ('split.count', [1, 2], r'is one of [1, 2] files'),
    ('split.count', 'x' * 10**5, 'is one of'),
    ('general.alignment', 24, 'must be a power of 2'),
    ('general.alignment', 2**30, 'must be a power of 2'),
    ('general.alignment', [32], 'must be a positive number'),
    ('general.alignment', True, 'must be a positive number'),
    ('general.alignment', 0, 'general.alignment must be a positive number, got 0'),
    ('split.count', 2, 'is one of 2 files'),
  ],
)
def test_gguf_metadata(key, value, problem, tmp_path):
  path = gguf_files.write(tmp_path / 'x.gguf', 'llama', {key: value})
  assert problem in hostile.refusal(lambda: read_header(path), path)


def test_gguf_tensors_that_overlap(tmp_path):
  path = tmp_path / 'x.gguf'
  write_gguf(path)
  content = path.read_bytes()
  at = content.index(b'output_norm.weight') + len(b'output_norm.weight') + 4 + 8 + 4
  path.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
  assert 'begins within another tensor' in hostile.refusal(lambda: binary_mutations.read_gguf(path), path)


def test_a_large_gguf_of_zeros(tmp_path):
  path = tmp_path / 'x.gguf'
  with path.open('wb') as file:
    file.write(_gguf(_array(8, 2**22)))
    file.truncate(2**33)
  start = hostile.peak_memory()
  with hostile.time_limit():
    assert len(read_header(path).metadata['a']) == 2**22  # empty texts
  assert hostile.peak_memory() - start < hostile.MEMORY
  with path.open('wb') as file:
    file.write(_gguf(_array(8, 2**22), b'\1\0\0\0\0\0\0\0x' * 2**21, struct.pack('<Q', 2**32)))
    file.truncate(2**33)
  assert 'its header is longer than 67,108,864 bytes' in hostile.refusal(lambda: read_header(path), path)


@pytest.mark.parametrize('path', ['hf://a/b', 'foo://x', 'foo://x.gguf', 'file:///tmp', 'http://a/b'])
def test_places_of_other_kinds(path):
  for read in (load_model, lambda path: load_drafter(path, None)):
    assert 'is not a path' in hostile.refusal(lambda read=read: read(path), path)


def test_a_user_without_a_home(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', '~/.cache/huggingface/hub')
  assert 'set HF_HOME' in hostile.refusal(lambda: load_model('a/b'), 'a/b')
  assert not os.listdir(tmp_path)


def test_a_home_that_is_not_known(monkeypatch, capsys):
  import jax

  from spectr_jax.io import compilation_cache

  def unknown(_):
    raise KeyError

  changed, before, update = {}, jax.config.jax_compilation_cache_dir, jax.config.update
  update('jax_compilation_cache_dir', None)
  monkeypatch.setattr('jax.config.update', changed.__setitem__)
  monkeypatch.setattr(pwd, 'getpwuid', unknown)
  for name in ('HOME', 'XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR'):
    monkeypatch.delenv(name, raising=False)
  try:
    compilation_cache.cache_programs()
  finally:
    update('jax_compilation_cache_dir', before)
  assert changed == {'jax_enable_compilation_cache': False}
  assert 'compiled programs are not kept: Could not determine home directory' in capsys.readouterr().err
