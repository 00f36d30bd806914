"""Documents to packed batches. A batch depends only on the seed and the step, which makes resuming exact."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding

from common.json_file import load_ours, save_ours
from spectr_jax import Tokenizer
from spectr_jax.io.new_files import new_folder
from spectr_jax.io.untrusted import is_remote
from train.text_sources import TextSource

_DOCUMENTS_PER_CHUNK = 512
_TOKENS_PER_CHECK = 1 << 24
_PARTS = 'train', 'held_out'


@dataclasses.dataclass(frozen=True)
class _Part:
  """What is written of a part."""

  dtype: str
  num_tokens: int
  num_bytes: int
  crc32: int


@dataclasses.dataclass(frozen=True)
class _Index:
  train: _Part
  held_out: _Part


@dataclasses.dataclass(frozen=True)
class PackedText:
  """Encoded documents end to end, each as bos, text, eos."""

  tokens: np.ndarray  # uint16 or uint32 `[T]`
  num_bytes: int  # UTF-8 bytes of the text

  def num_rows(self, seq_len: int) -> int:
    """The number of whole rows of `seq_len` inputs. A row's last target is the next row's first input."""
    return (len(self.tokens) - 1) // seq_len

  def check(self, seq_len: int, part: str) -> None:
    """Refuses a text shorter than one row, with a `ValueError` that calls it by `part`."""
    if self.num_rows(seq_len) < 1:
      raise ValueError(f'{part} text of {len(self.tokens)} tokens is shorter than one row of {seq_len} and its target')

  def rows(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """Rows `[..., seq_len + 1]`, int32, by indices `[...]`: inputs and, shifted by one, targets."""
    return self.tokens[indices[..., None] * seq_len + np.arange(seq_len + 1)].astype(np.int32)


def _encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
  """Packed tokens of chunks of documents, and the bytes of their text."""
  dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
  documents = iter(documents)
  while chunk := list(itertools.islice(documents, _DOCUMENTS_PER_CHUNK)):
    rows = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(chunk)]
    yield np.array(list(itertools.chain(*rows)), dtype), sum(len(document.encode()) for document in chunk)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> PackedText:
  """Encodes and packs documents in memory."""
  pieces = list(_encode(tokenizer, documents))
  tokens = [tokens for tokens, _ in pieces] or [np.zeros(0, np.uint16)]
  return PackedText(np.concatenate(tokens), sum(size for _, size in pieces))


def _write(directory: epath.Path, part: str, pieces: Iterator[tuple[np.ndarray, int]]) -> _Part:
  """Writes a part's tokens piece by piece, and returns a description of the file."""
  num_bytes, num_tokens, checksum, dtype = 0, 0, 0, 'uint16'
  with (directory / f'{part}.bin').open('wb') as stream:
    for tokens, size in pieces:
      content, dtype = tokens.tobytes(), tokens.dtype.name
      stream.write(content)
      checksum = zlib.crc32(content, checksum)
      num_bytes, num_tokens = num_bytes + size, num_tokens + len(tokens)
  return _Part(dtype, num_tokens, num_bytes, checksum)


def _read(path: epath.Path, written: _Part) -> PackedText:
  """The packed text of a part, mapped into memory if it is a local file; `ValueError` if it is not what was written."""
  if is_remote(path) or not written.num_tokens:
    tokens = np.frombuffer(path.read_bytes(), written.dtype)
  else:
    tokens = np.memmap(path, written.dtype, mode='r')
  checksum = 0
  for start in range(0, len(tokens), _TOKENS_PER_CHECK):
    checksum = zlib.crc32(tokens[start : start + _TOKENS_PER_CHECK], checksum)
  if len(tokens) != written.num_tokens or checksum != written.crc32:
    raise ValueError(f'{path.name} has another checksum')
  return PackedText(tokens, written.num_bytes)


def load_packed(
  source: TextSource, tokenizer: Tokenizer, cache_dir: epath.Path, origin: dict[str, str]
) -> tuple[PackedText, PackedText]:
  """Training and held-out text of a source, encoded once and kept under `cache_dir`, never whole in memory. It is found
  by `origin`, the source's description, and the tokenizer. A `ValueError` if it is damaged, or cannot be written.
  """
  identity = json.dumps([origin, tokenizer.fingerprint])
  path = cache_dir / f'packed_{hashlib.sha256(identity.encode()).hexdigest()[:16]}'
  if not path.exists():
    try:
      with new_folder(path, overwrite=False) as folder:
        parts = (_write(folder, part, _encode(tokenizer, source.documents(part))) for part in _PARTS)
        save_ours(folder / 'index.json', _Index(*parts))
    except OSError as error:
      if not path.exists():  # else another process was the first to finish
        raise ValueError(f'cannot write {path}: {error.strerror or error}') from error
    except ValueError:
      if not path.exists():
        raise
  try:
    index = load_ours(path / 'index.json', _Index, 'index of encoded text', 'it may be of another version')
    return _read(path / 'train.bin', index.train), _read(path / 'held_out.bin', index.held_out)
  except (OSError, ValueError) as error:
    raise ValueError(f'{path} is damaged ({error}): delete it, and the text is encoded again') from error


@functools.lru_cache(maxsize=2)  # a batch may reach into the next epoch
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.Generator(np.random.Philox([seed, epoch])).permutation(num_rows)


def batch_rows(num_rows: int, step: int, *, batch_size: int, seed: int) -> np.ndarray:
  """The rows of a step's batch, int64 `[batch_size]`. Each epoch visits all rows in a new random order."""
  places = np.arange(step * batch_size, (step + 1) * batch_size)
  rows = np.empty(batch_size, np.int64)
  for epoch in np.unique(places // num_rows):
    here = places // num_rows == epoch
    rows[here] = _order(num_rows, seed, int(epoch))[places[here] % num_rows]
  return rows


def batch_at(
  text: PackedText, step: int, *, batch_size: int, seq_len: int, seed: int, num_microbatches: int,
  sharding: NamedSharding,
) -> jax.Array:  # fmt: skip
  """The batch of a step, int32 `[A, batch_size / A, seq_len + 1]`, from text of at least one row. Every process reads
  its own rows only. Gradients are accumulated over A = `num_microbatches` parts.
  """
  rows = batch_rows(text.num_rows(seq_len), step, batch_size=batch_size, seed=seed).reshape(num_microbatches, -1)
  return jax.make_array_from_callback(
    (*rows.shape, seq_len + 1), sharding, lambda index: text.rows(rows[index[:2]], seq_len)
  )
