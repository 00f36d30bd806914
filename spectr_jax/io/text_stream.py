"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Iterable

from spectr_jax.engine.stop import StopStrings, without_special
from spectr_jax.io.tokenizer import TokenizerBase


class TextStream:
  """Decodes tokens as they come, and holds back what is not certain yet.

  That are bytes that may become a character, and text that may be the beginning of a stop text. All pieces in a row are
  the text that `decode` gives for all tokens, wherever they were cut, up to the first text of `stop`. Ids that end a
  text have none here, whatever they are otherwise.

  Attributes:
    tokens: All tokens so far.
    is_stopped: Whether the text has ended at a stop text; nothing comes after it.
  """

  def __init__(self, tokenizer: TokenizerBase, stop: StopStrings | None = None):
    self.tokens: list[int] = []
    self.is_stopped = False
    self._decode = tokenizer.decode_stream()
    self._ends = frozenset(tokenizer.eos_ids).difference(tokenizer.special_token_names)
    self._stop = stop
    self._held = ''  # may be the beginning of a stop text
    # The same with special tokens, for stop texts that name them. These end a character, as they do in a search.
    self._special = {} if stop is None else stop.special
    self._decode_part = tokenizer.decode_stream()
    self._spelled = ''

  def add(self, tokens: Iterable[int]) -> str:
    """Adds tokens, and returns the text that is new."""
    tokens = [int(token) for token in tokens]
    self.tokens += tokens
    shown = [token for token in tokens if token not in self._ends]
    if not self._special:
      return self._release(self._decode(shown, False))
    return ''.join(map(self._add_spelled, shown))  # one by one: the first that completes a stop text counts

  def finish(self) -> str:
    """The text that was held back, with U+FFFD for bytes that make no character."""
    text = self._release(self._decode([], True)) + self._held
    self._held = ''
    return text

  def _add_spelled(self, token: int) -> str:
    if self.is_stopped:
      return ''
    if token not in self._special:
      self._spelled += self._decode_part([token], False)
      return self._release(self._decode([token], False))
    self._spelled += self._decode_part([], True) + self._special[token]
    text = self._release('')
    return text + self._decode([], True) if self.is_stopped else text

  def _release(self, text: str) -> str:
    """The text that is certain, of what was held and `text`."""
    if self.is_stopped or self._stop is None:
      return '' if self.is_stopped else text
    text = self._held + text
    begin = self._stop.place(text, self._spelled)
    if begin is not None:
      self.is_stopped, self._held = True, ''
      return text[:begin]
    num_spelled = max((_num_common(self._spelled, stop) for stop in self._stop.spelled_texts), default=0)
    self._spelled = self._spelled[len(self._spelled) - num_spelled :]
    num_held = max(_num_common(text, stop) for stop in self._stop.texts)
    num_held = max(num_held, len(without_special(self._spelled)))
    self._held = text[len(text) - num_held :]
    return text[: len(text) - num_held]


def _num_common(text: str, stop: str) -> int:
  """The length of the longest end of `text` that is a beginning of `stop`, and shorter than it."""
  return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
