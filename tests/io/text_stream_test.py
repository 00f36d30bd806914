"""Text that arrives in tokens is that of all tokens together, and never half a character."""

import numpy as np
import pytest
import tiny_hub

from spectr_jax import StopStrings, TextStream, Tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer

_TEXT = 'the owl: \u00fc, \u6f22\u5b57 and \U0001f989! the end'


def _hub(backend):
  return HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(41,), add_bos=False)


@pytest.fixture(scope='module', params=['own', 'byte level', 'spaced'])
def tokenizer(request):
  if request.param == 'own':
    return Tokenizer.train(['the owl and the end ' * 20], 270)
  return _hub(tiny_hub.backend() if request.param == 'byte level' else tiny_hub.spaced_backend())


def test_pieces_are_the_whole(tokenizer):
  tokens, rng = tokenizer.encode(_TEXT), np.random.default_rng(0)
  assert len(tokens) > len(_TEXT) - 20  # the characters of several bytes are several tokens
  for _ in range(20):
    stream, places = TextStream(tokenizer), np.sort(rng.integers(0, len(tokens) + 1, 6))
    pieces = [stream.add(part) for part in np.split(tokens, places)]
    assert '\ufffd' not in ''.join(pieces)
    assert ''.join(pieces) + stream.finish() == tokenizer.decode(tokens)
    assert stream.tokens == tokens


def test_a_character_waits_for_its_bytes():
  tokenizer = _hub(tiny_hub.backend())
  stream = TextStream(tokenizer)
  owl = tokenizer.encode('\U0001f989')
  assert [stream.add([token]) for token in owl] == ['', '', '', '\U0001f989']
  assert stream.add(owl[:2]) == ''
  assert stream.finish() == tokenizer.decode(owl[:2]) != ''
  assert stream.finish() == ''


def test_bytes_that_make_no_character_are_shown():
  tokenizer = _hub(tiny_hub.backend())
  continuation = tokenizer.encode('\U0001f989')[1:2]
  assert '\ufffd' in TextStream(tokenizer).add(continuation * 4)


@pytest.mark.parametrize('texts', [['end'], [', '], ['zzz'], ['the end', '! the'], ['owl: x', 'wl', ' owl']])
def test_stop_texts_cut_as_they_do_in_the_end(tokenizer, texts):
  """Wherever the tokens are split, what is shown is what `StopStrings` keeps, and never more."""
  tokens, stop, rng = tokenizer.encode(_TEXT), StopStrings(tokenizer, texts), np.random.default_rng(1)
  found = stop.find(tokens)
  wanted = tokenizer.decode(tokens) if found is None else found.text
  for num_parts in (0, 3, 10, 40):
    stream, shown = TextStream(tokenizer, stop), ''
    for part in np.split(tokens, np.sort(rng.integers(0, len(tokens) + 1, num_parts))):
      shown += stream.add(part)
      assert wanted.startswith(shown)
    assert shown + stream.finish() == wanted
    assert stream.is_stopped == (found is not None)
