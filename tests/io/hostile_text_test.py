"""Text of random tokens: streamed, decoded and of their bytes it is the same, whatever the tokenizer and the cuts."""

import hostile
import pytest
import tiny_hub
import token_bytes_test

from spectr_jax import StopStrings, TextStream, Tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer

_CUT = 'é字\U0001f989'.encode()
_STOPS = 'the', '字', '\U0001f989', ' ', 'é字', 'ab', 'a', ', '


def _tokenizers():
  yield 'own', Tokenizer.train(['the owl and the end ' * 20], 270)
  backends = {'byte level': tiny_hub.backend(), 'spaced': tiny_hub.spaced_backend()}
  backends |= {name: token_bytes_test._backend(decoder) for name, decoder in token_bytes_test._KINDS.items()}
  for name, backend in backends.items():
    yield name, HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(0,), add_bos=False)


def _random_ids(tokenizer, single, rng):
  """Ids that mostly spell bytes, pieces of characters among them."""
  ids = []
  for _ in range(rng.randrange(12)):
    kind = rng.random()
    if kind < 0.4 and single:
      begin = rng.randrange(len(_CUT))
      content = _CUT[begin : begin + rng.randrange(5)]
      ids += [single[byte] for byte in content if byte in single]
    elif kind < 0.7 and single:
      ids.append(rng.choice([*single.values()]))
    else:
      ids.append(rng.randrange(tokenizer.vocab_size + 2))
  return ids


@pytest.mark.slow
def test_streams_of_random_tokens():
  num_tried = num_stopped = num_stray = 0
  for _, tokenizer in _tokenizers():
    single = {}
    for index in range(tokenizer.vocab_size):
      content = tokenizer._bytes[index]
      if len(content) == 1:
        single.setdefault(content[0], index)
    for rng in hostile.rngs(400):
      ids = _random_ids(tokenizer, single, rng)
      text = tokenizer.decode(ids)
      joined = b''.join(tokenizer._bytes[index] for index in ids).decode(errors='replace')
      assert text == joined.replace('▁', ' ') or text == joined.replace('▁', '') or text == joined
      stop = StopStrings(tokenizer, rng.sample(_STOPS, rng.randrange(1, 4)))
      found = stop.find(ids)
      for texts, wanted in ((None, text), (stop, text if found is None else found.text)):
        stream, shown, rest = TextStream(tokenizer, texts), '', ids
        while rest:
          size = rng.randrange(4)
          shown, rest = shown + stream.add(rest[:size]), rest[size:]
          assert wanted.startswith(shown)
        assert shown + stream.finish() == wanted
        assert stream.is_stopped == (texts is not None and found is not None)
      num_tried += 1
      num_stopped += found is not None
      num_stray += '\ufffd' in text
  print(f'{num_tried} tried, {num_stopped} stopped, {num_stray} with stray bytes')
  assert num_tried >= hostile.NUM_MUTATIONS
  assert min(num_stopped, num_stray) > 500
