"""Regular expressions of tokenizers: those of public models are taken, those that may match for ever are not."""

import time

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from spectr_jax.io.patterns import check_pattern

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
