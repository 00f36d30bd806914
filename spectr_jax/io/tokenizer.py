"""Byte-pair encoding with byte fallback: every text encodes, and decodes to itself."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, trainers

_SPECIAL_TOKENS = ('<pad>', '<bos>', '<eos>')
_BYTE_TOKENS = tuple(f'<0x{byte:02X}>' for byte in range(256))
# A word takes the space before it; digits stand alone, other runs stay together.
_WORDS = r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+'


class Tokenizer:
  """Text to ids and back.

  Attributes:
    vocab_size: Number of ids.
    pad_id, bos_id, eos_id: 0, 1, 2: padding, begin and end of a document.
    fingerprint: First 16 hexadecimal digits of the SHA-256 of vocabulary and merges; equal fingerprints encode alike.
  """

  pad_id, bos_id, eos_id = range(3)

  def __init__(self, backend: tokenizers.Tokenizer):
    missing = [token for token in _SPECIAL_TOKENS + _BYTE_TOKENS if backend.token_to_id(token) is None]
    if missing or [backend.token_to_id(token) for token in _SPECIAL_TOKENS] != [0, 1, 2]:
      raise ValueError(
        f'not a tokenizer of this project: needs {", ".join(_SPECIAL_TOKENS)} as ids 0, 1, 2 and the byte tokens'
        f' <0x00> to <0xFF>; {len(missing)} are missing'
      )
    # Special tokens are ids that documents cannot spell: their names in a text are text.
    backend.encode_special_tokens = True
    self._backend = backend

  @classmethod
  def train(cls, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from `documents`.

    Args:
      documents: Texts, read once.
      vocab_size: Number of ids wanted, special and byte tokens included.

    Raises:
      ValueError: `vocab_size` is too small, or the documents are too few to fill it.
    """
    smallest = len(_SPECIAL_TOKENS) + len(_BYTE_TOKENS)
    if vocab_size <= smallest:
      raise ValueError(f'vocab_size must be above {smallest} (special and byte tokens), got {vocab_size}')
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior='isolated')
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
      vocab_size=vocab_size,
      special_tokens=list(_SPECIAL_TOKENS + _BYTE_TOKENS),
      limit_alphabet=min(128, (vocab_size - smallest) // 2),
      show_progress=False,
      max_token_length=24,
    )
    backend.train_from_iterator(documents, trainer)
    spec = json.loads(backend.to_str())
    # Byte tokens are ordinary tokens to the decoder; as special ones they would be dropped from decoded text.
    spec['added_tokens'] = [token for token in spec['added_tokens'] if token['content'] in _SPECIAL_TOKENS]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if backend.get_vocab_size() != vocab_size:
      raise ValueError(
        f'the text yields only {backend.get_vocab_size()} tokens, {vocab_size} were asked for: lower vocab_size or'
        ' give more text'
      )
    return cls(backend)

  @classmethod
  def load(cls, path: epath.PathLike) -> Tokenizer:
    """Reads a tokenizer that `save` wrote.

    Raises:
      ValueError: The file is missing, no tokenizer, or damaged.
    """
    path = epath.Path(path)
    if not path.exists():
      raise ValueError(f'no tokenizer at {path}: expected a file written by train.tokenizer')
    try:
      backend = tokenizers.Tokenizer.from_str(path.read_text())
    except Exception as error:  # the backend raises bare Exception
      raise ValueError(f'{path} is not a readable tokenizer file: {error}') from error
    return cls(backend)

  def save(self, path: epath.PathLike) -> None:
    """Writes the tokenizer as one JSON file."""
    epath.Path(path).write_text(self._backend.to_str(pretty=True))

  @property
  def vocab_size(self) -> int:
    return self._backend.get_vocab_size()

  @functools.cached_property
  def fingerprint(self) -> str:
    spec = json.loads(self._backend.to_str())
    content = json.dumps([spec['model'], spec['pre_tokenizer'], spec['normalizer']], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
    """Ids of `text`, with `bos_id` in front if asked for."""
    return [self.bos_id] * add_bos + self._backend.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of many texts, on all cores."""
    return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`; pad, bos and eos vanish, incomplete byte sequences become U+FFFD."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
