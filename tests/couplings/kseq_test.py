"""K-SEQ: its threshold, and what it accepts."""

import functools

import jax
import numpy as np
import pytest
from enumerated import BERNOULLI, EXACT, AtGamma, assert_close, emitted_law, law_pairs, optimal_by_sets

from spectr_jax.couplings import KSeq
from spectr_jax.couplings.kseq import any_accepted, overlap
from spectr_jax.kernels import gamma

# Of every platform.
_FORMS = {'by chords': gamma._by_chords, 'by sections': gamma.solve_gamma.plain}


@functools.partial(jax.jit, static_argnums=0)
def _solve(form, p, q, n, num_rounds):
  """gamma*, and the excess of 1 - (1 - beta)^n over gamma beta there and one last bracket below."""
  gamma = form(p, q, n, num_rounds=num_rounds)

  def excess(gamma):
    beta = overlap(p, q, gamma)
    return any_accepted(beta, n) - gamma * beta

  return gamma, excess(gamma), excess(gamma - (n - 1) / 2.0**num_rounds)


@pytest.mark.parametrize('num_candidates', [1, 2, 3, 8])
@pytest.mark.parametrize('num_rounds', [1, 4, 16, 60])
@pytest.mark.parametrize('form', _FORMS.values(), ids=_FORMS)
def test_gamma_is_the_root_from_above(form, num_candidates, num_rounds):
  for p, q in law_pairs():
    gamma, excess, excess_below = map(float, _solve(form, p, q, num_candidates, num_rounds))
    assert 1 <= gamma <= num_candidates
    # At or above the root, where the excess is not positive; 1e-15 is one rounding of its two terms.
    assert excess <= 1e-15
    # ... and no further above than the bisection's last bracket. The bracket's end of 1 was never tried.
    if gamma - (num_candidates - 1) / 2**num_rounds > 1:
      assert excess_below >= -1e-15


@pytest.mark.parametrize('form', _FORMS.values(), ids=_FORMS)
def test_gamma_of_equal_laws_is_one(form):
  p = np.array([0.1, 0.2, 0.7])
  # With beta = 1/gamma the excess is -(1 - 1/gamma)^4: below a rounding of 1 for gamma up to 1 + 1e-4.
  assert float(_solve(form, p, p, 4, 40)[0]) == pytest.approx(1, abs=2e-4)


def test_kseq_on_the_bernoulli_example():
  p, q = BERNOULLI
  law, acceptance = emitted_law(AtGamma(), p, q, 2)
  assert_close(law, q, EXACT)
  # For 1 <= g <= 2, beta = .5/g + .25, and 1 - (1 - beta)^2 = g beta = .5 + .25 g means (.75 - .5/g)^2 = .5 - .25 g.
  roots = np.roots([0.25, 0.5625 - 0.5, -0.75, 0.25])  # times g^2
  gamma = float(next(g.real for g in roots if abs(g.imag) < 1e-12 and 1 <= g.real <= 2))
  assert acceptance == pytest.approx(0.5 + 0.25 * gamma, abs=1e-9)
  assert acceptance == pytest.approx(0.8476, abs=5e-5)
  assert optimal_by_sets(p, q, 2) == pytest.approx(0.9375, abs=EXACT)


def test_below_gamma_the_law_is_wrong():
  """The enumeration can tell: halfway from gamma* to 1 the residual would have to be negative."""
  law, _ = emitted_law(AtGamma(place=-0.5), *BERNOULLI, 2)
  assert np.abs(law - BERNOULLI[1]).max() > 1e-3
  errors = [np.abs(emitted_law(AtGamma(place=-0.5), p, q, 2)[0] - q).max() for p, q in law_pairs()]
  assert sum(error > 1e-4 for error in errors) >= 4


def test_rounds_change_acceptance_by_less_than_promised():
  for p, q in law_pairs():
    for n in (2, 3):
      assert abs(emitted_law(KSeq(), p, q, n)[1] - emitted_law(AtGamma(), p, q, n)[1]) < 1e-4
