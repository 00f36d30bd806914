"""The result of decoding: tokens, their origins, and failures."""

from __future__ import annotations

import dataclasses

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
  """

  def __init__(self, row: int, num_rounds: int, failure: int):
    names = [name for bit, name in ((FAILED_TARGET, 'target'), (FAILED_DRAFT, 'draft')) if failure & bit]
    super().__init__(f'row {row}, round {num_rounds}: logits of the {" and the ".join(names)} are not finite')
    self.row = row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
  """Generated tokens, their origins, and counts of rounds and acceptances.

  Attributes:
    tokens: int32 `[B, max_new_tokens]`, new tokens only, -1 after a row's end; an EOS is part of its row.
    lengths: int32 `[B]`, new tokens of each row.
    num_target_calls: int32 `[B]`, rounds in which the row was alive. The prefill is not counted.
    accepted_by_depth: int32 `[B, L]`, at index d - 1 the rounds that kept at least d drafted tokens; tokens that EOS or
      the limit cut off are not counted.
    origins: int32 `[B, max_new_tokens]`, the origin of each token: `ORIGIN_DRAFT` 0, an accepted guess;
      `ORIGIN_CORRECTION` 1, the target's replacement for rejected guesses; `ORIGIN_BONUS` 2, the target's own token
      after a path accepted to its end; -1 after a row's end.
    failures: int32 `[B]`, the models whose logits were not finite: `FAILED_TARGET` 1, `FAILED_DRAFT` 2 or their sum; 0
      everywhere unless the run was stopped for that. Such a row keeps nothing of its last round.
    statistics: Counts over the positions visited, or None if they were not asked for. They include tokens that EOS or
      the limit cut off.
  """

  tokens: jax.Array
  lengths: jax.Array
  num_target_calls: jax.Array
  accepted_by_depth: jax.Array
  origins: jax.Array
  failures: jax.Array
  statistics: Statistics | None = None

  def check(self) -> None:
    """Waits for the result and checks that no model failed; every process has to call it.

    Raises:
      NotFiniteError: The run was stopped because a model's logits are not finite.
    """
    failures, num_rounds = fetch((self.failures, self.num_target_calls))
    if failures.any():
      row = int(np.argmax(failures != 0))
      raise NotFiniteError(row, int(num_rounds[row]), int(failures[row]))
