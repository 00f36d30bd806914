"""Programs are handed on between runs whole, and not without limit."""

import os
import time

import kept_programs
import pytest


@pytest.fixture
def directories(tmp_path):
  own, kept = tmp_path / 'own', tmp_path / 'kept'
  for directory in (own, kept):
    directory.mkdir()
  return own, kept


def _compile(own, name, program=b'program', used=None):
  """Writes what JAX writes."""
  (own / f'{name}-cache').write_bytes(program)
  (own / f'{name}-atime').write_bytes((time.time_ns() if used is None else used).to_bytes(8, 'little'))


def test_the_next_run_has_what_one_compiled(directories, tmp_path):
  own, kept = directories
  start = kept_programs.take_over(kept, own)
  _compile(own, 'f')
  kept_programs.keep(own, kept, start)
  following = tmp_path / 'following'
  following.mkdir()
  kept_programs.take_over(kept, following)
  assert {path.name for path in following.iterdir()} == {'f-cache', 'f-atime'}
  assert (following / 'f-cache').read_bytes() == b'program'


def test_what_is_not_used_is_dropped_first(directories):
  own, kept = directories
  for name in 'fgh':
    (kept / f'{name}-cache').write_bytes(b'x' * 10)
    os.utime(kept / f'{name}-cache', (0, 0))
  start = kept_programs.take_over(kept, own)
  _compile(own, 'g', b'x' * 10)
  kept_programs.keep(own, kept, start, most_bytes=15)
  assert [path.name for path in kept.iterdir()] == ['g-cache']


def test_programs_of_others_are_refused(tmp_path, monkeypatch):
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  monkeypatch.setattr(kept_programs.tempfile, 'tempdir', None)
  path = kept_programs.directory()
  assert path.stat().st_mode & 0o777 == 0o700
  uid = os.getuid() + 1
  path.rename(str(path).replace(f'_{os.getuid()}_', f'_{uid}_'))
  monkeypatch.setattr(os, 'getuid', lambda: uid)
  with pytest.raises(PermissionError, match='belongs to another user'):
    kept_programs.directory()
