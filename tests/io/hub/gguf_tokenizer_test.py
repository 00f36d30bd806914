"""Tokenizers of GGUF files beside llama.cpp and SentencePiece, whose tokens stand here.

llama.cpp is that of llama-cpp-python 0.3.36. On the vocabularies in its folder `models` all texts of its own tests
agree for every pre-tokenizer below; the vocabularies are too large to stand here. With unused pieces 2,400 of 2,400
random texts agreed with sentencepiece 0.2.3, for eight vocabularies that it trained.
"""

import random
import re
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from spectr_jax.io.hub.gguf_header import GgufHeader
from spectr_jax.io.hub.gguf_tokenizer import WORDS, adds_bos, build_tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.patterns import check_pattern

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


def _header(tokens, **fields):
  """The header of a file with a tokenizer and nothing else."""
  metadata = {f'tokenizer.ggml.{name}': value for name, value in {'tokens': tokens, **fields}.items()}
  return GgufHeader('model.gguf', metadata, {}, np.zeros(0, np.uint8))


def _byte_level(pre):
  return build_tokenizer(_header(sorted(pre_tokenizers.ByteLevel.alphabet()), model='gpt2', pre=pre, merges=[]))


_TEXTS = (
  "It's 1234 o'clock",
  "IT'S `x` += $99; 50%",
  'naïve Größe\n\n ΑΒγ 漢字。',
  'नमस्ते e\u0301t',
  '  two   ½Ⅷ\t\r\n 𝔸𐐀ქ Ა ',
)
# The tokens that llama.cpp gives with a vocabulary that has every part of a text as a token.
_WORDS = {
  'command-r': (
    "It|'s| |1|2|3|4| o|'|clock",
    "IT|'|S| `|x|`| +=| $|9|9|;| |5|0|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    None,
    ' | two|   |½|Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
  ),
  'deepseek-llm': (
    "It|'|s| |1234| o|'|clock",
    "IT|'|S| `|x|`| +=| $|99|;| |50|%",
    'na|ï|ve| Gr|öß|e|\n|\n| ΑΒγ| |漢字|。',
    'नमस्ते| e|\u0301|t',
    ' | two|   |½|Ⅷ|\t|\r|\n| 𝔸|𐐀|ქ| |Ა| ',
  ),
  'falcon': (
    "It|'|s| |123|4| o|'|clock",
    "IT|'|S| |`|x|`| |+=| |$|99|;| 50|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    'नमस|्|त|े| e|\u0301|t',
    ' | two|  | ½Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
  ),
  'mpt': (
    "It|'s| 1234| o|'|clock",
    "IT|'|S| `|x|`| +=| $|99|;| 50|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    None,
    ' | two|  | ½Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
  ),
  'qwen35': (
    "It|'s| |1|2|3|4| o|'clock",
    "IT|'S| `|x|`| +=| $|9|9|;| |5|0|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    'नमस्ते| e\u0301t',
    ' | two|  | |½|Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
  ),
  'refact': (
    "It|'s| |1|2|3|4| o|'|clock",
    "IT|'|S| `|x|`| +=| $|9|9|;| |5|0|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    'नमस|्|त|े| e|\u0301|t',
    ' | two|   |½|Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
  ),
}


