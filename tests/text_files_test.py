"""Plain-text files: documents in them, globs, and files that are damaged or hostile."""

import bz2
import gzip
import os

import hostile
import pytest
from etils import epath

from common.text_files import Files, read_text


def test_files_are_read_alike_however_compressed_and_split_at_blank_lines(tmp_path):
  text = '\none\ntwo\n\n  \nthree é\n\n\n'
  (tmp_path / 'a.txt').write_text(text)
  (tmp_path / 'b.gz').write_bytes(gzip.compress(text.encode()))
  (tmp_path / 'c.bz2').write_bytes(bz2.compress(text.encode()))
  for name in ('a.txt', 'b.gz', 'c.bz2'):
    assert list(Files((str(tmp_path / name),)).documents()) == ['one\ntwo', 'three é']


def test_globs_are_sorted_and_patterns_keep_their_order(tmp_path):
  for name in ('x/b.txt', 'x/a.txt', 'y/a.txt', 'c.txt'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  source = Files((str(tmp_path / 'c.txt'), str(tmp_path / '*/*.txt')))
  assert list(source.documents()) == ['c.txt', 'x/a.txt', 'x/b.txt', 'y/a.txt']
  # Two files of one name are two entries, the others go by their names.
  assert sorted(source.describe()) == sorted(
    ['files/c.txt', 'files/b.txt', f'files/{tmp_path}/x/a.txt', f'files/{tmp_path}/y/a.txt']
  )


@pytest.mark.parametrize(('name', 'content'), [
  ('a.txt', b'\xff\xfe\xfa'), ('a.gz', b'not gzip'), ('a.bz2', b'not bzip2'),
  ('a.gz', gzip.compress(b'some text ' * 100, mtime=0)[:-12]),
])  # fmt: skip
def test_what_cannot_be_decoded_is_named(tmp_path, name, content):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f'cannot read .*{name}'):
    list(Files((str(path),)).documents())


def test_what_names_no_file_is_named(tmp_path):
  for pattern in ('nothing.txt', 'no*.txt', 'missing/*.txt', '*/nothing.txt'):
    with pytest.raises(ValueError, match='no file matches'):
      list(Files((str(tmp_path / pattern),)).documents())
  for pattern in ('foo://x/*.txt', 'a' * 5000, 'a\0b'):
    with pytest.raises(ValueError, match="(cannot look for|no file matches) '[fa]"):
      list(Files((pattern,)).documents())


@pytest.mark.parametrize('name', ['a.txt', 'a.gz', 'a.bz2'])
def test_only_regular_files_are_read(tmp_path, name):
  for put in (os.mkfifo, lambda path: path.symlink_to('/dev/zero')):
    path = tmp_path / name
    put(path)
    for read in (lambda path: list(Files((str(path),)).documents()), lambda path: Files((str(path),)).describe()):
      with hostile.time_limit(5), pytest.raises(ValueError, match=f'{path} is not a regular file'):
        read(path)
    path.unlink()


@pytest.mark.parametrize('module', [gzip, bz2])
def test_an_archive_that_unpacks_to_more_than_text_does_is_refused(tmp_path, module):
  path = tmp_path / ('a.gz' if module is gzip else 'a.bz2')
  path.write_bytes(module.compress((b'some text ' * 100 + b'\n\n') * 2**10) * 10_000)
  start = hostile.peak_memory()
  with hostile.time_limit(), pytest.raises(ValueError, match=r'cannot read .*: it unpacks to more than [\d,]+ bytes'):
    sum(map(len, Files((str(path),)).documents()))
  assert hostile.peak_memory() - start < hostile.MEMORY


def test_lines_are_bounded(tmp_path):
  path = tmp_path / 'a.txt'
  with path.open('wb') as file:
    file.write(b'one\n\n')
    file.truncate(2**40)  # a sparse file of a terabyte
  start, documents = hostile.peak_memory(), Files((str(path),)).documents()
  assert next(documents) == 'one'
  with hostile.time_limit(), pytest.raises(ValueError, match='line 3 has more than 134,217,728 bytes'):
    next(documents)
  assert hostile.peak_memory() - start < hostile.MEMORY


def test_ends_of_lines_do_not_matter(tmp_path):
  """Lines that come one by one are those of the whole text."""
  text = 'a\r\nb\rc\x0bd\x1c\ne\u2028f\x85\n\ng\r\r\nh\r\n \r\ni\x0c\n\x0c\nj'
  path = tmp_path / 'a.txt'
  path.write_bytes(text.encode())
  documents, lines = [], []
  for line in [*text.splitlines(), '']:
    if line.strip():
      lines.append(line)
    elif lines:
      documents.append('\n'.join(lines))
      lines = []
  assert list(Files((str(path),)).documents()) == documents
  assert read_text(epath.Path(path)) == path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['a.txt', 'a.gz', 'a.bz2'])
def test_mutated_text(tmp_path, name):
  path = tmp_path / name
  content = 'the owl\nan old 字 owl\r\n\n\u202e x\n'.encode() * 3
  pack = {'a.txt': bytes, 'a.gz': gzip.compress, 'a.bz2': bz2.compress}[name]
  tally = hostile.Tally(path)
  for rng in hostile.rngs():
    first, then = (pack, bytes) if rng.random() < 0.5 else (bytes, pack)
    path.write_bytes(then(hostile.mutated_bytes(first(content), rng)))
    tally.read(lambda: list(Files((str(path),)).documents()))
  tally.check()
