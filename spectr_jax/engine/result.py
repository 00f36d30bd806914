"""The result of decoding: tokens, their origins, and failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spectr_jax.engine.statistics import Statistics
from spectr_jax.sharding import fetch

ORIGIN_DRAFT, ORIGIN_CORRECTION, ORIGIN_BONUS = range(3)
FAILED_TARGET, FAILED_DRAFT = 1, 2


class NotFiniteError(ValueError):
  """A model gave logits that define no distribution: the largest of them is NaN or infinite.

  Attributes:
    row: The first row with such logits.
    failure: The models that gave them: `FAILED_TARGET`, `FAILED_DRAFT` or their sum.
  """

  def __init__(self, row: int, num_rounds: int, failure: int):
    names = [name for bit, name in ((FAILED_TARGET, 'target'), (FAILED_DRAFT, 'draft')) if failure & bit]
    super().__init__(f'row {row}, round {num_rounds}: logits of the {" and the ".join(names)} are not finite')
    self.row, self.failure = row, failure

  def with_hint(self, hint: str) -> NotFiniteError:
    """This error, whose message ends with a hint."""
    self.args = (f'{self}; {hint}',)
    return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
  """Generated tokens, their origins, and counts of rounds and acceptances.

  `generate` returns T = `max_new_tokens` places for new tokens; the result of a state has as many as its buffers.

  Attributes:
    tokens: int32 `[B, T]`, new tokens only, -1 after a row's end; an EOS is part of its row.
    lengths: int32 `[B]`, new tokens of each row.
    num_target_calls: int32 `[B]`, rounds in which the row was alive. The prefill is not counted.
    accepted_by_depth: int32 `[B, L]`, at index d - 1 the rounds that kept at least d drafted tokens; tokens that EOS or
      the limit cut off are not counted.
    origins: int32 `[B, T]`, the origin of each token: `ORIGIN_DRAFT` 0, an accepted guess;
      `ORIGIN_CORRECTION` 1, the target's replacement for rejected guesses; `ORIGIN_BONUS` 2, the target's own token
      after a path accepted to its end; -1 after a row's end.
    failures: int32 `[B]`, the models whose logits were not finite: `FAILED_TARGET` 1, `FAILED_DRAFT` 2 or their sum; 0
      everywhere unless the run was stopped for that. Such a row keeps nothing of its last round.
    statistics: Counts over the positions visited, or None if they were not asked for. They include tokens that EOS or
      the limit cut off.
    logprobs: float32 `[B, T]`, the log probability of each token under the target's own distribution, the
      softmax of its logits before temperature and filters; NaN after a row's end. None if it was not asked for.
  """

  tokens: jax.Array
  lengths: jax.Array
  num_target_calls: jax.Array
  accepted_by_depth: jax.Array
  origins: jax.Array
  failures: jax.Array
  statistics: Statistics | None = None
  logprobs: jax.Array | None = None

  def of_size(self, num_tokens: int) -> Generation:
    """The result with so many places for new tokens; no row has more tokens."""
    return dataclasses.replace(
      self,
      tokens=self.tokens[:, :num_tokens],
      origins=self.origins[:, :num_tokens],
      logprobs=None if self.logprobs is None else self.logprobs[:, :num_tokens],
    )

  def cut(self, lengths: Mapping[int, int]) -> Generation:
    """The result as if some rows had ended earlier, as a limit of tokens ends them.

    The arrays must be NumPy arrays, as `jax.device_get` returns them. Every round but a row's last one ends with a
    token that is no guess, so the counts follow from the origins.

    Args:
      lengths: The number of tokens to keep, at least 1, by row; other rows stay as they are.

    Raises:
      ValueError: A row has fewer tokens, or there are statistics, which cannot be cut.
    """
    if self.statistics is not None:
      raise ValueError('statistics are of whole rounds: a result that has them cannot be cut')
    copy: Any = jax.tree.map(np.array, self)
    for row, length in lengths.items():
      if not 1 <= length <= copy.lengths[row]:
        raise ValueError(f'row {row} has {copy.lengths[row]} tokens, and cannot be cut to {length}')
      is_draft = copy.origins[row, :length] == ORIGIN_DRAFT
      copy.lengths[row] = length
      copy.num_target_calls[row] = 1 + np.sum(~is_draft[:-1])
      copy.accepted_by_depth[row] = _accepted_by_depth(is_draft, copy.accepted_by_depth.shape[1])
      copy.tokens[row, length:] = copy.origins[row, length:] = -1
      if copy.logprobs is not None:
        copy.logprobs[row, length:] = np.nan
    return copy

  def check(self) -> None:
    """Waits for the result, in every process; NotFiniteError if the run was stopped since logits are not finite."""
    failures, num_rounds = fetch((self.failures, self.num_target_calls))
    if failures.any():
      row = int(np.argmax(failures != 0))
      raise NotFiniteError(row, int(num_rounds[row]), int(failures[row]))


def _accepted_by_depth(is_draft: np.ndarray, max_depth: int) -> np.ndarray:
  """The runs of guesses of at least d tokens, at index d - 1, of a row whose tokens are guesses where `is_draft`."""
  counts, depth = np.zeros(max_depth, np.int32), 0
  for is_guess in is_draft:
    if is_guess:
      counts[depth] += 1
    depth = depth + 1 if is_guess else 0
  return counts
