"""Checkpoints whose files are damaged, and folders of checkpoints in which other things stand."""

import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.hostile import refusal
from train.checkpoint import Checkpoints


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


def flip(path, place=9, bit=0):
  content = bytearray(path.read_bytes())
  content[place] ^= 1 << bit
  path.write_bytes(content)


def test_what_was_saved_is_read_and_older_ones_go(tmp_path):
  assert restore(tmp_path) is None
  save(tmp_path, 3, 6, 9)
  assert sorted(os.listdir(tmp_path / 'checkpoints')) == ['6', '9']
  assert_is_step(restore(tmp_path), 9)
  for step in ('6', '9'):
    checkpoint = tmp_path / 'checkpoints' / step
    hashes = json.loads((checkpoint / 'checksums.json').read_text())['sha256']
    assert sorted([*hashes, 'checksums.json']) == [str(path.relative_to(checkpoint)) for path in files_of(checkpoint)]
    assert {'_CHECKPOINT_METADATA', 'default/_METADATA', 'default/manifest.ocdbt'} <= hashes.keys()
  save(tmp_path, 12)
  assert_is_step(restore(tmp_path), 12)


def test_a_flipped_bit_a_missing_end_and_more_in_any_file_is_damage(run, newest):
  rng = random.Random(0)
  for path in files_of(newest):
    content = path.read_bytes()
    flip(path, rng.randrange(len(content)), rng.randrange(8))
    for damaged in (path.read_bytes(), content[: rng.randrange(len(content))], content + b'\0'):
      path.write_bytes(damaged)
      message = refuse(run, r'checkpoint .*/6 is damaged \(.*\); with --allow_fallback, training continues from step 3')
      assert path.name in message
    path.write_bytes(content)
  assert_is_step(restore(run), 6)
  flip(newest / 'default' / 'manifest.ocdbt')
  assert_is_step(restore(run, allow_fallback=True), 3)
  assert (run / 'damaged_checkpoints' / '6-0').is_dir()
  assert_is_step(restore(run), 3)


