"""Files of `torch.save`, written here without torch: what is read, and that nothing in them is ever executed."""

import os
import pickle
import struct
import zipfile

import hostile
import ml_dtypes
import numpy as np
import pytest
from binary_mutations import HOOKS, pickled_state, pickled_tensor, plain, torch_zip
from published_heads import arrays_of, tiny_target, write_head

from spectr_jax import load_drafter
from spectr_jax.io.hub.torch_file import TorchFile

_KINDS = {
  'float32': 'FloatStorage', 'float16': 'HalfStorage', 'bfloat16': 'BFloat16Storage', 'int64': 'LongStorage',
  'bool': 'BoolStorage',
}  # fmt: skip


def _save(path, arrays):
  """Writes arrays as a state dict."""
  tensors = {
    name: pickled_tensor(name, _KINDS[x.dtype.name], x.size, x.shape, tuple(s // x.itemsize for s in x.strides))
    for name, x in arrays.items()
  }
  return torch_zip(path, pickled_state(**tensors), {name: array.tobytes() for name, array in arrays.items()})


def _whole(file, name):
  return file.read(name, tuple(slice(0, size) for size in file.shape(name)))


@pytest.mark.parametrize('dtype', _KINDS)
def test_tensors_of_every_type(tmp_path, dtype):
  array = (np.arange(12).reshape(3, 4) % 5).astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  file = TorchFile(_save(tmp_path / 'x.bin', {'a.weight': array, 'b': array[0]}))
  assert file.names() == {'a.weight', 'b'}
  assert (file.shape('a.weight'), file.dtype('b')) == ((3, 4), array.dtype)
  np.testing.assert_array_equal(_whole(file, 'a.weight'), array)
  np.testing.assert_array_equal(file.read('a.weight', (slice(1, 3), slice(0, 2))), array[1:3, :2])


def test_a_tensor_may_be_a_part_of_a_storage(tmp_path):
  tensor = pickled_tensor('0', 'FloatStorage', 12, (3, 2), (1, 4), offset=1)
  path = torch_zip(tmp_path / 'x.bin', pickled_state(a=tensor), {'0': np.arange(12, dtype=np.float32).tobytes()})
  np.testing.assert_array_equal(_whole(TorchFile(path), 'a'), [[1, 5], [2, 6], [3, 7]])


_CALLS = {
  'os.system': 'touch executed',
  'builtins.eval': "open('executed', 'w')",
  'torch.load': 'x',
  'torch.storage._load_from_bytes': b'x',
  'collections.OrderedDict.fromkeys': 'x',
  'spectr_jax.io.hub.torch_file.TorchFile': 'x',
}


def _calling(name, argument):
  module, _, function = name.rpartition('.')
  return pickled_state(a=f'c{module}\n{function}\n'.encode() + plain(argument) + b'\x85R')


@pytest.mark.parametrize('name', _CALLS)
def test_nothing_is_executed(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  path = torch_zip(tmp_path / 'x.bin', _calling(name, _CALLS[name]), {})
  message = hostile.refusal(lambda: TorchFile(path), path)
  assert f'it names {name}, which a file of tensors does not need' in message
  assert os.listdir(tmp_path) == ['x.bin']


def test_the_pickles_here_would_do_harm(tmp_path, monkeypatch):
  """An ordinary unpickler executes what the test above refuses."""
  monkeypatch.chdir(tmp_path)
  pickle.loads(_calling('builtins.eval', _CALLS['builtins.eval']))['a'].close()
  assert os.listdir(tmp_path) == ['executed']


@pytest.mark.parametrize(
  'change',
  [
    {'shape': (7,), 'strides': (1,)}, {'offset': 1}, {'offset': -1}, {'shape': (2,), 'strides': (-1,)},
    {'shape': (2, 2)}, {'shape': (2.0,)}, {'shape': [6]}, {'shape': (2**60, 2), 'strides': (0, 0), 'offset': 6},
    {'shape': (4, 4), 'strides': (10**9, 1)}, {'shape': (2, 2), 'strides': (2**62, 2**62)}, {'offset': 2**64},
    {'shape': (1,) * 9, 'strides': (1,) * 9}, {'shape': (2**61, 0), 'strides': (1, 1)}, {'shape': (True,)},
    {'offset': -(2**63), 'shape': (2,)}, {'shape': (2**32, 2**32), 'strides': (0, 0)}, {'offset': None},
  ],
  ids=str,
)  # fmt: skip
def test_tensors_stay_within_their_storages(tmp_path, change):
  tensor = pickled_tensor('0', 'FloatStorage', 6, **({'shape': (6,), 'strides': (1,)} | change))
  path = torch_zip(tmp_path / 'x.bin', pickled_state(a=tensor), {'0': bytes(24)})
  message = hostile.refusal(lambda: TorchFile(path), path)
  assert 'a tensor is' in message or 'it has 9 axes' in message or 'its shape' in message


_TENSOR = pickled_tensor('0', 'FloatStorage', 4, (2, 2), (2, 1))
_BEYOND = pickled_tensor('0', 'FloatStorage', 4, (4, 4), (10**9, 1))


@pytest.mark.parametrize(
  ('content', 'problem'),
  [
    # The dict gets another `items`, so that nobody would look at its tensor.
    (HOOKS + plain('w') + _TENSOR + b's}' + plain('items') + HOOKS[:-2] + b'sb.', 'it changes an object'),
    (HOOKS + plain('w') + _BEYOND + b's.', 'a tensor is not within its storage of 4 numbers'),
    (b'}' + plain('w') + _TENSOR + b'}' + plain('shape') + b'Nsbs.', 'it changes an object'),
    (b'}' + plain('w') + _TENSOR + b's' + plain('w') + _TENSOR + b's.', "it holds 'w' twice"),
    (b'}' + _TENSOR + b'Ns.', 'dicts with texts as keys'),
    (b'}(' + plain('a') + b'u.', 'zip() argument 2 is shorter'),
    (b'](' + plain('a') + plain('a') + b'u.', 'dicts with texts as keys'),
    (b'}r\0\0\0\x10j\0\0\0\x20.', 'Memo value not found at index 536870912'),
    (b'}' * 10**6, 'damaged'),
    (b'(' * 10**6 + b't' * 10**6 + b'.', 'must hold tensors by name, got tuple'),
    (b']q\0' + b'h\0a' * 10**5 + b'.', 'must hold tensors by name, got list'),
    (plain({'epoch': 3}) + b'.', "'epoch' is not a tensor"),
    (b'\x8d' + b'\xff' * 8 + b'.', 'exceeds system'),
    (b'\x8b\xff\xff\xff\x7f' + b'1', r"it holds the instruction b'\x8b'"),
    (b'}(ibuiltins\neval\n.', "it holds the instruction b'i'"),
    (b'}(cbuiltins\neval\n', 'it names builtins.eval'),
    (b'}' + plain('os') + plain('system') + b'\x93', 'it names os.system'),
    (b'cos\x1b[2J\nsystem\n', 'it names'),
    (b'c' + b'x' * 1000, 'damaged'),
    (_TENSOR + b')R.', 'not callable'),
    (HOOKS[:-2] + b'K\1\x85R.', 'takes 0 positional arguments'),
    (b')Q.', 'not enough values'),
    (plain(('storage', 'x', '0', 'cpu', 4)) + b'Q.', 'not a storage'),
    (b'0', "it holds the instruction b'0'"),
    (b'\xfe', r"it holds the instruction b'\xfe'"),
    (b'X\2\0\0\0\xff\xff.', "codec can't decode"),
    (b'garbage', 'it holds the instruction'),
    (b'', 'damaged'),
  ],
)
def test_pickles(content, problem, tmp_path):
  path = torch_zip(tmp_path / 'x.bin', b'\x80\x02' + content, {'0': bytes(16)})
  assert problem in hostile.refusal(lambda: TorchFile(path), path)


def test_what_shares_numbers(tmp_path):
  path = tmp_path / 'x.bin'

  def write(*tensors):
    torch_zip(path, pickled_state(**{str(i): tensor for i, tensor in enumerate(tensors)}), {'0': bytes(16)})

  write(_TENSOR, _TENSOR, pickled_tensor('0', 'FloatStorage', 4, (1000, 4), (0, 1)))
  assert TorchFile(path).read('2', (slice(None), slice(None))).shape == (1000, 4)
  write(pickled_tensor('0', 'FloatStorage', 4, (5, 1, 0), (2**62, 2**62, 2**62)))
  assert TorchFile(path).read('0', (slice(None),) * 3).shape == (5, 1, 0)
  write(pickled_tensor('0', 'FloatStorage', 4, (2**30, 4), (0, 1)))
  assert 'the tensors share too much' in hostile.refusal(lambda: TorchFile(path), path)


def _directory(content):
  return content.rindex(b'PK\1\2')


@pytest.mark.parametrize(
  'change',
  [
    lambda x: x[:0],
    lambda x: x[: len(x) // 2],
    lambda x: x[:-3],
    lambda x: pickle.dumps({'a': 1}),  # the format before 1.6 is no archive
    lambda x: x.replace(b'a/data/1', b'a/data/0'),
    lambda x: x.replace(b'a/data/1', b'a/data/2'),
    lambda x: x[: _directory(x) + 8] + b'\1' + x[_directory(x) + 9 :],  # encrypted
    lambda x: x[: _directory(x) + 42] + b'\0\0\0\0' + x[_directory(x) + 46 :],
    lambda x: x[: _directory(x) + 20] + b'\xff\xff\xff\x7f' * 2 + x[_directory(x) + 28 :],
    lambda x: x.replace(b'a/data/0', b'a/data/x', 1),
    lambda x: x[:-12] + b'\xff' * 8 + x[-4:],
    lambda x: x[:-10] + b'\xff\xff\0\0' + x[-6:],
    lambda x: x.replace(bytes(range(16)), bytes(range(15)) + b'\0'),  # of another checksum
  ],
)
def test_archives(change, tmp_path):
  state = pickled_state(v=_TENSOR, w=pickled_tensor('1', 'FloatStorage', 1, (1,), (1,)))
  path = torch_zip(tmp_path / 'x.bin', state, {'0': bytes(range(16)), '1': bytes(4)})

  def read():
    file = TorchFile(path)
    return _whole(file, 'v'), _whole(file, 'w')

  read()
  path.write_bytes(change(path.read_bytes()))
  assert 'damaged or not a file of torch.save' in hostile.refusal(read, path)


def test_numbers_that_are_not_there_and_archives_that_would_grow(tmp_path):
  path = tmp_path / 'x.bin'
  for storages in ({'1': bytes(16)}, {'0': bytes(20)}, {}):
    torch_zip(path, pickled_state(v=_TENSOR), storages)
    hostile.refusal(lambda: TorchFile(path), path, 'the numbers of v are missing or of another size')
  for method, problem in ((zipfile.ZIP_DEFLATED, 'is compressed'), (zipfile.ZIP_STORED, 'larger than 2,097,152 bytes')):
    torch_zip(path, bytes(30 * 2**20), {}, method)
    assert problem in hostile.refusal(lambda: TorchFile(path), path)
  with path.open('wb') as file:  # a sparse file whose directory has 4 GB
    file.seek(2**32)
    file.write(b'PK\5\6' + struct.pack('<4H2LH', 0, 0, 1, 1, 2**32 - 2, 0, 0))
  assert 'a directory of 4,294,967,294 bytes' in hostile.refusal(lambda: TorchFile(path), path)


@pytest.mark.parametrize(('name', 'file'), [('eagle', 'pytorch_model.bin'), ('medusa', 'medusa_lm_head.pt')])
def test_heads_of_such_files_are_read(tmp_path, name, file):
  target, folder = tiny_target(), write_head(tmp_path, name)
  expected = load_drafter(folder, target)
  (folder / 'model.safetensors').unlink()
  _save(folder / file, arrays_of(name))
  found = load_drafter(folder, target)
  assert (type(found), found.config) == (type(expected), expected.config)
  np.testing.assert_array_equal(*(drafter.params['unembedding'] for drafter in (found, expected)))
