"""Byte-pair encoding with byte fallback: every text can be encoded, and decodes to itself."""

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
# A word includes the space before it. Every digit is a word; runs of letters, or of other characters, are one.
_WORDS = r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+'


class Tokenizer:
  """Converts text to ids and back.

  Attributes:
    pad_id: 0, padding.
    bos_id: 1, the beginning of a document.
    eos_id: 2, the end of a document.
  """

  pad_id: int = 0
  bos_id: int = 1
  eos_id: int = 2

  def __init__(self, backend: tokenizers.Tokenizer):
    missing = [token for token in _SPECIAL_TOKENS + _BYTE_TOKENS if backend.token_to_id(token) is None]
    if missing or [backend.token_to_id(token) for token in _SPECIAL_TOKENS] != [0, 1, 2]:
      raise ValueError(
        f'not a tokenizer of this project: needs {", ".join(_SPECIAL_TOKENS)} as ids 0, 1, 2 and the byte tokens'
        f' <0x00> to <0xFF>; {len(missing)} are missing'
      )
    # Documents cannot spell special tokens: their names in a text are encoded as text.
    backend.encode_special_tokens = True
    self._backend = backend

  @classmethod
  def train(cls, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from documents.

    Args:
      documents: Texts; iterated over once.
      vocab_size: Number of ids, including special and byte tokens.

    Returns:
      A tokenizer of exactly `vocab_size` ids.

    Raises:
      ValueError: `vocab_size` is too small, or the documents yield fewer tokens.
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
    # Byte tokens must not be special: the decoder drops special tokens from the text.
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
      ValueError: The file is missing, damaged or not a tokenizer.
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
    """Number of ids."""
    return self._backend.get_vocab_size()

  @functools.cached_property
  def fingerprint(self) -> str:
    """The first 16 hexadecimal digits of a SHA-256 of vocabulary and merges; equal fingerprints encode equally."""
    spec = json.loads(self._backend.to_str())
    content = json.dumps([spec['model'], spec['pre_tokenizer'], spec['normalizer']], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
    """Encodes a text.

    Args:
      text: Any text.
      add_bos: Whether to put `bos_id` in front.

    Returns:
      Its ids.
    """
    return [self.bos_id] * add_bos + self._backend.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes many texts on all CPU cores; the ids of each."""
    return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids to text; drops pad, bos and eos, and decodes incomplete byte sequences to U+FFFD."""
    return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)
