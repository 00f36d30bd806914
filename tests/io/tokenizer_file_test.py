"""`tokenizer.json` files that are damaged or hostile: one line that names the file, and nothing that runs for ever."""

import base64
import json
import struct
import time

import hostile
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from spectr_jax import Tokenizer
from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.patterns import check_pattern
from spectr_jax.io.tokenizer_file import read_backend

_BPE = {'type': 'BPE', 'vocab': {'a': 0, 'b': 1, 'ab': 2}, 'merges': [['a', 'b']]}
_WORD_PIECE = {
  'type': 'WordPiece', 'unk_token': '[UNK]', 'max_input_chars_per_word': 100, 'continuing_subword_prefix': '',
}  # fmt: skip
_DEEP = {'type': 'Lowercase'}
for _ in range(70):
  _DEEP = {'type': 'Sequence', 'normalizers': [_DEEP]}


def _spec(model=None, **sections):
  names = 'truncation', 'padding', 'normalizer', 'pre_tokenizer', 'post_processor', 'decoder'
  return {'version': '1.0', 'added_tokens': [], **dict.fromkeys(names), 'model': _BPE | (model or {})} | sections


def _added(content, index):
  flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized', 'special'), False)
  return {'id': index, 'content': content, **flags}


def _split(pattern):
  return {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}


def _replace(pattern, content):
  return {'type': 'Replace', 'pattern': pattern, 'content': content}


def _charsmap(units, replacements, size=None):
  content = struct.pack('<I', 4 * len(units) if size is None else size) + struct.pack(f'<{len(units)}I', *units)
  return {'type': 'Precompiled', 'precompiled_charsmap': base64.b64encode(content + replacements).decode()}


def _unigram(*pieces, **fields):
  return _spec() | {'model': {'type': 'Unigram', 'unk_id': 0, 'vocab': [['<u>', 0.0], *pieces], **fields}}


def _template(*pieces):
  step = {'type': 'TemplateProcessing', 'single': pieces, 'pair': [], 'special_tokens': {}}
  return _spec(post_processor=step)


def _read(tmp_path, spec):
  path = tmp_path / 'tokenizer.json'
  path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
  return read_backend(path)


def _refusal(tmp_path, function):
  return hostile.refusal(function, tmp_path / 'tokenizer.json')


