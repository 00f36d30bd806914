"""Texts that end a continuation: looked for on the host between rounds, and cut at the character."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.result import Generation
from spectr_jax.engine.state import DecodeState, finish
from spectr_jax.sharding import fetch
from spectr_jax.unicode import check_unicode

# Stand around the name of a special token. They are lone surrogates, which no text has.
_BEGIN, _END = '\ud800', '\udfff'


class Decodes(Protocol):
  """A tokenizer that turns ids into text; it may have `special_token_names`, names by id of tokens without text."""

  def decode(self, ids: Iterable[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Stop:
  """The end of a continuation at a stop text.

  Attributes:
    num_tokens: The tokens up to the one that completes the stop text, with that one.
    text: The text before the stop text.
  """

  num_tokens: int
  text: str


def check_stop_texts(texts: Sequence[str]) -> None:
  """Checks stop texts; ValueError if one is empty, is not valid Unicode, or has U+FFFD, which is no character."""
  if isinstance(texts, str) or not all(isinstance(text, str) and text and '\ufffd' not in text for text in texts):
    raise ValueError(f'stop must be texts of at least one character and without U+FFFD, got {texts!r}')
  for text in texts:
    check_unicode(text, f'stop {text!r}')


@dataclasses.dataclass(frozen=True)
class StopStrings:
  """Texts that end a continuation.

  The first token that completes one of them is the last of its row, and the text ends before the stop text. This
  depends on the continuation's tokens alone, and neither on the method nor on the rounds between two searches. A stop
  text may begin and end inside of tokens. Names of special tokens in it stand for these tokens, as well as for the same
  characters in a text. The prompt is not searched.

  Attributes:
    tokenizer: The tokenizer.
    texts: The stop texts.

  Raises:
    ValueError: There is no text, or one cannot be looked for.
  """

  tokenizer: Decodes
  texts: Sequence[str]

  def __post_init__(self):
    check_stop_texts(self.texts)
    if not self.texts:
      raise ValueError('stop has no texts')

  @functools.cached_property
  def spelled_texts(self) -> tuple[str, ...]:
    """The stop texts that name special tokens, as `special` spells them; of names at one place the longest is meant."""
    spelled = []
    for text in self.texts:
      names = [name for name in self._names.values() if name in text]
      if names:
        pattern = '|'.join(map(re.escape, sorted(names, key=len, reverse=True)))
        spelled.append(re.sub(pattern, lambda match: f'{_BEGIN}{match[0]}{_END}', text))
    return tuple(spelled)

  @functools.cached_property
  def special(self) -> Mapping[int, str]:
    """How special tokens are spelled in the search, by id; empty if no stop text names any."""
    return {index: f'{_BEGIN}{name}{_END}' for index, name in self._names.items()} if self.spelled_texts else {}

  @property
  def _names(self) -> Mapping[int, str]:
    return getattr(self.tokenizer, 'special_token_names', {})

  def place(self, text: str, spelled: str) -> int | None:
    """The place in `text` where a stop text begins, or None; `spelled` is the text's end as `special` spells tokens."""
    places = [(begin + len(stop), begin) for stop in self.texts if (begin := text.find(stop)) >= 0]
    for stop in self.spelled_texts:
      if (begin := spelled.find(stop)) >= 0:
        # What follows a place has the same characters in both texts.
        end, begin = (len(text) - len(without_special(spelled[at:])) for at in (begin + len(stop), begin))
        places.append((end, begin))
    # The stop text that ends first; of those that end together, the longest.
    return min(places)[1] if places else None

  def _spell(self, ids: Sequence[int]) -> str:
    """The text of ids with special tokens as `special` spells them; empty if there is none to look for."""
    if not self.special:
      return ''
    parts: list[str] = []
    begin = 0
    for place, index in enumerate(ids):
      if index in self.special:
        parts += self.tokenizer.decode(ids[begin:place]), self.special[index]
        begin = place + 1
    return ''.join(parts) + self.tokenizer.decode(ids[begin:])

  def find(self, tokens: Sequence[int] | np.ndarray, num_searched: int = 0) -> Stop | None:
    """The end of a continuation, integers `[T]` without padding, or None if none of the texts is in it.

    Every token is looked at with all that precede it, since bytes become characters only together, so the time grows
    with the square of T. The first `num_searched` tokens are known to complete no stop text.
    """
    ids = [int(token) for token in tokens]
    for length in range(num_searched + 1, len(ids) + 1):
      text = self.tokenizer.decode(ids[:length])
      begin = self.place(text, self._spell(ids[:length]))
      if begin is not None:
        return Stop(length, text[:begin])
    return None

  def text_of(self, tokens: Sequence[int] | np.ndarray) -> str:
    """The text of finished tokens `[T]`, without the stop text that the last one may complete."""
    stop = self.find(tokens, len(tokens) - 1)
    return self.tokenizer.decode([int(token) for token in tokens]) if stop is None else stop.text


def without_special(spelled: str) -> str:
  """A text without the special tokens that `StopStrings.special` spells."""
  return re.sub(f'{_BEGIN}[^{_END}]*{_END}', '', spelled)


def finish_reason(
  tokens: Sequence[int] | np.ndarray, eos_ids: Collection[int] = (), stop: StopStrings | None = None
) -> str:
  """The reason why a continuation ended: `stop`, a stop text; `eos`, an id that ends rows; `length`, the limit.

  Args:
    tokens: Integers `[T]`, its tokens without padding, at least one.
    eos_ids, stop: Ids and texts that end a row.
  """
  if stop is not None and stop.find(tokens, len(tokens) - 1) is not None:
    return 'stop'
  return 'eos' if int(tokens[-1]) in eos_ids else 'length'


def decode_until_stopped(
  decoder: Decoder, state: DecodeState, stop: StopStrings, *, rounds_at_a_time: int
) -> Generation:
  """Runs rounds until every row is done or at a stop text; the result, of NumPy arrays, depends on the tokens alone."""
  num_searched, ends = np.zeros(len(state.keys), np.int32), {}
  while True:
    state = decode_rounds(decoder, state, rounds_at_a_time)
    result, is_done = fetch((state.result, state.is_done))
    found = {
      row: end.num_tokens
      for row, length in enumerate(result.lengths)
      if row not in ends and (end := stop.find(result.tokens[row, :length], num_searched[row])) is not None
    }
    num_searched = result.lengths
    ends |= found
    if result.failures.any() or all(is_done[row] or row in ends for row in range(len(is_done))):
      return result.cut(ends)
    if found:
      state = finish(decoder, state, list(found))
