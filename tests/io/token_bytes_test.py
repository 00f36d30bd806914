"""Decoded text is that of the tokens' bytes; a token's name, bytes and place in a text spell the text together."""

import random

import pytest
import tiny_hub
import tokenizers
from text_tokenizers import DECODERS, TOKENIZERS, all_tokenizers, hub, streamed, word_backend
from tokenizers import decoders

from spectr_jax import StopStrings, TextStream
from spectr_jax.io.token_bytes import TokenBytes

_TEXTS = ['☃ a', 'the owl: ü, 漢字 and \U0001f989! the owl', 'é', '\u0301e\u200d', '\n\n\t x  y', 'naïve ☃☃ he']


def _of_backend(backend, ids):
  """The text of ids behind others, by the backend."""
  before = [backend.token_to_id('a')]
  whole, begin = (backend.decode(part, skip_special_tokens=True) for part in ([*before, *ids], before))
  return whole[len(begin) :]


def _pieces(found, ids, rng):
  """The text of ids that come in pieces."""
  decode, text = found.stream(), ''
  while ids:
    size = rng.randrange(4)
    text, ids = text + decode(ids[:size], False), ids[size:]
  return text + decode([], True)


@pytest.mark.parametrize('kind', [*DECODERS, 'byte level'])
def test_texts_are_those_of_the_backend(kind):
  backend, rng = tiny_hub.backend() if kind == 'byte level' else word_backend(DECODERS[kind]), random.Random(0)
  found, num_valid = TokenBytes(backend), 0
  for _ in range(300):
    ids = [rng.randrange(backend.get_vocab_size() + 3) for _ in range(rng.randrange(9))]
    text, wanted = found.decode(ids), _of_backend(backend, ids)
    assert _pieces(found, ids, rng) == text
    if '\ufffd' not in wanted + text:
      assert text == wanted
      num_valid += 1
    if kind == 'byte level':  # it replaces stray bytes as UTF-8 does
      assert text == wanted
  assert num_valid > 30


def test_the_end_of_a_word_is_a_space_wherever_the_text_is_cut():
  backend = word_backend(decoders.BPEDecoder())
  ids = [backend.token_to_id(word) for word in ('he', 'owl</w>', 'a</w>')]
  assert (backend.decode(ids), TokenBytes(backend).decode(ids)) == ('heowl a', 'heowl a ')


@pytest.mark.parametrize(
  ('decoder', 'name'),
  [
    (decoders.CTC(), 'CTC'),
    (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), 'ByteFallback'),
    (decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]), 'ByteFallback'),
    (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), 'WordPiece'),
    (decoders.Sequence([decoders.Fuse(), decoders.Replace('▁t', 'T')]), 'Replace'),
    (decoders.Sequence([decoders.ByteFallback(), decoders.Replace(tokenizers.Regex('a'), 'b')]), 'Replace'),
    (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(' ', 1, 0)]), 'Strip'),
  ],
)
def test_decoders_of_several_tokens_are_refused_by_name(decoder, name):
  message = f"^the vocabulary: the tokenizer's decoder {name} .*so that tokens have no text"
  with pytest.raises(ValueError, match=message):
    hub(word_backend(decoder), 0)


def test_ids_without_a_token_and_special_ones_have_no_bytes():
  found = TokenBytes(tiny_hub.backend())
  assert found.decode([7, 280, 41, 10**6, 2**32 - 1]) == ''
  for index in (-1, 2**32, 10**30):
    with pytest.raises(ValueError, match='ids of tokens are whole numbers from 0'):
      found.decode([index])


def test_tokens_beside_the_vocabulary_are_text():
  """Their characters may be some that bytes are spelled with."""
  backend = tiny_hub.backend()
  backend.add_tokens(['naïve', 'Ġ', '日'])
  tokenizer = hub(backend)
  for text in ('naïve owl', '日 naïve', ' x'):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_waits_for_its_bytes():
  tokenizer = TOKENIZERS['byte level']
  stream = TextStream(tokenizer)
  owl = tokenizer.encode('\U0001f989')
  assert [stream.add([token]) for token in owl] == ['', '', '', '\U0001f989']
  assert stream.add(owl[:2]) == ''
  assert stream.finish() == tokenizer.decode(owl[:2]) != ''
  assert stream.finish() == ''
  assert '\ufffd' in stream.add(owl[1:2] * 4)


@pytest.fixture(scope='module', params=TOKENIZERS)
def spelled(request):
  """A tokenizer, and the ids of bytes."""
  tokenizer, found = TOKENIZERS[request.param], {}
  for index in range(tokenizer.vocab_size):
    content = tokenizer._bytes[index]
    if len(content) == 1 and (request.param == 'byte level' or tokenizer.token(index).startswith('<0x')):
      found.setdefault(content[0], index)
  return tokenizer, lambda content: [found[byte] for byte in content]