@pytest.mark.parametrize(
  ('spec', 'problem'),
  [
    # Texts.
    ('[' * 10**6, 'nested too deeply'),
    ('null', 'must hold an object'),
    (b'\xff'.decode('latin-1') * 3, 'is damaged'),
    ('{"model": {}, "model": {}}', "is damaged: 'model' is there twice"),
    pytest.param('[' + '[],' * 7_000_000 + '[]]', 'more than 6,291,456 values', id='many values'),
    # Vocabularies.
    (_spec({'vocab': {'a': -1}}), 'vocab must be'),
    (_spec({'vocab': {'a': 2**31}}), 'vocab must be'),
    (_spec({'vocab': {'a': 0, 'b': 0, 'ab': 0}}), 'vocab must be'),
    (_spec({'vocab': {'a': True}}), 'vocab must be'),
    (_spec({'vocab': []}), 'vocab must have a token'),
    (_spec({'vocab': None}), 'vocab must have a token'),
    (_spec({'vocab': {'a' * 300_000: 0}}), 'a token of 300,000 characters'),
    (_spec({'type': 'Nope'}), "type must be 'BPE' or"),
    (_spec({'dropout': 0.5}), 'dropout must be 0'),
    (_spec({'merges': {'a': 'b'}}), 'merges must be a list'),
    (_spec({'merges': [['a', 'c']]}), "'a' and 'c' are merged, but join to no token"),
    (_spec({'merges': ['a b c']}), 'merges must have pairs of texts'),
    (_spec({'merges': [['a']]}), 'merges must have pairs of texts'),
    (_spec({'continuing_subword_prefix': 'xxxx'}), "'a' and 'b' are merged, but join to no token"),
    (
      _spec({'vocab': {'a': 0, '字b': 1, 'ab': 2}, 'merges': [['a', '字b']], 'continuing_subword_prefix': 'x'}),
      "'a' and '字b' are merged, but join to no token",
    ),
    (_unigram(['a' * 300_000, -1.0]), 'a token of 300,000 characters'),
    (_unigram(['a', 1e308]), 'vocab must have a finite number'),
    (_unigram(['a', -1.0], unk_id=7), 'UnkIdNotInVocabulary'),
    (_unigram(['a']), 'vocab must be'),
    (_spec({'type': 'WordPiece', 'unk_token': 'a', 'max_input_chars_per_word': 10**9}), 'max_input_chars_per_word'),
    # Added tokens.
    (_spec(added_tokens=[_added('<x>', 10**9)]), 'id must be a whole number'),
    (_spec(added_tokens=[_added('<x>', 9)]), "the added token '<x>' is to have the id 9, but gets 3"),
    (_spec(added_tokens=[_added('<x>', 3), _added('<y>', 3)]), "the added token '<y>' is to have the id 3, but gets 4"),
    (_spec(added_tokens=[_added('x' * 5000, 3)]), 'content must be a text of at most'),
    (_spec(added_tokens=[{'id': 3}]), 'a token without an id or content'),
    (_spec(added_tokens=[7]), 'must hold an object'),
    # Rules.
    (_spec(normalizer={'type': 'Nope'}), "normalizer has the unknown type 'Nope'"),
    (_spec(normalizer=[]), 'normalizer must be an object'),
    (_spec(normalizer=_DEEP), 'normalizer has more than 64 steps'),
    (_spec(normalizer={'type': 'Prepend', 'prepend': 'a' * 10**6}), 'prepend must be a text of at most 64'),
    (_spec(normalizer=_replace({'String': 'a'}, 'b' * 10**6)), 'content must be a text of at most 64'),
    (_spec(normalizer=_replace({'Regex': '(a+)+$'}, 'b')), 'in too many ways'),
    (_spec(normalizer={'type': 'Sequence', 'normalizers': [_replace({'String': 'a'}, 'aa')] * 30}), '256 times as'),
    (_spec(normalizer=_charsmap([], b'', size=2**32 - 1)), 'an index of 4294967295 bytes of 4'),
    (_spec(normalizer=_charsmap([0] * 256, b'a' * 10**5 + b'\0')), 'replaces a character by more than 64 bytes'),
    (_spec(normalizer={'type': 'Precompiled', 'precompiled_charsmap': '&'}), 'is not base64'),
    (_spec(pre_tokenizer=_split('(a|a)*c')), 'in too many ways'),
    (_spec(pre_tokenizer=_split(r'\p{Nope}')), 'the tokenizer fails'),
    (_spec(pre_tokenizer={'type': 'FixedLength', 'length': 0}), 'length must be a whole number from 1'),
    (_spec(pre_tokenizer={'type': 'Metaspace', 'replacement': 'ab'}), 'replacement must be a character'),
    (_spec(pre_tokenizer={'type': 'Sequence', 'pretokenizers': [{'type': 'ByteLevel'}] * 60}), '256 times as long'),
    (_spec(pre_tokenizer={'type': 'Sequence', 'pretokenizers': [_split('a')] * 60}), 'than 24 regular expressions'),
    (_spec(decoder={'type': 'Strip', 'content': 'a', 'start': 2**63, 'stop': 0}), 'start must be a whole number'),
    (_template({'SpecialToken': {'id': '<s>', 'type_id': 0}}), "the token '<s>', which is not among special_tokens"),
    (_template(*[{'Sequence': {'id': 'A', 'type_id': 0}}] * 50), 'single must have every text once'),
    (_template(), 'single must have every text once'),
  ],
)  # fmt: skip
def test_damaged_files_are_refused(spec, problem, tmp_path):
  assert problem in _refusal(tmp_path, lambda: _read(tmp_path, spec))


