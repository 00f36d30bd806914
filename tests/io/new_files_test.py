"""Files and folders that appear complete or not at all; folders with one writer."""

import multiprocessing
import os
import signal
import stat
import time

import pytest

from spectr_jax.io import new_files
from spectr_jax.io.new_files import check_new_folder, new_file, new_folder, only_writer, write_file


def _names(folder):
  return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize('failure', [OSError(28, 'No space left on device'), KeyboardInterrupt()])
@pytest.mark.parametrize('place', ['written', 'synced'])
def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path, monkeypatch, failure, place):
  path = tmp_path / 'o.json'
  path.write_text('old')
  path.chmod(0o600)

  def fail(*_):
    raise failure

  def write():
    with new_file(path) as file:
      file.write(b'new')
      file.flush()
      assert path.read_text() == 'old'
      if place == 'written':
        fail()
      monkeypatch.setattr(new_files.os, 'fsync', fail)

  with pytest.raises((ValueError, KeyboardInterrupt), match=r'^(cannot write .*o.json: No space left on device)?$'):
    write()
  assert path.read_text() == 'old'
  monkeypatch.undo()
  write_file(path, b'new')
  assert path.read_text() == 'new'
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert _names(tmp_path) == ['o.json']


@pytest.mark.parametrize('kind', ['folder', 'pipe', 'no_parent'])
def test_what_cannot_be_replaced_is_refused(tmp_path, kind):
  path = tmp_path / 'it'
  if kind == 'folder':
    path.mkdir()
  elif kind == 'pipe':
    os.mkfifo(path)
  else:
    path = path / 'o'
  with pytest.raises(ValueError, match='cannot write .*it'):
    write_file(path, b'')


def _hold(path, ready):
  with only_writer(path):
    ready.set()
    time.sleep(60)


def test_one_writer_until_its_process_ends(tmp_path):
  context = multiprocessing.get_context('spawn')
  ready = context.Event()
  process = context.Process(target=_hold, args=(tmp_path, ready))
  process.start()
  assert ready.wait(60)
  with pytest.raises(ValueError, match=f'{tmp_path} is being written by another process'), only_writer(tmp_path):
    pass
  os.kill(process.pid, signal.SIGKILL)
  process.join()
  with only_writer(tmp_path), pytest.raises(ValueError, match='another process'), only_writer(tmp_path):
    pass
  assert not _names(tmp_path)


@pytest.mark.parametrize('has_exchange', [True, False])
def test_a_folder_is_replaced_and_foreign_files_stay(tmp_path, monkeypatch, has_exchange):
  if not has_exchange:
    monkeypatch.setattr(new_files.ctypes, 'CDLL', lambda _: None)
  real, path = tmp_path / 'real', tmp_path / 'model'
  path.symlink_to(real)
  with new_folder(path, overwrite=False) as folder:
    (folder / 'a').write_text('1')
    assert not real.exists()
  (real / 'notes').mkdir()
  (real / 'notes' / 'mine.txt').write_text('mine')
  (real / 'link').symlink_to('/nowhere')
  with pytest.raises(ValueError, match='exists'), new_folder(path, overwrite=False):
    pass
  with new_folder(path, overwrite=True, owned=('a', 'b')) as folder:
    (folder / 'b').write_text('2')
  assert _names(tmp_path) == ['model', 'real']
  assert path.is_symlink()
  assert _names(real) == ['b', 'link', 'notes']
  assert (real / 'notes' / 'mine.txt').read_text() == 'mine'
  assert os.readlink(real / 'link') == '/nowhere'


def test_a_failure_changes_nothing(tmp_path):
  path = tmp_path / 'model'
  path.mkdir()
  (path / 'a').write_text('mine')
  check_new_folder(path)
  with pytest.raises(KeyError), new_folder(path, overwrite=True, owned=('a',)):
    raise KeyError
  assert _names(tmp_path) == ['model']
  assert (path / 'a').read_text() == 'mine'
  path = tmp_path / 'file'
  path.write_text('mine')
  with pytest.raises(ValueError, match='file exists and is not a folder'), new_folder(path, overwrite=True):
    pass
