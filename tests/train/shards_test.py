"""Files of conversations that are damaged, hostile or of others."""

import functools
import io
import os
import random
import zipfile

import ml_dtypes
import numpy as np
import pytest

from tests.hostile import NUM_MUTATIONS, Tally, mutated_bytes, refusal, rngs
from train.head_data import Shard, check_shard, shard_checksums

VOCAB_SIZE = 50


def make_shard(seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(4, 10, 6).astype(np.int32)
  return Shard(
    rng.integers(0, VOCAB_SIZE, (6, 10)).astype(np.int32), lengths, np.full(6, 2),
    rng.normal(size=(6, 10, 2, 4)).astype(ml_dtypes.bfloat16),
  )  # fmt: skip


@pytest.fixture
def path(tmp_path):
  make_shard().save(tmp_path / 'shard.npz')
  return tmp_path / 'shard.npz'


def write(path, compression=zipfile.ZIP_STORED, **arrays):
  """An archive of arrays, or of bytes."""
  shard = make_shard()
  names = {name: getattr(shard, name) for name in ('tokens', 'lengths', 'starts')}
  names |= {'features': shard.features.view(np.uint16)} | arrays
  with zipfile.ZipFile(path, 'w', compression) as archive:
    for name, array in names.items():
      if array is not None:
        content = io.BytesIO()
        if isinstance(array, bytes):
          content.write(array)
        else:
          np.lib.format.write_array(content, array, version=(1, 0))
        archive.writestr(f'{name}.npy', content.getvalue())


def header(shape, dtype='<u2'):
  content = io.BytesIO()
  np.lib.format.write_array_header_1_0(content, {'descr': dtype, 'fortran_order': False, 'shape': shape})
  return content.getvalue()


def test_a_shard_is_read_as_it_was_written(path):
  shard, loaded = make_shard(), Shard.load(path)
  for name in ('tokens', 'lengths', 'starts', 'features'):
    np.testing.assert_array_equal(getattr(loaded, name), getattr(shard, name))
  assert check_shard(path, VOCAB_SIZE) == (6, 10, 2, 4)
  assert isinstance(loaded.features, np.memmap)
  assert os.listdir(path.parent) == ['shard.npz']
  (path.parent / 'shard.part').write_text('mine')  # not an unfinished one of ours
  make_shard(1).save(path.parent / 'other.npz')
  assert shard_checksums(path) != shard_checksums(path.parent / 'other.npz')
  make_shard().save(path)
  assert (path.parent / 'shard.part').read_text() == 'mine'


def test_damage_is_named(path):
  whole = path.read_bytes()
  for content in (whole[:-100], b'', b'no archive' * 100):
    path.write_bytes(content)
    for read in (Shard.load, functools.partial(check_shard, vocab_size=VOCAB_SIZE), shard_checksums):
      with pytest.raises(ValueError, match='shard.npz is damaged: '):
        read(path)
  middle = whole.index(make_shard().features.tobytes()) + 100
  path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
  with pytest.raises(ValueError, match='shard.npz is damaged: features.npy has another checksum'):
    check_shard(path, VOCAB_SIZE)
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(ValueError, match='shard.npz is not a regular file'):
    check_shard(path, VOCAB_SIZE)


@pytest.mark.parametrize(('arrays', 'message'), [
  ({'features': header((6, 10, 2, 4), '|O') + bytes(960)}, 'features has another type than <u2'),
  ({'features': header((6, 10, 2, 4), '<f8') + bytes(960)}, 'features has another type than <u2'),
  ({'features': header((6, 10, 2, 10**9)) + bytes(960)}, 'features has another size'),
  ({'features': header((2**62, 10, 2, 4)) + bytes(960)}, 'features has another size'),
  ({'features': header((6, 10, 0, 4))}, 'features is empty'),
  ({'features': header((6, 10, 8))}, 'features is empty or has 3 dimensions'),
  ({'features': b''}, 'is damaged'),
  ({'features': header((6, 10, 2, 4)).replace(b'descr', b'descR') + bytes(960)}, 'is damaged'),
  ({'features': b'\x93NUMPY\1\0\xff\xff' + b'(' * 65535}, 'is damaged'),
  ({'features': None}, 'it holds other arrays'),
  ({'more': np.zeros(3)}, 'it holds other arrays'),
  ({'tokens': np.zeros((6, 9), np.int32)}, 'its arrays have different sizes'),
  ({'tokens': np.zeros((6, 10), np.int64)}, 'tokens has another type than <i4'),
  ({'tokens': header((6, 10), '<i4')}, 'is damaged'),
  ({'tokens': np.full((6, 10), -1, np.int32)}, 'a token, a length or a start is not valid'),
  ({'tokens': np.full((6, 10), VOCAB_SIZE, np.int32)}, 'has token 50, and the target has 50'),
  ({'lengths': np.full(6, 11, np.int32)}, 'a token, a length or a start is not valid'),
  ({'starts': np.full(6, 10, np.int32)}, 'a token, a length or a start is not valid'),
  ({'starts': np.full(6, -1)}, 'a token, a length or a start is not valid'),
  ({'compression': zipfile.ZIP_DEFLATED}, 'an array is compressed'),
])  # fmt: skip
def test_hostile_arrays(path, arrays, message):
  write(path)
  check_shard(path, VOCAB_SIZE)
  write(path, **arrays)
  refusal(lambda: check_shard(path, VOCAB_SIZE), path, f'shard.npz .*{message}')


@pytest.mark.slow
def test_hostile_shards(path):
  content, tally, wanted = path.read_bytes(), Tally(path), make_shard()

  def read():
    check_shard(path, VOCAB_SIZE)
    shard = Shard.load(path)
    assert float(np.abs(np.nan_to_num(shard.features.astype(np.float32))).sum()) >= 0
    assert shard.tokens.shape == wanted.tokens.shape

  for rng in rngs():
    path.write_bytes(mutated_bytes(content, rng))
    tally.read(read)
  # Headers of archives and arrays, which few of these hit.
  places = [i for name in (b'PK', b'\x93NUMPY') for i in range(len(content)) if content.startswith(name, i)]
  for i in range(NUM_MUTATIONS):
    rng = random.Random(f'header {i}')
    changed = bytearray(content)
    for _ in range(rng.choice((1, 2, 4))):
      changed[min(rng.choice(places) + rng.randrange(80), len(content) - 1)] = rng.choice(
        (0, 1, 255, rng.randrange(256))
      )
    path.write_bytes(changed)
    tally.read(read)
  tally.check(2 * NUM_MUTATIONS)
