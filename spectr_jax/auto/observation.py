"""What decoding some batches with a setting gave, and how long it took."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax.experimental import multihost_utils

from spectr_jax.auto.setting import Setting


@dataclasses.dataclass(frozen=True)
class Observation:
  """The tokens and the times of some batches of R rows in all, as JSON values.

  Seconds are those of a machine that decodes without a draft as fast as in the first observation.
  """

  row_tokens: list[int]  # `[R]`, new ones
  row_calls: list[int]  # `[R]`, of the target
  kept: list[int]  # `[L]`, at [d] the calls that kept at least d + 1 drafted tokens
  prefill_seconds: list[float]  # of each batch
  round_seconds: list[float]  # of a round of each batch

  @property
  def tokens_per_call(self) -> float:
    return sum(self.row_tokens) / sum(self.row_calls)

  def rounds(self, batch_size: int) -> float:
    """The mean number of rounds until the last row of a batch is done, over all batches that the rows could form.

    Few batches are decoded, and the slowest row of each says little: all rows together say more.
    """
    calls, size = sorted(self.row_calls), min(batch_size, len(self.row_calls))
    # The n-th smallest is the largest of a batch whose other rows are among the n - 1 smaller ones.
    is_largest = [math.comb(number, size - 1) / math.comb(len(calls), size) for number in range(len(calls))]
    return float(np.dot(calls, is_largest))

  def batch_seconds(self, batch_size: int) -> float:
    """The median prefill, and the mean number of rounds of the median time."""
    return float(np.median(self.prefill_seconds) + self.rounds(batch_size) * np.median(self.round_seconds))

  def joined(self, other: Observation) -> Observation:
    """Both together, of the same setting."""
    lists = {name: values + getattr(other, name) for name, values in vars(self).items()}
    return Observation(**lists | {'kept': np.add(self.kept, other.kept).tolist()})

  def of_the_first_process(self) -> Observation:
    """The observation of the first process, whose clock decides for all."""
    if jax.process_count() == 1:
      return self
    sent = multihost_utils.broadcast_one_to_all(
      {name: np.array(values) for name, values in vars(self).items() if values}
    )
    return dataclasses.replace(self, **{name: np.asarray(values).tolist() for name, values in sent.items()})


@dataclasses.dataclass(frozen=True)
class Speed:
  """The speed of a setting that was timed.

  Attributes:
    setting: The setting.
    tokens_per_call: Tokens per target call and row.
    tokens_per_second: New tokens of all rows over time, prefill included.
    interval: The 95% interval of `tokens_per_second`, over the rows and batches decoded.
    round_seconds: Seconds of a round.
  """

  setting: Setting
  tokens_per_call: float
  tokens_per_second: float
  interval: tuple[float, float]
  round_seconds: float

  @classmethod
  def of(cls, setting: Setting, seen: Observation, batch_size: int) -> Speed:
    """The speed of batches of so many rows."""
    tokens, calls, seconds = (np.array(each, float) for each in (seen.row_tokens, seen.row_calls, seen.round_seconds))
    speed = batch_size * tokens.mean() / seen.batch_seconds(batch_size)
    # The errors of a ratio of sums (delta method) and of a median, as parts of them.
    of_calls = np.sqrt(np.sum((tokens / tokens.sum() - calls / calls.sum()) ** 2))
    of_seconds = 1.25 * np.std(seconds) / np.median(seconds) / np.sqrt(len(seconds))
    half = 1.96 * speed * float(np.hypot(of_calls, of_seconds))
    return cls(setting, seen.tokens_per_call, speed, (max(0.0, speed - half), speed + half), np.median(seconds))
