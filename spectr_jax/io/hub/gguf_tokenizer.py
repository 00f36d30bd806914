"""The tokenizer that the metadata of a GGUF file describes."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.hub.gguf_header import GgufHeader
from spectr_jax.io.tokenizer_file import MOST_CHARACTERS, MOST_ID, MOST_MERGES, MOST_TOKENS, check_merges
from spectr_jax.io.untrusted import FLAG, TEXT, check_object, list_of, real, shown, whole

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_MOST_CUTS = 10 * 2**20  # of all tokens into two
_FILLER = re.compile(r'\[PAD\d+\]')
_SPACE = '\u2581'

# Pre-tokenizers: by name, how each splits a text into the words that merges stay within. They are those of the models'
# own files on the hub. llama.cpp brings no text to the form NFC, and matches some expressions otherwise, so that on
# rare texts it gives other ids than these.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# GPT-4o's (o200k) end words where small letters are followed by large ones. Letters without a case are both.
_LARGE, _SMALL = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_O200K_WORDS = '|'.join(
  (
    *(
      rf"[^\r\n\p{{L}}\p{{N}}]?{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
      for letters in (f'{_LARGE}*{_SMALL}+', f'{_LARGE}+{_SMALL}*')
    ),
    r'\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+',
  )
)
# Marks belong to the letters that they stand on.
_QWEN35_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
  r'| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_CHINESE = '[一-龥ࠀ-一가-퟿]+'
# Letters with a case as DeepSeek LLM lists them: without Mathematical Alphanumeric Symbols, small Armenian letters,
# most of Georgian, parts of Latin Extended-D and E, and scripts that came to Unicode later.
_CASED = (
  r'[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A78F}-\x{AB6F}'
  r'\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EDF}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}]]'
)


@dataclasses.dataclass(frozen=True)
class Words:
  """How a text is split into the words that merges stay within."""

  patterns: tuple[str, ...]  # applied one after the other; each match is a word, and so is what is between them
  is_nfc: bool = False  # whether the text is brought to Unicode's form NFC first
  takes_whole_words: bool = False  # whether a word that is a token is taken without merging
  adds_bos: bool = False  # whether a text begins with the beginning of a document by default


_GPT2 = Words((_GPT2_WORDS,))
_GPT_NEOX = dataclasses.replace(_GPT2, is_nfc=True)
_SINGLE_DIGITS = Words((r'\p{N}', _GPT2_WORDS))
_LLAMA3 = Words((_LLAMA3_WORDS.replace('DIGITS', '{1,3}'),), takes_whole_words=True, adds_bos=True)
_QWEN2 = Words((_LLAMA3_WORDS.replace('DIGITS', ''),), is_nfc=True)
_THREES = '[0-9][0-9][0-9]'
WORDS = {
  # For files from before pre-tokenizers had names; llama.cpp reads them like this.
  'default': Words((r'[\p{P}\$\+<=>\^~\|]+', _GPT2_WORDS, r'\p{N}+', _THREES)),
  'gpt-2': _GPT2,
  **dict.fromkeys(('olmo', 'mpt'), _GPT_NEOX),  # olmo is also that of Pythia
  **dict.fromkeys(('smollm', 'starcoder', 'refact', 'minerva-7b'), _SINGLE_DIGITS),
  'command-r': dataclasses.replace(_SINGLE_DIGITS, is_nfc=True),
  'falcon': Words((r'[\p{P}\$\+<=>\^~\|`]+', _GPT2_WORDS, _THREES)),
  **dict.fromkeys(('llama-bpe', 'llama3', 'llama-v3', 'falcon3'), _LLAMA3),
  'smaug-bpe': Words(_LLAMA3.patterns),
  **dict.fromkeys(('qwen2', 'deepseek-r1-qwen', 'megrez'), _QWEN2),
  'gpt-4o': Words((_O200K_WORDS,)),
  'qwen35': Words((_QWEN35_WORDS,)),  # without NFC in llama.cpp's tests
  'deepseek-coder': Words(('[\r\n]', r'\s?\p{L}+', r'\s?\p{P}+', _CHINESE, r'\p{N}')),
  'deepseek-llm': Words(('[\r\n]', rf'\s?{_CASED}+', r'\s?[!-/:-~！-／：-～‘-‟　-。]+', r'\s+$', _CHINESE, r'\p{N}+')),
}

# The tokenizer, and what then changes the ids of a text, or None.
_Built: TypeAlias = tuple[tokenizers.Tokenizer, Callable[[list[int]], list[int]] | None]


_FIELDS = {
  'model': TEXT,
  'pre': TEXT,
  'tokens': list_of(TEXT, MOST_TOKENS),
  'token_type': list_of(whole(-(2**31)), MOST_TOKENS),
  'scores': list_of(real(), MOST_TOKENS),
  'merges': list_of(TEXT, MOST_MERGES),
  **dict.fromkeys(('add_bos_token', 'add_space_prefix', 'remove_extra_whitespaces'), FLAG),
}
ID_KEYS = tuple(f'tokenizer.ggml.{name}_token_id' for name in ('bos', 'eos', 'eot', 'eom', 'padding', 'unknown'))


def check_metadata(header: GgufHeader) -> None:
  """Checks all that the metadata says on the tokenizer, but not whether its parts fit together."""
  prefix = 'tokenizer.ggml.'
  fields = {f'{prefix}{name}': kind for name, kind in _FIELDS.items()} | {'tokenizer.chat_template': TEXT}
  metadata = check_object(header.metadata, fields, header.path)
  token_id = whole(0, len(metadata[f'{prefix}tokens']) - 1 if f'{prefix}tokens' in metadata else MOST_ID)
  check_object(metadata, dict.fromkeys(ID_KEYS, token_id), header.path)


def build_tokenizer(header: GgufHeader) -> Backend:
  """The tokenizer of a model. Whether a text begins with the beginning of a document is left to the caller."""
  build, _ = _kind(header)
  vocab = _Vocabulary.read(header)
  tokenizer, rewrite = guarded(header.path, build, header, vocab)
  backend = Backend(tokenizer, header.path, rewrite)
  backend.add_special_tokens(vocab.added(_CONTROL, _UNKNOWN))
  backend.add_tokens(vocab.added(_USER_DEFINED))
  return backend


def adds_bos(header: GgufHeader) -> bool:
  """Whether a text begins with the beginning of a document."""
  _, default = _kind(header)
  if header.metadata.get('tokenizer.ggml.model') == 'gemma4':  # files that say otherwise are mistaken
    return default
  return bool(header.metadata.get('tokenizer.ggml.add_bos_token', default))


def _kind(header: GgufHeader) -> tuple[Callable[[GgufHeader, _Vocabulary], _Built], bool]:
  """The builder for a kind of tokenizer, and whether the kind adds the beginning of a document."""
  model = header.required('tokenizer.ggml.model')
  if model == 'gpt2':
    return _byte_level, _words(header).adds_bos
  if model not in ('llama', 'gemma4'):
    raise ValueError(f"{header.path}: unknown tokenizer {shown(model)}; known are 'gpt2', 'llama' and 'gemma4'")
  return _sentence_piece if model == 'llama' else _merged_pieces, True


def _words(header: GgufHeader) -> Words:
  name = header.metadata.get('tokenizer.ggml.pre', 'default')
  if name not in WORDS:
    raise ValueError(f'{header.path}: unknown pre-tokenizer {shown(name)}; known are {", ".join(WORDS)}')
  return WORDS[name]


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


def _byte_level(header: GgufHeader, vocab: _Vocabulary) -> _Built:
  """Byte-pair encoding of bytes, as of GPT-2."""
  words = _words(header)
  ids = vocab.ids(header.path)
  merges = _stored_merges(header, ids)
  backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=words.takes_whole_words))
  if words.is_nfc:
    backend.normalizer = normalizers.NFC()
  splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated') for pattern in words.patterns]
  to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
  backend.decoder = decoders.ByteLevel()
  return backend, None


def _stored_merges(header: GgufHeader, ids: dict[str, int]) -> list[tuple[str, str]]:
  pairs = (merge.partition(' ') for merge in header.required('tokenizer.ggml.merges'))
  merges = [(left, right) for left, _, right in pairs]
  check_merges(merges, ids, header.path)
  return merges


def _merged_pieces(header: GgufHeader, vocab: _Vocabulary) -> _Built:
  """Byte-pair encoding of characters by merges, as of Gemma 4; what no token has is encoded as bytes."""
  merges = _stored_merges(header, vocab.ids(header.path))
  return _pieces(header, vocab, merges, has_prefix=False), None


def _sentence_piece(header: GgufHeader, vocab: _Vocabulary) -> _Built:
  """Byte-pair encoding of characters by the scores of SentencePiece; what no token has is encoded as bytes."""
  if header.metadata.get('tokenizer.ggml.remove_extra_whitespaces', False):
    raise ValueError(f'{header.path}: tokenizers that remove spaces are not known')
  scores = header.required('tokenizer.ggml.scores')
  if len(scores) < len(vocab.tokens):
    raise ValueError(f'{header.path}: {len(vocab.tokens)} tokens, but {len(scores)} scores')
  has_prefix = header.metadata.get('tokenizer.ggml.add_space_prefix', True)
  pieces = {token: i for i, token in enumerate(vocab.tokens) if vocab.types[i] in (_NORMAL, _UNUSED)}
  merges = _merges(header.path, pieces, vocab.tokens, scores)
  unused = frozenset(i for left, right in merges if vocab.types[i := pieces[left + right]] == _UNUSED)
  rewrite = UnusedPieces(vocab.tokens, pieces, scores, unused) if unused else None
  return _pieces(header, vocab, merges, has_prefix), rewrite


def _pieces(
  header: GgufHeader, vocab: _Vocabulary, merges: list[tuple[str, str]], has_prefix: bool
) -> tokenizers.Tokenizer:
  """Byte-pair encoding of characters, spaces among them; what no token has is encoded as bytes."""
  unknown = header.metadata.get('tokenizer.ggml.unknown_token_id') or 0
  if unknown >= len(vocab.tokens):
    raise ValueError(f'{header.path}: {len(vocab.tokens)} tokens, and {unknown} is unknown')
  model = models.BPE(vocab.ids(header.path), merges, unk_token=vocab.tokens[unknown], fuse_unk=True, byte_fallback=True)
  backend = tokenizers.Tokenizer(model)
  prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
  backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(' ', _SPACE)])
  without_prefix = [decoders.Strip(' ', 1, 0)] if has_prefix else []
  backend.decoder = decoders.Sequence(
    [decoders.Replace(_SPACE, ' '), decoders.ByteFallback(), decoders.Fuse(), *without_prefix]
  )
  return backend


def _merges(path: str, pieces: dict[str, int], tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
  """All pairs of pieces that join to a piece, highest score first, as SentencePiece merges neighbors."""
  if sum(map(len, pieces)) > _MOST_CUTS:
    raise ValueError(f'{path}: all tokens together have more than {_MOST_CUTS:,} characters')
  pairs = []
  for token, i in pieces.items():
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in pieces and right in pieces:
        pairs.append((-scores[i], i, pieces[left], pieces[right]))
    if len(pairs) > MOST_MERGES:
      raise ValueError(f'{path}: more than {MOST_MERGES:,} pairs of tokens join to a token')
  return [(tokens[left], tokens[right]) for *_, left, right in sorted(pairs)]


class UnusedPieces:
  """Cuts unused pieces in the ids of a text, as the package `sentencepiece` does; high scores are merged first.

  Where a piece is cut follows from the last two neighbors in the whole text that could have become it. So the merges of
  a text with such a piece are made again here.
  """

  def __init__(self, tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], unused: frozenset[int]):
    self._tokens, self._ids, self._scores, self._unused = tokens, ids, scores, unused

  def __call__(self, ids: list[int]) -> list[int]:
    if self._unused.isdisjoint(ids):
      return ids
    symbols: list[str] = []
    kept: dict[int, int] = {}  # by place: the ids of what is not merged, such as bytes
    for index in ids:
      if self._ids.get(self._tokens[index]) == index:
        symbols += self._tokens[index]
      else:
        kept[len(symbols)] = index
        symbols.append('')
    places, halves = self._merge(symbols, kept)
    result: list[int] = []
    for place in places:
      if place in kept:
        result.append(kept[place])
        continue
      waiting = [symbols[place]]
      while waiting:
        piece = waiting.pop()
        index = self._ids[piece]
        if index in self._unused and piece in halves:
          waiting += reversed(halves[piece])
        else:
          result.append(index)
    return result

  def _merge(self, symbols: list[str], kept: Mapping[int, int]) -> tuple[list[int], dict[str, tuple[str, str]]]:
    """Merges symbols: the places that are left, and the last two neighbors that could become each unused piece."""
    num = len(symbols)
    before, after = list(range(-1, num - 1)), list(range(1, num + 1))
    halves: dict[str, tuple[str, str]] = {}
    queue: list[tuple[float, int, int, str]] = []

    def propose(left, right):
      if left < 0 or right >= num or left in kept or right in kept:
        return
      piece = symbols[left] + symbols[right]
      index = self._ids.get(piece)
      if index is None:
        return
      heapq.heappush(queue, (-self._scores[index], left, right, piece))
      if index in self._unused:
        halves[piece] = symbols[left], symbols[right]

    for place in range(num - 1):
      propose(place, place + 1)
    while queue:
      _, left, right, piece = heapq.heappop(queue)
      if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != piece:
        continue  # one of them is part of another piece by now
      symbols[left], symbols[right] = piece, ''
      after[left] = after[right]
      if after[right] < num:
        before[after[right]] = left
      propose(before[left], left)
      propose(left, after[left])
    places, place = [], 0
    while place < num:
      places.append(place)
      place = after[place]
    return places, halves
