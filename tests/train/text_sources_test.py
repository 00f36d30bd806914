import bz2
import gzip
import itertools
import os

import hostile
import ml_collections
import pytest
from etils import epath

from common import text_files
from train import text_sources
from train.text_sources import Files, Stdlib, is_held_out, make_source


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


@pytest.mark.parametrize(
  ('name', 'content'), [('a.txt', b'\xff\xfe\xfa'), ('a.gz', b'not gzip'), ('a.bz2', b'not bzip2')]
)
def test_what_cannot_be_decoded_is_named(tmp_path, name, content):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f'cannot read .*{name}'):
    list(Files((str(path),)).documents())


def test_a_truncated_archive_is_named(tmp_path):
  path = tmp_path / 'a.gz'
  path.write_bytes(gzip.compress(b'some text ' * 100)[:-12])
  with pytest.raises(ValueError, match=r'cannot read .*a\.gz'):
    list(Files((str(path),)).documents())


@pytest.mark.parametrize('pattern', ['nothing.txt', 'no*.txt', 'missing/*.txt', '*/nothing.txt'])
def test_missing_files_are_named(tmp_path, pattern):
  with pytest.raises(ValueError, match='no file matches'):
    list(Files((str(tmp_path / pattern),)).documents())


def test_no_files_and_unknown_sources_are_refused():
  source = make_source(ml_collections.ConfigDict({'source': 'files', 'files': '', 'held_out_percent': 1.0}))
  with pytest.raises(ValueError, match=r'needs config\.files'):
    list(source.documents('train'))
  with pytest.raises(ValueError, match="unknown source 'web'; allowed: files, lm1b, stdlib"):
    make_source(ml_collections.ConfigDict({'source': 'web', 'files': ''}))


def test_stdlib_takes_sources_and_docstrings_and_leaves_tests_and_site_packages(tmp_path, monkeypatch):
  docstring = 'What the module is for. ' * 10 + 'End.'
  for name in ('a.py', 'b/c.py', 'test/d.py', 'b/tests/e.py', 'site-packages/f.py', 'b/__pycache__/g.py'):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(f'"""{docstring}"""\nname = {name!r}\n')
  (tmp_path / 'odd.py').write_text('this is (not Python')
  (tmp_path / 'short.py').write_text('"""Short."""')
  monkeypatch.setattr(text_sources.sysconfig, 'get_path', lambda name: str(tmp_path))
  found = list(Stdlib().documents())
  assert [line for text in found for line in text.splitlines() if line.startswith('name =')] == [
    "name = 'a.py'", "name = 'b/c.py'",
  ]  # fmt: skip
  assert found.count(docstring) == 2
  assert found[-1] == '"""Short."""'  # as source, not as a docstring: those have 200 characters or more
  assert found == list(Stdlib().documents())
  assert set(Stdlib().describe()) == {'stdlib/documents', 'stdlib/python'}


def test_stdlib_of_this_python_has_text():
  documents = list(itertools.islice(Stdlib().documents(), 200))
  assert len(documents) == 200
  assert all(document.strip() == document and document for document in documents)


def test_the_split_depends_on_content_alone(documents):
  held_out = {document for document in documents if is_held_out(document, 10)}
  assert {document for document in reversed(documents[:200]) if is_held_out(document, 10)} == held_out & set(
    documents[:200]
  )
  # 400 documents at 10 %: within five standard deviations of 40.
  assert 10 < len(held_out) < 70
  assert not any(is_held_out(document, 0) for document in documents)
  assert all(is_held_out(document, 100) for document in documents)
  assert held_out <= {document for document in documents if is_held_out(document, 20)}


# Hostile files.


@pytest.mark.parametrize('name', ['a.txt', 'a.gz', 'a.bz2'])
@pytest.mark.parametrize('kind', ['pipe', 'device'])
def test_only_regular_files_are_read(tmp_path, name, kind):
  path = tmp_path / name
  if kind == 'pipe':
    os.mkfifo(path)
  else:
    path.symlink_to('/dev/zero')
  for read in (lambda: list(Files((str(path),)).documents()), Files((str(path),)).describe):
    with hostile.time_limit(5), pytest.raises(ValueError, match=f'{path} is not a regular file'):
      read()


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


@pytest.mark.parametrize('pattern', ['foo://x/*.txt', 'a' * 5000, 'a\0b'])
def test_what_cannot_be_a_path_is_named(pattern):
  with pytest.raises(ValueError, match="(cannot look for|no file matches) '[fa]"):
    list(Files((pattern,)).documents())


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
  assert text_files.read_text(epath.Path(path)) == path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['a.txt', 'a.gz', 'a.bz2'])
def test_mutated_text(tmp_path, name):
  path = tmp_path / name
  content = 'the owl\nan old 字 owl\r\n\n\u202e x\n'.encode() * 3
  packed = {'a.txt': lambda content: content, 'a.gz': gzip.compress, 'a.bz2': bz2.compress}[name]
  tally = hostile.Tally(path)
  for rng in hostile.rngs():
    if rng.random() < 0.5:
      path.write_bytes(hostile.mutated_bytes(packed(content), rng))
    else:
      path.write_bytes(packed(hostile.mutated_bytes(content, rng)))
    tally.read(lambda: list(Files((str(path),)).documents()))
  tally.check()
