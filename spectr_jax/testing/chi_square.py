"""Losslessness shown by sampling: the engine's tokens against a known joint law."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from spectr_jax.generate import generate
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class ChiSquare:
  """Pearson's test of counts against a law.

  Attributes:
    statistic: Sum of (count - expected)^2 / expected.
    num_cells: Cells compared; those expecting fewer than 10 are pooled into one.
    p_value: Chance of a statistic at least as large if the law is right; 0 if something impossible was seen.
    num_samples: Sample size.
  """

  statistic: float
  num_cells: int
  p_value: float
  num_samples: int


def chi_square(counts: np.ndarray, law: np.ndarray) -> ChiSquare:
  """Tests counts against probabilities of the same shape.

  Raises:
    ValueError: The shapes differ, or there is nothing to compare.
  """
  counts, law = np.asarray(counts, np.float64).reshape(-1), np.asarray(law, np.float64).reshape(-1)
  if counts.shape != law.shape or not counts.sum():
    raise ValueError(f'need samples, and one probability per cell; got {counts.shape}, {law.shape}, {counts.sum()}')
  num_samples = int(counts.sum())
  expected = num_samples * law / law.sum()
  if counts[expected == 0].any():
    return ChiSquare(np.inf, int(np.count_nonzero(expected)), 0.0, num_samples)
  is_rare = expected < 10
  counts = np.append(counts[~is_rare], counts[is_rare].sum())
  expected = np.append(expected[~is_rare], expected[is_rare].sum())
  counts, expected = counts[expected > 0], expected[expected > 0]
  statistic = float(((counts - expected) ** 2 / expected).sum())
  degrees = max(len(counts) - 1, 1)
  return ChiSquare(statistic, len(counts), float(scipy.stats.chi2.sf(statistic, degrees)), num_samples)


def sample_counts(
  rng_key: jax.Array,
  target: Model,
  draft: Model | None,
  prompt: np.ndarray,
  *,
  method: str | Method,
  tree: TokenTree,
  num_tokens: int,
  num_samples: int,
  batch_size: int = 131072,
  **sampling,
) -> np.ndarray:
  """Counts of the first tokens that `generate` emits after one prompt.

  Args:
    rng_key: One typed key.
    target: The target.
    draft: The draft.
    prompt: int `[P]`.
    method: The method.
    tree: The tree.
    num_tokens: T.
    num_samples: Rows to draw, rounded up to whole batches.
    batch_size: Rows at a time.
    **sampling: `temperature`, `top_k`, `top_p`.

  Returns:
    int64 `[V] * num_tokens`.
  """
  counts = np.zeros(target.vocab_size**num_tokens, np.int64)
  prompts = jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (batch_size, len(prompt)))
  lengths = jnp.full(batch_size, len(prompt), jnp.int32)
  weights = target.vocab_size ** np.arange(num_tokens)[::-1]
  for batch in range(-(-num_samples // batch_size)):
    tokens = generate(
      jax.random.fold_in(rng_key, batch),
      target,
      draft,
      prompts,
      lengths,
      method=method,
      tree=tree,
      max_new_tokens=num_tokens,
      **sampling,
    ).tokens
    counts += np.bincount(np.asarray(tokens) @ weights, minlength=len(counts))
  return counts.reshape((target.vocab_size,) * num_tokens)
