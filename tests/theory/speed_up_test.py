"""Closed forms of speed against sums, the published examples, and the verifier enumerated."""

import numpy as np
import pytest

from spectr_jax import METHODS, TokenTree
from spectr_jax.testing import constant_tables, expected_acceptance
from spectr_jax.theory import expected_chain_tokens, expected_tokens, speed_up, total_variation


def test_tokens_of_a_chain_are_a_geometric_sum():
  rates = np.array([0, 1e-9, 0.3, 0.7, 1 - 1e-9, 1])
  lengths = np.array([[0], [1], [2], [24]])
  expected = [[sum(rate**i for i in range(length + 1)) for rate in rates] for length in lengths[:, 0]]
  np.testing.assert_allclose(expected_chain_tokens(rates, lengths), expected, rtol=1e-12)
  for rate in rates:
    assert expected_chain_tokens(rate, 5) == pytest.approx(expected_tokens(TokenTree.chains(1, 5), [rate]), rel=1e-12)


def test_published_examples():
  """2.9 tokens at .7, 3.7 at .8, 4.7 at .9 and 1.6 or 1.7 at .4, with five drafted tokens."""
  np.testing.assert_array_equal(expected_chain_tokens([0.7, 0.8, 0.9, 0.4], 5).round(2), [2.94, 3.69, 4.69, 1.66])


def test_tokens_are_those_of_the_verifier():
  """Where laws depend on nothing every drafted token is accepted with 1 - TV(p, q)."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])
  accepted = expected_acceptance(METHODS['speculative'], TokenTree.chains(1, 3), constant_tables(p, q, max_length=3))
  assert 1 + accepted.sum() == pytest.approx(float(expected_chain_tokens(1 - total_variation(p, q), 3)), abs=1e-12)


def test_speed_up():
  # A draft that costs nothing and a call that costs as much as one token.
  assert speed_up(3.0, 4, draft_cost=0) == 3
  # 4 steps of a tenth and a call of 1.2.
  assert speed_up(3.2, 4, draft_cost=0.1, call_cost=1.2) == pytest.approx(2)
  # Leviathan et al. 2023: longer drafts pay up to a length that depends on the cost.
  lengths = np.arange(1, 40)
  speeds = speed_up(expected_chain_tokens(0.8, lengths), lengths, draft_cost=np.array([[0.01], [0.1], [0.5]]))
  assert speeds.shape == (3, 39)
  best = lengths[speeds.argmax(axis=1)]
  assert (np.diff(best) < 0).all()
  # Theirs: it pays at all exactly if the rate exceeds the cost (Corollary 3.9).
  assert speed_up(expected_chain_tokens(0.3, 1), 1, draft_cost=0.29) > 1
  assert speed_up(expected_chain_tokens(0.3, lengths), lengths, draft_cost=0.31).max() < 1