@pytest.mark.parametrize(
  ('spec', 'text', 'problem'),
  [
    (_spec({'type': 'WordLevel', 'unk_token': '[UNK]'}), 'x', 'Missing [UNK] token'),
    (_spec(_WORD_PIECE), 'x', 'Missing [UNK] token'),
    (_spec({'unk_token': '<u>'}), 'x', 'Unk token `<u>` not found'),
    (_unigram(['a', -1.0], unk_id=None), 'x', '`unk_id` is missing'),
    (_spec(normalizer=_charsmap([2**32 - 1] * 256, b'abc\0')), 'é', 'index out of bounds'),
    (_spec(), 'a\ud800', 'the tokenizer fails'),
  ],
)
def test_failures_at_use_are_one_line(spec, text, problem, tmp_path):
  """Also those that are panics of the package, which no `except Exception` catches."""
  backend = _read(tmp_path, spec)
  assert problem in _refusal(tmp_path, lambda: backend.encode(text))
  assert problem in _refusal(tmp_path, lambda: backend.encode_batch_fast([text]))


def test_panics_when_decoding_are_one_line(tmp_path):
  decoder = {'type': 'Strip', 'content': '字', 'start': 1, 'stop': 1}
  backend = _read(tmp_path, _spec({'vocab': {'字': 0}, 'merges': []}, decoder=decoder))
  assert 'the tokenizer fails' in _refusal(tmp_path, lambda: backend.decode([0]))
  assert 'the tokenizer fails: ' in _refusal(tmp_path, lambda: backend.decode([-1]))


def test_what_cuts_and_fills_texts_is_left_out(tmp_path):
  padding = {
    'strategy': {'Fixed': 10**9}, 'direction': 'Right', 'pad_to_multiple_of': None, 'pad_id': 0, 'pad_type_id': 0,
    'pad_token': 'a',
  }  # fmt: skip
  truncation = {'direction': 'Right', 'max_length': 1, 'strategy': 'LongestFirst', 'stride': 5}
  assert _read(tmp_path, _spec(padding=padding, truncation=truncation)).encode('abab').ids == [2, 2]


def test_files_without_a_type_of_model_are_read(tmp_path):
  """As that of GPT-2."""
  model = {'dropout': None, 'unk_token': '', 'continuing_subword_prefix': '', 'end_of_word_suffix': ''}
  spec = _spec(model | {'fuse_unk': False, 'merges': ['a b']})
  del spec['model']['type']
  assert _read(tmp_path, spec).encode('ab').ids == [2]


def test_large_files_are_refused(tmp_path):
  path = tmp_path / 'tokenizer.json'
  with path.open('wb') as file:
    file.truncate(2**40)
  assert 'larger than 67,108,864 bytes' in _refusal(tmp_path, lambda: Tokenizer.load(path))


def test_a_wrapped_tokenizer_keeps_its_name_and_other_errors_pass():
  def interrupted():
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    guarded('x', interrupted)
  with pytest.raises(ZeroDivisionError):
    guarded('x', lambda: 1 / 0)
  backend = Backend(Backend(tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, '[UNK]')), 'first'), 'second')
  with pytest.raises(ValueError, match='^first: the tokenizer fails: .*UNK'):
    backend.encode('b')
  with pytest.raises(AttributeError):
    backend.encode_special_tokens = True


# Regular expressions: those of public models are taken, those that may match for ever are not.

_PUBLIC = {
  'GPT-2': r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
  'Llama 3': (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r'|\s+(?!\S)|\s+'
  ),
  'GPT-4o': (
    r'[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+'
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  ),
  'DeepSeek-V3': (
    r'[!"#$%&' + r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r'| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
  ),
  'EXAONE': r'[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+',
  'Ling': r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
  'Kimi': r'[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:\'s|\'t)?|\p{N}{1,3}',
  'BLOOM': r' ?[^(\s|[.,!?…。，、।۔،])]+',
  'Aya': r'\d{1,3}(?=(?:\d{3})*\b)',
  'SuperBPE': r'(?=(\d{3})+(?!\d))',
  'Chameleon': r'(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z',
  'XLM-R': r' {2,}',
  'nothing': '',
}


