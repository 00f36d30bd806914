"""The bytes that tokens stand for: text is decoded from them, whether all tokens are there or they come one by one.

A decoder of `tokenizers` makes text of lists of tokens, and replaces or drops more than it must where bytes make no
character. Here every token has its bytes, those that it stands for in the middle of a text. The text is that of all
bytes in a row, in which U+FFFD stands for what is not UTF-8. So the text of a continuation keeps the space that it may
begin with, and does not depend on where it was cut.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from spectr_jax.io.backend import Backend, guarded
from spectr_jax.io.untrusted import named


@dataclasses.dataclass(frozen=True)
class TextToken:
  """A token as it stands in a text.

  Attributes:
    name: Its text. A special token has its name, bytes of half a character are spelled as in `bytes:\\xe2\\x98`, and an
      id that stands for nothing is `token_id:7`.
    content: Its own bytes; special tokens have none. All in a row are the text in UTF-8, with stray bytes as they are.
    offset: The character of the text that its first byte is part of, from 0.
    end: The first character behind those that its bytes are part of; `offset` where it has none.
  """

  name: str
  content: bytes
  offset: int
  end: int


# Takes more ids, and whether they are the last; gives the text that is new.
TextDecoder = Callable[[Iterable[int], bool], str]
# Takes more ids of a text, and says what each is in it.
TokenDecoder = Callable[[Iterable[int]], list[TextToken]]
_BYTE_TOKEN = re.compile('<0x[0-9A-Fa-f]{2}>')


@functools.cache
def _byte_of_character() -> dict[str, int]:
  """GPT-2's alphabet: visible bytes are spelled as themselves, the others as the characters from U+0100 on."""
  visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  hidden = [byte for byte in range(256) if byte not in visible]
  table = {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
  assert table.keys() == {*pre_tokenizers.ByteLevel.alphabet()}
  return table


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
  """The steps of a decoder, those of sequences one after another."""
  if decoder is None:
    return [{'type': None}]
  if decoder['type'] == 'Sequence':
    return [step for part in decoder['decoders'] for step in _steps(part)]
  return [decoder]


def _refuse(step: Mapping[str, Any], why: str) -> ValueError:
  return ValueError(f"the tokenizer's decoder {step['type']} {why}, so that tokens have no text of their own")


class _Rules:
  """A decoder's steps: what they make of a token, and of the characters of the text in the end."""

  def __init__(self, decoder: Mapping[str, Any] | None):
    self.of_token: list[Callable[[str], str]] = []  # of a token's spelling, in their order
    self.spelling: str | None = None  # of bytes in the result: `ByteLevel`, `ByteFallback`, or None for UTF-8
    self.of_character: list[tuple[str, str]] = []  # characters and what they become, in their order
    self._is_joined = False
    for step in _steps(decoder):
      self._add(step)

  def _add(self, step: Mapping[str, Any]) -> None:
    match step['type']:
      case 'Fuse':
        self._is_joined = True
      case 'Strip' if self._is_joined:
        pass  # drops what stands at the ends of a whole text
      case 'ByteLevel' | 'ByteFallback' as kind:
        if self._is_joined or self.spelling is not None:
          raise _refuse(step, 'stands behind steps that join bytes')
        self.spelling, self._is_joined = kind, kind == 'ByteLevel'
      case 'Metaspace':
        # The first token loses its spaces, and joined tokens are one.
        is_lost = self._is_joined and step['prepend_scheme'] != 'never'
        self._replace(step['replacement'], '' if is_lost else ' ')
      case 'Replace' if 'String' in step['pattern'] and len(step['pattern']['String']) == 1:
        self._replace(step['pattern']['String'], step['content'])
      case _ if self._is_joined or self.spelling is not None:
        raise _refuse(step, 'stands behind steps that join bytes')
      case 'Replace' | 'Strip':
        alone = _made(step)
        self.of_token.append(lambda token: alone.decode([token]))
      case 'WordPiece':
        behind = _made(step)
        self.of_token.append(lambda token: behind.decode(['a', token])[1:])
      case 'BPEDecoder':  # the last token of a text would lose its space
        self.of_token.append(lambda token: token.replace(step['suffix'], ' '))
      case None:
        self.of_token.append(lambda token: f' {token}')
      case _:
        raise _refuse(step, 'looks at several tokens at once')

  def _replace(self, character: str, content: str) -> None:
    if self._is_joined or self.spelling is not None:
      self.of_character.append((character, content))
    else:
      self.of_token.append(lambda token: token.replace(character, content))


def _made(step: Mapping[str, Any]) -> decoders.Decoder:
  decoder = tokenizers.decoders.Fuse()
  decoder.__setstate__(json.dumps(step).encode())
  return decoder


class TokenBytes(dict[int, bytes]):
  """The bytes of each id of a tokenizer, computed on demand; special tokens and ids without a token have none."""

  def __init__(self, backend: tokenizers.Tokenizer | Backend):
    """Reads how the tokenizer spells bytes; `ValueError` if its decoder gives tokens no text of their own."""
    super().__init__()
    self._backend = Backend(backend)
    decoder = self._backend.decoder
    with named(self._backend.name):
      self._rules = _Rules(None if decoder is None else json.loads(decoder.__getstate__()))

  @functools.cached_property
  def _added(self) -> dict[int, tokenizers.AddedToken]:
    return self._backend.get_added_tokens_decoder()

  @functools.cached_property
  def special(self) -> dict[int, str]:
    """The names of special tokens, by id."""
    return {index: token.content for index, token in self._added.items() if token.special}

  def __missing__(self, index: int) -> bytes:
    content = self[index] = self._find(index)
    return content

  def _find(self, index: int) -> bytes:
    if not 0 <= index < 2**32:
      raise ValueError(f'ids of tokens are whole numbers from 0 to 2**32 - 1, got {index}')
    token = self._backend.id_to_token(index)
    if token is None or index in self.special:
      return b''
    rules = self._rules
    # Tokens that stand beside the vocabulary are looked for in texts, not in bytes.
    is_text = index in self._added and self._backend.model.id_to_token(index) is None
    for function in rules.of_token:
      token = guarded(self._backend.name, function, token)
    if rules.spelling == 'ByteFallback' and _BYTE_TOKEN.fullmatch(token):
      return bytes([int(token[3:5], 16)])
    if rules.spelling == 'ByteLevel' and not is_text:
      alphabet = _byte_of_character()
      if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()

  def join(self, ids: Iterable[int]) -> bytes:
    """The bytes of ids in a row."""
    return b''.join(map(self.__getitem__, map(int, ids)))

  def decode(self, ids: Iterable[int]) -> str:
    """The text of ids; `ValueError` for an id below 0 or above all that there can be."""
    return self._finished(self.join(ids).decode(errors='replace'))

  def _finished(self, text: str) -> str:
    for character, content in self._rules.of_character:
      text = text.replace(character, content)
    return text

  def stream(self) -> TextDecoder:
    """A decoder of ids that come in pieces. Bytes wait until they make a character, or cannot make one any more."""
    characters = codecs.getincrementaldecoder('utf-8')('replace')
    return lambda ids, is_end: self._finished(characters.decode(self.join(ids), is_end))

  def content(self, index: int) -> bytes:
    """The bytes of an id in a text, in which some characters have been replaced."""
    text = self[index].decode(errors='surrogateescape')
    return self._finished(text).encode(errors='surrogateescape')

  def _name(self, index: int, content: bytes) -> str:
    if index in self.special:
      return self.special[index]
    try:
      return content.decode() or f'token_id:{index}'
    except UnicodeDecodeError:
      return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in content)

  def token_stream(self) -> TokenDecoder:
    """A decoder of ids that come in pieces, which says what each of them is in the text of all."""
    characters, length = codecs.getincrementaldecoder('utf-8')('replace'), 0

    def read(ids: Iterable[int]) -> list[TextToken]:
      nonlocal length
      tokens = []
      for index in map(int, ids):
        raw, content = self[index], self.content(index)
        text = characters.decode(raw[:1])
        # The first byte is part of the character that waits for more of them, or else of the last one.
        is_waiting = bool(characters.getstate()[0]) or not raw
        offset = length + len(self._finished(text if is_waiting else text[:-1]))
        length += len(self._finished(text + characters.decode(raw[1:])))
        end = length + bool(characters.getstate()[0]) if content else offset
        tokens.append(TextToken(self._name(index, content), content, offset, end))
      return tokens

    return read
