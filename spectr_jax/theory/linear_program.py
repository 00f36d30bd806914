"""Linear programs over probabilities, solved on the host for small cases."""

from __future__ import annotations

import numpy as np

MAX_PROGRAM_SIZE = 10**5
# HiGHS takes absolute tolerances of at least 1e-10, by default 1e-7, which exceeds the probability of many events.
# Multiplying the masses by a power of 2 is exact and lowers the tolerance to 1e-13 of the total.
_SCALE = 2.0**10
_TOLERANCE = 1e-10


def check_size(num_combinations: int) -> None:
  """ValueError for a program of more than `MAX_PROGRAM_SIZE` combinations, which would take too long to solve."""
  if num_combinations > MAX_PROGRAM_SIZE:
    raise ValueError(
      f'at most {MAX_PROGRAM_SIZE} combinations of guesses and texts are allowed, got {num_combinations}'
    )


def maximize(values, matrix, limits) -> tuple[float, np.ndarray]:
  """The largest `values . x` over x >= 0 with `matrix x <= limits`, and such an x, float64 `[X]`.

  `values` is `[X]`, `matrix` `[C, X]`, sparse, and `limits` `[C]`; x and limits are probabilities. RuntimeError if the
  solver fails.
  """
  from scipy import optimize

  result = optimize.linprog(
    -np.asarray(values, np.float64),
    A_ub=matrix,
    b_ub=_SCALE * limits,
    method='highs',
    options={'primal_feasibility_tolerance': _TOLERANCE, 'dual_feasibility_tolerance': _TOLERANCE},
  )
  if not result.success:
    raise RuntimeError(f'linear program failed: {result.message}')
  return float(-result.fun / _SCALE), np.maximum(result.x, 0) / _SCALE  # -1e-13 is within the tolerance
