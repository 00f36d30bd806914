"""What is measured: block efficiency with its interval, and acceptance by position."""

from __future__ import annotations

import math

import numpy as np
from scipy import special


def block_efficiency(tokens: np.ndarray, calls: np.ndarray) -> float:
  """Tokens emitted per target call, all prompts together: `sum(tokens) / sum(calls)`.

  Args:
    tokens: `[P]`, tokens of each prompt.
    calls: `[P]`, target calls of each prompt.
  """
  return float(np.sum(tokens) / np.sum(calls))


def block_efficiency_interval(tokens: np.ndarray, calls: np.ndarray) -> tuple[float, float] | None:
  """95% interval of the block efficiency over prompts.

  Prompts are the sample and the estimate is a ratio of two sums, so its variance is that of the residuals
  `tokens - r * calls` (delta method), with Student's t for few prompts. Several continuations of one prompt belong
  together: add them up first.

  Args:
    tokens: `[P]`, tokens of each prompt.
    calls: `[P]`, target calls of each prompt.

  Returns:
    Low and high end, or None for a single prompt, which says nothing about others.
  """
  num_prompts = len(tokens)
  if num_prompts < 2:
    return None
  ratio = block_efficiency(tokens, calls)
  residuals = tokens - ratio * calls
  error = math.sqrt(num_prompts / (num_prompts - 1) * float(np.sum(residuals**2))) / float(np.sum(calls))
  half = float(special.stdtrit(num_prompts - 1, 0.975)) * error
  return ratio - half, ratio + half


def acceptance_by_position(accepted_by_depth: np.ndarray, calls: np.ndarray) -> list[float]:
  """The share of rounds that kept at least d + 1 drafted tokens, at index d.

  Args:
    accepted_by_depth: `[P, L]`, rounds of each prompt that kept at least d + 1.
    calls: `[P]`, rounds of each prompt.
  """
  return (np.sum(accepted_by_depth, axis=0) / np.sum(calls)).tolist()