@pytest.mark.parametrize(
  ('content', 'expected'),
  [
    ('字字'.encode() + '字'.encode()[:1], '字字\ufffd'),
    ('字字'.encode() + '字'.encode()[:2], '字字\ufffd'),
    (b'\xc3\xf1\x9e\xcf\x8e', '\ufffd\ufffdώ'),
    (b'\xff' + '字'.encode(), '\ufffd字'),
    (b'a\x80\x80b\xed\xa0\x80', 'a\ufffd\ufffdb\ufffd\ufffd\ufffd'),
    (b'\xf0\x9f\xa6a\xf0\x9f\xa6\x89', '\ufffda\U0001f989'),
    (b'\xc0\xaf\xf5\x00', '\ufffd\ufffd\ufffd\0'),
    (b'\xef\xbb\xbfa', '\ufeffa'),
  ],
)
def test_stray_bytes_lose_nothing_but_themselves(spelled, content, expected):
  tokenizer, ids_of = spelled
  ids = ids_of(content)
  assert tokenizer.decode(ids) == expected == content.decode(errors='replace')
  for begin in range(len(ids) + 1):
    for end in range(begin, len(ids) + 1):
      sizes = iter((begin, end - begin, len(ids)))
      assert streamed(tokenizer, None, ids, sizes)[0] == expected


def test_stop_texts_behind_stray_bytes_are_found(spelled):
  tokenizer, ids_of = spelled
  for before in (b'\xff', b'\xc3', b'\xf0\x9f', b'\xe5\xad\xff\xff\x80'):
    for text in ('字x', '\U0001f989', 'end'):
      ids = ids_of(before + text.encode() + b'more')
      stop = StopStrings(tokenizer, [text])
      found = stop.find(ids)
      assert found.text == before.decode(errors='replace')
      assert found.num_tokens == len(before) + len(text.encode())
      assert stop.text_of(ids[: found.num_tokens]) == found.text
      assert streamed(tokenizer, stop, ids, iter([1] * len(ids))) == (found.text, True)


# Tokens in a text.


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_places_are_those_of_tokenizers(kind):
  """... 0.23.3, which knows where in the text each token was found."""
  tokenizer = TOKENIZERS[kind]
  num_parts = 0
  for text in _TEXTS:
    found = tokenizer._backend.encode(text, add_special_tokens=False)
    tokens, decoded = tokenizer.decode_tokens(found.ids), tokenizer.decode(found.ids)
    num_added = len(decoded) - len(text)  # the space in front
    assert decoded == ' ' * num_added + text
    for token, (begin, _) in zip(tokens, found.offsets, strict=True):
      if begin or token.offset:
        assert token.offset == begin + num_added
      num_parts += token.name.startswith('bytes:')
  assert num_parts > 20


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_names_and_bytes(kind):
  tokenizer = TOKENIZERS[kind]
  special, ids = [*tokenizer.special_token_names], tokenizer.encode('x☃b')
  tokens = tokenizer.decode_tokens([*ids[:-1], special[-1], ids[-1], 10**6])
  *_, snow, man, cut, end, b, nothing = tokens
  begin = len(tokenizer.decode(ids)) - 2
  assert [(part.name, part.content, part.offset) for part in (snow, man, cut)] == [
    ('bytes:\\xe2', b'\xe2', begin), ('bytes:\\x98', b'\x98', begin), ('bytes:\\x83', b'\x83', begin),
  ]  # fmt: skip
  assert (end.name, end.content, end.offset) == (tokenizer.special_token_names[special[-1]], b'', begin + 1)
  assert (b.name, b.content, b.offset) == ('b', b'b', begin + 1)
  assert (nothing.name, nothing.content) == ('token_id:1000000', b'')


def test_tokens_of_random_ids_are_the_text():
  rng, num_stray, num_whole = random.Random(0), 0, 0
  for tokenizer in all_tokenizers():
    special = tokenizer.special_token_names
    for _ in range(60):
      ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(rng.randrange(12))]
      tokens, text = tokenizer.decode_tokens(ids), tokenizer.decode(ids)
      assert b''.join(token.content for token in tokens).decode(errors='replace') == text
      offsets = [token.offset for token in tokens]
      assert offsets == sorted(offsets)
      for index, token in zip(ids, tokens):
        if index in special:
          assert (token.name, token.content) == (special[index], b'')
        elif token.content and not token.name.startswith('bytes:'):
          assert text[token.offset :].startswith(token.name)
          assert token.name.encode() == token.content
          num_whole += 1
      decode, cut = tokenizer.decode_tokens_stream(), rng.randrange(len(ids) + 1)
      assert decode(ids[:cut]) + decode(ids[cut:]) == tokens
      num_stray += '\ufffd' in text
  assert min(num_stray, num_whole) > 100


@pytest.mark.parametrize(
  ('content', 'offsets'),
  [
    (b'a\xe2b', [0, 1, 2]),  # stays half
    (b'\xe2\x98\xe2\x98\x83', [0, 0, 1, 1, 1]),
    (b'\xff\x80a', [0, 1, 2]),
    (b'\xed\xa0\x80a', [0, 0, 2, 3]),  # a surrogate is three stray bytes, of which two wait for the third
    (b'\xf0\x9f\xa6\x89x', [0, 0, 0, 0, 1]),
  ],
)
def test_places_beside_stray_bytes(content, offsets):
  """Each byte's place is that of the first character that holds it when the bytes before are decoded with it."""
  tokenizer = TOKENIZERS['own']
  tokens = tokenizer.decode_tokens([3 + byte for byte in content])
  assert [token.offset for token in tokens] == offsets


def test_replaced_characters_have_the_bytes_of_the_text():
  backend = word_backend(
    decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme='never')])
  )
  found = TokenBytes(backend)
  tokens = found.token_stream()([backend.token_to_id(word) for word in ('▁the', '▁▁', 'x')])
  assert [(token.name, token.content, token.offset) for token in tokens] == [
    (' the', b' the', 0), ('  ', b'  ', 4), ('x', b'x', 6),
  ]  # fmt: skip
