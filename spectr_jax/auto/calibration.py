"""The measurements that predictions follow from, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

FORMAT = 2  # of the JSON that `to_json` writes


@dataclasses.dataclass(frozen=True)
class Observation:
  """The time and the tokens of decoding the calibration prompts with one setting."""

  num_batches: int
  num_tokens: int  # new ones, of all rows
  row_calls: list[int]  # target calls of each row: of each prompt, once or several times
  kept: list[int]  # [L], at [d] the calls that kept at least d + 1 drafted tokens
  prefill_seconds: float  # these are medians over batches
  round_seconds: float

  @property
  def num_calls(self) -> int:
    return sum(self.row_calls)

  @property
  def tokens_per_call(self) -> float:
    return self.num_tokens / self.num_calls

  @property
  def tokens_per_row(self) -> float:
    return self.num_tokens / len(self.row_calls)

  def rounds(self, batch_size: int) -> float:
    """The mean number of rounds until the last row of a batch is done, over all batches that the rows could form.

    Few batches are decoded, and the slowest row of each says little: all rows together say more.
    """
    calls, size = sorted(self.row_calls), min(batch_size, len(self.row_calls))
    # The n-th smallest is the largest of a batch whose other rows are among the n - 1 smaller ones.
    is_largest = [math.comb(number, size - 1) for number in range(len(calls))]
    return float(np.dot(calls, is_largest) / math.comb(len(calls), size))

  def joined(self, other: Observation) -> Observation:
    """The observation of both runs of one setting, whose seconds are means over batches."""
    weights = [each.num_batches for each in (self, other)]
    means = {
      name: float(np.average([getattr(each, name) for each in (self, other)], weights=weights))
      for name in ('prefill_seconds', 'round_seconds')
    }
    return Observation(
      num_batches=self.num_batches + other.num_batches,
      num_tokens=self.num_tokens + other.num_tokens,
      row_calls=self.row_calls + other.row_calls,
      kept=[a + b for a, b in zip(self.kept, other.kept, strict=True)],
      **means,
    )

  def share_of_tokens(self, draft_length: int) -> float:
    """The tokens per call with shorter drafts, relative to those observed, for methods that decide token by token."""
    counts = np.array(self.kept) / self.num_calls
    return float((1 + counts[:draft_length].sum()) / (1 + counts.sum()))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The measurements from which predictions follow."""

  conditions: dict[str, Any]  # JSON values: device, models, sampling, batch size, new tokens
  draft_seconds: dict[str, float]  # by the tree's name
  target_seconds: dict[int, float]  # of a call, by the tree's number of nodes without the root
  observations: dict[str, Observation]  # by setting
  is_complete: bool = True  # False if it goes on, or was interrupted
  format: int = FORMAT

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2) + '\n'

  def check_conditions(self, conditions: dict[str, Any], source: str) -> None:
    """Refuses conditions other than those that `source` was measured with; the ValueError names the first."""
    for name, value in conditions.items():
      if self.conditions.get(name) != value:
        raise ValueError(f'{source} was measured with {name} {self.conditions.get(name)}, not {value}; name a new file')
