"""Stop texts, of special tokens too, end a text at the same place, however they are looked for."""

import hostile
import pytest
import tiny_hub
from text_tokenizers import TOKENIZERS, all_tokenizers, hub, streamed

from spectr_jax import Stop, StopStrings, TextStream, finish_reason
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer


@pytest.mark.parametrize(
  ('text', 'texts', 'length', 'expected'),
  [
    # The lengths are those at which `StopStringCriteria` of transformers 5.24 is true for the first time.
    ('the owl<|im_end|> he', ['<|im_end|>'], 4, 'the owl'),
    ('the owl<|im_end|> he', ['owl<|im_end|>'], 4, 'the '),
    ('a<|stop|>b<|im_end|>c', ['b<|im_end|>'], 4, 'a'),
    ('a<|stop|><|im_end|>c', ['<|stop|><|im_end|>'], 3, 'a'),
    ('a<|im_end|> the owl', ['<|im_end|> the'], 3, 'a'),
    ('x☃<|im_end|>', ['☃<|im_end|>'], 5, 'x'),
    ('x☃<|im_end|>', ['<|stop|>'], None, 'x☃'),
    # It also takes the end of a name for it, and no text around a special token. Here a name is meant as a whole, and
    # what stands in the text ends it.
    ('a<|im_end|> the owl', ['im_end|>'], None, 'a the owl'),
    ('a<|stop|>b', ['ab'], 3, ''),
    # Other special tokens between the parts are no part of a stop text.
    ('a<|stop|><|im_end|>', ['a<|im_end|>'], None, 'a'),
    # What is complete first, and of what ends together the longest.
    ('a<|stop|>b', ['b', '<|stop|>'], 2, 'a'),
    ('ab<|stop|>', ['<|stop|>', 'b<|stop|>'], 3, 'a'),
    ('ab<|stop|>', ['b', 'ab<|stop|>'], 2, 'a'),
    ('a<|stop|>b<|stop|>c', ['<|stop|>c'], 5, 'ab'),
    ('xa<|stop|>bc', ['a<|stop|>bc'], 5, 'x'),
    ('xa<|stop|>bd', ['a<|stop|>bc'], None, 'xabd'),
  ],
)  # fmt: skip
def test_places(text, texts, length, expected):
  tokenizer = TOKENIZERS['byte level']
  ids, stop = tokenizer.encode(text), StopStrings(tokenizer, texts)
  assert stop.find(ids) == (None if length is None else Stop(length, expected))
  kept = ids[:length]
  assert stop.text_of(kept) == expected
  assert finish_reason(kept, (), stop) == ('length' if length is None else 'stop')
  for size in (1, 2, len(ids)):
    assert streamed(tokenizer, stop, ids, iter([size] * len(ids))) == (expected, length is not None)


@pytest.mark.parametrize('kind', TOKENIZERS)
def test_every_special_token_ends_a_text(kind):
  tokenizer = TOKENIZERS[kind]
  assert len(tokenizer.special_token_names) >= 3
  before, after = tokenizer.encode(' the he'), tokenizer.encode(' b')
  whole = tokenizer.decode(before)
  for index, name in tokenizer.special_token_names.items():
    for text, kept in ((name, whole), (whole[-2:] + name, whole[:-2])):
      stop = StopStrings(tokenizer, [text])
      ids = [*before, index, *after]
      assert stop.find(ids) == Stop(len(before) + 1, kept)
      assert streamed(tokenizer, stop, ids, iter([1] * len(ids))) == (kept, True)


def test_the_longest_of_several_names_is_meant():
  special = {'<|end|>': 50, '<|end|>>': 51, '>>': 52}
  tokenizer = hub(tiny_hub.backend(special), 50)
  for text, index in (('a<|end|>>', 51), ('a<|end|>', 50), ('a<|end|>b>>', 52)):
    ids = tokenizer.encode(text)
    assert ids[-1] == index
    stop = StopStrings(tokenizer, [text[1:]])
    assert stop.find(ids) == Stop(len(ids), 'a')
    assert streamed(tokenizer, stop, ids, iter([1] * 9)) == ('a', True)
    for other in {50, 51, 52} - {index}:
      assert stop.find([*ids[:-1], other]) is None


def test_names_that_are_spelled_in_a_text_end_it_too():
  tokenizer = TOKENIZERS['own']  # encodes them as text
  ids = tokenizer.encode('the end<eos> and')
  assert tokenizer.decode(ids) == 'the end<eos> and'
  found = StopStrings(tokenizer, ['<eos>']).find(ids)
  assert (found.text, found.num_tokens < len(ids)) == ('the end', True)