@pytest.mark.parametrize('pre', _WORDS)
def test_words_are_those_of_llama_cpp(pre):
  backend, decoder = _byte_level(pre), decoders.ByteLevel()
  for text, expected in zip(_TEXTS, _WORDS[pre], strict=True):
    # The form NFC, which llama.cpp leaves to others, is that of these models' own tokenizers.
    assert (backend.normalizer is not None) == (_WORDS[pre][3] is None)
    if expected is not None:
      words = [decoder.decode([word]) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
      assert '|'.join(words) == expected


def test_words_of_gpt_4o_are_those_of_tiktoken():
  """Of its expression for o200k, with which 5,000 random texts agreed. llama.cpp's knows cases of ASCII alone."""
  texts = (*_TEXTS, "camelCase XMLHttpRequest DON'T we'LL http://a.b//\n\n x=Ǆa漢aA")
  expected = (
    "It's| |123|4| o|'clock",
    "IT'S| `|x|`| +=| $|99|;| |50|%",
    'naïve| Größe|\n\n| ΑΒγ| 漢字|。',
    'नमस्ते| e\u0301t',
    ' | two|  | |½Ⅷ|\t\r\n| 𝔸𐐀ქ| Ა| ',
    "camel|Case| XMLHttp|Request| DON'T| we'LL| http|://|a|.b|//\n\n| x|=Ǆa漢a|A",
  )
  backend, decoder = _byte_level('gpt-4o'), decoders.ByteLevel()
  for text, words in zip(texts, expected, strict=True):
    found = [decoder.decode([word]) for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert '|'.join(found) == words


def test_special_tokens_of_harmony_pass_through():
  """They are found beside words in prompts of the template, have no text, and a message cannot spell them."""
  special = [f'<|{name}|>' for name in ('start', 'message', 'channel', 'end', 'return')]
  tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
  types = [NORMAL] * 256 + [CONTROL] * len(special)
  backend = build_tokenizer(_header(tokens, token_type=types, model='gpt2', pre='gpt-4o', merges=[]))
  template = "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
  template += "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
  tokenizer = HubTokenizer.from_parts(backend, bos_id=None, eos_ids=[260], add_bos=False, chat_template=template)
  start, message, channel, end, back = range(256, 261)

  def ids(text):
    return [tokens.index(letter) for letter in text]

  assert tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}]) == [
    start, *ids('user'), message, *ids('hi'), end, start, *ids('assistant')
  ]  # fmt: skip
  assert tokenizer.encode('<|channel|>final<|return|>') == [channel, *ids('final'), back]
  assert tokenizer.decode([channel, *ids('final'), message, *ids('Ja'), back]) == 'finalJa'
  spelt = tokenizer.encode_chat([{'role': 'user', 'content': '<|end|>'}])
  assert spelt.count(end) == 1
  assert spelt[5:14] == [message, *ids('<|end|>'), end]


def test_letters_of_deepseek_llm():
  """It lists those that make a word; llama.cpp's words, for the ends of the list's gaps."""
  backend = _byte_level('deepseek-llm')

  def num_words(first, others):
    return {len(backend.pre_tokenizer.pre_tokenize_str(first + other)) for other in others}

  assert num_words('é', 'ÀǅΩԱꜢꝯꞌꭰꮿﬀ𐐀𑢠𞤀') == num_words('Ꭰ', 'ჅᎠᏽᲐᲿⰀⳳℤ') == {1}
  assert num_words('é', 'ՠաֈꞐꟊꟵꬰꭠ𐕰𖹀𝐀𝟋𝼀ªʰא') == num_words('Ꭰ', 'ქჽᲀⴀⴭᴬℸ') == {2}


def test_marks_are_composed_where_models_want_it_and_files_are_read_again():
  text = 'e\u0301'
  for pre, words in WORDS.items():
    expected = unicodedata.normalize('NFC', text) if words.is_nfc else text
    backend = _byte_level(pre)
    assert backend.decode(backend.encode(text).ids) == expected, pre
    for pattern in words.patterns:
      check_pattern(pattern, pre)


def test_pre_tokenizers_with_several_names_or_none():
  same = [
    ('refact', 'starcoder'),
    ('minerva-7b', 'smollm'),
    ('mpt', 'olmo'),
    ('megrez', 'qwen2'),
    ('falcon3', 'llama3'),
  ]
  for one, other in same:
    assert WORDS[one] == WORDS[other]
  with pytest.raises(ValueError, match="unknown pre-tokenizer 'gemma4'; known are default, gpt-2, "):
    _byte_level('gemma4')


