"""Rules for children: what they say the law of their draws is, and that they draw from it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.proposal import FirstArrivals, Independent, LikeliestAndOne, WithoutReplacement
from spectr_jax.testing import chi_square
from tests.slow import slow_but

RULES = [Independent(), WithoutReplacement(), FirstArrivals(), LikeliestAndOne()]
DISTINCT = RULES[1:]
LAWS = {
  'random': np.array([0.3, 0.15, 0.45, 0.1]),
  'zeros': np.array([0.0, 0.7, 0.0, 0.3]),
  'one_hot': np.array([0.0, 0.0, 1.0, 0.0]),
  'uniform': np.array([0.25, 0.25, 0.25, 0.25]),
}
NUM_DRAWS = 200_000


@functools.cache
def _probability(rule):
  return jax.jit(jax.vmap(rule.probability, (None, 0)))


def _tuples(vocab_size, count, lowest=-1):
  return np.array(list(itertools.product(range(lowest, vocab_size), repeat=count)))


def _law(rule, probs, count):
  """Probability of every tuple of `count` children, -1 included; float64."""
  tuples = _tuples(len(probs), count, -1 if rule.may_run_out else 0)
  with jax.enable_x64(True):
    return tuples, np.asarray(_probability(rule)(jnp.asarray(probs), tuples))


@functools.partial(jax.jit, static_argnames=('rule', 'count', 'num_draws'))
def _draws(key, probs, first_child, *, rule, count, num_draws=NUM_DRAWS):
  return jax.vmap(lambda k: rule(k, probs, first_child, count))(jax.random.split(key, num_draws))


def _by_hand(probs, children, *, likeliest=False):
  """Without replacement: each child from what is left, -1 once nothing is; all but the last may be the likeliest."""
  left, chance = dict(enumerate(probs)), 1.0
  if likeliest:
    for child in children[:-1]:
      token = max(left, key=lambda token: left[token])
      chance *= child == (token if left[token] else -1)
      left[token] = 0.0
    children = children[-1:]
  for child in children:
    mass = sum(left.values())
    if child < 0:
      chance *= mass == 0
    else:
      chance *= left[child] / mass if mass > 0 else 0.0
      left[child] = 0.0
  return chance


@pytest.mark.parametrize('law', list(LAWS))
@pytest.mark.parametrize('count', [1, 2, 3, 5])
@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.name)
def test_probability_in_closed_form(rule, count, law):
  probs = LAWS[law]
  tuples, weights = _law(rule, probs, count)
  assert weights.dtype == np.float64
  assert weights.sum() == pytest.approx(1, abs=1e-14)
  if count > 3:
    return
  if rule == Independent():
    expected = np.prod(probs[tuples], axis=1)
  else:
    likeliest = rule == LikeliestAndOne()
    expected = [_by_hand(probs, children, likeliest=likeliest) for children in tuples.tolist()]
  np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize('law', list(LAWS))
def test_first_arrivals_are_draws_without_replacement(law):
  for count in (1, 2, 3, 5):
    (_, first), (_, other) = (_law(rule, LAWS[law], count) for rule in (WithoutReplacement(), FirstArrivals()))
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize('law', list(LAWS))
@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.name)
def test_draws_follow_the_probability(rule, law):
  """The joint law of three children; with two tokens to draw, or one, the last are -1."""
  probs = LAWS[law]
  tuples, weights = _law(rule, probs, 3)
  drawn = np.asarray(_draws(jax.random.key(1), jnp.float32(probs), 4, rule=rule, count=3))
  assert drawn.dtype == np.int32
  base = len(probs) + 1
  powers = base ** np.arange(3)
  cells = np.zeros(base**3)
  cells[(tuples + 1) @ powers] = weights
  result = chi_square(np.bincount((drawn + 1) @ powers, minlength=base**3), cells)
  assert result.num_samples == NUM_DRAWS
  assert result.p_value > 1e-3, result


def test_the_test_can_tell():
  """Independent children are not those without replacement, nor is the order of siblings arbitrary."""
  probs = LAWS['random']
  tuples, weights = _law(WithoutReplacement(), probs, 2)
  powers = 5 ** np.arange(2)
  cells = np.zeros(25)
  cells[(tuples + 1) @ powers] = weights
  for rule, order in ((Independent(), 1), (WithoutReplacement(), -1), (FirstArrivals(), -1)):
    drawn = np.asarray(_draws(jax.random.key(2), jnp.float32(probs), 1, rule=rule, count=2))[:, ::order]
    assert chi_square(np.bincount((drawn + 1) @ powers, minlength=25), cells).p_value < 1e-9


@pytest.mark.parametrize('rule', slow_but(DISTINCT[:1], RULES), ids=lambda rule: rule.name)
def test_a_law_that_runs_out(rule):
  """Once the support is used up there are no children: not a second copy, and never a token of probability 0."""
  assert rule.may_run_out == (rule in DISTINCT)
  for law, count in itertools.product(LAWS, (1, 2, 4, 6)):
    probs = LAWS[law]
    support = np.flatnonzero(probs).tolist()
    drawn = np.asarray(_draws(jax.random.key(3), jnp.float32(probs), 1, rule=rule, count=count, num_draws=200))
    for children in drawn.tolist():
      there = [child for child in children if child >= 0]
      assert set(there) <= set(support)
      if rule in DISTINCT:
        assert children == there + [-1] * (count - len(there))
        assert len(there) == len(set(there)) == min(count, len(support))
      else:
        assert children == there


def test_first_arrivals_depend_on_the_key_alone():
  """Two nodes of a depth run one race: their exponentials are the same, whatever their numbers and laws."""
  key = jax.random.key(5)
  first, other = jnp.float32(LAWS['random']), jnp.float32([0.1, 0.2, 0.3, 0.4])
  exponentials = np.asarray(jax.random.exponential(key, (4,)))
  for probs in (first, other):
    expected = np.argsort(exponentials / probs)
    for number in (1, 7, 1000):
      np.testing.assert_array_equal(FirstArrivals()(key, probs, number, 4), expected)
      # More children do not change the ones before.
      np.testing.assert_array_equal(FirstArrivals()(key, probs, number, 2), expected[:2])


@pytest.mark.parametrize('rule', [Independent(), WithoutReplacement()], ids=lambda rule: rule.name)
def test_other_rules_have_noise_of_their_own_at_every_node(rule):
  """Two nodes with one law and one key: their children are independent, and a child depends on its own number."""
  probs = jnp.float32(LAWS['random'])
  pairs = np.stack(
    [np.asarray(_draws(jax.random.key(6), probs, first, rule=rule, count=1))[:, 0] for first in (1, 2)], axis=1
  )
  counts = np.bincount(pairs @ np.array([4, 1]), minlength=16)
  assert chi_square(counts, np.outer(LAWS['random'], LAWS['random'])).p_value > 1e-3
  if rule == Independent():  # the second child of one parent is the first of the next
    np.testing.assert_array_equal(
      np.asarray(_draws(jax.random.key(6), probs, 1, rule=rule, count=2, num_draws=100))[:, 1], pairs[:100, 1]
    )


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule.name)
def test_a_peaked_law_on_a_large_vocabulary(rule):
  """One token has nearly everything: float32 must not lose the others, nor draw one of probability 0."""
  rng = np.random.default_rng(0)
  weights = np.where(rng.random(5000) < 0.5, 0, rng.random(5000) * 1e-7)
  weights[17] = 1
  probs = jnp.float32(weights / weights.sum())
  drawn = np.asarray(_draws(jax.random.key(7), probs, 1, rule=rule, count=4, num_draws=500))
  assert (np.asarray(probs)[drawn] > 0).all()
  assert (drawn[:, 0] == 17).mean() > 0.99
  if rule.may_run_out:
    # The rest is close to uniform: about 2500 tokens, of which 1500 draws hit more than a thousand.
    if rule == LikeliestAndOne():  # one draw of four
      assert (drawn[:, :-1] == drawn[0, :-1]).all()
      assert len(np.unique(drawn[:, -1])) > 300
      return
    assert len(np.unique(drawn[:, 1:])) > 1000