def test_half_a_character_before_a_special_token():
  tokenizer = TOKENIZERS['byte level']
  half = tokenizer.encode('\U0001f989')[:2]
  (x,) = tokenizer.encode('x')
  for texts, ids in ((['<|stop|>'], [x, *half, 200, x]), (['<|stop|>x'], [x, *half, 200, x])):
    stop = StopStrings(tokenizer, texts)
    assert stop.find(ids).text == 'x\ufffd'
    assert streamed(tokenizer, stop, ids, iter([1] * 9)) == ('x\ufffd', True)


def _found(tokenizer, ids, texts):
  """The end of a text and its length by the definition: what every beginning of the ids spells, piece by piece."""
  names = tokenizer.special_token_names
  for length in range(1, len(ids) + 1):
    places, plain = [], tokenizer.decode(ids[:length])
    spelled, part = [], []  # characters, and ids of special tokens
    for index in [*ids[:length], None]:
      if index in names or index is None:
        spelled += [*tokenizer.decode(part), *([index] if index is not None else [])]
        part = []
      else:
        part.append(index)
    for text in texts:
      wanted = [[*text]]
      if kept := [name for name in names.values() if name in text]:
        parts, rest = [], text
        while rest:
          name = max((name for name in kept if rest.startswith(name)), key=len, default='')
          parts.append(next(index for index in names if names[index] == name) if name else rest[0])
          rest = rest[len(name) or 1 :]
        wanted.append(parts)
      for characters, looked_for in zip(([*plain], spelled), wanted):
        size = len(looked_for)
        if characters[-size:] == looked_for or any(
          characters[at : at + size] == looked_for for at in range(len(characters) - size + 1)
        ):
          at = next(at for at in range(len(characters)) if characters[at : at + size] == looked_for)
          behind = [sum(isinstance(c, str) for c in characters[place:]) for place in (at + size, at)]
          places.append(tuple(len(plain) - number for number in behind))
    if places:
      return Stop(length, plain[: min(places)[1]])
  return None


_STRAY = 'é字\U0001f989'.encode()
_PARTS = 'the', '字', 'é', '\U0001f989', ' ', 'a', 'b', 'ab', ', '


def _random_ids(tokenizer, single, rng):
  """Ids of special tokens, of pieces of characters, and others."""
  ids = []
  for _ in range(rng.randrange(12)):
    kind, begin = rng.random(), rng.randrange(len(_STRAY))
    if kind < 0.3 and tokenizer.special_token_names:
      ids.append(rng.choice([*tokenizer.special_token_names]))
    elif kind < 0.8:
      ids += [single[byte] for byte in _STRAY[begin : begin + rng.randrange(5)] if byte in single]
    else:
      ids.append(rng.randrange(tokenizer.vocab_size + 2))
  return ids


def test_random_tokens_and_stop_texts():
  """Searched at once, in streams of any cuts, and by the definition."""
  num_stopped = num_special = num_stray = 0
  for tokenizer in all_tokenizers():
    single = {}
    for index in range(tokenizer.vocab_size):
      content = tokenizer._bytes[index]
      if len(content) == 1:
        single.setdefault(content[0], index)
    parts = [*_PARTS, *tokenizer.special_token_names.values()]
    for rng in hostile.rngs(400):
      ids = _random_ids(tokenizer, single, rng)
      text = tokenizer.decode(ids)
      texts = [''.join(rng.choices(parts, k=rng.randrange(1, 3))) for _ in range(rng.randrange(1, 4))]
      stop = StopStrings(tokenizer, texts)
      found = stop.find(ids)
      assert found == _found(tokenizer, ids, texts)
      for given, wanted in ((None, text), (stop, text if found is None else found.text)):
        sizes = (rng.randrange(4) for _ in range(100))
        assert streamed(tokenizer, given, ids, sizes) == (wanted, given is not None and found is not None)
      num_stopped += found is not None
      num_special += found is not None and bool(stop.special)
      num_stray += '\ufffd' in text
  assert min(num_stopped, num_special, num_stray) > 300


def test_ids_that_end_a_text_have_none_in_streams():
  backend = tiny_hub.backend()
  (x, y) = backend.encode('xy').ids
  tokenizer = HubTokenizer.from_parts(
    backend, bos_id=None, eos_ids=(41, y), add_bos=False, special_tokens={'eos_token': '<|im_end|>'}
  )
  assert tokenizer.decode([x, y]) == 'xy'
  for end in (41, y):
    stream = TextStream(tokenizer)
    assert stream.add([x, end]) + stream.finish() == 'x'
    assert stream.tokens == [x, end]
