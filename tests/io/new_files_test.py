"""Files and folders that appear complete or not at all; outputs with one writer."""

import multiprocessing
import os
import signal
import stat
import time

import pytest

from spectr_jax.io import new_files
from spectr_jax.io.new_files import NewFile, new_folder, only_writer, write_file


def _names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path):
  path = tmp_path / 'o.json'
  path.write_text('old')
  path.chmod(0o600)
  new = NewFile(path)
  new.write(b'new')
  assert path.read_text() == 'old'
  new.commit()
  new.discard()
  assert path.read_text() == 'new'
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  other = NewFile(tmp_path / 'other.json')
  other.write(b'new')
  other.discard()
  assert _names(tmp_path) == ['o.json']


def test_links_stay_and_planted_names_are_not_used(tmp_path, monkeypatch):
  victim, real, link = tmp_path / 'victim', tmp_path / 'real.json', tmp_path / 'o.json'
  victim.write_text('mine')
  link.symlink_to(real)
  for name in ('o.json.unfinished', 'real.json.unfinished', '.real.json.00.unfinished'):
    (tmp_path / name).symlink_to(victim)
  write_file(link, b'new')
  assert link.is_symlink()
  assert real.read_text() == 'new'
  # Even a name that was guessed is refused, since it is created and never opened.
  monkeypatch.setattr(new_files.secrets, 'token_hex', lambda _: '00')
  with pytest.raises(ValueError, match=r'cannot write .*real\.json: File exists'):
    write_file(link, b'newer')
  assert victim.read_text() == 'mine'
  assert real.read_text() == 'new'


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


def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch):
  path = tmp_path / 'o.json'
  path.write_text('old')

  def fail(_):
    raise OSError(28, 'No space left on device')

  new = NewFile(path)
  monkeypatch.setattr(new_files.os, 'fsync', fail)
  new.write(b'new')
  with pytest.raises(ValueError, match=r'o\.json: No space left on device'):
    new.commit()
  assert path.read_text() == 'old'
  assert _names(tmp_path) == ['o.json']


def _hold(path, ready):
  with only_writer(path):
    ready.set()
    time.sleep(60)


def test_one_writer_until_its_process_ends(tmp_path):
  path = tmp_path / 'o.json'
  context = multiprocessing.get_context('spawn')
  ready = context.Event()
  process = context.Process(target=_hold, args=(path, ready))
  process.start()
  assert ready.wait(60)
  with pytest.raises(ValueError, match=r'o\.json is being written by another process'), only_writer(path):
    pass
  os.kill(process.pid, signal.SIGKILL)
  process.join()
  assert _names(tmp_path) == ['.o.json.lock']
  with only_writer(path):
    with pytest.raises(ValueError, match='another process'), only_writer(path):
      pass
    with only_writer(tmp_path / 'other.json'):
      pass
  assert _names(tmp_path) == []


def test_a_lock_is_neither_a_link_nor_written(tmp_path):
  victim = tmp_path / 'victim'
  victim.write_text('mine')
  (tmp_path / '.o.lock').symlink_to(victim)
  with pytest.raises(ValueError, match='o.lock'), only_writer(tmp_path / 'o'):
    pass
  (tmp_path / '.p.lock').write_text('mine')
  with only_writer(tmp_path / 'p'):
    pass
  assert (tmp_path / '.p.lock').read_text() == victim.read_text() == 'mine'
  os.mkfifo(tmp_path / '.q.lock')
  with only_writer(tmp_path / 'q'):
    pass
  assert (tmp_path / '.q.lock').is_fifo()


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
  with new_folder(path, overwrite=True, owned=lambda _: ('a',)) as folder:
    (folder / 'b').write_text('2')
  assert _names(tmp_path) == ['model', 'real']
  assert path.is_symlink()
  assert _names(real) == ['b', 'link', 'notes']
  assert (real / 'notes' / 'mine.txt').read_text() == 'mine'
  assert os.readlink(real / 'link') == '/nowhere'


def test_a_foreign_file_is_not_replaced_and_a_failure_changes_nothing(tmp_path):
  path = tmp_path / 'model'
  path.mkdir()
  (path / 'a').write_text('mine')
  with pytest.raises(ValueError, match='model/a is not replaced'), new_folder(path, overwrite=True) as folder:
    (folder / 'a').write_text('new')
  with pytest.raises(KeyError), new_folder(path, overwrite=True, owned=lambda _: ('a',)) as folder:
    raise KeyError
  assert _names(tmp_path) == ['model']
  assert (path / 'a').read_text() == 'mine'
  path = tmp_path / 'file'
  path.write_text('mine')
  with pytest.raises(ValueError, match='file exists and is not a folder'), new_folder(path, overwrite=True):
    pass
