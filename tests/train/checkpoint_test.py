"""Checkpoints whose files are damaged, and folders of checkpoints in which other things stand."""

import json
import os
import random
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.hostile import Tally
from train.checkpoint import Checkpoints


def state_of(step):
  numbers = np.random.default_rng(step).normal(size=(2, 40, 30)).astype(np.float32)
  params = {'kernel': jnp.asarray(numbers[0]), 'gain': jnp.asarray(numbers[1, 0])}
  return {'params': params, 'moments': [jnp.asarray(numbers[1])], 'step': jnp.asarray(step, jnp.int32)}


def save(workdir, *steps, keep=2):
  checkpoints = Checkpoints(epath.Path(workdir), keep)
  for step in steps:
    checkpoints.save(state_of(step))
  checkpoints.close()


def restore(workdir, like=None, **options):
  checkpoints = Checkpoints(epath.Path(workdir), 2)
  try:
    return checkpoints.restore(state_of(0) if like is None else like, **options)
  finally:
    checkpoints.close()


def assert_is_step(state, step):
  jax.tree.map(np.testing.assert_array_equal, state, state_of(step))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('saved')
  save(workdir, 3, 6)
  return workdir


@pytest.fixture
def copy(tmp_path, saved):
  shutil.copytree(saved, tmp_path / 'run')
  return tmp_path / 'run'


def files_of(checkpoint):
  return sorted(path for path in checkpoint.rglob('*') if path.is_file())


def flip(path, place, bit):
  content = bytearray(path.read_bytes())
  content[place] ^= 1 << bit
  path.write_bytes(content)


def test_what_was_saved_is_read_and_older_ones_go(tmp_path):
  assert restore(tmp_path) is None
  save(tmp_path, 3, 6, 9)
  assert sorted(path.name for path in (tmp_path / 'checkpoints').iterdir()) == ['6', '9']
  assert_is_step(restore(tmp_path), 9)
  save(tmp_path, 12)
  assert_is_step(restore(tmp_path), 12)


def test_every_file_has_a_checksum(saved):
  for step in ('3', '6'):
    checkpoint = saved / 'checkpoints' / step
    hashes = json.loads((checkpoint / 'checksums.json').read_text())['sha256']
    names = [str(path.relative_to(checkpoint)) for path in files_of(checkpoint)]
    assert sorted([*hashes, 'checksums.json']) == names
    assert {'_CHECKPOINT_METADATA', 'default/_METADATA', 'default/manifest.ocdbt'} <= set(names)


def test_one_flipped_bit_in_any_file_is_damage(copy):
  """Flips spread over all files, one in each."""
  checkpoint, rng = copy / 'checkpoints' / '6', random.Random(0)
  for path in files_of(checkpoint):
    content = path.read_bytes()
    flip(path, rng.randrange(len(content)), rng.randrange(8))
    with pytest.raises(
      ValueError, match=r'checkpoint .*/6 is damaged \(.*\); with --allow_fallback, training continues from step 3'
    ) as info:
      restore(copy)
    assert path.name in str(info.value)
    path.write_bytes(content)
  assert_is_step(restore(copy), 6)
  flip(checkpoint / 'default' / 'manifest.ocdbt', 9, 0)
  assert_is_step(restore(copy, allow_fallback=True), 3)
  assert (copy / 'damaged_checkpoints' / '6-0').is_dir()
  assert_is_step(restore(copy), 3)


@pytest.mark.slow
def test_hundreds_of_flips_are_damage(copy):
  checkpoint, num = copy / 'checkpoints' / '6', 600
  paths, tally = files_of(checkpoint), Tally(checkpoint)
  for i in range(num):
    rng = random.Random(f'flip {i}')
    path = paths[i % len(paths)]
    content = path.read_bytes()
    if i % 2:
      flip(path, rng.randrange(len(content)), rng.randrange(8))
    else:
      path.write_bytes(content[: rng.randrange(len(content))] if i % 4 else content + rng.randbytes(rng.choice((1, 9))))
    tally.read(lambda: restore(copy), (i, path.name))
    path.write_bytes(content)
  tally.check(num)
  assert tally.num_read == 0
  assert all('is damaged' in message for message in tally.refusals)


def remove(checkpoint):
  next((checkpoint / 'default' / 'd').iterdir()).unlink()


def remove_all(checkpoint):
  shutil.rmtree(checkpoint / 'default')


def add(checkpoint):
  (checkpoint / 'default' / 'd' / 'other').write_bytes(b'1')