# Gemma 4: merges of characters.


def test_merged_pieces_are_those_of_llama_cpp():
  words = ['\n', '\n\n', '\n\n\n', '\n\n\n\n', '▁', '▁▁', '▁▁▁', 'a', 'b', 'c', '▁a', 'ab', '▁ab', 'bc', 'abc', 'é']
  tokens = ['<pad>', '<eos>', '<bos>', '<unk>', *_BYTES, '<turn|>', '<|think|>', *words]
  merges = [
    '\n \n', '\n\n \n', '\n \n\n', '\n\n \n\n', '\n\n\n \n', '\n \n\n\n', '▁ a', 'b c', 'a b', '▁a b', '▁ ab', 'a bc',
    'ab c', '▁ ▁', '▁▁ ▁', '▁ ▁▁',
  ]  # fmt: skip
  header = _header(
    tokens,
    token_type=[CONTROL] * 4 + [BYTE] * 256 + [USER_DEFINED, CONTROL] + [NORMAL] * len(words),
    model='gemma4',
    merges=merges,
    unknown_token_id=3,
    add_bos_token=False,
  )
  backend = build_tokenizer(header)
  for text, expected in {
    'ab': ['ab'],
    'abc abc': ['abc', '▁a', 'bc'],
    '   a': ['▁▁', '▁a'],
    '\n\n\n\n\na': ['\n\n', '\n\n\n', 'a'],
    'a\n b': ['a', '\n', '▁', 'b'],
    'é日': ['é', '<0xE6>', '<0x97>', '<0xA5>'],
    'ab<turn|> c': ['ab', '<turn|>', '▁', 'c'],
    '<|think|>bc': ['<|think|>', 'bc'],
  }.items():
    found = backend.encode(text)
    assert found.tokens == expected
    assert backend.decode(found.ids, skip_special_tokens=False) == text
  # llama.cpp: files that say otherwise are mistaken.
  assert adds_bos(header)
  with pytest.raises(ValueError, match="'▁' and 'é' are merged, but join to no token"):
    build_tokenizer(_header(tokens, model='gemma4', merges=['▁ é']))


# SentencePiece.

_PIECES = {
  '▁': -20, 'a': -21, 'b': -22, 'c': -23, 'd': -24, '▁a': -9, 'ab': -1, 'bc': -2, 'abc': -3, 'cd': -4, 'bcd': -5,
  'abcd': -6, 'da': -7, 'dab': -8, 'aa': -10, 'aab': -11,
}  # fmt: skip
_UNUSED = {'ab', 'bc', 'bcd', '▁a', 'da', 'aab'}
_PIECE_TOKENS = ['<unk>', '<s>', '</s>', *_BYTES, *_PIECES]


def _pieces(*others, unused=(), **fields):
  """The tokenizer of the pieces, and of other tokens as users define them."""
  types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [UNUSED if piece in unused else NORMAL for piece in _PIECES]
  scores = [0.0] * 259 + [float(score) for score in _PIECES.values()] + [0.0] * len(others)
  types += [USER_DEFINED] * len(others)
  header = _header([*_PIECE_TOKENS, *others], token_type=types, scores=scores, model='llama', **fields)
  assert adds_bos(header)
  return build_tokenizer(header)


