"""Tokenizers that spell bytes in every way that is read."""

import tiny_hub
import tokenizers
from tokenizers import decoders, models

from spectr_jax import TextStream, Tokenizer
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer

WORDS = [
  'a', 'he', '##ing', '▁the', '▁', '▁▁', 'owl</w>', 'a</w>', '.', 'x', "'s", '日', '##.', '<0x41>', '<0xE6>', '<0x97>',
]  # fmt: skip
SPACED = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]
DECODERS = {
  'none': None,
  'metaspace': decoders.Metaspace(),
  'metaspace that keeps the first space': decoders.Metaspace(prepend_scheme='never'),
  'spaced': decoders.Sequence(SPACED),
  'spaced, nested': decoders.Sequence([decoders.Sequence(SPACED[:2]), decoders.Sequence(SPACED[2:])]),
  'spaces last': decoders.Sequence([*SPACED[1:3], decoders.Metaspace(prepend_scheme='never')]),
  'bytes, then metaspace': decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
  'all spaces dropped': decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
  'replaced': decoders.Replace(tokenizers.Regex('▁+'), '_'),
  'several replaced': decoders.Replace('▁t', 'T'),
  'stripped': decoders.Strip('▁', 1, 0),
  'word piece': decoders.WordPiece(),
  'word piece as it is': decoders.WordPiece(cleanup=False),
}


def word_backend(decoder):
  """A tokenizer of `WORDS` with a decoder."""
  found = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token='a'))
  if decoder is not None:
    found.decoder = decoder
  return found


def hub(backend, eos_id=41):
  """A tokenizer of the hub."""
  return HubTokenizer.from_parts(backend, bos_id=None, eos_ids=(eos_id,), add_bos=False)


TOKENIZERS = {
  'own': Tokenizer.train(['the owl and the end ' * 20], 270),
  'byte level': hub(tiny_hub.backend()),
  'spaced': hub(tiny_hub.spaced_backend(), 2),
}


def all_tokenizers():
  """Those above, and one of every decoder."""
  return [*TOKENIZERS.values(), *(hub(word_backend(decoder), 0) for decoder in DECODERS.values())]


def streamed(tokenizer, stop, ids, sizes):
  """The text of ids that come in pieces of some sizes, and whether it has ended at a stop text."""
  stream, shown, rest = TextStream(tokenizer, stop), '', list(ids)
  while rest:
    size = next(sizes)
    shown, rest = shown + stream.add(rest[:size]), rest[size:]
  return shown + stream.finish(), stream.is_stopped
