"""Files of conversations: what is read is what was written, and damage is named."""

import io
import os
import random

import ml_dtypes
import numpy as np
import pytest

from train.head_data import Shard, shard_checksums


def make_shard(seed=0):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(4, 10, 6).astype(np.int32)
  return Shard(
    rng.integers(0, 50, (6, 10)).astype(np.int32), lengths, np.full(6, 2),
    rng.normal(size=(6, 10, 2, 4)).astype(ml_dtypes.bfloat16),
  )  # fmt: skip


def assert_equal(shard, other):
  for name in ('tokens', 'lengths', 'starts', 'features'):
    np.testing.assert_array_equal(getattr(shard, name), getattr(other, name))


@pytest.fixture
def path(tmp_path):
  make_shard().save(tmp_path / 'shard.npz')
  return tmp_path / 'shard.npz'


def test_a_shard_is_read_as_it_was_written(path):
  assert_equal(Shard.load(path), make_shard())
  assert os.listdir(path.parent) == ['shard.npz']
  make_shard(1).save(path.parent / 'other.npz')
  assert shard_checksums(path) != shard_checksums(path.parent / 'other.npz')
  make_shard(1).save(path)
  assert shard_checksums(path) == shard_checksums(path.parent / 'other.npz')


def other_arrays():
  content = io.BytesIO()
  np.savez(content, tokens=np.zeros((6, 10), np.int32))
  return content.getvalue()


def test_damage_is_named_or_changes_nothing(path):
  whole, rng, num_refused = path.read_bytes(), random.Random(0), 0
  for content in (whole[:-100], b'', b'no archive' * 100, other_arrays(), None):
    path.unlink()
    if content is not None:
      path.write_bytes(content)
    with pytest.raises(ValueError, match='shard.npz is damaged: '):
      Shard.load(path)
    path.write_bytes(whole)
  for _ in range(200):
    content = bytearray(whole)
    content[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    try:
      assert_equal(Shard.load(path), make_shard())
    except ValueError as error:
      num_refused += 'shard.npz is damaged: ' in str(error)
  assert 120 < num_refused < 200
