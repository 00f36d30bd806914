"""The best plans of two drafts: against all plans on a grid, written out for two tokens."""

import numpy as np
import pytest

from benchmarks.distance_to_optimum import kept_by_methods
from benchmarks.planned_optimum import coordinated_optimum, divided_optimum
from spectr_jax import theory

_STEPS = np.linspace(0, 1, 401)


def _tables(seed: int, vocab_size: int, length: int):
  rng = np.random.default_rng(seed)
  shape = (vocab_size,) * length
  return [rng.dirichlet(np.full(vocab_size**length, 0.6)).reshape(shape) for _ in range(2)]


def _after(joint):
  first = joint.sum(axis=1)
  return first, joint / first[:, None]


def _kept_of_one(credit, p, q):
  return np.minimum(p, np.multiply.outer(credit, q)).sum(axis=-1)


def _kept_of_same(credit, p, q):
  """The most that two candidates after one context keep: the least cut, over the sets of two tokens."""
  sets = ([], [0], [1], [0, 1])
  return np.min([credit * (1 - q[own].sum()) + 1 - (1 - p[own].sum()) ** 2 for own in sets], axis=0)


def _kept_of_apart(credits, laws):
  """The same for one candidate after each of two contexts that share mass."""
  sets = ([], [0], [1], [0, 1])
  (p, q), (other_p, other_q) = laws
  return np.min(
    [
      credits[0] * (1 - q[own].sum()) + credits[1] * (1 - other_q[beside].sum())
      + 1 - (1 - p[own].sum()) * (1 - other_p[beside].sum())
      for own in sets for beside in sets
    ],
    axis=0,
  )  # fmt: skip


def _best_on_grid(draft, target, kept_of_apart):
  """The most over credits of both tokens where the drafts begin apart; where they do not, the token has the rest."""
  (p, below_p), (q, below_q) = _after(draft), _after(target)
  credits = np.meshgrid(_STEPS, _STEPS, indexing='ij')
  apart = 2 * p[0] * p[1]
  laws = [(below_p[token], below_q[token]) for token in range(2)]
  value = apart * (credits[0] + credits[1] + kept_of_apart(credits, laws))
  for token in range(2):
    rest = (q[token] - apart * credits[token]) / p[token] ** 2
    own = np.clip(rest, 0, 1)
    value += p[token] ** 2 * (own + _kept_of_same(own, *laws[token]))
    value[rest < 0] = 0
  value[credits[0] + credits[1] > 1 + 1e-9] = 0
  return value.max()


def _in_order(credits, laws):
  """What branches keep below their first tokens, when they are visited one after the other, the better one first."""
  values = []
  for first, second in ((0, 1), (1, 0)):
    left = 1 - credits[first]
    later = np.divide(credits[second], left, out=np.zeros_like(left), where=left > 1e-9)
    below = left * _kept_of_one(np.minimum(later, 1), *laws[second])
    values.append(_kept_of_one(credits[first], *laws[first]) + below)
  return np.maximum(*values)


@pytest.mark.parametrize('seed', range(8))
def test_plans_of_two_tokens(seed):
  draft, target = _tables(seed, 2, 2)
  coordinated, divided = coordinated_optimum(draft, target), divided_optimum(draft, target)
  assert coordinated == pytest.approx(_best_on_grid(draft, target, _kept_of_apart), abs=4e-3)
  assert coordinated >= _best_on_grid(draft, target, _kept_of_apart) - 1e-6
  # A pair of guesses may also choose its order by chance, which the grid has not.
  assert -1e-6 <= divided - _best_on_grid(draft, target, _in_order) < 1e-2
  assert divided <= coordinated + 1e-6


def test_one_token_is_the_optimum():
  draft, target = _tables(0, 5, 1)
  optimum = theory.stateless_chains_optimum(draft, target, 2)
  for plan in (divided_optimum, coordinated_optimum):
    assert plan(draft, target) == pytest.approx(optimum, abs=1e-6)


def test_plans_bound_their_methods():
  """And are bounded by the optimum, in their order; equal models keep every token."""
  draft, target = _tables(1, 3, 3)
  divided, coordinated = divided_optimum(draft, target), coordinated_optimum(draft, target)
  assert divided < coordinated < theory.stateless_chains_optimum(draft, target, 2)
  kept = kept_by_methods(draft, target, 2, ('race_traversal', 'race_layers'), 2048, seed=0)
  assert kept['race_traversal'][0] < divided + 4 * kept['race_traversal'][1]
  assert kept['race_layers'][0] < coordinated + 4 * kept['race_layers'][1]
  assert divided_optimum(draft, draft) == pytest.approx(3, abs=1e-6)
  assert coordinated_optimum(draft, draft) == pytest.approx(3, abs=1e-5)


def test_too_many_pairs():
  with pytest.raises(ValueError, match='combinations'):
    coordinated_optimum(*_tables(0, 20, 3))
