"""Metrics: ratios over prompts with their intervals, and acceptance by position."""

from __future__ import annotations

import math

import numpy as np

# An interval is estimated from at least so many prompts or batches. Student's t for two is so wide that the interval of
# any two numbers says nothing.
MIN_UNITS = 3


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> float:
  """The ratio over all prompts: `sum(numerators) / sum(denominators)`, `[P]` each, such as tokens and target calls."""
  return float(np.sum(numerators) / np.sum(denominators))


def _student_quantile(num_degrees: int) -> float:
  """The end of the interval around 0 that holds 95% of Student's t."""
  from scipy import special  # takes a third of a second, which decoding need not wait for

  return float(special.stdtrit(num_degrees, 0.975))


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float] | None:
  """The 95% confidence interval of `ratio` over prompts, of arrays `[P]`; None for fewer than `MIN_UNITS`.

  The estimate is a ratio of two sums, so its variance is that of the residuals `numerator - ratio * denominator` (delta
  method), with Student's t for few prompts. Several continuations of one prompt are one unit: add them up first.
  """
  num_prompts = len(numerators)
  if num_prompts < MIN_UNITS:
    return None
  middle = ratio(numerators, denominators)
  residuals = numerators - middle * denominators
  error = math.sqrt(num_prompts / (num_prompts - 1) * float(np.sum(residuals**2))) / float(np.sum(denominators))
  half = _student_quantile(num_prompts - 1) * error
  return middle - half, middle + half


def within(interval: tuple[float, float] | None, low: float, high: float = math.inf) -> tuple[float, float] | None:
  """The part of an interval that can be true of a number from `low` to `high`."""
  return None if interval is None else (max(interval[0], low), min(interval[1], high))


def half_width(value: float, interval: tuple[float, float] | None) -> float | None:
  """The number behind ± of a value whose interval is symmetric; None of others, and where there is none."""
  if interval is None or not math.isclose(interval[1] - value, value - interval[0], rel_tol=1e-6, abs_tol=1e-9):
    return None
  return (interval[1] - interval[0]) / 2


def text_of(value: float, interval: tuple[float, float] | None, digits: int = 2) -> str:
  """`2.35 ± 0.06` of a value whose interval is symmetric, `2.35 (2.31 to 2.41)` of others; the value without one."""
  if interval is None:
    return f'{value:.{digits}f}'
  half, (low, high) = half_width(value, interval), interval
  around = f' ({low:.{digits}f} to {high:.{digits}f})' if half is None else f' ± {half:.{digits}f}'
  return f'{value:.{digits}f}{around}'


def ratio_text(numerators: np.ndarray, denominators: np.ndarray) -> str:
  """`ratio` with its interval, as `text_of`."""
  return text_of(ratio(numerators, denominators), ratio_interval(numerators, denominators))


def compare(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> tuple[float, float, float]:
  """The factor first / second between two ratios on the same prompts, and the ends of its 95% interval.

  Each is numerators and denominators, `[P]`, of at least two prompts. The comparison is paired: the common variation of
  prompts cancels, so the interval is narrower than those of the two ratios suggest. It is computed for the logarithm of
  the factor, whose error is to first order a sum over prompts of each prompt's shares of the four sums.
  """
  shares = [numbers / np.sum(numbers) for numbers in (*first, *second)]
  influence = shares[0] - shares[1] - shares[2] + shares[3]
  num_prompts = len(influence)
  error = math.sqrt(num_prompts / (num_prompts - 1) * float(np.sum(influence**2)))
  half = _student_quantile(num_prompts - 1) * error
  factor = ratio(*first) / ratio(*second)
  return factor, factor * math.exp(-half), factor * math.exp(half)


def comparison_text(
  first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], digits: int = 3
) -> str:
  """The factor of `compare` with the ends of its interval."""
  factor, low, high = compare(first, second)
  return f'{factor:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})'


def acceptance_by_position(accepted_by_depth: np.ndarray, calls: np.ndarray) -> list[float]:
  """The share of rounds that kept at least d + 1 drafted tokens, at index d.

  `accepted_by_depth` is `[P, L]`, the number of such rounds of each prompt, `calls` is `[P]`, that of all rounds.
  """
  return (np.sum(accepted_by_depth, axis=0) / np.sum(calls)).tolist()
