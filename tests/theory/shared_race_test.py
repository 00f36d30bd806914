"""The shared race against the sum as it is written, closed forms, races run, and bounds."""

import numpy as np
import pytest

from spectr_jax.theory import race_match_bound, race_match_prob, total_variation

EXACT = 1e-12


def _laws(vocab_size, count, zero_share=0.25, concentration=0.5):
  rng = np.random.default_rng(vocab_size)
  laws = rng.dirichlet(np.full(vocab_size, concentration), (2, count))
  laws[rng.random(laws.shape) < zero_share] = 0
  laws[..., 0] += 1e-3
  return laws / laws.sum(axis=-1, keepdims=True)


def _sum_over_pairs(p, q):
  both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
  return sum(1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both)


@pytest.mark.parametrize('vocab_size', [1, 2, 3, 7, 40])
def test_sorted_sums_are_those_over_pairs(vocab_size):
  p, q = _laws(vocab_size, 12)
  expected = [_sum_over_pairs(*laws) for laws in zip(p, q)]
  np.testing.assert_allclose(race_match_prob(p, q), expected, rtol=0, atol=EXACT)
  # Ties of the ratio do not matter: here p/q is 2, 2, 1, 1/4.
  p, q = np.array([0.2, 0.4, 0.3, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
  assert race_match_prob(p, q) == pytest.approx(_sum_over_pairs(p, q), abs=EXACT)
  np.testing.assert_allclose(race_match_prob(p[::-1], q[::-1]), race_match_prob(p, q), rtol=0, atol=EXACT)


def test_closed_forms():
  # Of two tokens the first wins where E_0/E_1 is below its odds: the shared race is a maximal coupling.
  for u, v in ((0.25, 0.5), (0.1, 0.9), (0.3, 0.3)):
    assert race_match_prob([1 - u, u], [1 - v, v]) == pytest.approx(1 - abs(u - v), abs=EXACT)
  assert race_match_prob(*_laws(5, 3)[[0, 0]]) == pytest.approx(np.ones(3), abs=EXACT)
  assert race_match_prob([1, 0], [0, 1]) == 0
  # Uniform laws on sets of tokens: |A and B| / |A or B|, the Jaccard similarity.
  p, q = np.array([1, 1, 1, 1, 0, 0]) / 4, np.array([0, 0, 1, 1, 1, 1]) / 4
  assert race_match_prob(p, q) == pytest.approx(2 / 6, abs=EXACT)
  assert race_match_bound(p, q) == pytest.approx(1 / 4, abs=EXACT)
  assert race_match_bound(p, p) == pytest.approx(1 / 2, abs=EXACT)


def test_between_the_lemma_and_speculative_decoding():
  for concentration in (0.1, 1, 10):
    p, q = _laws(30, 200, concentration=concentration)
    exact, distance = race_match_prob(p, q), total_variation(p, q)
    assert (race_match_bound(p, q) <= exact + EXACT).all()
    assert (exact <= 1 - distance + EXACT).all()
    # What correlated sampling guarantees.
    assert (exact >= (1 - distance) / (1 + distance) - EXACT).all()


def test_races_are_won_by_the_same_as_often():
  num_races = 200_000
  rng = np.random.default_rng(0)
  for p, q in zip(*_laws(6, 3)):
    noise = rng.exponential(size=(num_races, 6))
    with np.errstate(divide='ignore'):
      matches = (noise / p).argmin(axis=1) == (noise / q).argmin(axis=1)
    expected = float(race_match_prob(p, q))
    assert abs(matches.mean() - expected) < 4.5 * np.sqrt(expected * (1 - expected) / num_races)


def test_a_large_vocabulary_takes_no_table_of_pairs():
  rng = np.random.default_rng(0)
  logits = 3 * rng.standard_normal(50_000)
  laws = [np.exp(x - x.max()) for x in (logits, logits + rng.standard_normal(50_000))]
  p, q = (law / law.sum() for law in laws)
  found = race_match_prob(p, q)
  chosen = np.argsort(-np.minimum(p, q))[:200]
  some = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in chosen)
  assert some < found < some + np.minimum(p, q).sum() - np.minimum(p, q)[chosen].sum()
