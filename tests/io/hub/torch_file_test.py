"""Files of `torch.save`, written here without torch: what is read, and that nothing in them is ever executed."""

import collections
import io
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
from published_heads import arrays_of, tiny_target, write_head

from spectr_jax import load_drafter
from spectr_jax.io.hub.torch_file import TorchFile

_KINDS = {
  'float32': 'FloatStorage', 'float16': 'HalfStorage', 'bfloat16': 'BFloat16Storage', 'int64': 'LongStorage',
  'bool': 'BoolStorage',
}  # fmt: skip


class _Named:
  """A global that a pickle names."""

  def __init__(self, module, name):
    self.module, self.name = module, name

  def __reduce__(self):
    raise AssertionError('written by _Pickler')


class _Pickler(pickle._Pickler):
  """Writes globals that do not exist here."""

  def persistent_id(self, obj):
    return obj if isinstance(obj, tuple) and obj[:1] == ('storage',) else None

  def save_named(self, obj):
    self.write(pickle.GLOBAL + f'{obj.module}\n{obj.name}\n'.encode())

  dispatch = {**pickle._Pickler.dispatch, _Named: save_named}


class _Call:
  """A call that a pickle makes when it is read."""

  def __init__(self, function, *arguments):
    self.function, self.arguments = function, arguments


def _save_call(pickler, call):
  pickler.save(call.function)
  pickler.save(call.arguments)
  pickler.write(pickle.REDUCE)


_Pickler.dispatch[_Call] = _save_call


