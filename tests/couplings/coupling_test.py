"""All couplings: the distribution of what is emitted, and candidates that do not exist or cannot be drawn."""

import jax.numpy as jnp
import numpy as np
import pytest
from enumerated import (
  BERNOULLI,
  COUPLINGS,
  EXACT,
  ONE_DRAFT,
  RACES,
  AtGamma,
  apply,
  assert_close,
  emitted_law,
  exactness,
  jitted,
  language_laws,
  law_pairs,
  optimal_by_sets,
  outcome_of,
)

from spectr_jax.couplings import KSeq, Maximal, MaximalAfter, Race, Recursive


@pytest.mark.parametrize(('d', 'r'), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize('coupling', [AtGamma(), Recursive(), MaximalAfter(Race(num_rounds=1))])
def test_uniform_to_a_part_of_it(d, r, n, coupling):
  """U(d) -> U(d/r): K-SEQ with gamma <= r accepts every candidate in the support of the target.

  So do the others, and they attain the optimum 1 - (1 - 1/r)^n, the chance that one of the candidates lies there.
  """
  p, q = np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0)
  best = 1 - (1 - 1 / r) ** n
  assert optimal_by_sets(p, q, n) == pytest.approx(best, abs=EXACT)
  law, acceptance = emitted_law(coupling, p, q, n)
  assert_close(law, q, exactness(coupling))
  assert acceptance == pytest.approx(best, abs=exactness(coupling))


@pytest.mark.parametrize('n', [1, 2, 3])
@pytest.mark.parametrize(
  'coupling', [*COUPLINGS, AtGamma(), AtGamma(place=0.3), AtGamma(place=1.0), MaximalAfter(RACES[1])]
)
def test_emits_the_target(coupling, n):
  for p, q in law_pairs():
    law, acceptance = emitted_law(coupling, p, q, n)
    assert_close(law, q, exactness(coupling))
    # Among candidates that differ there can be more than the optimum for independent ones.
    optimum = 1 if coupling == Recursive(with_replacement=False) else optimal_by_sets(p, q, n)
    assert acceptance <= optimum + exactness(coupling)
    if coupling == AtGamma():
      assert (1 - 1 / np.e) * optimum - EXACT <= acceptance
    if n == 1:
      best = np.minimum(p, q).sum()
      assert acceptance <= best + EXACT if isinstance(coupling, KSeq) else acceptance == pytest.approx(best, abs=EXACT)


@pytest.mark.parametrize('coupling', ONE_DRAFT)
def test_one_draft_emits_the_target(coupling):
  for p, q in law_pairs():
    law, acceptance = emitted_law(coupling, p, q, 1)
    assert_close(law, q, EXACT)
    assert acceptance == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


def test_maximal_is_for_one_candidate():
  """The enumeration can tell: two candidates under the single-draft rule do not give the target."""
  law, _ = emitted_law(Maximal(), *BERNOULLI, 2)
  assert np.abs(law - BERNOULLI[1]).max() > 1e-2


@pytest.mark.parametrize(('n', 'places'), [(2, (1, 2)), (2, (0, 2)), (1, (1,)), (1, (2,))])
@pytest.mark.parametrize('coupling', COUPLINGS)
def test_invalid_candidates_are_skipped(coupling, n, places):
  """Wherever they stand and whatever they hold, the outcome is that of the valid ones alone."""
  for p, q in law_pairs():
    law, acceptance = emitted_law(coupling, p, q, n, places)
    plain_law, plain_acceptance = emitted_law(coupling, p, q, n)
    assert_close(law, plain_law, exactness(coupling))
    assert acceptance == pytest.approx(plain_acceptance, abs=exactness(coupling))


@pytest.mark.parametrize('place', [1, 2])
@pytest.mark.parametrize('coupling', ONE_DRAFT)
def test_invalid_candidates_beside_one_draft_are_skipped(coupling, place):
  for p, q in law_pairs():
    assert_close(emitted_law(coupling, p, q, 1, (place,))[0], q, EXACT)


@pytest.mark.parametrize('coupling', [*COUPLINGS, *ONE_DRAFT])
def test_without_a_valid_candidate_nothing_is_accepted(coupling):
  outcome = outcome_of(coupling, [0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0, 3], [False, False])
  np.testing.assert_array_equal(outcome.accept_probs, 0)


@pytest.mark.parametrize('coupling', [*COUPLINGS, *ONE_DRAFT])
def test_a_candidate_the_draft_cannot_draw_decides_nothing(coupling):
  """p(x) = 0 < q(x): the ratio is infinite, and x is not accepted for it."""
  for is_valid in ([True, False], [True, True]):
    outcome = outcome_of(coupling, [0.0, 0.0, 0.4, 0.6], [0.5, 0.1, 0.1, 0.3], [0, 1], is_valid)
    np.testing.assert_array_equal(outcome.accept_probs, 0)
    assert np.isfinite(outcome.residual).all()


@pytest.mark.parametrize('coupling', [*COUPLINGS, *ONE_DRAFT])
def test_equal_laws_accept_everything_and_fall_back_to_the_target(coupling):
  p = [0.1, 0.2, 0.3, 0.4]
  outcome = outcome_of(coupling, p, p, [1, 0], [True, False])
  assert_close(outcome.accept_probs, [1, 0], EXACT)
  assert outcome.residual.sum() > 0
  if coupling in COUPLINGS:
    outcome = outcome_of(coupling, p, p, [1, 0], [True, True])
    # The threshold of K-SEQ comes from above, and a race's fit stops short.
    assert_close(outcome.accept_probs.sum(), 1, 1e-3)
    assert outcome.residual.sum() > 0


@pytest.mark.parametrize('coupling', [*COUPLINGS, *ONE_DRAFT])
def test_float32_stays_float32_and_close(coupling):
  for p, q in law_pairs():
    for is_valid in ([True, False], [True, True])[: 2 if coupling in COUPLINGS else 1]:
      wide = outcome_of(coupling, p, q, [0, 3], is_valid)
      narrow = outcome_of(coupling, p, q, [0, 3], is_valid, np.float32)
      assert narrow.accept_probs.dtype == narrow.residual.dtype == jnp.float32
      assert_close(narrow.accept_probs, wide.accept_probs, 1e-5)


@pytest.mark.parametrize('coupling', COUPLINGS)
def test_rows_do_not_depend_on_each_other(coupling):
  """Rows with no, one and several candidates side by side, on a vocabulary large enough for loops over rows."""
  drafts, targets = language_laws(1, count=5)
  rng = np.random.default_rng(0)
  candidates = np.array([rng.choice(drafts.shape[1], 4, replace=False, p=p / p.sum()) for p in drafts.astype(float)])
  is_valid = np.arange(4) < np.array([3, 0, 1, 4, 2])[:, None]
  together = jitted(coupling, (0, 0, 0, 0))(drafts, targets, candidates, is_valid)
  for row in range(5):
    alone = apply(coupling, drafts[row], targets[row], candidates[row], is_valid[row])
    # Sums over 4096 float32 in another order.
    assert_close(together.accept_probs[row], alone.accept_probs, 2e-6)
    assert_close(together.residual[row], alone.residual, 2e-6)
