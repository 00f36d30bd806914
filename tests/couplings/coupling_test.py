"""All couplings by enumeration: the distribution of what is emitted, and candidates that do not exist or are given."""

import dataclasses
import itertools

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
  all_candidates,
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

from spectr_jax.couplings import Given, KSeq, Maximal, MaximalAfter, OverAccept, Race, Recursive
from spectr_jax.proposal import Independent, WithoutReplacement


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


_EXACT = [*COUPLINGS, AtGamma(), AtGamma(place=0.3), AtGamma(place=1.0), MaximalAfter(RACES[1])]


@pytest.mark.parametrize(
  ('coupling', 'n'), [*itertools.product(_EXACT, (1, 2, 3)), *((coupling, 1) for coupling in ONE_DRAFT)]
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


def test_maximal_is_for_one_candidate():
  """The enumeration can tell: two candidates under the single-draft rule do not give the target."""
  law, _ = emitted_law(Maximal(), *BERNOULLI, 2)
  assert np.abs(law - BERNOULLI[1]).max() > 1e-2


_ONE_PLACE, _PLACES = [(1,), (2,)], [(1, 2), (0, 2), (1,), (2,)]


@pytest.mark.parametrize(
  ('coupling', 'places'), [*itertools.product(COUPLINGS, _PLACES), *itertools.product(ONE_DRAFT, _ONE_PLACE)]
)
def test_invalid_candidates_are_skipped(coupling, places):
  """Wherever they stand and whatever they hold, the outcome is that of the valid ones alone."""
  for p, q in law_pairs():
    law, acceptance = emitted_law(coupling, p, q, len(places), places)
    plain_law, plain_acceptance = emitted_law(coupling, p, q, len(places))
    assert_close(law, plain_law, exactness(coupling))
    assert acceptance == pytest.approx(plain_acceptance, abs=exactness(coupling))


@pytest.mark.parametrize('coupling', [*COUPLINGS, *ONE_DRAFT])
def test_nothing_is_accepted_that_does_not_exist_or_cannot_be_drawn(coupling):
  outcome = outcome_of(coupling, [0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0, 3], [False, False])
  np.testing.assert_array_equal(outcome.accept_probs, 0)
  # p(x) = 0 < q(x): the ratio is infinite, and x is not accepted for it.
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


@pytest.mark.parametrize('epsilon', [-0.1, -1e-9, float('nan')])
def test_negative_epsilon_is_refused(epsilon):
  with pytest.raises(ValueError, match='epsilon must be at least 0'):
    OverAccept(epsilon, has_best_residual=True)


# Given candidates, which are not samples.


def _given_law(coupling, p, q, candidates, is_valid):
  """The law of the emitted token for fixed candidates, and the chance of acceptance."""
  outcome = outcome_of(coupling, p, q, candidates, is_valid)
  accept, residual = np.asarray(outcome.accept_probs), np.asarray(outcome.residual)
  assert (accept >= 0).all()
  assert (residual >= 0).all()
  law = (1 - accept.sum()) * residual / residual.sum()
  np.add.at(law, np.asarray(candidates), accept)
  return law, accept


def test_given_candidates_emit_the_target_whatever_they_are():
  """For every set and order of candidates by itself, not on average; accepted with q(D), which is the most."""
  for p, q in law_pairs():
    for candidates in itertools.product(range(4), repeat=3):
      for is_valid in ((True, True, True), (False, True, True), (True, False, False), (False, False, False)):
        law, accept = _given_law(Given(), p, q, candidates, is_valid)
        assert_close(law, q, EXACT)
        there = {token for token, exists in zip(candidates, is_valid) if exists}
        assert accept.sum() == pytest.approx(q[list(there)].sum(), abs=EXACT)
        # A copy adds nothing to the first.
        for slot, token in enumerate(candidates):
          if not is_valid[slot] or token in [candidates[i] for i in range(slot) if is_valid[i]]:
            assert accept[slot] == 0


@pytest.mark.parametrize('coupling', [Maximal(), KSeq(), Recursive(), MaximalAfter(Race())])
def test_given_counted_as_a_draw_is_caught(coupling):
  """The enumeration can tell: the draft's likeliest tokens, judged as if they had been drawn from p."""
  errors = []
  for p, q in law_pairs()[:6]:
    candidates = np.argsort(-p)[: 1 if coupling == Maximal() else 2]
    law, _ = _given_law(coupling, p, q, candidates, np.ones(len(candidates), bool))
    errors.append(np.abs(law - q).max())
  assert max(errors) > 0.05


# Recursive rejection, with and without replacement.


def _one_after_the_other(p, q, candidates, with_replacement):
  """Recursive rejection as it is published: r, and without replacement p, rewritten after every rejection."""
  accept, reach, r = [], 1.0, q
  for x in candidates:
    chance = min(1, r[x] / p[x]) if p[x] > 0 else 0.0
    accept.append(reach * chance)
    reach *= 1 - chance
    residual = np.maximum(r - p, 0)
    r = residual / residual.sum() if residual.sum() > 0 else r
    if not with_replacement:
      p = np.where(np.arange(len(p)) == x, 0, p)
      p = p / p.sum() if p.sum() > 0 else p
  return np.array(accept), reach, r


@pytest.mark.parametrize('with_replacement', [True, False])
def test_recursive_is_what_is_published(with_replacement):
  coupling = Recursive(with_replacement=with_replacement)
  num_compared = 0
  for p, q in law_pairs()[:-1]:
    tuples, weights = all_candidates(p, 3, coupling.proposal_rules[0])
    tuples = tuples[(weights > 0) & (tuples >= 0).all(1)]
    if not len(tuples):
      continue
    outcome = jitted(coupling)(p, q, tuples, np.ones(tuples.shape, bool))
    for candidates, accept, residual in zip(tuples, np.asarray(outcome.accept_probs), np.asarray(outcome.residual)):
      expected, reach, r = _one_after_the_other(p, q, candidates, with_replacement)
      assert_close(accept, expected, EXACT)
      if reach > 1e-6:  # else it is a difference of equals
        assert_close(residual / residual.sum(), r, 1e-9)
        num_compared += 1
  assert num_compared > 20


@dataclasses.dataclass(frozen=True)
class _OnOtherChildren(Recursive):
  """Recursive rejection on candidates that were drawn in the other way."""

  @property
  def proposal_rules(self):
    return (WithoutReplacement,) if self.with_replacement else (Independent,)


@pytest.mark.parametrize('with_replacement', [True, False])
def test_recursive_is_for_its_own_children(with_replacement):
  errors = []
  for p, q in law_pairs()[:6]:
    law, _ = emitted_law(_OnOtherChildren(with_replacement=with_replacement), p, q, 2)
    errors.append(np.abs(law - q).max())
  assert max(errors) > 1e-2
