"""LM1B from an archive made here: prepared without TensorFlow, read back, and everything that can be missing."""

import hashlib
import importlib.util
import io
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tarfile

import pytest

from train import lm1b

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
  any(
    importlib.util.find_spec(name) is None for name in ('array_record', 'importlib_resources', 'tensorflow_datasets')
  ),
  reason='needs the extra lm1b',
)

# Python before 3.11.4 knows no filters, and later versions warn without one.
_FILTER = {'filter': 'data'} if hasattr(tarfile, 'data_filter') else {}


@pytest.fixture(scope='module')
def sentences():
  """Sentences by file: two shards of each part, in the archive's folders, and a file that is in neither part."""
  rng = random.Random(1)

  def shard():
    words = 'the', 'of', 'parliament', 'said', 'naïve', ',', '"', '1.2', 'markets'
    return [' '.join(rng.choices(words, k=rng.randint(1, 20))) + ' .' for _ in range(rng.randint(150, 250))]

  train, held_out = (folder for folder, _ in lm1b._FILES.values())
  return {
    f'{train}/news.en-00001-of-00100': shard(),
    f'{train}/news.en-00002-of-00100': shard(),
    f'{held_out}/news.en.heldout-00000-of-00050': shard(),
    f'{held_out}/news.en.heldout-00001-of-00050': shard(),
    f'{held_out}/news.en-00000-of-00100': shard(),
  }


@pytest.fixture(scope='module')
def archive(tmp_path_factory, sentences):
  path = tmp_path_factory.mktemp('manual') / lm1b.ARCHIVE
  with tarfile.open(path, 'w:gz') as tar:
    for name, lines in sentences.items():
      content = ''.join(line + '\n' for line in lines).encode()
      member = tarfile.TarInfo(f'./{lm1b.FOLDER}/{name}')
      member.size = len(content)
      tar.addfile(member, io.BytesIO(content))
  return path


def _part(sentences, part):
  folder, prefix = lm1b._FILES[part]
  return [line for name, lines in sentences.items() if name.startswith(f'{folder}/{prefix}') for line in lines]


def _prepare(archive, data_dir, sha256=None):
  """Runs the command in a process of its own, as TensorFlow Datasets keeps state."""
  checksum = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
  arguments = f'--manual_dir={archive.parent}', f'--data_dir={data_dir}', f'--sha256={checksum}'
  command = [sys.executable, '-m', 'train.prepare_data', *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='module')
def extracted(tmp_path_factory, archive):
  path = tmp_path_factory.mktemp('extracted')
  with tarfile.open(archive) as tar:
    tar.extractall(path, **_FILTER)
  return path


@pytest.fixture(scope='module')
def prepared(tmp_path_factory, archive):
  data_dir = tmp_path_factory.mktemp('data')
  done = _prepare(archive, data_dir)
  assert done.returncode == 0, done.stderr
  assert str(data_dir / 'lm1b' / '1.1.0') in done.stdout
  return data_dir


@pytest.mark.parametrize('part', ['train', 'held_out'])
def test_what_was_prepared_has_every_sentence_once(prepared, sentences, part):
  found = list(lm1b.Lm1b(str(prepared)).documents(part))
  assert sorted(found) == sorted(_part(sentences, part))
  assert found == list(lm1b.Lm1b(str(prepared)).documents(part))


def test_tensorflow_is_not_needed(prepared):
  code = (
    'import sys; from train.lm1b import Lm1b;'
    f' num_documents = sum(1 for _ in Lm1b({str(prepared)!r}).documents("train"));'
    ' print(num_documents if "tensorflow" not in sys.modules else "TensorFlow was imported")'
  )
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 300


def test_the_extracted_archive_is_read_as_it_is(extracted, prepared, sentences):
  for path in (extracted, extracted / lm1b.FOLDER):
    source = lm1b.Lm1b(str(path))
    for part in ('train', 'held_out'):
      assert list(source.documents(part)) == _part(sentences, part)
  first, second = (lm1b.Lm1b(str(path)).describe() for path in (prepared, extracted))
  assert (first['lm1b/form'], second['lm1b/form']) == ('array_record 1.1.0', 'extracted')
  assert first['lm1b/files'] != second['lm1b/files']


def test_nothing_there_is_one_message_with_the_three_ways(tmp_path):
  with pytest.raises(ValueError, match=r'no LM1B in .*\(1\).*\(2\).*statmt\.org.*\(3\)'):
    next(lm1b.Lm1b(str(tmp_path)).documents('train'))
  with pytest.raises(ValueError, match='no LM1B in'):
    lm1b.Lm1b(str(tmp_path)).describe()


def test_a_prepared_data_set_is_not_overwritten(prepared, archive):
  before = sorted(path.stat().st_mtime_ns for path in prepared.rglob('*'))
  done = _prepare(archive, prepared)
  assert done.returncode == 1
  assert done.stderr.strip().splitlines()[-1].endswith('exists and is not overwritten')
  assert sorted(path.stat().st_mtime_ns for path in prepared.rglob('*')) == before


def test_another_archive_is_refused(tmp_path, archive):
  done = _prepare(archive, tmp_path, lm1b.SHA256)
  assert done.returncode == 1
  assert done.stderr.count('\n') == 1
  assert 'it is damaged or another file' in done.stderr
  assert not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match=r'no archive at .*: download .* from https://www\.statmt\.org'):
    lm1b.check_archive(tmp_path / lm1b.ARCHIVE, lm1b.SHA256, print)


def test_a_damaged_archive_leaves_nothing_that_looks_finished(tmp_path, archive):
  damaged = tmp_path / 'manual' / lm1b.ARCHIVE
  damaged.parent.mkdir()
  damaged.write_bytes(archive.read_bytes()[:-2000])
  done = _prepare(damaged, tmp_path / 'data')
  assert done.returncode == 1
  assert 'cannot prepare' in done.stderr.strip().splitlines()[-1]
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'data' / 'lm1b' / '1.1.0').exists()


def test_another_format_is_refused(tmp_path, prepared):
  shutil.copytree(prepared, tmp_path / 'data')
  path = tmp_path / 'data/lm1b/1.1.0/dataset_info.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | {'fileFormat': 'tfrecord'}))
  with pytest.raises(ValueError, match='prepared as tfrecord, which takes TensorFlow to read'):
    next(lm1b.Lm1b(str(tmp_path / 'data')).documents('train'))
