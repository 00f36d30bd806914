"""The One Billion Word Benchmark (Chelba et al. 2013), one sentence per document.

TensorFlow Datasets prepares and reads it here without TensorFlow, in the format `array_record`. The extracted archive
can also be read directly, without TensorFlow Datasets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator

from etils import epath

HOMEPAGE = 'https://www.statmt.org/lm-benchmark/'
FOLDER = '1-billion-word-language-modeling-benchmark-r13output'
ARCHIVE = f'{FOLDER}.tar.gz'
SHA256 = '01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e'
VERSION = '1.1.0'

# Folder and prefix of the files' names, by part.
_FILES = {
  'train': ('training-monolingual.tokenized.shuffled', 'news.en-'),
  'held_out': ('heldout-monolingual.tokenized.shuffled', 'news.en.heldout-'),
}
_SPLITS = {'train': 'train', 'held_out': 'test'}
_READ_AT_ONCE = 4096


def _tfds():
  """TensorFlow Datasets; a `ValueError` names what it lacks."""
  import importlib.util

  missing = [name for name in ('tensorflow_datasets', 'importlib_resources', 'array_record')
             if importlib.util.find_spec(name) is None]  # fmt: skip
  if missing:
    raise ValueError(f"source lm1b needs {', '.join(missing)}: install this project's extra, pip install -e '.[lm1b]'")
  import tensorflow_datasets

  return tensorflow_datasets


def _lines(stream) -> Iterator[str]:
  """Sentences of a binary stream, separated by any of the three line ends, as in TensorFlow Datasets."""
  for line in io.TextIOWrapper(stream, encoding='utf-8'):
    yield line.strip()


@dataclasses.dataclass(frozen=True)
class Lm1b:
  """The benchmark in a directory; a `train.text_sources.TextSource`."""

  # Directory of `lm1b/1.1.0`, prepared as array_record by `python -m train.prepare_data` or by TensorFlow Datasets,
  # or of the extracted archive; empty for `~/tensorflow_datasets`.
  data_dir: str = ''
  name: str = 'lm1b'

  @property
  def _root(self) -> epath.Path:
    return epath.Path(self.data_dir or '~/tensorflow_datasets').expanduser()

  @functools.cached_property
  def _prepared(self):
    """The prepared data set, or None if it does not exist; a `ValueError` if it cannot be read."""
    path = self._root / 'lm1b' / VERSION
    if not (path / 'dataset_info.json').exists():
      return None
    builder = _tfds().builder_from_directory(path)
    file_format = builder.info.file_format.value
    if file_format != 'array_record':
      raise ValueError(
        f'{path} is prepared as {file_format}, which takes TensorFlow to read: prepare it as array_record'
        ' (python -m train.prepare_data, with another --data_dir)'
      )
    return builder

  @functools.cached_property
  def _extracted(self) -> dict[str, list[epath.Path]] | None:
    """The files of each part of the extracted archive, or None if the archive is not extracted."""
    for root in (self._root, self._root / FOLDER):
      files = {part: sorted((root / folder).glob(f'{prefix}*')) for part, (folder, prefix) in _FILES.items()}
      if all(files.values()):
        return files
    return None

  def _check(self) -> None:
    if self._prepared is None and self._extracted is None:
      raise ValueError(
        f'no LM1B in {self._root}. Set config.data_dir to (1) a directory with lm1b/{VERSION}, prepared by TensorFlow'
        f' Datasets as array_record; or (2) download {ARCHIVE} from {HOMEPAGE} and run python -m train.prepare_data'
        f' --manual_dir=DIR_OF_THE_ARCHIVE --data_dir=DIR; or (3) extract the archive and set it to where {FOLDER} lies'
      )

  def documents(self, part: str) -> Iterator[str]:
    self._check()
    if self._prepared is None:
      for path in self._extracted[part]:
        with path.open('rb') as stream:
          try:
            yield from _lines(stream)
          except UnicodeDecodeError as error:
            raise ValueError(f'cannot read {path} as text: {error}') from error
      return
    data = self._prepared.as_data_source(_SPLITS[part])
    for start in range(0, len(data), _READ_AT_ONCE):
      for example in data.__getitems__(range(start, min(start + _READ_AT_ONCE, len(data)))):
        yield example['text'].decode()

  def describe(self) -> dict[str, str]:
    """A hash of the files' names and sizes, in the order of the text. Their gigabytes of content are not hashed."""
    self._check()
    if self._prepared is None:
      files = [path for paths in self._extracted.values() for path in paths]
      described = [f'{path.name} {path.stat().length}' for path in files]
      form = 'extracted'
    else:
      splits = self._prepared.info.splits
      described = [f'{name} {splits[name].num_bytes} {splits[name].shard_lengths}' for name in _SPLITS.values()]
      form = f'array_record {VERSION}'
    return {'lm1b/form': form, 'lm1b/files': hashlib.sha256('\n'.join(described).encode()).hexdigest()}


def check_archive(path: epath.Path, sha256: str, notify: Callable[[int, int], None]) -> None:
  """Compares an archive with its SHA-256; a `ValueError` if it is not there or differs. `notify` is called with the
  bytes read so far and in total.
  """
  if not path.is_file():
    raise ValueError(f'no archive at {path}: download {ARCHIVE} from {HOMEPAGE}')
  digest, done, total = hashlib.sha256(), 0, path.stat().length
  with path.open('rb') as stream:
    while block := stream.read(1 << 22):
      digest.update(block)
      done += len(block)
      notify(done, total)
  if digest.hexdigest() != sha256:
    raise ValueError(f'{path} has SHA-256 {digest.hexdigest()}, not {sha256}: it is damaged or another file')


def _sentences(archive: epath.Path, part: str) -> Iterator[tuple[str, dict[str, str]]]:
  """The key and example of every sentence of a part, in the archive's order."""
  folder, prefix = _FILES[part]
  with archive.open('rb') as raw, tarfile.open(fileobj=raw, mode='r:gz') as members:
    for member in members:
      *_, parent, name = ('', '', *member.name.split('/'))
      if member.isfile() and parent == folder and name.startswith(prefix):
        for index, line in enumerate(_lines(members.extractfile(member))):
          yield f'{name}_{index}', {'text': line}


def prepare(manual_dir: epath.PathLike, data_dir: epath.PathLike) -> epath.Path:
  """Prepares `data_dir/lm1b/1.1.0` from the archive in `manual_dir`, and returns its directory; an interrupted run
  leaves nothing that looks complete. A `ValueError` if it is there already, or the archive cannot be read.
  """
  tfds = _tfds()
  archive = epath.Path(manual_dir).expanduser() / ARCHIVE

  with tfds.core.registered.skip_registration():

    class Lm1b(tfds.core.GeneratorBasedBuilder):
      """LM1B from its archive. The builder of TensorFlow Datasets has the same result, and needs TensorFlow."""

      VERSION = tfds.core.Version(VERSION)

      def _info(self):
        features = tfds.features.FeaturesDict({'text': tfds.features.Text()})
        return tfds.core.DatasetInfo(
          builder=self, features=features, supervised_keys=('text', 'text'), homepage=HOMEPAGE
        )

      def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(part) for part, split in _SPLITS.items()}

      def _generate_examples(self, part):
        return _sentences(archive, part)

  builder = Lm1b(data_dir=epath.Path(data_dir).expanduser(), file_format='array_record')
  path = epath.Path(builder.data_path)
  if path.exists():
    raise ValueError(f'{path} exists and is not overwritten')
  try:
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
    raise ValueError(f'cannot prepare {path} from {archive}: {error}') from error
  return path
