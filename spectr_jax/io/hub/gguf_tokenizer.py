"""The tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.foreign import FLAG, TEXT, Kind, check_object, shown, whole
from spectr_jax.io.hub.gguf_header import GgufHeader
from spectr_jax.io.tokenizer_file import MOST_CHARACTERS, MOST_ID, MOST_MERGES, MOST_TOKENS, check_merges

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_MOST_CUTS = 10 * 2**20  # of all tokens into two
_FILLER = re.compile(r'\[PAD\d+\]')
_SPACE = '\u2581'

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@dataclasses.dataclass(frozen=True)
class _Words:
  """Splits a text into the words that merges stay within.

  Attributes:
    patterns: Regular expressions, applied one after the other; each match is a word, and so is what is between them.
    is_nfc: Whether the text is brought to Unicode's form NFC first.
    takes_whole_words: Whether a word that is a token is taken without merging.
    adds_bos: Whether a text begins with the beginning of a document, unless the metadata says otherwise.
  """

  patterns: tuple[str, ...]
  is_nfc: bool = False
  takes_whole_words: bool = False
  adds_bos: bool = False


_GPT2 = _Words((_GPT2_WORDS,))
_SINGLE_DIGITS = _Words((r'\p{N}', _GPT2_WORDS))
_LLAMA3 = _Words((_LLAMA3_WORDS.replace('DIGITS', '{1,3}'),), takes_whole_words=True, adds_bos=True)
_QWEN2 = _Words((_LLAMA3_WORDS.replace('DIGITS', ''),), is_nfc=True)
_WORDS = {
  # For files from before pre-tokenizers had names; llama.cpp reads them like this.
  'default': _Words((r'[\p{P}\$\+<=>\^~\|]+', _GPT2_WORDS, r'\p{N}+', '[0-9][0-9][0-9]')),
  'gpt-2': _GPT2,
  'olmo': dataclasses.replace(_GPT2, is_nfc=True),  # GPT-NeoX and Pythia
  'smollm': _SINGLE_DIGITS,
  'starcoder': _SINGLE_DIGITS,
  'llama-bpe': _LLAMA3,
  'llama3': _LLAMA3,
  'llama-v3': _LLAMA3,
  'qwen2': _QWEN2,
  'deepseek-r1-qwen': _QWEN2,
  'deepseek-coder': _Words(('[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', '[一-龥ࠀ-一가-퟿]+', r'\p{N}')),
}


def _list(words: str, most: int, *kinds: type) -> Kind:
  """Lists of values of some types of Python."""
  return Kind(
    f'a list of at most {most} {words}', lambda x: type(x) is list and len(x) <= most and set(map(type, x)) <= {*kinds}
  )


_FIELDS = {
  'model': TEXT,
  'pre': TEXT,
  'tokens': _list('texts', MOST_TOKENS, str),
  'token_type': _list('whole numbers', MOST_TOKENS, int),
  'scores': _list('numbers', MOST_TOKENS, float, int),
  'merges': _list('texts', MOST_MERGES, str),
  **dict.fromkeys(('add_bos_token', 'add_space_prefix', 'remove_extra_whitespaces'), FLAG),
}
_ID_FIELDS = tuple(f'{name}_token_id' for name in ('bos', 'eos', 'eot', 'eom', 'padding', 'unknown'))


def check_metadata(header: GgufHeader) -> None:
  """Checks all that the metadata says on the tokenizer, but not whether its parts fit together.

  Raises:
    ValueError: A value is of a wrong type, or an id is none of a token.
  """
  prefix = 'tokenizer.ggml.'
  fields = {f'{prefix}{name}': kind for name, kind in _FIELDS.items()} | {'tokenizer.chat_template': TEXT}
  metadata = check_object(header.metadata, fields, header.path)
  token_id = whole(0, len(metadata[f'{prefix}tokens']) - 1 if f'{prefix}tokens' in metadata else MOST_ID)
  check_object(metadata, {f'{prefix}{name}': token_id for name in _ID_FIELDS}, header.path)


def build_tokenizer(header: GgufHeader) -> Backend:
  """Builds the tokenizer of a model.

  Its post-processor adds nothing: whether a text begins with the beginning of a document is the caller's choice.

  Args:
    header: The header, which `check_metadata` has checked.

  Raises:
    ValueError: Its kind or pre-tokenizer is unknown, or something is missing or contradictory.
  """
  build, _ = _kind(header)
  vocab = _Vocabulary.read(header)
  backend = Backend(guarded(header.path, build, header, vocab), header.path)
  backend.add_special_tokens(vocab.added(_CONTROL, _UNKNOWN))
  backend.add_tokens(vocab.added(_USER_DEFINED))
  return backend


def special_ids(header: GgufHeader) -> tuple[int, ...]:
  """The ids of control tokens, which stand for no text."""
  types = header.metadata.get('tokenizer.ggml.token_type', [])
  return tuple(i for i, kind in enumerate(types) if kind == _CONTROL)


def adds_bos(header: GgufHeader) -> bool:
  """Whether a text begins with the beginning of a document.

  Raises:
    ValueError: The kind of tokenizer or its pre-tokenizer is unknown.
  """
  _, default = _kind(header)
  return bool(header.metadata.get('tokenizer.ggml.add_bos_token', default))


def _kind(header: GgufHeader) -> tuple[Callable[[GgufHeader, _Vocabulary], tokenizers.Tokenizer], bool]:
  """The builder for a kind of tokenizer, and whether the kind adds the beginning of a document."""
  model = header.required('tokenizer.ggml.model')
  if model == 'llama':
    return _sentence_piece, True
  if model != 'gpt2':
    raise ValueError(f"{header.path}: unknown tokenizer {shown(model)}; known are 'gpt2' and 'llama'")
  return _byte_level, _words(header).adds_bos


def _words(header: GgufHeader) -> _Words:
  name = header.metadata.get('tokenizer.ggml.pre', 'default')
  if name not in _WORDS:
    raise ValueError(f'{header.path}: unknown pre-tokenizer {shown(name)}; known are {", ".join(_WORDS)}')
  return _WORDS[name]


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
  """Tokens by id, and the type of each."""

  tokens: list[str]
  types: list[int]

  @classmethod
  def read(cls, header: GgufHeader) -> _Vocabulary:
    tokens = header.required('tokenizer.ggml.tokens')
    types = header.metadata.get('tokenizer.ggml.token_type', [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
      raise ValueError(f'{header.path}: {len(tokens)} tokens, but types of {len(types)}')
    longest = max(map(len, tokens), default=0)
    if longest > MOST_CHARACTERS:
      raise ValueError(f'{header.path}: a token of {longest:,} characters, the most are {MOST_CHARACTERS}')
    # Fillers up to the size of the model's embedding are no tokens.
    size = len(tokens)
    while size and types[size - 1] == _UNUSED and _FILLER.fullmatch(tokens[size - 1]):
      size -= 1
    return cls(tokens[:size], types[:size])

  def ids(self, path: str) -> dict[str, int]:
    ids = {token: i for i, token in enumerate(self.tokens)}
    # Tokens without a text stand for nothing, so there may be several.
    if len(ids) < len(self.tokens) - max(0, self.tokens.count('') - 1):
      twice = next(token for token, _ in collections.Counter(self.tokens).most_common() if token)
      raise ValueError(f'{path}: the token {shown(twice)} is there twice')
    return ids

  def added(self, *types: int) -> list[tokenizers.AddedToken]:
    """The tokens of some types, which are found in a text before it is normalized and split."""
    return [
      tokenizers.AddedToken(token, special=_USER_DEFINED not in types, normalized=False)
      for token, kind in zip(self.tokens, self.types, strict=True)
      if kind in types
    ]


def _byte_level(header: GgufHeader, vocab: _Vocabulary) -> tokenizers.Tokenizer:
  """Byte-pair encoding of bytes, as of GPT-2."""
  words = _words(header)
  pairs = (merge.partition(' ') for merge in header.required('tokenizer.ggml.merges'))
  merges = [(left, right) for left, _, right in pairs]
  ids = vocab.ids(header.path)
  check_merges(merges, ids, header.path)
  backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=words.takes_whole_words))
  if words.is_nfc:
    backend.normalizer = normalizers.NFC()
  splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated') for pattern in words.patterns]
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
  backend.decoder = decoders.ByteLevel()
  return backend


def _sentence_piece(header: GgufHeader, vocab: _Vocabulary) -> tokenizers.Tokenizer:
  """Byte-pair encoding of characters by the scores of SentencePiece; what no token has is encoded as bytes."""
  if header.metadata.get('tokenizer.ggml.remove_extra_whitespaces', False):
    raise ValueError(f'{header.path}: tokenizers that remove spaces are not known')
  scores = header.required('tokenizer.ggml.scores')
  unknown = header.metadata.get('tokenizer.ggml.unknown_token_id') or 0
  if len(scores) < len(vocab.tokens) or unknown >= len(vocab.tokens):
    raise ValueError(f'{header.path}: {len(vocab.tokens)} tokens, but {len(scores)} scores, and {unknown} is unknown')
  if any(map(math.isnan, scores)):
    raise ValueError(f'{header.path}: a score is not a number')
  model = models.BPE(
    vocab.ids(header.path),
    _merges(header.path, vocab, scores),
    unk_token=vocab.tokens[unknown],
    fuse_unk=True,
    byte_fallback=True,
  )
  backend = tokenizers.Tokenizer(model)
  has_prefix = header.metadata.get('tokenizer.ggml.add_space_prefix', True)
  prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
  backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(' ', _SPACE)])
  without_prefix = [decoders.Strip(' ', 1, 0)] if has_prefix else []
  backend.decoder = decoders.Sequence(
    [decoders.Replace(_SPACE, ' '), decoders.ByteFallback(), decoders.Fuse(), *without_prefix]
  )
  return backend


def _merges(path: str, vocab: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
  """All pairs of tokens that join to a token, the highest score of it first.

  SentencePiece merges the neighbors that join to the token with the highest score, whichever two they are.
  """
  normal = {token: i for i, (token, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True)) if kind == _NORMAL}
  if sum(map(len, normal)) > _MOST_CUTS:
    raise ValueError(f'{path}: all tokens together have more than {_MOST_CUTS:,} characters')
  pairs = []
  for token, i in normal.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in normal and right in normal:
        pairs.append((-scores[i], i, normal[left], normal[right]))
    if len(pairs) > MOST_MERGES:
      raise ValueError(f'{path}: more than {MOST_MERGES:,} pairs of tokens join to a token')
  return [(vocab.tokens[left], vocab.tokens[right]) for *_, left, right in sorted(pairs)]
