"""Recursive rejection, with and without replacement."""

import dataclasses

import numpy as np
import pytest
from enumerated import (
  BERNOULLI,
  EXACT,
  all_candidates,
  assert_close,
  emitted_law,
  jitted,
  law_pairs,
)

from spectr_jax.couplings import Recursive
from spectr_jax.proposal import Independent, WithoutReplacement


@pytest.mark.parametrize('n', [1, 2, 3])
def test_recursive_on_the_bernoulli_example(n):
  """Only token 0 is ever rejected, and from then on r is all on token 1: accepted as soon as it is among the rest."""
  _, acceptance = emitted_law(Recursive(), *BERNOULLI, n)
  assert acceptance == pytest.approx(0.75 + 0.25 * (1 - 0.75 ** (n - 1)), abs=EXACT)  # .8125 with two candidates
  # Without replacement the second candidate is the other token, for sure.
  _, acceptance = emitted_law(Recursive(with_replacement=False), *BERNOULLI, n)
  assert acceptance == pytest.approx(0.75 if n == 1 else 1, abs=EXACT)


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
