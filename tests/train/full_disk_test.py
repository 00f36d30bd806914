"""Disks that are full or cannot be written, at the start of training and where one file of a run lies."""

import contextlib
import os
import shutil

import pytest

from spectr_jax import load_model
from tests.train.workdir_test import content_of, refuse
from train.train import train

pytestmark = pytest.mark.slow


class Disk:
  """A small file system of its own."""

  def __init__(self, path, size):
    path.mkdir(parents=True, exist_ok=True)
    self.path = path
    if os.system(f'mount -t tmpfs -o size={size} tmpfs {path} 2>/dev/null'):
      pytest.skip('needs the right to mount')

  def fill(self):
    with (self.path / 'filling').open('wb', buffering=0) as file, contextlib.suppress(OSError):
      while True:
        file.write(bytes(4096))

  def close(self):
    os.system(f'umount -l {self.path}')


@pytest.fixture
def disk(tmp_path):
  disk = Disk(tmp_path / 'disk', '8m')
  yield disk
  disk.close()


def test_a_full_disk_at_the_start_changes_nothing(disk, finished, config):
  workdir = disk.path / 'run'
  shutil.copytree(finished, workdir)
  shutil.rmtree(workdir / 'checkpoints' / '12')
  disk.fill()
  before = content_of(workdir)
  with pytest.raises(ValueError, match='No space left on device') as info:
    train(config, workdir)
  assert str(workdir) in str(info.value)
  assert content_of(workdir) == before
  (disk.path / 'filling').unlink()
  assert train(config, workdir).step == 12


@pytest.mark.parametrize('name', ['metrics.jsonl', 'model', 'checkpoints', 'data'])
def test_a_disk_that_is_full_where_one_file_lies(disk, tmp_path, make_config, name):
  """It ends the run in one line that names the file; what was written before stays, and the run continues."""
  workdir = tmp_path / 'run'
  workdir.mkdir()
  (workdir / name).symlink_to(disk.path / name)
  if name in ('checkpoints', 'data'):
    (disk.path / name).mkdir()
  if name == 'metrics.jsonl':
    (workdir / name).unlink()
    config = make_config()
    config.num_steps = 6
    train(config, workdir)
    shutil.move(workdir / name, disk.path / name)
    (workdir / name).symlink_to(disk.path / name)
  disk.fill()
  with pytest.raises(ValueError, match=f'/(run|disk)/{name}.*No space left on device') as info:
    train(make_config(), workdir)
  assert len(str(info.value)) < 1000
  assert '\n' not in str(info.value)
  (disk.path / 'filling').unlink()
  assert train(make_config(), workdir).step == 12
  load_model(workdir / 'model')


def test_a_read_only_directory(disk, finished, config):
  workdir = disk.path / 'run'
  shutil.copytree(finished, workdir)
  os.system(f'mount -o remount,ro {disk.path}')
  refuse(config, workdir, 'run.*Read-only file system')
