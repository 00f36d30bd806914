"""The texts that rows hold, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class HeldTexts:
  """Prompts and new tokens of B rows, of requests that have ended, too; the caches hold all but the last token.

  Attributes:
    tokens: int32 `[B, C]`, by position.
    lengths: int `[B]`, those of the texts; 0 where a row holds none.
    num_drafted: int `[B]`, the first tokens of a text that the drafter holds, as for `Drafter.read`: fewer than all but
      the last while it pauses.
  """

  def __init__(self, batch_size: int, most_tokens: int):
    """Begins with rows that hold nothing, and have room for C tokens each."""
    self.tokens = np.zeros((batch_size, most_tokens), np.int32)
    self.lengths, self.num_drafted = np.zeros(batch_size, np.int64), np.zeros(batch_size, np.int64)

  def num_shared(self, tokens: np.ndarray) -> np.ndarray:
    """The tokens at the beginning of a prompt that the caches of each row hold, but for its last one, `[B]`."""
    is_other = self.tokens[:, : len(tokens)] != tokens
    shared = np.where(is_other.any(axis=1), is_other.argmax(axis=1), len(tokens))
    return np.clip(np.minimum(shared, self.lengths - 1), 0, len(tokens) - 1)

  def begin(self, rows: Sequence[int], prompts: Sequence[np.ndarray]) -> None:
    """Rows hold prompts from now on."""
    for row, prompt in zip(rows, prompts, strict=True):
      self.tokens[row, : len(prompt)] = prompt
      self.lengths[row] = len(prompt)

  def extend(self, row: int, tokens: np.ndarray) -> None:
    """A row has new tokens."""
    start = self.lengths[row]
    self.lengths[row] = start + len(tokens)
    self.tokens[row, start : self.lengths[row]] = tokens

  def behind(self, rows: Sequence[int]) -> list[int]:
    """Those of the rows whose drafter does not hold all but the last token."""
    return [row for row in rows if self.num_drafted[row] < self.lengths[row] - 1]
