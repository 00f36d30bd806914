"""Binary files that were made to do harm: each is refused in one line, soon and in little memory."""

import json
import os
import pathlib
import pwd
import struct
import subprocess
import sys
import zipfile

import binary_mutations
import hostile
import numpy as np
import pytest
import safetensors.numpy
from binary_mutations import pickled_tensor, torch_zip, write_gguf
from gguf import GGUFWriter

from spectr_jax import load_drafter, load_model
from spectr_jax.io.hub.gguf_header import read_header
from spectr_jax.io.hub.tensors import SafetensorsFolder
from spectr_jax.io.hub.torch_file import TorchFile


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['torch', 'safetensors', 'gguf', 'params'])
def test_mutations(kind, tmp_path):
  """In a process of its own, which must not end by a signal."""
  tests = pathlib.Path(__file__).parents[1]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{tests.parent}{os.pathsep}{tests}'}
  command = [sys.executable, binary_mutations.__file__, kind, str(tmp_path), str(hostile.NUM_MUTATIONS)]
  ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
  assert ran.returncode == 0, (ran.returncode, ran.stderr[-3000:])
  print(kind, ran.stdout)


# Files of torch.


_TENSOR = pickled_tensor('0', 'FloatStorage', 4, (2, 2), (2, 1))
_DICT = b'ccollections\nOrderedDict\n)R'
_FOREIGN = pickled_tensor('0', 'FloatStorage', 4, (4, 4), (10**9, 1))


def _key(text):
  return b'X' + struct.pack('<I', len(text)) + text.encode()


@pytest.mark.parametrize(
  ('pickle', 'problem'),
  [
    # The dict gets another `items`, so that nobody would look at its tensor.
    (_DICT + _key('w') + _FOREIGN + b's}' + _key('items') + _DICT[:-2] + b'sb.', 'it changes an object'),
    (_DICT + _key('w') + _FOREIGN + b's.', "'w' is not a tensor that can be read: it is not within its storage of 4"),
    (b'}' + _key('w') + _TENSOR + b'}' + _key('shape') + b'Nsbs.', 'it changes an object'),
    (b'}' + _key('w') + _TENSOR + b's' + _key('w') + _TENSOR + b's.', "it holds 'w' twice"),
    (b'}' + _TENSOR + b'Ns.', 'keys that are not texts'),
    (b'}r\0\0\0\x10j\0\0\0\x20.', 'takes a value where there is none'),
    (b'}' * 10**6, 'it ends early'),
    (b'(' * 10**6 + b't' * 10**6 + b'.', 'must hold tensors by name, got tuple'),
    (b']q\0' + b'h\0a' * 10**5 + b'.', 'must hold tensors by name, got list'),
    (b'\x8d' + b'\xff' * 8 + b'.', 'it ends early'),
    (b'\x8b\xff\xff\xff\x7f' + b'1', 'it holds the instruction LONG4'),
    (b'}(ibuiltins\neval\n.', 'it holds the instruction INST'),
    (b'}(cbuiltins\neval\n', 'it names builtins.eval'),
    (b'}' + _key('os') + _key('system') + b'\x93', 'it names os.system'),
    (b'cos\x1b[2J\nsystem\n', 'it names'),
    (_TENSOR + b')R.', 'it calls something that is no function'),
    (_DICT[:-2] + b'K\1\x85R.', 'it calls collections.OrderedDict in an unknown way'),
    (b')Q.', 'not a storage'),
    (b'}(' + _key('a') + b'u.', 'sets items'),
    (b'0', 'it holds the instruction POP'),
    (b'\xfe', 'it holds the unknown instruction 254'),
    (b'X\2\0\0\0\xff\xff.', 'is not read'),
  ],
)
def test_pickles(pickle, problem, tmp_path):
  path = tmp_path / 'x.bin'
  torch_zip(path, b'\x80\x02' + pickle, {'0': bytes(16)})
  assert problem in hostile.refusal(lambda: TorchFile(path), path)


def test_what_shares_numbers(tmp_path):
  """Tied tensors and small expanded ones are read; a few bytes do not become all memory."""
  path = tmp_path / 'x.bin'

  def write(*tensors):
    state = b''.join(_key(str(index)) + tensor for index, tensor in enumerate(tensors))
    torch_zip(path, b'\x80\x02}(' + state + b'u.', {'0': bytes(16)})

  write(_TENSOR, _TENSOR, pickled_tensor('0', 'FloatStorage', 4, (1000, 4), (0, 1)))
  assert TorchFile(path).read('2', (slice(None), slice(None))).shape == (1000, 4)
  write(pickled_tensor('0', 'FloatStorage', 4, (5, 1, 0), (2**62, 2**62, 2**62)))
  assert TorchFile(path).read('0', (slice(None),) * 3).shape == (5, 1, 0)
  write(pickled_tensor('0', 'FloatStorage', 4, (2**30, 4), (0, 1)))
  assert 'the tensors share too much' in hostile.refusal(lambda: TorchFile(path), path)


def _directory(content):
  return content.rindex(b'PK\1\2')


