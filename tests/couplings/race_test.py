"""Races: what wins, and how close that comes to the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerated import (
  BERNOULLI,
  EXACT,
  INTEGRAL,
  RACES,
  all_candidates,
  assert_close,
  emitted_law,
  jitted,
  language_laws,
  law_pairs,
  optimal_by_sets,
)

from spectr_jax.couplings import MaximalAfter, Race, SingleDraft
from spectr_jax.proposal import Independent
from spectr_jax.theory import optimal_acceptance, race_acceptance
from tests.slow import slow


def test_race_on_the_bernoulli_example():
  """Token 1, the class with the higher ratio, wins wherever it occurs: that attains 1 + q(0) - p(0)^2 = .9375."""
  laws = [np.append(law, [0, 0]) for law in BERNOULLI]
  _, acceptance = emitted_law(MaximalAfter(Race()), *laws, 2)
  assert acceptance == pytest.approx(0.9375, abs=1e-6)
  assert optimal_by_sets(*BERNOULLI, 2) == pytest.approx(0.9375, abs=EXACT)
  # With three candidates token 1 must not always win, for p(0)^3 < q(0), and weights have to be fitted.
  _, acceptance = emitted_law(MaximalAfter(Race()), *laws, 3)
  assert 0.97 < acceptance <= 1 + INTEGRAL


@pytest.mark.parametrize(
  ('race', 'n'), [*((race, 3) for race in RACES), *(slow(race, 2) for race in RACES), (RACES[0], 1)]
)
def test_the_law_of_a_pick(race, n):
  """`Pick.probs` is the law of what `Pick.pick_probs` picks, over all tuples of candidates; repeats count twice."""
  for p, q in law_pairs():
    tuples, weights = all_candidates(p, 3, Independent)
    pick = jitted(race)(p, q, tuples, np.broadcast_to(np.arange(3) < n, tuples.shape))
    picked, law = np.asarray(pick.pick_probs), np.zeros(len(p))
    is_possible = weights > 0
    assert_close(picked[is_possible].sum(1), 1, EXACT)
    np.add.at(law, tuples, np.where(is_possible[:, None], weights[:, None] * picked, 0))
    assert_close(np.asarray(pick.probs), np.broadcast_to(law, (len(tuples), len(p))), INTEGRAL)
    own = np.take_along_axis(np.asarray(pick.probs), tuples, axis=1) * (np.arange(3) < n)
    assert_close(pick.candidate_probs, own, 1e-15)


def _picks(selection, p, q, candidates, is_valid):
  """The picks of up to 64 rows of candidates, in the shape that is compiled already."""
  rows = len(candidates)
  pick = jitted(selection)(p, q, np.resize(candidates, (64, 3)), np.resize(is_valid, (64, 3)))
  return np.asarray(pick.pick_probs)[:rows], np.asarray(pick.probs)[:rows]


def test_a_token_drawn_twice_has_two_tickets():
  # Without a fit all tokens of a side have equal weights, and these laws have one side.
  p, q = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.26, 0.25, 0.25, 0.24])
  picked, _ = _picks(Race(num_rounds=0), p, q, [[0, 0, 1], [2, 3, 2], [1, 1, 1]], np.ones((3, 3), bool))
  assert_close(picked, 1 / 3, EXACT)


@pytest.mark.parametrize('selection', [Race(), SingleDraft()])
def test_picks_of_none_and_of_one(selection):
  for p, q in law_pairs():
    picked, law = _picks(selection, p, q, [[0, 3, 1]] * 2, [[False] * 3, [False, True, False]])
    np.testing.assert_array_equal(picked, [[0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(law, [np.zeros(4), p])


@pytest.mark.parametrize('num_rounds', [Race.num_rounds, 0])
def test_races_on_a_large_vocabulary(num_rounds):
  """In float32: a law to within rounding; at most the optimum, with fitted weights at least .97 of it on average."""
  drafts, targets = language_laws(0)
  overlaps = np.minimum(drafts, targets).sum(1)
  assert overlaps.min() < 0.5 < 0.9 < overlaps.max()
  race = Race(num_rounds=num_rounds)
  share = {}
  for n in (2, 4, 8):
    laws = jitted(race, (0, 0, None, None))(drafts, targets, np.zeros(8, np.int32), np.arange(8) < n).probs
    assert laws.dtype == np.float32
    laws = np.asarray(laws, np.float64)
    assert (laws >= 0).all()
    # An n-fold product of sums of 4096 float32: 1.1e-6 is seen at n = 8, and it grows with n.
    assert np.abs(laws.sum(1) - 1).max() <= 2e-6 * max(1, n / 8)
    acceptance = np.minimum(laws, targets).sum(1)
    best = np.asarray(optimal_acceptance(drafts.astype(np.float64), targets.astype(np.float64), n))
    assert (acceptance <= best + 2e-6).all()
    share[n] = (acceptance / best).mean()
  if num_rounds:
    assert min(share.values()) >= 0.97, share
  else:  # the fit matters, so the bound above says something
    assert share[8] < 0.95, share


@pytest.mark.parametrize('temperature', [slow(1.0), 0.25])
def test_a_race_comes_close_to_the_optimum_at_every_position(temperature):
  """Also where rounding asks for more of a rare class than there is of it."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(200, 4096)) * rng.uniform(3, 6, (200, 1))
  drafted = logits + 0.9 * rng.normal(size=logits.shape)
  p, q = (np.float32(x) for x in jax.nn.softmax(jnp.stack([drafted, logits]) / temperature))
  for n in (2, 8):
    assert np.min(race_acceptance(p, q, n) / optimal_acceptance(p, q, n)) > 0.96