def written(name, content):
  """Damage: a file of a checkpoint has another content."""
  return lambda checkpoint: (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize(('damage', 'message'), [
  (lambda checkpoint: next((checkpoint / 'default' / 'd').iterdir()).unlink(), 'default/d/[0-9a-f]* is missing'),
  (lambda checkpoint: shutil.rmtree(checkpoint / 'default'), 'is missing'),
  (written('default/d/other', b'1'), 'default/d/other was not saved with it'),
  (lambda checkpoint: (checkpoint / 'checksums.json').unlink(), 'checksums.json is missing'),
  (written('checksums.json', b'{"sha256": {}}'), 'checksums.json is not as it was written'),
  (written('checksums.json', b'[' * 10**6), 'checksums.json is damaged: it is nested too deeply'),
  (written('checksums.json', b'[1]'), 'checksums.json must hold an object'),
  (written('_CHECKPOINT_METADATA', b'{"a":' * 10**6), '_CHECKPOINT_METADATA is damaged: it is nested too deeply'),
  (written('_CHECKPOINT_METADATA', b'\xff\xfe'), '_CHECKPOINT_METADATA is damaged: byte 0 is not UTF-8'),
])  # fmt: skip
def test_damage_is_named_and_the_one_before_serves(run, newest, damage, message):
  damage(newest)
  refuse(run, rf'/6 is damaged \(.*{message}.*\); with --allow_fallback')
  assert newest.is_dir()
  assert_is_step(restore(run, allow_fallback=True), 3)
  assert not newest.exists()


def test_damage_of_an_older_one_does_not_matter_until_it_is_needed(run, newest):
  flip(run / 'checkpoints' / '3' / 'default' / 'manifest.ocdbt')
  assert_is_step(restore(run), 6)
  flip(newest / 'default' / 'manifest.ocdbt')
  assert 'allow_fallback' not in refuse(run, '/3 is damaged', allow_fallback=True)
  assert not (run / 'damaged_checkpoints').exists()


def test_what_systems_and_killed_processes_leave_is_no_damage(run, newest):
  newest.rename(run / 'checkpoints' / '6.orbax-checkpoint-tmp-complete')
  assert_is_step(restore(run), 3)
  save(run, 6)
  assert_is_step(restore(run), 6)
  assert sorted(os.listdir(run / 'checkpoints')) == ['3', '6']
  (newest / 'default' / '.DS_Store').write_bytes(b'1')
  (run / 'checkpoints' / 'notes.txt').write_text('mine')
  for name in ('30x', '-1'):
    (run / 'checkpoints' / name).mkdir()
  assert_is_step(restore(run), 6)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # reads still under way
def test_what_is_whole_and_does_not_fit(run, newest, tmp_path):
  like = state_of(0)
  like['params']['kernel'] = jnp.zeros((7, 30))
  refuse(run, '/6 has all of its files, but is of another configuration or version', like)
  newest.rename(run / 'checkpoints' / '7')
  refuse(run, '/7 is that of step 6; with --allow_fallback')
  save(tmp_path / 'other', 3, moments=[jnp.full((40, 30), jnp.nan)])
  refuse(tmp_path / 'other', '/3 is damaged .it has numbers that are not finite')


def pipe(path):
  path.unlink(missing_ok=True)
  path.parent.mkdir(exist_ok=True)
  os.mkfifo(path)


def link(path):
  path.rename(path.parents[2] / 'd')
  path.symlink_to(path.parents[2] / 'd')


def file_of_a_user(path):
  path.mkdir()
  (path / 'thesis.tex').write_text('mine')


@pytest.mark.parametrize(('change', 'name', 'message'), [
  (pipe, '6/default/_METADATA', r'/6 is damaged \(.*_METADATA is not a regular file\)'),
  (pipe, '3/metrics/metrics', r'/3 is damaged \(.*metrics is not a regular file\)'),
  (link, '6/default/d', r'/6 is damaged \(.*/d is a symbolic link\)'),
  (lambda path: path.symlink_to(path.parent / '6'), '9', r'/9 is damaged \(.*/9 is a symbolic link\)'),
  (lambda path: os.truncate(path, 10**10), '6/default/_METADATA', r'/6 is damaged \(.* has 10,000,000,000 bytes'),
  (lambda path: os.truncate(path, 10**10), '3/_CHECKPOINT_METADATA', r'/3 is damaged \(.* has 10,000,000,000 bytes'),
  (file_of_a_user, '5', '/5 is not a checkpoint'),
  (lambda path: path.write_text('mine'), '12', '/12 is not a checkpoint'),
  *(
    (lambda path: shutil.copytree(path.parent / '6', path), name, f"holds '{shown}', which is no step")
    for name, shown in ((str(10**18), '1000000000000000000'), ('9' * 200, '9+[.]+9+'), ('007', '007'))
  ),
  (lambda path: path.symlink_to(path.parent), '9.orbax-checkpoint-tmp', 'is no unfinished checkpoint'),
])  # fmt: skip
def test_what_is_no_checkpoint_is_one_line_and_stays(run, change, name, message):
  change(run / 'checkpoints' / name)
  before = sorted(os.listdir(run / 'checkpoints'))
  for options in ({}, {'allow_fallback': True}):
    refuse(run, message + '.*: move it to another place', **options)
  assert sorted(os.listdir(run / 'checkpoints')) == before


def test_the_folder_of_checkpoints_may_be_on_another_disk(tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'run' / 'checkpoints').symlink_to(tmp_path / 'elsewhere')
  save(tmp_path / 'run', 3)
  assert_is_step(restore(tmp_path / 'run'), 3)
  assert os.listdir(tmp_path / 'elsewhere') == ['3']


def test_damaged_checkpoints_go_nowhere_else(run, newest, tmp_path):
  flip(newest / 'default' / 'manifest.ocdbt')
  aside = run / 'damaged_checkpoints'
  aside.symlink_to(tmp_path)
  refuse(run, 'cannot move .*/6 to .*damaged_checkpoints: .* is a symbolic link', allow_fallback=True)
  aside.unlink()
  aside.write_text('mine')
  refuse(run, 'cannot move .*/6 to .*damaged_checkpoints: File exists', allow_fallback=True)
  assert newest.is_dir()
