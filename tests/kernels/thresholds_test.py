"""Thresholds: every platform's form against sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import thresholds
from spectr_jax.kernels.dispatch import tracing_for

_FORMS = {
  'together': thresholds.largest_threshold.plain,
  'without asking': thresholds._without_asking,
  'row by row': thresholds._row_by_row,
}


def _by_sorting(probs, goal, weights):
  """The largest probability of one row at which those as large or larger weigh enough, or 0."""
  for threshold in sorted(set(probs.tolist()), reverse=True):
    if weights[probs >= threshold].sum() >= goal:
      return threshold
  return 0.0


def _eighths(vocab_size):
  """Of which sums are exact; with ties and zeros, and the last row asks for more than there is."""
  rng = np.random.default_rng(0)
  probs = np.float32(rng.integers(0, 9, (15, vocab_size)) / 8)
  goal = np.append(rng.integers(1, 8, 14), 100)
  return probs, lambda weights: goal


def _many_sizes():
  """Multiples of 2^-24 whose sums are exact in any order, some of them neighboring floats."""
  sizes = np.int64(2.0 ** np.random.default_rng(2).uniform(0, 17, (6, 1000)))
  sizes[:, :40] = 2**16 + np.arange(40)
  return np.float32(sizes / 2**24), lambda weights: weights.sum(-1) * [0.999, 0.95, 0.9, 0.5, 0.1, 0.001]


# 64 tokens are a multiple of the parts of a sum, 24 are none.
@pytest.mark.parametrize('case', [_eighths(24), _eighths(64), _many_sizes()], ids=['24', '64', 'many sizes'])
@pytest.mark.parametrize('form', _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize('is_weighted', [False, True])
def test_every_form_keeps_what_sorting_keeps(form, is_weighted, case):
  probs, goals_of = case
  weights = probs if is_weighted else np.ones_like(probs)
  goal = np.float32(goals_of(weights))
  found = np.asarray(jax.jit(form, static_argnames='is_weighted')(probs, goal, is_weighted=is_weighted))
  assert found.shape == (len(probs), 1)
  expected = np.array([_by_sorting(*row) for row in zip(probs, goal, weights)])
  np.testing.assert_array_equal(probs >= found, probs >= expected[:, None])
  assert not (probs >= found).all()
  np.testing.assert_array_equal(found[goal > weights.sum(-1)], 0)


@pytest.mark.parametrize('form', _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize('is_weighted', [False, True])
def test_a_bound_from_below_changes_nothing(form, is_weighted):
  rng = np.random.default_rng(4)
  probs = np.float32(np.int64(2.0 ** rng.uniform(0, 17, (6, 1000))) / 2**24)
  weights = probs if is_weighted else np.ones_like(probs)
  goal = np.float32(weights.sum(-1) * 0.01)
  search = functools.partial(jax.jit(form, static_argnames='is_weighted'), is_weighted=is_weighted)
  expected = np.asarray(search(probs, goal))
  # The threshold itself, the largest number below it, one far below, one between two of its tokens, 0.
  ranked = np.sort(probs, axis=-1)
  below = np.nextafter(expected, np.float32(0))
  for bound in (expected, below, ranked[:, 500:501], ranked[:, 700:701] * 1.0001, 0 * expected):
    weight = np.sum(np.where(probs >= bound, weights, 0), axis=-1, dtype=np.float32)
    assert (weight >= goal).all()
    found = np.asarray(search(probs, goal, above=(jnp.asarray(bound), jnp.asarray(weight))))
    np.testing.assert_array_equal(probs >= found, probs >= expected)


@pytest.fixture
def passes(monkeypatch):
  """The passes of all searches so far."""
  found, loop = [], jax.lax.while_loop

  def counted(is_going, step, start):
    end, count = loop(lambda x: is_going(x[0]), lambda x: (step(x[0]), x[1] + 1), (start, 0))
    jax.debug.callback(lambda count: found.append(int(count)), count)
    return end

  monkeypatch.setattr(jax.lax, 'while_loop', counted)
  return found


def test_an_accelerator_needs_no_more_passes_than_it_says(passes):
  """Among probabilities of many sizes, and among neighboring floats, which only the last pass tells apart."""
  rng = np.random.default_rng(1)
  probs = np.exp(rng.normal(0, 8, (20, 400))).astype(np.float32)
  probs /= probs.sum(-1, keepdims=True)
  probs[0] = (np.float32(1 / 400).view(np.int32) + np.arange(400, dtype=np.int32)).view(np.float32)
  for goal in (0.5, 0.95, 1.0):
    jax.block_until_ready(thresholds.largest_threshold.plain(probs, jnp.full(20, goal), is_weighted=True))
  jax.effects_barrier()
  assert max(passes) == thresholds.THRESHOLD_PASSES


@pytest.mark.parametrize(('is_weighted', 'goals', 'most'), [(False, (1, 40, 2000), 8), (True, (0.5, 0.9, 0.95), 15)])
def test_a_cpu_interpolates(passes, is_weighted, goals, most):
  """Bisection takes 13 passes on average for a number of tokens and 17 for a mass. What is hard has a bound."""
  rng = np.random.default_rng(3)
  search = jax.jit(lambda probs, goal: thresholds._row_by_row(probs, goal, is_weighted=is_weighted))

  def run(rows):
    passes.clear()
    for goal in goals:
      jax.block_until_ready(search(rows, jnp.full(len(rows), goal, jnp.float32)))
    jax.effects_barrier()
    return passes

  def distributions(logits):
    return np.asarray(jax.nn.softmax(jnp.float32(logits)))

  assert np.mean(run(distributions(rng.normal(0, 3, (8, 8192))))) < most
  hard = np.zeros((6, 8192), np.float32)
  hard[0, 7] = 1  # one token
  hard[1] = 1 / 8192  # all alike
  hard[2, :60] = 0.5 ** np.arange(1, 61)
  hard[3] = (np.float32(1 / 8192).view(np.int32) + np.arange(8192, dtype=np.int32)).view(np.float32)
  hard[4, :3] = 0.4, 0.4, 0.2
  hard[5] = distributions(rng.normal(0, 30, 8192))
  assert max(run(hard)) <= thresholds._MOST_GUESSES + 31


def test_a_bound_from_below_shortens_the_search(passes):
  """Of top-p among the tokens that top-k keeps."""
  probs = np.asarray(jax.nn.softmax(jnp.float32(np.random.default_rng(5).normal(0, 3, (8, 8192)))))
  bound = np.sort(probs, axis=-1)[:, -40:-39]
  mass = np.sum(np.where(probs >= bound, probs, 0), axis=-1, dtype=np.float32)
  jax.block_until_ready(thresholds._row_by_row(probs, jnp.asarray(0.95 * mass), is_weighted=True, above=(bound, mass)))
  jax.effects_barrier()
  assert np.mean(passes) < 6


@pytest.mark.parametrize(
  ('platform', 'vocab_size', 'form'),
  [
    ('cpu', 64, 'together'),
    ('cpu', 65, 'row by row'),
    ('gpu', 64, 'without asking'),
    ('gpu', 65, 'without asking'),
    ('tpu', 65, 'together'),
  ],
)
def test_every_platform_has_its_form(platform, vocab_size, form):
  """Short rows are searched together on a CPU, too."""
  with tracing_for(platform):
    found = thresholds.largest_threshold.form_for(jnp.zeros((2, vocab_size)), jnp.ones(2), is_weighted=False)
  assert found is _FORMS[form]
