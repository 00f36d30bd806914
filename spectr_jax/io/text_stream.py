"""Text of tokens that arrive one by one."""

from __future__ import annotations

from collections.abc import Iterable

from spectr_jax.engine.stop import StopStrings
from spectr_jax.io.tokenizer import TokenizerBase


class TextStream:
  """Decodes tokens as they come, and holds back what is not certain yet.

  That are bytes that may become a character, and text that may be the beginning of a stop text. All pieces in a row are
  the text that `decode` gives for all tokens, wherever they were cut.

  Attributes:
    tokens: All tokens so far.
    is_stopped: Whether the text has ended at a stop text; nothing comes after it.
  """

  def __init__(self, tokenizer: TokenizerBase, stop: StopStrings | None = None):
    """Starts with no tokens.

    Args:
      tokenizer: The tokenizer.
      stop: Texts that end the text, which is cut before them; or None.
    """
    self.tokens: list[int] = []
    self.is_stopped = False
    self._decode = tokenizer.decode_stream()
    self._stop_texts = () if stop is None else tuple(stop.texts)
    self._held = ''  # may be the beginning of a stop text

  def add(self, tokens: Iterable[int]) -> str:
    """Adds tokens.

    Args:
      tokens: Ids.

    Returns:
      The text that is new.
    """
    tokens = [int(token) for token in tokens]
    self.tokens += tokens
    return self._release(self._decode(tokens, False))

  def finish(self) -> str:
    """The text that was held back, with U+FFFD for bytes that make no character."""
    text = self._release(self._decode([], True)) + self._held
    self._held = ''
    return text

  def _release(self, text: str) -> str:
    """The text that is certain, of what was held and `text`."""
    if self.is_stopped:
      return ''
    text = self._held + text
    # The stop text that ends first; of those that end together, the longest.
    places = [(begin + len(stop), begin) for stop in self._stop_texts if (begin := text.find(stop)) >= 0]
    if places:
      self.is_stopped, self._held = True, ''
      return text[: min(places)[1]]
    num_held = max((_num_common(text, stop) for stop in self._stop_texts), default=0)
    self._held = text[len(text) - num_held :]
    return text[: len(text) - num_held]


def _num_common(text: str, stop: str) -> int:
  """The length of the longest end of `text` that is a beginning of `stop`, and shorter than it."""
  return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