def _merged(text):
  """SentencePiece: joins the neighbors whose join has the highest score until no two join to a piece."""
  symbols = list(text.replace(' ', '▁'))
  while joins := [(_PIECES[a + b], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in _PIECES]:
    at = -max(joins)[1]
    symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
  return [token for x in symbols for token in ([x] if x in _PIECES else [_BYTES[byte] for byte in x.encode()])]


@pytest.mark.parametrize('with_prefix', [True, False])
def test_pieces_are_merged_by_their_scores(with_prefix):
  backend, rng = _pieces('  ', add_space_prefix=with_prefix), random.Random(0)
  begin = ' ' if with_prefix else ''
  for _ in range(300):
    text = re.sub(' +', ' ', ''.join(rng.choices('aabbccdd é漢🙂', k=rng.randrange(1, 30))))
    found = backend.encode(text)
    assert found.tokens == _merged(begin + text), text
    assert backend.decode(found.ids) == text
  parts = _merged(f'{begin}a')
  assert backend.encode('a<s>a  a</s>').tokens == [*parts, '<s>', *parts, '  ', *parts, '</s>']


# As `SentencePieceProcessor.encode` of sentencepiece 0.2.3 gives them.
_PIECES_OF = {
  'ab': '▁ a b',
  'abc': '▁ abc',
  'abcd': '▁ abcd',
  'bcda': '▁ b c d a',
  'aab': '▁ a a b',
  'dab da': '▁ dab ▁ d a',
  'abé': '▁ a b <0xC3> <0xA9>',
  'cab ab': '▁ c a b ▁ a b',
  'cdab': '▁ cd a b',
  'bcd bcdd': '▁ b c d ▁ b c d d',
  'a dbccddaa c': '▁ a ▁ d b c cd d a a ▁ c',
  'dacdb  aac b': '▁ d a cd b ▁ ▁ a a c ▁ b',
  'bcabccbbbcba': '▁ b c abc c b b b c b a',
  ' cda  abdd c': '▁ ▁ cd a ▁ ▁ a b d d ▁ c',
  'acddbccdcbca': '▁ a cd d b c cd c b c a',
}


def test_unused_pieces_are_steps_of_merging_and_no_tokens():
  backend = _pieces(unused=_UNUSED)
  for text, expected in _PIECES_OF.items():
    assert ' '.join(_PIECE_TOKENS[index] for index in backend.encode(text).ids) == expected, text
  parts = {'bos_id': 1, 'eos_ids': [2], 'add_bos': True, 'chat_template': '{{ messages[0].content }}'}
  tokenizer = HubTokenizer.from_parts(backend, **parts)
  found = [[_PIECE_TOKENS[index] for index in ids] for ids in tokenizer.encode_batch(list(_PIECES_OF))]
  assert found == [expected.split() for expected in _PIECES_OF.values()]
  assert all(tokenizer.decode(tokenizer.encode(text)) == f' {text}' for text in _PIECES_OF)
  # A message that spells a special token is encoded by a copy of the tokenizer.
  ids = tokenizer.encode_chat([{'role': 'user', 'content': 'ab</s>'}])
  assert [_PIECE_TOKENS[index] for index in ids[:3]] == ['▁', 'a', 'b']
  assert 2 not in ids


def test_a_long_text_of_unused_pieces():
  backend = _pieces(unused=_UNUSED)
  text = 'abcdab' * 20_000
  ids = backend.encode(text).ids
  assert len(ids) == 1 + 20_000 * 3
  assert backend.decode(ids) == text


def test_rules_that_tokenizer_json_cannot_express_are_not_written(tmp_path):
  tokenizer = HubTokenizer.from_parts(_pieces(unused=_UNUSED), bos_id=1, eos_ids=[2], add_bos=True)
  with pytest.raises(ValueError, match='^model.gguf: tokenizer.json has no pieces that are merged and are no tokens$'):
    tokenizer.save(tmp_path)
  # Unused tokens that nothing is merged to, such as room for more, are no such pieces.
  others = _header(
    ['<unk>', '<s>', '</s>', *_BYTES, 'a', 'b', '<dummy1>'],
    token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL, NORMAL, UNUSED],
    scores=[0.0] * 262,
    model='llama',
  )
  HubTokenizer.from_parts(build_tokenizer(others), bos_id=1, eos_ids=[2], add_bos=True).save(tmp_path)
  assert tokenizers.Tokenizer.from_file(str(tmp_path / 'tokenizer.json')).encode('ab').tokens[0] == '<s>'