def empty_checksums(checkpoint):
  (checkpoint / 'checksums.json').write_text('{"sha256": {}}')


def deep_checksums(checkpoint):
  (checkpoint / 'checksums.json').write_text('[' * 10**6)


def list_of_checksums(checkpoint):
  (checkpoint / 'checksums.json').write_text('[1]')


def deep_description(checkpoint):
  (checkpoint / '_CHECKPOINT_METADATA').write_text('{"a":' * 10**6)


def binary_description(checkpoint):
  (checkpoint / '_CHECKPOINT_METADATA').write_bytes(b'\xff\xfe')


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (remove, 'default/d/[0-9a-f]* is missing'),
    (remove_all, 'is missing'),
    (add, 'default/d/other was not saved with it'),
    (empty_checksums, 'checksums.json is not as it was written'),
    (deep_checksums, 'checksums.json is damaged: it is nested too deeply'),
    (list_of_checksums, 'checksums.json must hold an object'),
    (deep_description, '_CHECKPOINT_METADATA is damaged: it is nested too deeply'),
    (binary_description, '_CHECKPOINT_METADATA is damaged: byte 0 is not UTF-8'),
  ],
)
def test_damage_is_named_and_the_one_before_serves(copy, damage, message):
  checkpoint = copy / 'checkpoints' / '6'
  damage(checkpoint)
  with pytest.raises(ValueError, match=rf'/6 is damaged \(.*{message}.*\); with --allow_fallback') as info:
    restore(copy)
  assert '\n' not in str(info.value)
  assert checkpoint.is_dir()
  assert_is_step(restore(copy, allow_fallback=True), 3)
  assert not checkpoint.exists()


def test_damage_of_an_older_one_does_not_matter_until_it_is_needed(copy):
  flip(copy / 'checkpoints' / '3' / 'default' / 'manifest.ocdbt', 9, 0)
  assert_is_step(restore(copy), 6)
  flip(copy / 'checkpoints' / '6' / 'default' / 'manifest.ocdbt', 9, 0)
  with pytest.raises(ValueError, match='/3 is damaged') as info:
    restore(copy, allow_fallback=True)
  assert 'allow_fallback' not in str(info.value)
  assert not (copy / 'damaged_checkpoints').exists()


def test_what_systems_add_is_no_damage(copy):
  (copy / 'checkpoints' / '6' / 'default' / '.DS_Store').write_bytes(b'1')
  (copy / 'checkpoints' / 'notes.txt').write_text('mine')
  (copy / 'checkpoints' / '30x').mkdir()
  (copy / 'checkpoints' / '-1').mkdir()
  assert_is_step(restore(copy), 6)


def test_a_checkpoint_without_checksums_is_read_and_said_to_be_unchecked(copy):
  (copy / 'checkpoints' / '6' / 'checksums.json').unlink()
  checkpoints = Checkpoints(epath.Path(copy), 2)
  assert_is_step(checkpoints.restore(state_of(0)), 6)
  assert checkpoints.unchecked == copy / 'checkpoints' / '6'
  checkpoints.close()


def test_a_process_killed_before_the_name_was_given_leaves_no_checkpoint(copy):
  (copy / 'checkpoints' / '6').rename(copy / 'checkpoints' / '6.orbax-checkpoint-tmp-complete')
  assert_is_step(restore(copy), 3)
  save(copy, 6)
  assert_is_step(restore(copy), 6)
  assert sorted(path.name for path in (copy / 'checkpoints').iterdir()) == ['3', '6']


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_another_configuration_is_not_called_damage(copy):
  like = state_of(0)
  like['params']['kernel'] = jnp.zeros((7, 30))
  with pytest.raises(ValueError, match='/6 has all of its files, but is of another configuration or version'):
    restore(copy, like)
  (copy / 'checkpoints' / '6' / 'checksums.json').unlink()
  with pytest.raises(ValueError, match='/6 is damaged or of another configuration or version'):
    restore(copy, like)


def test_numbers_that_are_not_finite_are_damage(tmp_path):
  checkpoints = Checkpoints(epath.Path(tmp_path), 2)
  checkpoints.save(state_of(3) | {'moments': [jnp.full((40, 30), jnp.nan)]})
  checkpoints.close()
  with pytest.raises(ValueError, match='/3 is damaged .it has numbers that are not finite'):
    restore(tmp_path)


def test_a_renamed_checkpoint_is_refused(copy):
  (copy / 'checkpoints' / '6').rename(copy / 'checkpoints' / '7')
  with pytest.raises(ValueError, match='/7 is that of step 6; with --allow_fallback'):
    restore(copy)


