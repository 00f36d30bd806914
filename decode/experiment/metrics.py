"""What is measured: ratios over prompts with their interval, and acceptance by position."""

from __future__ import annotations

import math

import numpy as np
from scipy import special


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> float:
  """All prompts together: `sum(numerators) / sum(denominators)`.

  Of tokens and target calls this is block efficiency, of accepted tokens and optima the share of the optimum.

  Args:
    numerators: `[P]`, of each prompt.
    denominators: `[P]`, of each prompt.
  """
  return float(np.sum(numerators) / np.sum(denominators))


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float] | None:
  """95% interval of `ratio` over prompts.

  Prompts are the sample and the estimate is a ratio of two sums, so its variance is that of the residuals
  `numerator - ratio * denominator` (delta method), with Student's t for few prompts. Several continuations of one
  prompt belong together: add them up first.

  Args:
    numerators: `[P]`, of each prompt.
    denominators: `[P]`, of each prompt.

  Returns:
    Low and high end, or None for a single prompt, which says nothing about others.
  """
  num_prompts = len(numerators)
  if num_prompts < 2:
    return None
  middle = ratio(numerators, denominators)
  residuals = numerators - middle * denominators
  error = math.sqrt(num_prompts / (num_prompts - 1) * float(np.sum(residuals**2))) / float(np.sum(denominators))
  half = float(special.stdtrit(num_prompts - 1, 0.975)) * error
  return middle - half, middle + half


def compare(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float]:
  """How many times larger one ratio is than another on the same prompts, and its 95% interval.

  What prompts have in common cancels, so the interval is narrower than those of the two ratios suggest. It is that of
  the logarithm, whose error to first order is the sum over prompts of each prompt's share of the four sums.

  Args:
    first: Numerators and denominators, `[P]` each, of at least two prompts.
    second: The same of what it is compared with.

  Returns:
    The factor, and the low and high end of its interval.
  """
  shares = [numbers / np.sum(numbers) for numbers in (*first, *second)]
  influence = shares[0] - shares[1] - shares[2] + shares[3]
  num_prompts = len(influence)
  error = math.sqrt(num_prompts / (num_prompts - 1) * float(np.sum(influence**2)))
  half = float(special.stdtrit(num_prompts - 1, 0.975)) * error
  factor = ratio(*first) / ratio(*second)
  return factor, factor * math.exp(-half), factor * math.exp(half)


def acceptance_by_position(accepted_by_depth: np.ndarray, calls: np.ndarray) -> list[float]:
  """The share of rounds that kept at least d + 1 drafted tokens, at index d.

  Args:
    accepted_by_depth: `[P, L]`, rounds of each prompt that kept at least d + 1.
    calls: `[P]`, rounds of each prompt.
  """
  return (np.sum(accepted_by_depth, axis=0) / np.sum(calls)).tolist()
