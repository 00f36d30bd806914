"""Decoded text is that of the tokens' bytes, and agrees with the backend wherever those are valid UTF-8."""

import random

import pytest
import tiny_hub
import tokenizers
from tokenizers import decoders, models

from spectr_jax import StopStrings, TextStream, Tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.token_bytes import TokenBytes

_WORDS = [
  'a',
  'he',
  '##ing',
  '▁the',
  '▁',
  '▁▁',
  'owl</w>',
  'a</w>',
  '.',
  'x',
  "'s",
  '日',
  '##.',
  '<0x41>',
  '<0xE6>',
  '<0x97>',
]
_SPACED = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
_KINDS = {
  'none': None,
  'metaspace': decoders.Metaspace(),
  'metaspace that keeps the first space': decoders.Metaspace(prepend_scheme='never'),
  'spaced': decoders.Sequence(_SPACED),
  'spaced, nested': decoders.Sequence([decoders.Sequence(_SPACED[:2]), decoders.Sequence(_SPACED[2:])]),
  'spaces last': decoders.Sequence([*_SPACED[1:3], decoders.Metaspace(prepend_scheme='never')]),
  'bytes, then metaspace': decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
  'all spaces dropped': decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
  'replaced': decoders.Replace(tokenizers.Regex('▁+'), '_'),
  'several replaced': decoders.Replace('▁t', 'T'),
  'stripped': decoders.Strip('▁', 1, 0),
  'word piece': decoders.WordPiece(),
  'word piece as it is': decoders.WordPiece(cleanup=False),
}


def _backend(decoder):
  found = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token='a'))
  if decoder is not None:
    found.decoder = decoder
  return found


def _byte_level():
  return tiny_hub.backend()


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


@pytest.mark.parametrize('kind', [*_KINDS, 'byte level'])
def test_texts_are_those_of_the_backend(kind):
  backend, rng = _byte_level() if kind == 'byte level' else _backend(_KINDS[kind]), random.Random(0)
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
  backend = _backend(decoders.BPEDecoder())
  ids = [backend.token_to_id(word) for word in ('he', 'owl</w>', 'a</w>')]
  assert backend.decode(ids) == 'heowl a'
  assert TokenBytes(backend).decode(ids) == 'heowl a '


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
  with pytest.raises(
    ValueError, match=f"^the vocabulary: the tokenizer's decoder {name} .*so that tokens have no text"
  ):
    HubTokenizer.from_parts(_backend(decoder), bos_id=None, eos_ids=(0,), add_bos=False)


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
  tokenizer = HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(41,), add_bos=False)
  for text in ('naïve owl', '日 naïve', ' x'):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope='module', params=['own', 'spaced', 'byte level'])
def spelled(request):
  """A tokenizer, and the ids of bytes."""
  if request.param == 'own':
    tokenizer = Tokenizer.train(['the owl and the end ' * 20], 270)
    return tokenizer, lambda content: [3 + byte for byte in content]
  backend = tiny_hub.spaced_backend() if request.param == 'spaced' else tiny_hub.backend()
  tokenizer = HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(41,), add_bos=False)
  found = {}
  for index in range(backend.get_vocab_size()):
    content = tokenizer._bytes[index]
    if len(content) == 1 and (request.param == 'byte level' or backend.id_to_token(index).startswith('<0x')):
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
      stream = TextStream(tokenizer)
      pieces = [stream.add(part) for part in (ids[:begin], ids[begin:end], ids[end:])]
      assert ''.join(pieces) + stream.finish() == expected


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
      stream = TextStream(tokenizer, stop)
      assert ''.join(stream.add([index]) for index in ids) + stream.finish() == found.text
      assert stream.is_stopped
