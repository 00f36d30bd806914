"""Tiny language models as tables, with zeros and equal rows on purpose, for proofs of losslessness."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class ContextTables:
  """Distributions of draft and target after every context over a tiny vocabulary.

  A context is a sequence of tokens. A context of length l has the number `(V^l - 1)/(V - 1) + (tokens read in base V)`.

  Attributes:
    draft_probs: float64 `[C, V]`, the draft's distribution after each context.
    target_probs: float64 `[C, V]`, the target's distribution after each context.
    max_length: Length of the longest contexts, in tokens.
  """

  draft_probs: np.ndarray
  target_probs: np.ndarray
  max_length: int

  @property
  def vocab_size(self) -> int:
    return self.draft_probs.shape[1]

  def joint_target_law(self, num_tokens: int) -> np.ndarray:
    """The target's joint distribution of the first tokens, `[V] * num_tokens`."""
    law = np.ones(1)
    for length in range(num_tokens):
      first = first_context(self.vocab_size, length)
      law = (law[:, None] * self.target_probs[first : first + len(law)]).reshape(-1)
    return law.reshape((self.vocab_size,) * num_tokens)


def first_context(vocab_size: int, length):
  """The number of the first context of `length` tokens."""
  return (vocab_size**length - 1) // (vocab_size - 1)


def _random_laws(rng: np.random.Generator, count: int, vocab_size: int, zero_share: float) -> np.ndarray:
  laws = rng.dirichlet(np.full(vocab_size, 0.7), count)
  laws[rng.random(laws.shape) < zero_share] = 0
  is_empty = laws.sum(1) == 0
  laws[is_empty, rng.integers(vocab_size, size=is_empty.sum())] = 1
  return laws / laws.sum(1, keepdims=True)


def random_tables(
  seed: int, vocab_size: int, max_length: int, *, zero_share: float = 0.2, equal_share: float = 0.15
) -> ContextTables:
  """Random distributions for every context up to `max_length`; some have zeros, some are equal for draft and target.

  Args:
    vocab_size: V, at least 2.
    max_length: Length of the longest contexts. A proof of T tokens with drafts of L tokens needs T + L - 1.
    zero_share: Probability that an entry is 0, independently for draft and target. Disjoint supports occur.
    equal_share: Probability that the target's distribution equals the draft's.
  """
  rng = np.random.default_rng(seed)
  count = first_context(vocab_size, max_length + 1)
  draft = _random_laws(rng, count, vocab_size, zero_share)
  target = _random_laws(rng, count, vocab_size, zero_share)
  is_equal = rng.random(count) < equal_share
  target[is_equal] = draft[is_equal]
  return ContextTables(draft, target, max_length)


def constant_tables(draft_probs, target_probs, max_length: int) -> ContextTables:
  """Tables with the same two distributions after every context, for comparison with closed forms."""
  count = first_context(len(draft_probs), max_length + 1)
  return ContextTables(
    np.tile(np.asarray(draft_probs, np.float64), (count, 1)),
    np.tile(np.asarray(target_probs, np.float64), (count, 1)),
    max_length,
  )
