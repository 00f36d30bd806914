"""Couplings by enumeration in float64: every tuple of candidates, every decision, the library's own functions."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.couplings import KSeq, Maximal, solve_gamma
from spectr_jax.couplings.kseq import any_accepted, overlap

BERNOULLI = np.array([0.75, 0.25]), np.array([0.5, 0.5])
# Sums of at most 4^3 products of float64: 1e-14 each, and a residual's division.
EXACT = 1e-12


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@dataclasses.dataclass(frozen=True)
class AtGamma(KSeq):
  """K-SEQ at another threshold: `place` 0 is gamma*, 1 is n, below 0 lies between 1 and gamma*."""

  num_rounds: int = 60
  place: float = 0.0

  def gamma(self, draft_probs, target_probs, num_candidates):
    root = super().gamma(draft_probs, target_probs, num_candidates)
    end = num_candidates if self.place >= 0 else 1
    return root + abs(self.place) * (end - root)


_JITTED = {}


@functools.partial(jax.jit, static_argnums=0)
def _apply(coupling, draft_probs, target_probs, candidates, is_valid):
  return coupling(draft_probs, target_probs, candidates, is_valid)


def _outcome(coupling, draft_probs, target_probs, candidates, is_valid, dtype=np.float64):
  laws = np.asarray(draft_probs, dtype), np.asarray(target_probs, dtype)
  return _apply(coupling, *laws, np.asarray(candidates, np.int32), np.asarray(is_valid))


def _emitted(coupling, draft_probs, target_probs, n, pad=()):
  """The law of the emitted token and the chance of acceptance, over all tuples of n candidates drawn from the draft.

  `pad` puts invalid candidates at these places of the tuple.
  """
  vocab_size = len(draft_probs)
  tuples = np.array(list(itertools.product(range(vocab_size), repeat=n)))
  weights = np.prod(np.asarray(draft_probs)[tuples], axis=1)
  is_valid = np.ones(n, bool)
  for place in pad:
    tuples = np.insert(tuples, place, np.argmax(target_probs), axis=1)
    is_valid = np.insert(is_valid, place, False)
  function = _JITTED.setdefault(coupling, jax.jit(jax.vmap(coupling, (None, None, 0, None))))
  outcome = function(jnp.asarray(draft_probs), jnp.asarray(target_probs), tuples, is_valid)
  accept, residual = np.asarray(outcome.accept_probs), np.asarray(outcome.residual)
  assert accept.dtype == np.float64
  assert (accept >= 0).all()
  assert (accept.sum(1) <= 1 + EXACT).all()
  assert (accept[:, ~is_valid] == 0).all()
  assert (residual >= 0).all()
  law = np.zeros(vocab_size)
  np.add.at(law, tuples, weights[:, None] * accept)
  rejected = weights * (1 - accept.sum(1))
  law += rejected @ (residual / residual.sum(1, keepdims=True))
  return law, float(weights @ accept.sum(1))


def _laws():
  """Pairs (draft, target): random, with zeros on either side, disjoint, equal, one-hot."""
  rng = np.random.default_rng(0)
  pairs = [(rng.dirichlet(np.full(4, 0.7)), rng.dirichlet(np.full(4, 0.7))) for _ in range(6)]
  pairs += [
    (np.array([0.5, 0.5, 0, 0]), np.array([0.1, 0.2, 0.3, 0.4])),
    (np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, 0, 0.5, 0.5])),
    (np.array([0.3, 0, 0.7, 0]), np.array([0, 0.6, 0.2, 0.2])),
    (np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.9, 0.1])),
    (np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.1, 0.2, 0.3, 0.4])),
    (np.array([0.5, 0, 0, 0.5]), np.array([0.5, 0, 0, 0.5])),
    (np.array([1.0, 0, 0, 0]), np.array([0.25, 0.25, 0.25, 0.25])),
    (np.array([0.25, 0.25, 0.25, 0.25]), np.array([0, 1.0, 0, 0])),
    (np.array([1.0, 0, 0, 0]), np.array([1.0, 0, 0, 0])),
    (np.array([1 - 3e-12, 1e-12, 1e-12, 1e-12]), np.array([1e-12, 1e-12, 1e-12, 1 - 3e-12])),
  ]
  return pairs


def _optimum(p, q, n):
  """alpha*: the least of 1 + q(A) - p(A)^n over all sets A of tokens."""
  sets = np.array(list(itertools.product((0, 1), repeat=len(p))))
  return (1 + sets @ q - (sets @ p) ** n).min()


@jax.jit
def _solve(p, q, n, num_rounds):
  """gamma*, and the excess of 1 - (1 - beta)^n over gamma beta there and one last bracket below."""
  gamma = solve_gamma(p, q, n, num_rounds=num_rounds)

  def excess(gamma):
    beta = overlap(p, q, gamma)
    return any_accepted(beta, n) - gamma * beta

  return gamma, excess(gamma), excess(gamma - (n - 1) / 2.0**num_rounds)


@pytest.mark.parametrize('num_candidates', [1, 2, 3, 8])
@pytest.mark.parametrize('num_rounds', [1, 4, 16, 60])
def test_gamma_is_the_root_from_above(num_candidates, num_rounds):
  for p, q in _laws():
    gamma, excess, excess_below = map(float, _solve(p, q, num_candidates, num_rounds))
    assert 1 <= gamma <= num_candidates
    # At or above the root, where the excess is not positive; 1e-15 is one rounding of its two terms.
    assert excess <= 1e-15
    # ... and no further above than the bisection's last bracket. The bracket's end of 1 was never tried.
    if gamma - (num_candidates - 1) / 2**num_rounds > 1:
      assert excess_below >= -1e-15


def test_gamma_of_one_candidate_is_one():
  for p, q in _laws():
    assert float(_solve(p, q, 1, 16)[0]) == 1


def test_gamma_of_equal_laws_is_one():
  p = np.array([0.1, 0.2, 0.7])
  # With beta = 1/gamma the excess is -(1 - 1/gamma)^4: below a rounding of 1 for gamma up to 1 + 1e-4.
  assert float(_solve(p, p, 4, 40)[0]) == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize(('d', 'r'), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize('n', [1, 2, 3])
def test_uniform_to_a_part_of_it(d, r, n):
  """U(d) -> U(d/r): K-SEQ with gamma <= r accepts every candidate in the support of the target.

  So it attains the optimum 1 - (1 - 1/r)^n, the chance that one of the candidates lies there.
  """
  p, q = np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0)
  law, acceptance = _emitted(AtGamma(), p, q, n)
  np.testing.assert_allclose(law, q, atol=EXACT)
  best = 1 - (1 - 1 / r) ** n
  assert acceptance == pytest.approx(best, abs=EXACT)
  assert _optimum(p, q, n) == pytest.approx(best, abs=EXACT)


def test_bernoulli_example():
  p, q = BERNOULLI
  law, acceptance = _emitted(AtGamma(), p, q, 2)
  np.testing.assert_allclose(law, q, atol=EXACT)
  # For 1 <= g <= 2, beta = .5/g + .25, and 1 - (1 - beta)^2 = g beta = .5 + .25 g means (.75 - .5/g)^2 = .5 - .25 g.
  roots = np.roots([0.25, 0.5625 - 0.5, -0.75, 0.25])  # times g^2
  gamma = float(next(g.real for g in roots if abs(g.imag) < 1e-12 and 1 <= g.real <= 2))
  assert acceptance == pytest.approx(0.5 + 0.25 * gamma, abs=1e-9)
  assert acceptance == pytest.approx(0.8476, abs=5e-5)
  assert _optimum(p, q, 2) == pytest.approx(0.9375, abs=EXACT)


@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('coupling', [KSeq(), AtGamma(), AtGamma(place=0.3), AtGamma(place=1.0)])
def test_kseq_emits_the_target(coupling, n):
  for p, q in _laws():
    law, acceptance = _emitted(coupling, p, q, n)
    np.testing.assert_allclose(law, q, atol=EXACT)
    if coupling == AtGamma():
      optimum = _optimum(p, q, n)
      assert (1 - 1 / np.e) * optimum - EXACT <= acceptance <= optimum + EXACT
      if n == 1:
        assert acceptance == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


def test_below_gamma_the_law_is_wrong():
  """The enumeration can tell: halfway from gamma* to 1 the residual would have to be negative."""
  law, _ = _emitted(AtGamma(place=-0.5), *BERNOULLI, 2)
  assert np.abs(law - BERNOULLI[1]).max() > 1e-3
  errors = [np.abs(_emitted(AtGamma(place=-0.5), p, q, 2)[0] - q).max() for p, q in _laws()]
  assert sum(error > 1e-4 for error in errors) >= 4


def test_rounds_change_acceptance_by_less_than_promised():
  for p, q in _laws():
    for n in (2, 3):
      assert abs(_emitted(KSeq(), p, q, n)[1] - _emitted(AtGamma(), p, q, n)[1]) < 1e-4


def test_maximal_emits_the_target():
  for p, q in _laws():
    law, acceptance = _emitted(Maximal(), p, q, 1)
    np.testing.assert_allclose(law, q, atol=EXACT)
    assert acceptance == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


def test_maximal_is_for_one_candidate():
  """The enumeration can tell: two candidates under the single-draft rule do not give the target."""
  law, _ = _emitted(Maximal(), *BERNOULLI, 2)
  assert np.abs(law - BERNOULLI[1]).max() > 1e-2


@pytest.mark.parametrize('pad', [(0,), (1,), (2,), (0, 2, 4)])
def test_invalid_candidates_are_skipped(pad):
  """Wherever they stand and whatever they hold, the outcome is that of the valid ones alone."""
  for p, q in _laws():
    law, acceptance = _emitted(KSeq(), p, q, 2, pad=pad)
    plain_law, plain_acceptance = _emitted(KSeq(), p, q, 2)
    np.testing.assert_allclose(law, plain_law, atol=EXACT)
    assert acceptance == pytest.approx(plain_acceptance, abs=EXACT)
    if pad in ((0,), (1,)):
      np.testing.assert_allclose(_emitted(Maximal(), p, q, 1, pad=pad)[0], q, atol=EXACT)


@pytest.mark.parametrize('coupling', [KSeq(), Maximal()])
def test_without_a_valid_candidate_nothing_is_accepted(coupling):
  outcome = _outcome(coupling, [0.5, 0.5], [0.9, 0.1], [0, 1], [False, False])
  np.testing.assert_array_equal(outcome.accept_probs, 0)


@pytest.mark.parametrize('coupling', [KSeq(), Maximal()])
def test_a_candidate_the_draft_cannot_draw_decides_nothing(coupling):
  """p(x) = 0 < q(x): the ratio is infinite, and x is not accepted for it."""
  outcome = _outcome(coupling, [0.0, 1.0], [0.5, 0.5], [0, 0], [True, False])
  np.testing.assert_array_equal(outcome.accept_probs, 0)
  assert np.isfinite(outcome.residual).all()


@pytest.mark.parametrize('coupling', [KSeq(), Maximal()])
def test_equal_laws_accept_everything_and_fall_back_to_the_target(coupling):
  p = [0.1, 0.9]
  outcome = _outcome(coupling, p, p, [1, 0], [True, False])
  np.testing.assert_allclose(outcome.accept_probs, [1, 0], atol=EXACT)
  assert outcome.residual.sum() > 0


@pytest.mark.parametrize('coupling', [KSeq(), Maximal()])
def test_float32_stays_float32_and_close(coupling):
  for p, q in _laws():
    wide = _outcome(coupling, p, q, [0, 3], [True, False])
    narrow = _outcome(coupling, p, q, [0, 3], [True, False], np.float32)
    assert narrow.accept_probs.dtype == narrow.residual.dtype == jnp.float32
    np.testing.assert_allclose(narrow.accept_probs, wide.accept_probs, atol=1e-5)
