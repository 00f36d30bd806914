"""Over-acceptance against linear programs, the coupling that decodes, and sets of rejection laws."""

import jax
import numpy as np
import pytest
from scipy import optimize

from spectr_jax.couplings import OverAccept
from spectr_jax.theory import (
  best_rejection_law,
  emitted_law,
  minimal_bias,
  over_acceptance,
  pareto_bias,
  rejection_prob,
  total_variation,
)

EXACT, SOLVED = 1e-12, 1e-7


def _laws(seed, vocab_size=4):
  rng = np.random.default_rng(seed)
  laws = rng.dirichlet(np.full(vocab_size, 0.7), 2)
  if seed % 2:  # zeros on either side
    laws[[0, 1], rng.permutation(vocab_size)[:2]] = 0
  return laws / laws.sum(axis=-1, keepdims=True)


def _least_bias(p, q, accept=None, most_rejected=1.0):
  """min TV(output, q) as a program over what is accepted, `a = b p`, what is corrected, and the gaps to the target."""
  size, one = len(p), np.eye(len(p))
  fixed = [(0, x) for x in p] if accept is None else [(x, x) for x in accept * p]
  result = optimize.linprog(
    np.repeat([0, 0, 0.5], size),
    A_ub=np.vstack([np.hstack([one, one, -one]), np.hstack([-one, -one, -one]), np.repeat([0, 1, 0], size)]),
    b_ub=np.concatenate([q, -q, [most_rejected]]),
    A_eq=np.repeat([1, 1, 0], size)[None],
    b_eq=[1],
    bounds=fixed + [(0, None)] * (2 * size),
    method='highs',
  )
  assert result.success
  return result.fun


@pytest.mark.parametrize('seed', range(6))
def test_minimal_bias_is_that_of_a_linear_program(seed):
  """Theorem 4, for any acceptance, also below that of speculative decoding; and its law attains it."""
  p, q = _laws(seed)
  rng = np.random.default_rng(seed)
  for accept in (rng.random(4), rng.random(4) ** 0.2, *over_acceptance(p, q, [0, 0.05, 0.2, 1])):
    bias = minimal_bias(p, q, accept)
    assert bias == pytest.approx(_least_bias(p, q, accept), abs=SOLVED)
    # As published; the two sums cancel.
    published = (np.abs(q - accept * p).sum() - ((1 - accept) * p).sum()) / 2
    assert bias == pytest.approx(published, abs=EXACT)
    law = best_rejection_law(p, q, accept)
    assert total_variation(emitted_law(p, accept, law), q) == pytest.approx(bias, abs=EXACT)
    # And others are no better.
    for other in (q, p, *rng.dirichlet(np.ones(4), 20)):
      assert total_variation(emitted_law(p, accept, other), q) >= bias - EXACT


@pytest.mark.parametrize('seed', range(6))
def test_rejection_and_bias_add_up(seed):
  """Theorem 5, for any acceptance that is at least that of speculative decoding."""
  p, q = _laws(seed)
  right = over_acceptance(p, q, 0)
  for share in np.random.default_rng(seed).random((20, 4)):
    accept = right + share * (1 - right)
    assert rejection_prob(p, accept) + minimal_bias(p, q, accept) == pytest.approx(total_variation(p, q), abs=EXACT)


@pytest.mark.parametrize('seed', range(6))
def test_no_rule_is_below_the_front(seed):
  """Over all acceptances, not only those that Theorem 5 is about."""
  p, q = _laws(seed)
  distance = float(total_variation(p, q))
  for rejection in (0, 0.3 * distance, 0.9 * distance, distance, min(1, 1.2 * distance)):
    assert pareto_bias(p, q, rejection) == pytest.approx(_least_bias(p, q, most_rejected=rejection), abs=SOLVED)


@pytest.mark.parametrize('has_best_residual', [True, False])
def test_the_law_is_that_of_the_coupling(has_best_residual):
  """Decoding-OPT and Decoding-UNO, every candidate of the library's own coupling."""
  with jax.enable_x64(True):
    for seed in range(4):
      p, q = _laws(seed)
      for epsilon in (0, 0.1, 0.4, 3.0):
        coupling = OverAccept(epsilon=epsilon, has_best_residual=has_best_residual)
        law, rejected = np.zeros(4), 0
        for x in np.flatnonzero(p):
          outcome = coupling(jax.numpy.asarray(p), jax.numpy.asarray(q), np.array([x]), np.ones(1, bool))
          accepted, residual = float(outcome.accept_probs[0]), np.asarray(outcome.residual)
          law[x] += p[x] * accepted
          law += p[x] * (1 - accepted) * residual / residual.sum()
          rejected += p[x] * (1 - accepted)
        accept = over_acceptance(p, q, epsilon)
        after = best_rejection_law(p, q, accept) if has_best_residual else q
        np.testing.assert_allclose(emitted_law(p, accept, after), law, rtol=0, atol=EXACT)
        assert rejection_prob(p, accept) == pytest.approx(rejected, abs=EXACT)


def test_without_excess_it_is_lossless():
  p, q = _laws(1)
  accept = over_acceptance(p, q, 0)
  np.testing.assert_allclose(accept[p > 0], np.minimum(1, q / np.where(p > 0, p, 1))[p > 0], rtol=0, atol=EXACT)
  np.testing.assert_allclose(emitted_law(p, accept, best_rejection_law(p, q, accept)), q, rtol=0, atol=EXACT)
  assert rejection_prob(p, accept) == pytest.approx(total_variation(p, q), abs=EXACT)
  # Where nothing is rejected any law will do.
  np.testing.assert_array_equal(best_rejection_law(p, p, np.ones(4)), p)


def test_leading_axes_broadcast():
  p, q = np.stack([_laws(seed) for seed in range(3)], axis=1)
  epsilons = np.array([0, 0.1, 0.3])
  accept = over_acceptance(p[:, None], q[:, None], epsilons)
  assert accept.shape == (3, 3, 4)
  bias, rejected = minimal_bias(p[:, None], q[:, None], accept), rejection_prob(p[:, None], accept)
  law = emitted_law(p[:, None], accept, q[:, None])
  front = pareto_bias(p[:, None], q[:, None], rejected)
  assert bias.shape == rejected.shape == front.shape == (3, 3)
  for i, j in np.ndindex(3, 3):
    alone = over_acceptance(p[i], q[i], epsilons[j])
    np.testing.assert_array_equal(accept[i, j], alone)
    assert bias[i, j] == minimal_bias(p[i], q[i], alone)
    np.testing.assert_array_equal(law[i, j], emitted_law(p[i], alone, q[i]))
  np.testing.assert_allclose(front, bias, rtol=0, atol=EXACT)
