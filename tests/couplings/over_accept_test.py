"""Accepting too much, on purpose."""

import numpy as np
import pytest
from enumerated import (
  EXACT,
  assert_close,
  emitted_law,
  law_pairs,
)

from spectr_jax.couplings import OverAccept


@pytest.mark.parametrize('epsilon', [0.0, 0.05, 0.2, 3.0])
def test_over_acceptance_is_on_the_front(epsilon):
  """Rejections saved and bias add up to TV(p, q) with the best residual; with the target's law the bias is larger."""
  for p, q in law_pairs():
    total_variation = 1 - np.minimum(p, q).sum()
    law, acceptance = emitted_law(OverAccept(epsilon, has_best_residual=True), p, q, 1)
    assert acceptance == pytest.approx(np.minimum(p, q + epsilon).sum(), abs=EXACT)
    bias = np.abs(law - q).sum() / 2
    assert 1 - acceptance + bias == pytest.approx(total_variation, abs=EXACT)
    uno, same = emitted_law(OverAccept(epsilon, has_best_residual=False), p, q, 1)
    assert same == acceptance
    assert_close(uno, np.minimum(p, q + epsilon) + (1 - acceptance) * q, EXACT)
    assert np.abs(uno - q).sum() / 2 >= bias - EXACT


@pytest.mark.parametrize('epsilon', [-0.1, -1e-9, float('nan')])
def test_negative_epsilon_is_refused(epsilon):
  with pytest.raises(ValueError, match='epsilon must be at least 0'):
    OverAccept(epsilon, has_best_residual=True)
