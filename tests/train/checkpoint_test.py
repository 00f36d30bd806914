"""Checkpoints whose files are damaged, and folders of checkpoints in which other things stand."""

import os
import random
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.hostile import refusal
from train.checkpoint import Checkpoints, checksum


def state_of(step):
  numbers = np.random.default_rng(step).normal(size=(2, 40, 30)).astype(np.float32)
  params = {'kernel': jnp.asarray(numbers[0]), 'gain': jnp.asarray(numbers[1, 0])}
  return {'params': params, 'moments': [jnp.asarray(numbers[1])], 'step': jnp.asarray(step, jnp.int32)}


def save(workdir, *steps, **changes):
  checkpoints = Checkpoints(epath.Path(workdir), 2)
  for step in steps:
    checkpoints.save(state_of(step) | changes)
  checkpoints.close()


def restore(workdir, like=None, **options):
  checkpoints = Checkpoints(epath.Path(workdir), 2)
  try:
    return checkpoints.restore(state_of(0) if like is None else like, **options)
  finally:
    checkpoints.close()


def assert_is_step(state, step):
  jax.tree.map(np.testing.assert_array_equal, state, state_of(step))


def refuse(workdir, message, like=None, **options):
  return refusal(lambda: restore(workdir, like, **options), workdir, message)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('saved')
  save(workdir, 3, 6)
  return workdir


@pytest.fixture
def run(tmp_path, saved):
  """A copy of a run with checkpoints of steps 3 and 6."""
  shutil.copytree(saved, tmp_path / 'run')
  return tmp_path / 'run'


@pytest.fixture
def newest(run):
  return run / 'checkpoints' / '6'


def files_of(checkpoint):
  return sorted(path for path in checkpoint.rglob('*') if path.is_file())


def test_what_was_saved_is_read_and_older_ones_go(tmp_path):
  assert restore(tmp_path) is None
  save(tmp_path, 3, 6, 9)
  assert sorted(os.listdir(tmp_path / 'checkpoints')) == ['6', '9']
  assert_is_step(restore(tmp_path), 9)
  save(tmp_path, 12)
  assert_is_step(restore(tmp_path), 12)


def test_the_checksum_is_a_sum_of_bits_by_place():
  arrays = {
    'a': np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32), 'b': np.arange(7, dtype=jnp.bfloat16),
    'c': np.int32(-5), 'd': np.zeros((0, 3), np.float32),
  }  # fmt: skip
  wanted = 0
  for array in arrays.values():
    words = array.reshape(-1).view(f'u{array.dtype.itemsize}').tolist()
    wanted = (31 * wanted + sum(word * (2 * place + 1) for place, word in enumerate(words))) % 2**32
  assert int(checksum(arrays)) == wanted
  for name, array in arrays.items():
    for place, bit in [(0, 0), (array.size - 1, 8 * array.dtype.itemsize - 1)] if array.size else ():
      words = array.reshape(-1).view(f'u{array.dtype.itemsize}').copy()
      words[place] ^= words.dtype.type(1 << bit)
      assert int(checksum(arrays | {name: words.view(array.dtype).reshape(array.shape)})) != wanted


def damages(content, rng):
  """A flipped bit, a missing end, no end at all, and zeros where a block was lost."""
  flipped, begin = bytearray(content), rng.randrange(len(content))
  flipped[begin] ^= 1 << rng.randrange(8)
  size = min(64, len(content) - begin)
  return bytes(flipped), content[:begin], b'', content[:begin] + bytes(size) + content[begin + size :], None


def outcomes(run, path, damaged):
  """Reads the newest checkpoint with other content of a file; the refusals, which name what is damaged."""
  content, refusals = path.read_bytes(), []
  for other in damaged:
    path.unlink()
    if other is not None:
      path.write_bytes(other)
    try:
      assert_is_step(restore(run), 6)
    except ValueError as error:
      refusals.append(str(error))
  path.write_bytes(content)
  line = re.compile(r'checkpoint .*/6 is damaged.*; with --allow_fallback, training continues from step 3')
  assert all(map(line.fullmatch, refusals))
  return refusals


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_damage_of_any_file_is_refused_or_changes_no_number(run, newest):
  rng, refused = random.Random(0), set()
  for path in files_of(newest):
    if outcomes(run, path, damages(path.read_bytes(), rng)):
      refused.add(path.relative_to(newest).parts[:2])
  assert {('default', 'd'), ('default', 'manifest.ocdbt'), ('default', '_METADATA')} <= refused
  # Bits that change a number and nothing else.
  largest = max(files_of(newest), key=lambda path: path.stat().st_size)
  content = largest.read_bytes()
  flips = [bytearray(content) for _ in range(20)]
  for flipped in flips:
    flipped[rng.randrange(len(content) // 2)] ^= 1 << rng.randrange(8)
  assert any('its numbers differ from their checksum' in line for line in outcomes(run, largest, map(bytes, flips)))


def test_the_one_before_serves_on_request(run, newest):
  (newest / 'default' / 'manifest.ocdbt').write_bytes(b'')
  refuse(run, '/6 is damaged.*; with --allow_fallback, training continues from step 3')
  assert newest.is_dir()
  assert_is_step(restore(run, allow_fallback=True), 3)
  assert (run / 'damaged_checkpoints' / '6-0').is_dir()
  assert_is_step(restore(run), 3)
  (run / 'checkpoints' / '3' / 'default' / 'manifest.ocdbt').write_bytes(b'')
  assert 'allow_fallback' not in refuse(run, '/3 is damaged', allow_fallback=True)
  assert (run / 'checkpoints' / '3').is_dir()


def test_what_systems_and_killed_processes_leave_is_no_damage(run, newest):
  newest.rename(run / 'checkpoints' / '6.orbax-checkpoint-tmp')
  assert_is_step(restore(run), 3)
  save(run, 6)
  assert_is_step(restore(run), 6)
  (newest / 'default' / '.DS_Store').write_bytes(b'1')
  (run / 'checkpoints' / 'notes.txt').write_text('mine')
  for name in ('30x', '-1'):
    (run / 'checkpoints' / name).mkdir()
  assert_is_step(restore(run), 6)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_what_is_whole_and_does_not_fit(run, newest):
  like = state_of(0)
  like['params']['kernel'] = jnp.zeros((7, 30))
  refuse(run, '/6 is damaged, or of another configuration or version', like)
  newest.rename(run / 'checkpoints' / '7')
  refuse(run, '/7 is that of step 6; with --allow_fallback')


def file_of_a_user(path):
  path.mkdir()
  (path / 'thesis.tex').write_text('mine')


@pytest.mark.parametrize(('change', 'name'), [
  (file_of_a_user, '5'), (lambda path: path.write_text('mine'), '12'),
])  # fmt: skip
def test_what_is_no_checkpoint_is_one_line_and_stays(run, change, name):
  change(run / 'checkpoints' / name)
  before = sorted(os.listdir(run / 'checkpoints'))
  for options in ({}, {'allow_fallback': True}):
    refuse(run, f'/{name} is not a checkpoint: move it to another place', **options)
  assert sorted(os.listdir(run / 'checkpoints')) == before


def test_the_folder_of_checkpoints_may_be_on_another_disk(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'run' / 'checkpoints').symlink_to(tmp_path / 'elsewhere')
  save(tmp_path / 'run', 3)
  assert_is_step(restore(tmp_path / 'run'), 3)
  assert os.listdir(tmp_path / 'elsewhere') == ['3']