@pytest.mark.parametrize(
  ('change', 'problem'),
  [
    (lambda x: x.replace(b'a/data/1', b'a/data/0'), 'two entries a/data/0'),
    (lambda x: x[: _directory(x) + 8] + b'\1' + x[_directory(x) + 9 :], 'missing'),  # encrypted
    (lambda x: x[: _directory(x) + 42] + b'\0\0\0\0' + x[_directory(x) + 46 :], 'is larger than its place'),
    (lambda x: x[: _directory(x) + 20] + b'\xff\xff\xff\x7f' * 2 + x[_directory(x) + 28 :], 'larger than its place'),
    (lambda x: x.replace(b'a/data/0', b'a/data/x', 1), 'is not where the directory of the archive has it'),
    (lambda x: x[:-12] + b'\xff' * 8 + x[-4:], 'the record of its directory is missing'),
    (lambda x: x[:-14] + b'\7\0\7\0' + x[-10:], 'entries, expected 7'),
    (lambda x: x[:-10] + b'\xff\xff\0\0' + x[-6:], 'an entry that is none|not within the file|ends within'),
    (lambda x: b'12345' + x, 'damaged'),
  ],
)  # fmt: skip
def test_archives(change, problem, tmp_path):
  path = tmp_path / 'x.bin'
  state = _key('v') + _TENSOR + _key('w') + pickled_tensor('1', 'FloatStorage', 1, (1,), (1,))
  torch_zip(path, b'\x80\x02}(' + state + b'u.', {'0': bytes(16), '1': bytes(4)})
  whole = tuple(slice(0, 2) for _ in range(2))
  TorchFile(path).read('v', whole)
  path.write_bytes(change(path.read_bytes()))
  message = hostile.refusal(lambda: TorchFile(path).read('v', whole), path)
  assert any(part in message for part in problem.split('|')), message


def test_archives_that_would_grow(tmp_path):
  path = tmp_path / 'x.bin'
  for method, problem in ((zipfile.ZIP_DEFLATED, 'is compressed'), (zipfile.ZIP_STORED, 'larger than 2,097,152 bytes')):
    with zipfile.ZipFile(path, 'w', method) as archive, archive.open('a/data.pkl', 'w') as entry:
      for _ in range(30):
        entry.write(bytes(2**20))
    assert problem in hostile.refusal(lambda: TorchFile(path), path)
  with path.open('wb') as file:  # a sparse file whose directory has 4 GB
    file.seek(2**32)
    file.write(b'PK\5\6' + struct.pack('<4H2LH', 0, 0, 1, 1, 2**32 - 2, 0, 0))
  assert 'a directory of 4,294,967,294 bytes' in hostile.refusal(lambda: TorchFile(path), path)


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
    ({'a': {'dtype': 'F8_E4M3', 'shape': [4], 'data_offsets': [0, 4]}}, b'1234', 'of type F8_E4M3; known are'),
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


@pytest.mark.parametrize('size', [0, 7, 8, 9])
def test_short_safetensors(size, tmp_path):
  path = tmp_path / 'model.safetensors'
  path.write_bytes(safetensors.numpy.save({'a': np.ones(3)})[:size])
  assert 'is damaged' in hostile.refusal(lambda: SafetensorsFolder(tmp_path), path)


@pytest.mark.parametrize('kind', ['pipe', 'device', 'folder', 'missing', 'dangling'])
def test_what_is_no_file_of_tensors(kind, tmp_path):
  for place in (tmp_path / 'model.safetensors', tmp_path / 'x.bin'):
    if kind == 'pipe':
      os.mkfifo(place)
    elif kind == 'device':
      place.symlink_to('/dev/zero')
    elif kind == 'folder':
      place.mkdir()
    elif kind == 'dangling':
      place.symlink_to('nowhere')
  hostile.refusal(lambda: SafetensorsFolder(tmp_path), tmp_path)
  hostile.refusal(lambda: TorchFile(tmp_path / 'x.bin'), tmp_path / 'x.bin')


@pytest.mark.parametrize(
  'name', ['../x', '/dev/zero', '..', '.', '', 'a/b', 'a\\b', 'x' * 300, 'a\0b', '\x1b[2J', '\ud800', 1, None, [], {}]
)
def test_indices_name_files_beside_them(name, tmp_path):
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {'a': name}}))
  hostile.refusal(lambda: SafetensorsFolder(tmp_path), index)


@pytest.mark.parametrize('text', ['{}', '[]', '{"weight_map": null}', '{"weight_map": []}', '[' * 10**5, '\xff'])
def test_indices(text, tmp_path):
  index = tmp_path / 'model.safetensors.index.json'
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
  ],
)
def test_gguf_metadata(key, value, problem, tmp_path):
  path = tmp_path / 'x.gguf'
  writer = GGUFWriter(path, 'llama')
  adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
  adders[type(value)](key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
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


# Paths.


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
  from common import compilation_cache

  def unknown(_):
    raise KeyError

  changed = {}
  monkeypatch.setattr('jax.config.update', changed.__setitem__)
  monkeypatch.setattr(pwd, 'getpwuid', unknown)
  for name in ('HOME', 'XDG_CACHE_HOME', 'JAX_COMPILATION_CACHE_DIR'):
    monkeypatch.delenv(name, raising=False)
  compilation_cache.keep_compiled(None)
  assert changed == {'jax_enable_compilation_cache': False}
  assert 'compiled programs are not kept: Could not determine home directory' in capsys.readouterr().err
