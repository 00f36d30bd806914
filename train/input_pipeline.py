"""Documents to packed batches. A batch is a function of the seed and the step alone, which makes resuming exact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
from etils import epath

from spectr_jax.io.tokenizer import Tokenizer
from train.text_sources import TextSource, is_held_out

_DOCUMENTS_PER_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class PackedText:
  """Encoded documents end to end, each as bos, text, eos.

  Attributes:
    tokens: uint16 or uint32 `[T]`.
    num_bytes: UTF-8 bytes of the text, for bits per byte.
  """

  tokens: np.ndarray
  num_bytes: int

  def num_rows(self, seq_len: int) -> int:
    """Whole rows of `seq_len` inputs; a row's last target is the next row's first input."""
    return (len(self.tokens) - 1) // seq_len

  def check(self, seq_len: int, part: str) -> None:
    """Refuses a text shorter than one row.

    Args:
      seq_len: Tokens in a row.
      part: What the text is, for the message.

    Raises:
      ValueError: It is shorter.
    """
    if self.num_rows(seq_len) < 1:
      raise ValueError(f'{part} text of {len(self.tokens)} tokens is shorter than one row of {seq_len} and its target')

  def rows(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
    """int32 `[len(indices), seq_len + 1]`: inputs and, shifted by one, targets."""
    return self.tokens[indices[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int32)


def encode_documents(tokenizer: Tokenizer, documents: Iterator[str]) -> PackedText:
  """Encodes and packs `documents`."""
  dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
  pieces, num_bytes, chunk = [], 0, []

  def flush():
    for ids in tokenizer.encode_batch(chunk):
      pieces.append(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype))
    chunk.clear()

  for document in documents:
    num_bytes += len(document.encode())
    chunk.append(document)
    if len(chunk) == _DOCUMENTS_PER_CHUNK:
      flush()
  flush()
  return PackedText(np.concatenate(pieces) if pieces else np.zeros(0, dtype), num_bytes)


def load_packed(source: TextSource, tokenizer: Tokenizer, held_out_percent: float, cache_dir: epath.Path):
  """Training and held-out text of a source, encoded once and kept under `cache_dir`.

  Returns:
    Training text, held-out text, and the source's description.
  """
  origin = source.describe()
  identity = json.dumps([origin, tokenizer.fingerprint, held_out_percent])
  path = cache_dir / f'packed_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npz'
  if not path.exists():
    documents = list(source.documents())
    held_out = [is_held_out(document, held_out_percent) for document in documents]
    parts = [
      encode_documents(tokenizer, (d for d, is_out in zip(documents, held_out, strict=True) if is_out == wanted))
      for wanted in (False, True)
    ]
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix('.unfinished')
    with unfinished.open('wb') as stream:
      np.savez(
        stream,
        train=parts[0].tokens,
        held_out=parts[1].tokens,
        num_bytes=np.array([parts[0].num_bytes, parts[1].num_bytes]),
      )
    unfinished.replace(path)
  try:
    with path.open('rb') as stream, np.load(stream) as data:
      num_bytes = data['num_bytes'].tolist()
      return PackedText(data['train'], num_bytes[0]), PackedText(data['held_out'], num_bytes[1]), origin
  except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as error:
    raise ValueError(f'{path} is damaged ({error}): delete it, and the text is encoded again') from error


def batch_at(text: PackedText, step: int, *, batch_size: int, seq_len: int, seed: int) -> np.ndarray:
  """The batch of a step: rows in an order drawn anew for each epoch from `seed`.

  Args:
    text: Packed text with at least one row.
    step: The step, from 0.
    batch_size: Rows in a batch.
    seq_len: Tokens in a row.
    seed: Seed of the order.

  Returns:
    int32 `[batch_size, seq_len + 1]`.

  Raises:
    ValueError: The text is shorter than one row.
  """
  text.check(seq_len, 'training')
  num_rows = text.num_rows(seq_len)
  places = np.arange(step * batch_size, (step + 1) * batch_size)
  rows = np.empty(batch_size, np.int64)
  for epoch in np.unique(places // num_rows):
    order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(num_rows)
    here = places // num_rows == epoch
    rows[here] = order[places[here] % num_rows]
  return text.rows(rows, seq_len)
