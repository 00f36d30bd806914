"""`tokenizer.json`, the file of the package `tokenizers`.

The package trusts it: it may panic on a file, crash or run for ever, when it reads the file or when it encodes a text,
and what it does cannot be interrupted. So all that decides on its time and memory is checked before.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from etils import epath

from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.patterns import check_pattern
from spectr_jax.io.untrusted import (
  ANYTHING,
  FLAG,
  TEXT,
  Kind,
  check_object,
  list_of,
  map_of,
  object_of,
  one_of,
  parse_json,
  read_text,
  real,
  shown,
  whole,
)

MOST_BYTES = 2**26  # the largest of public models has half of that
MOST_TOKENS = 2**20
MOST_ID = 2**22
MOST_MERGES = 2**21
MOST_CHARACTERS = 2**10  # of a token
_MOST_ADDED = 2**18
MOST_CHARACTERS_OF_PIECES = 2**8  # of tokens of Unigram models, which look for all of them at every place
_MOST_VALUES = 6 * 2**20  # of the JSON text, which take up to 72 bytes each
_MOST_STEPS = 64  # of a section
_MOST_PATTERNS = 24
_MOST_GROWTH = 256  # of a text; some public models have 36
_MOST_INSERTED = 64  # characters put in front of a text
_MOST_WORD = 1000  # characters of a word of WordPiece models, which take cubic time


def _text_of(most: int) -> Kind:
  return Kind(f'a text of at most {most} characters', lambda x: TEXT.is_valid(x) and len(x) <= most)


TOKEN = _text_of(MOST_CHARACTERS)
TOKEN_ID = whole(0, MOST_ID)
_SHORT_TEXT = _text_of(_MOST_INSERTED)


def _is_vocab(x: Any) -> bool:
  if type(x) is list:
    return len(x) <= MOST_TOKENS and all(
      type(entry) is list and len(entry) == 2 and type(entry[0]) is str for entry in x
    )
  if type(x) is not dict or len(x) > MOST_TOKENS:
    return False
  ids = x.values()
  return set(map(type, ids)) <= {int} and (not x or (min(ids) >= 0 and max(ids) <= MOST_ID and len(set(ids)) == len(x)))


_MODEL = {
  'type': one_of('BPE', 'WordPiece', 'WordLevel', 'Unigram'),
  'vocab': Kind(f'at most {MOST_TOKENS} tokens with an id of its own each, up to {MOST_ID}, or with scores', _is_vocab),
  'merges': list_of(ANYTHING, MOST_MERGES),
  'unk_token': TOKEN,
  'unk_id': whole(0, MOST_TOKENS),
  'dropout': one_of(0, 0.0),  # others give a text other ids each time
  'continuing_subword_prefix': _SHORT_TEXT,
  'end_of_word_suffix': _SHORT_TEXT,
  'max_input_chars_per_word': whole(1, _MOST_WORD),
  **dict.fromkeys(('fuse_unk', 'byte_fallback', 'ignore_merges'), FLAG),
}
FLAGS_OF_ADDED = 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'
_ADDED = {'id': TOKEN_ID, 'content': TOKEN, **dict.fromkeys(FLAGS_OF_ADDED, FLAG)}
_FILE = {
  'version': one_of('1.0'),
  'added_tokens': list_of(ANYTHING, _MOST_ADDED),
  **dict.fromkeys(('normalizer', 'pre_tokenizer', 'post_processor', 'decoder', 'model'), object_of({})),
}

_PATTERN = Kind(
  'an object with one text, "String" or "Regex"',
  lambda x: type(x) is dict and len(x) == 1 and set(x) <= {'String', 'Regex'} and all(map(TEXT.is_valid, x.values())),
)
_REPLACE = {'pattern': _PATTERN, 'content': _SHORT_TEXT}
_CHARACTER = Kind('a character', lambda x: TEXT.is_valid(x) and len(x) == 1)
_METASPACE = {
  'replacement': _CHARACTER,
  'prepend_scheme': one_of('always', 'first', 'never'),
  'add_prefix_space': FLAG,
  'split': FLAG,
}
_BYTE_LEVEL = {'add_prefix_space': FLAG, 'trim_offsets': FLAG, 'use_regex': FLAG}
_BEHAVIOR = one_of('Removed', 'Isolated', 'MergedWithPrevious', 'MergedWithNext', 'Contiguous')
_ENDS = {name: Kind('a token with its id', lambda x: type(x) is list and len(x) == 2) for name in ('sep', 'cls')}
_INSERTED = object_of({'id': TOKEN, 'ids': list_of(TOKEN_ID, 64), 'tokens': list_of(TOKEN, 64)})
_TEMPLATE = list_of(
  object_of({'SpecialToken': object_of({'id': TOKEN}), 'Sequence': object_of({'id': one_of('A', 'B')})}), 64
)
# The fields of every step by section and type; a step of the type Sequence has a list of others.
_STEPS: Mapping[str, Mapping[str, Mapping[str, Kind]]] = {
  'normalizer': {
    'BertNormalizer': dict.fromkeys(('clean_text', 'handle_chinese_chars', 'strip_accents', 'lowercase'), FLAG),
    'Strip': {'strip_left': FLAG, 'strip_right': FLAG},
    'Prepend': {'prepend': _SHORT_TEXT},
    'Replace': _REPLACE,
    'Precompiled': {'precompiled_charsmap': TEXT},
    **dict.fromkeys(('StripAccents', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase', 'Nmt', 'ByteLevel'), {}),
  },
  'pre_tokenizer': {
    'ByteLevel': _BYTE_LEVEL,
    'Metaspace': _METASPACE,
    'Split': {'pattern': _PATTERN, 'behavior': _BEHAVIOR, 'invert': FLAG},
    'Punctuation': {'behavior': _BEHAVIOR},
    'Digits': {'individual_digits': FLAG},
    'CharDelimiterSplit': {'delimiter': _CHARACTER},
    'FixedLength': {'length': whole(1)},
    **dict.fromkeys(('BertPreTokenizer', 'Whitespace', 'WhitespaceSplit', 'UnicodeScripts'), {}),
  },
  'post_processor': {
    'ByteLevel': _BYTE_LEVEL,
    'BertProcessing': _ENDS,
    'RobertaProcessing': {**_ENDS, 'trim_offsets': FLAG, 'add_prefix_space': FLAG},
    'TemplateProcessing': {'single': _TEMPLATE, 'pair': _TEMPLATE, 'special_tokens': map_of(_INSERTED)},
  },
  'decoder': {
    'ByteLevel': _BYTE_LEVEL,
    'Metaspace': _METASPACE,
    'Replace': _REPLACE,
    'Strip': {'content': _CHARACTER, 'start': whole(0, _MOST_INSERTED), 'stop': whole(0, _MOST_INSERTED)},
    'WordPiece': {'prefix': _SHORT_TEXT, 'cleanup': FLAG},
    'BPEDecoder': {'suffix': _SHORT_TEXT},
    'CTC': {'pad_token': TOKEN, 'word_delimiter_token': TOKEN, 'cleanup': FLAG},
    **dict.fromkeys(('Fuse', 'ByteFallback'), {}),
  },
}
_SEQUENCES = {
  'normalizer': 'normalizers',
  'pre_tokenizer': 'pretokenizers',
  'post_processor': 'processors',
  'decoder': 'decoders',
}


def read_backend(path: epath.PathLike) -> Backend:
  """Reads a tokenizer, without what the file says on cutting and filling texts."""
  text = read_text(path, MOST_BYTES)
  if sum(map(text.count, ',[{')) > _MOST_VALUES:
    raise ValueError(f'{path} has more than {_MOST_VALUES:,} values, the most that a tokenizer may have')
  added = _check(parse_json(text, str(path), is_read_again=True), str(path))
  backend = Backend(guarded(str(path), tokenizers.Tokenizer.from_str, text), str(path))
  backend.no_truncation()
  backend.no_padding()
  for token, index in added.items():
    given = backend.token_to_id(token)
    if given != index:
      raise ValueError(f'{path}: the added token {shown(token)} is to have the id {index}, but gets {given}')
  return backend


def _check(content: Any, where: str) -> dict[str, int]:
  spec = check_object(content, _FILE, where)
  _check_model(spec.get('model') or {}, f'{where}: model')
  steps = {section: list(_steps(spec.get(section), section, where)) for section in _STEPS}
  for name, applied in (
    ('the text to encode', steps['normalizer'] + steps['pre_tokenizer']),
    ('the text of a token', steps['decoder']),
  ):
    growth = math.prod(map(_growth, applied))
    if growth > _MOST_GROWTH:
      raise ValueError(f'{where} may make {name} more than {_MOST_GROWTH} times as long')
    if sum('Regex' in (step.get('pattern') or {}) for step in applied) > _MOST_PATTERNS:
      raise ValueError(f'{where} applies more than {_MOST_PATTERNS} regular expressions to {name}')
  tokens = spec.get('added_tokens') or []
  for token in tokens:
    check_object(token, _ADDED, f'{where}: added_tokens')
    if token.get('id') is None or token.get('content') is None:
      raise ValueError(f'{where}: added_tokens has a token without an id or content')
  # The package leaves out the empty token.
  return {token['content']: token['id'] for token in tokens if token['content']}


def _check_model(model: dict[str, Any], where: str) -> None:
  check_object(model, _MODEL, where)
  vocab = model.get('vocab')
  if not vocab:
    raise ValueError(f'{where}: vocab must have a token')
  if isinstance(vocab, dict):
    tokens, most = vocab, MOST_CHARACTERS
  else:
    tokens, most = [token for token, _ in vocab], MOST_CHARACTERS_OF_PIECES
    score = real()
    if not all(score.is_valid(entry[1]) for entry in vocab):
      raise ValueError(f'{where}: vocab must have {score.words} for every token')
  longest = max(map(len, tokens))
  if longest > most:
    raise ValueError(f'{where}: vocab has a token of {longest:,} characters, the most are {most}')
  if isinstance(vocab, dict):
    pairs = [merge.split(' ') if isinstance(merge, str) else merge for merge in model.get('merges') or []]
    for pair in pairs:
      if type(pair) is not list or len(pair) != 2 or set(map(type, pair)) != {str}:
        raise ValueError(f'{where}: merges must have pairs of texts, got {shown(pair)}')
    check_merges(pairs, vocab, where, prefix=model.get('continuing_subword_prefix') or '')


def check_merges(pairs: Sequence[Sequence[str]], tokens: Mapping[str, int], where: str, *, prefix: str = '') -> None:
  """Checks that pairs, the second without `prefix`, join to a token; the package crashes on some that do not."""
  if not prefix and all(map(tokens.__contains__, map(''.join, pairs))):
    return
  start = len(prefix)
  for left, right in pairs:
    if left + right[start:] not in tokens or not right.startswith(prefix):
      raise ValueError(f'{where}: {shown(left)} and {shown(right)} are merged, but join to no token')


def _steps(content: Any, section: str, where: str) -> Iterator[dict[str, Any]]:
  """The steps of a section, with their fields checked."""
  waiting, num = [content], 0
  while waiting:
    step = waiting.pop()
    if step is None:
      continue
    num += 1
    if num > _MOST_STEPS:
      raise ValueError(f'{where}: {section} has more than {_MOST_STEPS} steps')
    kind = check_object(step, {'type': TEXT}, f'{where}: {section}').get('type')
    if kind == 'Sequence':
      name = _SEQUENCES[section]
      waiting += reversed(
        check_object(step, {name: list_of(ANYTHING, _MOST_STEPS)}, f'{where}: {section}').get(name) or []
      )
    elif kind is None or kind not in _STEPS[section]:
      known = ', '.join(['Sequence', *_STEPS[section]])
      raise ValueError(f'{where}: {section} has the unknown type {shown(kind)}; known are {known}')
    else:
      place = f'{where}: {section} {kind}'
      pattern = check_object(step, _STEPS[section][kind], place).get('pattern') or {}
      if 'Regex' in pattern:
        check_pattern(pattern['Regex'], place)
      if kind == 'Precompiled':
        _check_charsmap(step.get('precompiled_charsmap') or '', place)
      if kind == 'TemplateProcessing':
        _check_template(step, place)
      yield step


def _check_template(step: dict[str, Any], where: str) -> None:
  known = step.get('special_tokens') or {}
  for name in ('single', 'pair'):
    pieces = step.get(name) or []
    missing = {piece['SpecialToken'].get('id') for piece in pieces if piece.get('SpecialToken')} - set(known)
    if missing:
      raise ValueError(f'{where}: {name} has the token {shown(missing.pop())}, which is not among special_tokens')
    texts = [piece['Sequence'].get('id') for piece in pieces if piece.get('Sequence')]
    if len(set(texts)) < len(texts) or (name == 'single' and texts != ['A']):
      raise ValueError(f'{where}: {name} must have every text once')


def _check_charsmap(text: str, where: str) -> None:
  """Checks SentencePiece's map of characters: an index in numbers of 4 bytes, then replacements that end in zeros."""
  try:
    content = base64.b64decode(text, validate=True)
  except (binascii.Error, ValueError) as error:
    raise ValueError(f'{where}: precompiled_charsmap is not base64') from error
  size = struct.unpack_from('<I', content)[0] if len(content) >= 4 else 0
  replacements = content[4 + size :]
  if not 4 <= size <= len(content) - 4 or size % 4:
    raise ValueError(f'{where}: precompiled_charsmap is damaged: an index of {size} bytes of {len(content)}')
  if re.search(rb'[^\0]{65}', replacements) or not replacements.endswith(b'\0'):
    raise ValueError(f'{where}: precompiled_charsmap is damaged: it replaces a character by more than 64 bytes')


def _growth(step: dict[str, Any]) -> int:
  """How many times as long a step may make a text, in bytes."""
  kind = step['type']
  if kind == 'Replace':
    pattern, size = step.get('pattern') or {}, len((step.get('content') or '').encode())
    removed = len(pattern.get('String', '').encode())
    return max(1, -(-size // removed)) if removed else 1 + size
  if kind in ('NFKC', 'NFKD', 'Precompiled'):
    return 4
  if kind in ('ByteLevel', 'Metaspace'):
    return 3
  return 1