def _tensor(key, array, **changes):
  fields = {'offset': 0, 'shape': array.shape, 'strides': tuple(s // array.itemsize for s in array.strides)} | changes
  storage = 'storage', _Named('torch', _KINDS[array.dtype.name]), key, 'cpu', array.size
  hooks = _Call(_Named('collections', 'OrderedDict'))
  rebuild = _Named('torch._utils', '_rebuild_tensor_v2')
  return _Call(rebuild, storage, *fields.values(), False, hooks)


def _write(path, content, storages, compression=zipfile.ZIP_STORED):
  """Writes an archive as torch does; `content` is the pickled object, or its bytes."""
  if not isinstance(content, bytes):
    file = io.BytesIO()
    _Pickler(file, 2).dump(content)
    content = file.getvalue()
  with zipfile.ZipFile(path, 'w', compression) as archive:
    archive.writestr('archive/data.pkl', content)
    archive.writestr('archive/byteorder', 'little')
    for key, array in storages.items():
      archive.writestr(f'archive/data/{key}', array.tobytes())
  return path


def save(path, arrays):
  """Writes arrays as a state dict."""
  storages = dict(enumerate(arrays.values()))
  tensors = {name: _tensor(str(key), array) for key, (name, array) in enumerate(arrays.items())}
  return _write(path, tensors, storages)


def _whole(file, name):
  return file.read(name, tuple(slice(0, size) for size in file.shape(name)))


@pytest.mark.parametrize('dtype', _KINDS)
def test_tensors_of_every_type(tmp_path, dtype):
  array = (np.arange(12).reshape(3, 4) % 5).astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  file = TorchFile(save(tmp_path / 'x.bin', {'a.weight': array, 'b': array[0]}))
  assert file.names() == {'a.weight', 'b'}
  assert (file.shape('a.weight'), file.dtype('b')) == ((3, 4), array.dtype)
  np.testing.assert_array_equal(_whole(file, 'a.weight'), array)
  np.testing.assert_array_equal(file.read('a.weight', (slice(1, 3), slice(0, 2))), array[1:3, :2])


def test_a_tensor_may_be_a_part_of_a_storage(tmp_path):
  array = np.arange(12, dtype=np.float32)
  tensor = _tensor('0', array, offset=1, shape=(3, 2), strides=(1, 4))
  file = TorchFile(_write(tmp_path / 'x.bin', {'a': tensor}, {0: array}))
  np.testing.assert_array_equal(_whole(file, 'a'), [[1, 5], [2, 6], [3, 7]])


@pytest.mark.parametrize(
  'call',
  [
    _Call(_Named('os', 'system'), 'touch executed'),
    _Call(_Named('builtins', 'eval'), "open('executed', 'w')"),
    _Call(_Named('torch', 'load'), 'x'),
    _Call(_Named('torch.storage', '_load_from_bytes'), b'x'),
    _Call(_Named('collections', 'OrderedDict.fromkeys'), 'x'),
    _Call(_Named('spectr_jax.io.hub.torch_file', 'TorchFile'), 'x'),
  ],
  ids=lambda call: f'{call.function.module}.{call.function.name}',
)
def test_nothing_is_executed(tmp_path, monkeypatch, call):
  monkeypatch.chdir(tmp_path)
  path = _write(tmp_path / 'x.bin', {'a': call}, {})
  named = f'{call.function.module}.{call.function.name}'
  with pytest.raises(ValueError, match=f'x.bin is not read: it names {named}, which a file of tensors does not need'):
    TorchFile(path)
  assert os.listdir(tmp_path) == ['x.bin']


def test_the_pickles_here_would_do_harm(tmp_path, monkeypatch):
  """An ordinary unpickler executes what the test above refuses."""
  monkeypatch.chdir(tmp_path)
  path = _write(tmp_path / 'x.bin', {'a': _Call(_Named('builtins', 'eval'), "open('executed', 'w')")}, {})
  with zipfile.ZipFile(path) as archive:
    pickle.loads(archive.read('archive/data.pkl'))['a'].close()
  assert 'executed' in os.listdir(tmp_path)


_ARRAY = np.arange(6, dtype=np.float32)


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
  path = _write(tmp_path / 'x.bin', {'a': _tensor('0', _ARRAY, **change)}, {0: _ARRAY})
  with pytest.raises(ValueError, match="x.bin: 'a' is not a tensor that can be read: "):
    TorchFile(path)


def test_what_is_no_state_dict(tmp_path):
  path = tmp_path / 'x.bin'
  with pytest.raises(ValueError, match="'epoch' is not a tensor"):
    TorchFile(_write(path, {'a': _tensor('0', _ARRAY), 'epoch': 3}, {0: _ARRAY}))
  with pytest.raises(ValueError, match='must hold tensors by name, got list'):
    TorchFile(_write(path, [1], {}))
  with pytest.raises(ValueError, match='the numbers of a are missing or of another size'):
    TorchFile(_write(path, {'a': _tensor('0', _ARRAY)}, {1: _ARRAY}))
  with pytest.raises(ValueError, match='the numbers of a are missing or of another size'):
    TorchFile(_write(path, {'a': _tensor('0', _ARRAY)}, {0: _ARRAY[:5]}))
  with pytest.raises(ValueError, match='x.bin is damaged: entry archive/byteorder is compressed'):
    TorchFile(_write(path, {'a': _tensor('0', _ARRAY)}, {0: _ARRAY}, zipfile.ZIP_DEFLATED))
  collected = collections.OrderedDict(a=1)
  with pytest.raises(ValueError, match="'a' is not a tensor"):
    TorchFile(_write(path, collected, {}))


def test_damaged_files(tmp_path):
  path = save(tmp_path / 'x.bin', {'a': _ARRAY})
  whole = path.read_bytes()
  for size in (0, 10, len(whole) // 2, len(whole) - 3):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='x.bin is damaged or not a file of torch.save') as error:
      TorchFile(path)
    assert '\n' not in str(error.value)
  path.write_bytes(pickle.dumps({'a': 1}))  # the format before 1.6 is no archive
  with pytest.raises(ValueError, match='x.bin is damaged or not a file of torch.save'):
    TorchFile(path)
  for content in (b'', b'\x80\x02}', b'garbage', b'cposix\nsystem\n.', b'\x80\x02c' + b'x' * 1000):
    with pytest.raises(ValueError, match='x.bin is not read|x.bin must hold'):
      TorchFile(_write(path, content, {}))
  at = whole.index(_ARRAY.tobytes())
  path.write_bytes(whole[:at] + b'\xff' + whole[at + 1 :])
  file = TorchFile(path)
  with pytest.raises(ValueError, match='x.bin is damaged: Bad CRC'):
    _whole(file, 'a')


@pytest.mark.parametrize(('name', 'file'), [('eagle', 'pytorch_model.bin'), ('medusa', 'medusa_lm_head.pt')])
def test_heads_of_such_files_are_read(tmp_path, name, file):
  target, folder = tiny_target(), write_head(tmp_path, name)
  expected = load_drafter(folder, target)
  (folder / 'model.safetensors').unlink()
  save(folder / file, arrays_of(name))
  found = load_drafter(folder, target)
  assert (type(found), found.config) == (type(expected), expected.config)
  np.testing.assert_array_equal(*(drafter.params['unembedding'] for drafter in (found, expected)))
