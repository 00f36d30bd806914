"""Tokenizers: what all of them offer, and the one that is trained here.

`Tokenizer` is byte-pair encoding with byte fallback: every text can be encoded, and decodes to itself. Those of other
models are in `spectr_jax.io.hub`.
"""

from __future__ import annotations

import abc
import copy
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, trainers

from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.new_files import write_file
from spectr_jax.io.token_bytes import TextDecoder, TextToken, TokenBytes, TokenDecoder
from spectr_jax.io.tokenizer_file import MOST_TOKENS, read_backend
from spectr_jax.unicode import check_unicode

_SPECIAL_TOKENS = ('<pad>', '<bos>', '<eos>')
_SPECIAL_TEXTS = {0: '⟨pad⟩', 1: '⟨begin⟩', 2: '⟨end⟩'}
_BYTE_TOKENS = tuple(f'<0x{byte:02X}>' for byte in range(256))
# A word includes the space before it. Every digit is a word; runs of letters, or of other characters, are one.
_WORDS = r' ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+'


class TokenizerBase(abc.ABC):
  """Converts text to ids and back.

  Attributes:
    pad_id: Id that fills rows behind their text; models do not read it.
    bos_id: Id that begins a text, None if there is none.
    eos_ids: Ids that end a text.
    add_bos: Whether a prompt begins with `bos_id`, which then is not None.
  """

  pad_id: int
  bos_id: int | None
  eos_ids: tuple[int, ...]
  add_bos: bool

  def __init__(self, backend: tokenizers.Tokenizer | Backend):
    self._backend = Backend(backend)
    self._bytes = TokenBytes(self._backend)

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """The first 16 hexadecimal digits of a SHA-256; ids mean the same where fingerprints are equal."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, the largest plus one. Models may have logits for more."""
    return self._backend.get_vocab_size()

  def token(self, index: int) -> str | None:
    """The token of an id as the vocabulary spells it, None for an id without one."""
    return self._backend.id_to_token(index)

  def token_text(self, index: int) -> str:
    """The text of one id for people to read, who see special tokens and ids without a token as well."""
    return self.decode([index])

  def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
    """Encodes a text to its ids, behind `bos_id` if `add_bos`.

    Raises `ValueError` if the text is not valid Unicode, or if `bos_id` is asked for and there is none.
    """
    check_unicode(text, 'the text')
    ids = self._backend.encode(text, add_special_tokens=False).ids
    if not add_bos:
      return ids
    if self.bos_id is None:
      raise ValueError('add_bos: this tokenizer has no token that begins a text')
    return [self.bos_id, *ids]

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes many texts on all CPU cores; the ids of each. `ValueError` if one is not valid Unicode."""
    for text in texts:
      check_unicode(text, 'the text')
    return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

  def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts to continue. They begin with `bos_id` if `add_bos`, also those that spell it themselves."""
    rows = self.encode_batch(texts)
    if not self.add_bos or self.bos_id is None:
      return rows
    return [ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids] for ids in rows]

  def encode_prompt(self, text: str) -> list[int]:
    """Encodes a text to continue, see `encode_prompts`."""
    return self.encode_prompts([text])[0]

  def encode_chat(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
  ) -> list[int]:
    """Encodes a conversation up to where the model answers, of messages with the texts `role` and `content`.

    Raises `ValueError` if the model has no chat template or its template refuses the conversation.
    """
    del messages, tools
    raise ValueError('the model has no chat template: it continues texts, and takes no conversations')

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids as they continue a text, with the space that they may begin with.

    It is that of the bytes of all tokens in a row, see `token_bytes`. Special tokens have none, and U+FFFD stands for
    bytes that make no character.
    """
    return self._bytes.decode(ids)

  @functools.cached_property
  def token_contents(self) -> Sequence[bytes]:
    """The bytes that each id has within a text; those of all ids in a row are a text. Special tokens have none."""
    return [self._bytes.content(index) for index in range(self.vocab_size)]

  def with_texts(self, texts: Mapping[int, str]) -> Self:
    """The same tokenizer with other texts of some ids, which are none of its special tokens."""
    found = copy.copy(self)
    vars(found).pop('token_contents', None)
    found._bytes = TokenBytes(self._backend)
    found._bytes.special = {index: name for index, name in self._bytes.special.items() if index not in texts}
    found._bytes.update({index: text.encode() for index, text in texts.items()})
    return found

  def decode_stream(self) -> TextDecoder:
    """A decoder of ids that come in pieces, whose texts in a row are those that `decode` gives for all ids."""
    return self._bytes.stream()

  @property
  def special_token_names(self) -> Mapping[int, str]:
    """The special tokens, which have no text, by id."""
    return self._bytes.special

  def decode_tokens(self, ids: Iterable[int]) -> list[TextToken]:
    """Each token as it stands in the text of all: its name, its bytes and its place."""
    return self._bytes.token_stream()(ids)

  def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
    """The bytes that each of some ids stands for in the middle of a text; none for special tokens."""
    return [self._bytes.content(index) for index in ids]

  def decode_tokens_stream(self) -> TokenDecoder:
    """A decoder of ids that come in pieces, which gives in a row what `decode_tokens` gives for all ids."""
    return self._bytes.token_stream()


def first_difference(first: TokenizerBase, other: TokenizerBase) -> int | None:
  """The smallest id that two tokenizers give different meanings; None if they agree on all ids that they share."""
  if first.fingerprint == other.fingerprint:
    return None
  for index in range(min(first.vocab_size, other.vocab_size)):
    one, two = first.token(index), other.token(index)
    if one != two and one is not None and two is not None:
      return index
  return None


def check_same_tokens(named: Sequence[tuple[str, TokenizerBase]]) -> None:
  """Checks that tokenizers agree on all ids that they share; some may know more ids than others.

  `named` has each with the name of its model, the target's first. If an id has two meanings, a `ValueError` names the
  smallest.
  """
  (name, first), *others = named
  for other_name, other in others:
    index = first_difference(first, other)
    if index is not None:
      raise ValueError(
        f'target and draft must share a tokenizer, but id {index} is {first.token(index)!r} in {name} and'
        f' {other.token(index)!r} in {other_name} (fingerprints {first.fingerprint} and {other.fingerprint})'
      )


class Tokenizer(TokenizerBase):
  """The tokenizer of models that are trained here. Ids 0, 1 and 2 are padding and both ends of a document."""

  pad_id: int = 0
  bos_id: int = 1
  eos_id: int = 2
  eos_ids: tuple[int, ...] = (2,)
  add_bos: bool = True

  def __init__(self, backend: tokenizers.Tokenizer | Backend):
    super().__init__(backend)
    backend = self._backend
    missing = [token for token in _SPECIAL_TOKENS + _BYTE_TOKENS if backend.token_to_id(token) is None]
    if missing or [backend.token_to_id(token) for token in _SPECIAL_TOKENS] != [0, 1, 2]:
      raise ValueError(
        f'{backend.name} is not a tokenizer of this project: needs {", ".join(_SPECIAL_TOKENS)} as ids 0, 1, 2 and the'
        f' byte tokens <0x00> to <0xFF>; {len(missing)} are missing'
      )
    # Documents cannot spell special tokens: their names in a text are encoded as text.
    backend.tokenizer.encode_special_tokens = True

  @classmethod
  def train(cls, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from documents, which are iterated over once: a tokenizer of exactly `vocab_size` ids.

    Raises `ValueError` if `vocab_size`, special and byte tokens included, is too small or too large, or the documents
    yield fewer tokens.
    """
    smallest = len(_SPECIAL_TOKENS) + len(_BYTE_TOKENS)
    if vocab_size <= smallest:
      raise ValueError(f'vocab_size must be above {smallest} (special and byte tokens), got {vocab_size}')
    if vocab_size > MOST_TOKENS:
      raise ValueError(f'vocab_size must be at most {MOST_TOKENS}, got {vocab_size}')
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
    guarded('the documents', backend.train_from_iterator, documents, trainer)
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
    """Reads a tokenizer that `save` wrote; `ValueError` if the file is missing, damaged or not a tokenizer."""
    path = epath.Path(path)
    if not path.exists():
      raise ValueError(f'no tokenizer at {path}: expected a file written by train.tokenizer')
    return cls(read_backend(path))

  def save(self, path: epath.PathLike) -> None:
    """Writes the tokenizer as one JSON file, wholly or not at all."""
    write_file(path, self._backend.to_str(pretty=True).encode())

  @functools.cached_property
  def fingerprint(self) -> str:
    """The first 16 hexadecimal digits of a SHA-256 of vocabulary and merges; equal fingerprints encode equally."""
    spec = json.loads(self._backend.to_str())
    content = json.dumps([spec['model'], spec['pre_tokenizer'], spec['normalizer']], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  def token_text(self, index: int) -> str:
    """The text of one id; ⟨pad⟩, ⟨begin⟩ and ⟨end⟩ for special tokens."""
    return _SPECIAL_TEXTS.get(index) or self.decode([index])
