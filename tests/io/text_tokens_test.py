"""A token's name, bytes and place in a text: what they spell together is the text."""

import random

import pytest
import tiny_hub
import token_bytes_test
from tokenizers import decoders

from spectr_jax import Tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.token_bytes import TokenBytes

_TEXTS = ['☃ a', 'the owl: ü, 漢字 and \U0001f989! the owl', 'é', '\u0301e\u200d', '\n\n\t x  y', 'naïve ☃☃ he']


def _hub(backend, eos_id):
  return HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(eos_id,), add_bos=False)


_TOKENIZERS = {
  'own': Tokenizer.train(['the owl and the end ' * 20], 270),
  'byte level': _hub(tiny_hub.backend(), 41),
  'spaced': _hub(tiny_hub.spaced_backend(), 2),
}


@pytest.mark.parametrize('kind', _TOKENIZERS)
def test_places_are_those_of_tokenizers(kind):
  """... 0.23.3, which knows where in the text each token was found."""
  tokenizer = _TOKENIZERS[kind]
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


@pytest.mark.parametrize('kind', _TOKENIZERS)
def test_names_and_bytes(kind):
  tokenizer = _TOKENIZERS[kind]
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


def _tokenizers():
  yield from _TOKENIZERS.values()
  for decoder in token_bytes_test._KINDS.values():
    yield _hub(token_bytes_test._backend(decoder), 0)


def test_tokens_of_random_ids_are_the_text():
  rng, num_stray, num_whole = random.Random(0), 0, 0
  for tokenizer in _tokenizers():
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
  tokenizer = _TOKENIZERS['own']
  tokens = tokenizer.decode_tokens([3 + byte for byte in content])
  assert [token.offset for token in tokens] == offsets


def test_replaced_characters_have_the_bytes_of_the_text():
  backend = token_bytes_test._backend(
    decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme='never')])
  )
  found = TokenBytes(backend)
  tokens = found.token_stream()([backend.token_to_id(word) for word in ('▁the', '▁▁', 'x')])
  assert [(token.name, token.content, token.offset) for token in tokens] == [
    (' the', b' the', 0), ('  ', b'  ', 4), ('x', b'x', 6),
  ]  # fmt: skip