def pipe(folder):
  os.unlink(folder / '6' / 'default' / '_METADATA')
  os.mkfifo(folder / '6' / 'default' / '_METADATA')


def pipe_in_an_older_one(folder):
  (folder / '3' / 'metrics').mkdir()
  os.mkfifo(folder / '3' / 'metrics' / 'metrics')


def link(folder):
  (folder / '6' / 'default' / 'd').rename(folder / 'd')
  (folder / '6' / 'default' / 'd').symlink_to(folder / 'd')


def linked_step(folder):
  (folder / '9').symlink_to(folder / '6')


def huge(folder):
  os.truncate(folder / '6' / 'default' / '_METADATA', 10**10)


def huge_in_an_older_one(folder):
  os.truncate(folder / '3' / '_CHECKPOINT_METADATA', 10**10)


def folder_of_a_user(folder):
  (folder / '5').mkdir()
  (folder / '5' / 'thesis.tex').write_text('mine')


def file_of_a_user(folder):
  (folder / '12').write_text('mine')


def large_step(folder):
  shutil.copytree(folder / '6', folder / str(10**18))


def larger_step(folder):
  shutil.copytree(folder / '6', folder / ('9' * 200))


def padded_step(folder):
  shutil.copytree(folder / '6', folder / '007')


def linked_unfinished(folder):
  (folder / '9.orbax-checkpoint-tmp').symlink_to(folder)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (pipe, r'/6 is damaged \(.*_METADATA is not a regular file\)'),
    (pipe_in_an_older_one, r'/3 is damaged \(.*metrics is not a regular file\)'),
    (link, r'/6 is damaged \(.*/d is a symbolic link\)'),
    (linked_step, r'/9 is damaged \(.*/9 is a symbolic link\)'),
    (huge, r'/6 is damaged \(default/_METADATA has 10,000,000,000 bytes'),
    (huge_in_an_older_one, r'/3 is damaged \(_CHECKPOINT_METADATA has 10,000,000,000 bytes'),
    (folder_of_a_user, '/5 is not a checkpoint'),
    (file_of_a_user, '/12 is not a checkpoint'),
    (large_step, "holds '1000000000000000000', which is no step"),
    (larger_step, "holds '9+[.]+9+', which is no step"),
    (padded_step, "holds '007', which is no step"),
    (linked_unfinished, 'is no unfinished checkpoint'),
  ],
)
def test_what_is_no_checkpoint_is_one_line_and_stays(copy, change, message):
  change(copy / 'checkpoints')
  before = sorted(os.listdir(copy / 'checkpoints'))
  for options in ({}, {'allow_fallback': True}):
    with pytest.raises(ValueError, match=message + '.*: move it to another place') as info:
      restore(copy, **options)
    assert '\n' not in str(info.value)
    assert len(str(info.value)) < 600
  assert sorted(os.listdir(copy / 'checkpoints')) == before


def test_the_folder_of_checkpoints_is_something_else(tmp_path):
  for name, make in (('file', lambda path: path.write_text('mine')), ('pipe', os.mkfifo)):
    (tmp_path / name).mkdir()
    make(tmp_path / name / 'checkpoints')
    with pytest.raises(ValueError, match=re.escape(f'{tmp_path}/{name}/checkpoints is not a folder')):
      restore(tmp_path / name)
  # A folder on another disk, say.
  (tmp_path / 'run').mkdir()
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'run' / 'checkpoints').symlink_to(tmp_path / 'elsewhere')
  save(tmp_path / 'run', 3)
  assert_is_step(restore(tmp_path / 'run'), 3)
  assert sorted(os.listdir(tmp_path / 'elsewhere')) == ['3']


def test_damaged_checkpoints_go_nowhere_else(copy, tmp_path):
  remove(copy / 'checkpoints' / '6')
  (copy / 'damaged_checkpoints').symlink_to(tmp_path)
  with pytest.raises(ValueError, match='cannot move .*/6 to .*damaged_checkpoints: .* is a symbolic link'):
    restore(copy, allow_fallback=True)
  (copy / 'damaged_checkpoints').unlink()
  (copy / 'damaged_checkpoints').write_text('mine')
  with pytest.raises(ValueError, match='cannot move .*/6 to .*damaged_checkpoints: File exists'):
    restore(copy, allow_fallback=True)
  assert (copy / 'checkpoints' / '6').is_dir()
