"""Given candidates, which are not samples."""

import itertools

import numpy as np
import pytest
from enumerated import (
  EXACT,
  assert_close,
  law_pairs,
  outcome_of,
)

from spectr_jax.couplings import Given, KSeq, Maximal, MaximalAfter, Race, Recursive


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


def test_one_given_candidate_is_a_draw_from_a_point_mass():
  for p, q in law_pairs():
    for token in range(4):
      given = outcome_of(Given(), p, q, [token], [True])
      drawn = outcome_of(Maximal(), np.eye(4)[token], q, [token], [True])
      assert_close(given.accept_probs, drawn.accept_probs, EXACT)
      assert_close(given.residual / given.residual.sum(), drawn.residual / drawn.residual.sum(), EXACT)


@pytest.mark.parametrize('coupling', [Maximal(), KSeq(), Recursive(), MaximalAfter(Race())])
def test_given_counted_as_a_draw_is_caught(coupling):
  """The enumeration can tell: the draft's likeliest tokens, judged as if they had been drawn from p."""
  errors = []
  for p, q in law_pairs()[:6]:
    candidates = np.argsort(-p)[: 1 if coupling == Maximal() else 2]
    law, _ = _given_law(coupling, p, q, candidates, np.ones(len(candidates), bool))
    errors.append(np.abs(law - q).max())
  assert max(errors) > 0.05