@pytest.mark.parametrize('name', _PUBLIC)
def test_expressions_of_public_models_are_taken(name):
  check_pattern(_PUBLIC[name], 'file')
  tokenizers.Regex(_PUBLIC[name])


@pytest.mark.parametrize(
  'pattern',
  [
    '(a+)+$', '(a|a)*c', 'a*a*a*c', 'a*a*[bc]', '(a*)*b', '(?:a+b?)+c', '(?:(?:a{1,9}){1,9}){1,9}b', '(?i)(a+)+b',
    '(a+){3}', '(?:a?){30}a{30}', '(a|b|ab)*c', '(.*)*$', '(?=(a+)+$)', '(?!(a+)+$)x', '((a+)+$)?', '((a+)+$)*',
    '(?>(a+)+b)', '(a+)++b', '(a|a)' * 20 + 'c', 'a?' * 20 + 'c', '(?:a|(?:a|(?:a*)*)*)*b', '(?:(?:a*[bc]|a)*c|a)*',
    'a{1,500}a{1,500}b',  '[]](a+)+$', '[^]a](a+)+$', r'\p{L}+(\p{L}+)x', '(a+|b)+?c', '.*.*=.*x',
    '(x+x+)+y', '(.*?,){11}P', '[ab]+(?>(.*|(?:ab)))[^b]', '|'.join(['a*b'] * 300),
  ],
)  # fmt: skip
def test_what_matches_in_too_many_ways_is_refused(pattern):
  with pytest.raises(ValueError, match='^file has the regular expression .*(in too many ways|is repeated a number of)'):
    check_pattern(pattern, 'file')


@pytest.mark.parametrize(
  ('pattern', 'message'),
  [
    (r'(a)\1', r'\\1 is not known here'),
    (r'(?<x>a\g<x>?b)', r'\\g is not known here'),
    ('x(?i)a', r'\(\?i\) is not known here'),
    ('(?x:a)', r'\(\?x: is not known here'),
    ('(?~a)', 'is not known here'),
    ('(?(1)a|b)', 'is not known here'),
    ('(*FAIL)', 'is not known here'),
    (r'\Qa\E', 'is not known here'),
    ('a{3,1}', 'is not known here'),
    ('a{1,3}+', 'is not known here'),
    ('a{5000}', 'more than 1000 times'),
    ('a{99999999999999999}', 'more than 1000 times'),
    ('a**', 'what is repeated is repeated'),
    ('*a', r'\* repeats nothing'),
    ('(a', 'a parenthesis is not closed'),
    ('a)', 'a parenthesis closes nothing'),
    ('[[a]*b(c+)+$', 'a class of characters does not end'),
    ('[a', 'a class of characters does not end'),
    ('\\', 'it ends with a backslash'),
    ('(' * 100 + ')' * 100, 'nested too deeply'),
    ('a' * 10**6, 'of 1,000,000 characters, the most are 8,192'),
  ],
)
def test_what_is_not_known_is_refused(pattern, message):
  with pytest.raises(ValueError, match=message) as caught:
    check_pattern(pattern, 'file')
  assert str(caught.value).startswith('file has')


@pytest.mark.parametrize('name', [name for name in _PUBLIC if name != 'EXAONE'])
def test_what_is_taken_is_quick(name):
  split = pre_tokenizers.Split(tokenizers.Regex(_PUBLIC[name]), 'isolated')
  for text in ('a' * 20000, ' ' * 20000, 'aB' * 10000, '1' * 2000 + 'a', '字' * 20000 + '\n'):
    begin = time.process_time()
    split.pre_tokenize_str(text)
    assert time.process_time() - begin < 5
