"""The kernels that search thresholds, interpreted, against sorting and against the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.ops import threshold_kernels, thresholds


def _rows(vocab_size):
  """Distributions of many shapes: with ties, zeros and neighbouring floats, a point mass, and one sum above 1."""
  rng = np.random.default_rng(vocab_size)
  probs = np.exp(rng.normal(0, np.array([0.1, 1, 3, 8, 20])[:, None], (5, vocab_size)))
  probs = np.concatenate([probs, rng.integers(0, 4, (2, vocab_size)) + 1e-30, np.eye(1, vocab_size, vocab_size // 2)])
  probs = np.float32(probs / probs.sum(1, keepdims=True))
  near = (np.float32(1 / vocab_size).view(np.int32) + np.arange(vocab_size, dtype=np.int32)).view(np.float32)
  return np.concatenate([probs, near[None], np.float32(np.eye(1, vocab_size)) + np.finfo(np.float32).eps])


@functools.partial(jax.jit, static_argnames=('is_weighted', 'step', 'interpret'))
def _kept_in_parts(probs, goal, is_weighted, step=threshold_kernels.step_parts, interpret=None):
  """What a search over two parts of each row keeps; nothing if the parts do not agree."""
  options = {} if interpret is None else {'interpret': interpret}
  parts, goal = jnp.split(probs, 2, axis=1), goal[:, None]

  def step_both(low, high, sums):
    first, second = (step(part, goal, low, high, sums, is_weighted=is_weighted, **options) for part in parts)
    agreed = (jnp.where(one == other, one, jnp.iinfo(one.dtype).max) for one, other in zip(first[:2], second[:2]))
    return *agreed, jnp.stack([first[2], second[2]])

  return probs >= threshold_kernels.search_parts(step_both, lambda sums: sums.sum(0), goal)


def _kept_by(form):
  if form == 'rows':
    return lambda *arguments: np.asarray(_keep_rows(*arguments)) > 0
  if form == 'parts':
    return lambda *arguments: np.asarray(_kept_in_parts(*arguments, interpret=True))
  return lambda *arguments: np.asarray(_kept_in_parts(*arguments, threshold_kernels.step_parts_plainly))


@functools.partial(jax.jit, static_argnames='is_weighted')
def _keep_rows(probs, goal, is_weighted):
  return threshold_kernels.keep_rows(probs, goal, is_weighted=is_weighted, interpret=True)


@pytest.mark.parametrize('vocab_size', [100, 2356])
@pytest.mark.parametrize('form', ['rows', 'parts', 'plain parts'])
def test_the_tokens_kept_have_the_mass_and_no_fewer_would(form, vocab_size):
  probs = _rows(vocab_size)
  for goal in (1e-4, 0.95, 0.999):
    kept = _kept_by(form)(probs, jnp.full(len(probs), goal, jnp.float32), True)
    for row, own in zip(np.float64(probs), kept):
      own = own & (row > 0)
      # Sums are rounded, so a goal that is met by a hair may be missed.
      assert row[own].sum() >= goal - 2e-6
      smallest = row[own].min()
      assert own.sum() == (row >= smallest).sum()  # the largest ones, with all ties
      larger = row[row > smallest]
      assert len(larger) == 0 or larger.sum() < goal + 2e-6


@pytest.mark.parametrize('form', ['rows', 'parts', 'plain parts'])
def test_counts_are_exact(form):
  probs = np.maximum(_rows(1300), np.float32(1e-37))
  for goal in (1, 37, 1300):
    kept = _kept_by(form)(probs, jnp.full(len(probs), goal, jnp.float32), False)
    np.testing.assert_array_equal(kept, probs >= -np.sort(-probs, axis=1)[:, goal - 1 : goal])
    plain = thresholds._together(probs, jnp.full(len(probs), goal), is_weighted=False)
    np.testing.assert_array_equal(kept, probs >= plain)


def test_rows_are_divided_by_what_is_kept_or_stay_as_they_are():
  probs = _rows(1300)
  goal = jnp.where(jnp.arange(len(probs)) % 2 == 0, 0.9, 0)
  np.testing.assert_allclose(
    _keep_rows(probs, goal, True), thresholds._keep_largest(probs, goal, is_weighted=True), rtol=2e-6
  )
  np.testing.assert_array_equal(np.asarray(_keep_rows(probs, goal, True))[1::2], probs[1::2])
  np.testing.assert_array_equal(_keep_rows(probs[:3], goal[:3], True), _keep_rows(probs, goal, True)[:3])
  everything = jnp.full(len(probs), 2000.0)
  whole = probs / probs.sum(1, keepdims=True)
  np.testing.assert_allclose(_keep_rows(probs, everything, False), whole, rtol=2e-6, atol=1e-37)


def test_passes_are_enough():
  """The last pass leaves neighbouring floats, whichever section is kept."""
  highest, num_sections = threshold_kernels._HIGHEST, threshold_kernels._WHOLE_SECTIONS
  low, high = jnp.zeros(100, jnp.int32), jnp.full(100, highest)
  goal = jnp.asarray(np.random.default_rng(0).integers(0, highest, 100), jnp.int32)
  for _ in range(threshold_kernels._num_passes(num_sections)):
    points = threshold_kernels._points(low, high, num_sections)
    low, high = jax.jit(threshold_kernels._narrow)(low, high, points, [point <= goal for point in points])
  np.testing.assert_array_equal(low, goal)
