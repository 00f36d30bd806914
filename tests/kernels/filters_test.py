"""Filters: the kernels of a TPU, interpreted, against sorting and against the plain form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import filters, thresholds
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.tpu import filter_rows
from tests.kernels.interpreted import launch_into


def rows_of_many_shapes(vocab_size):
  """Distributions with ties, zeros and neighboring floats, a point mass, and one sum above 1."""
  rng = np.random.default_rng(vocab_size)
  probs = np.exp(rng.normal(0, np.array([0.1, 1, 3, 8, 20])[:, None], (5, vocab_size)))
  probs = np.concatenate([probs, rng.integers(0, 4, (2, vocab_size)) + 1e-30, np.eye(1, vocab_size, vocab_size // 2)])
  probs = np.float32(probs / probs.sum(1, keepdims=True))
  near = (np.float32(1 / vocab_size).view(np.int32) + np.arange(vocab_size, dtype=np.int32)).view(np.float32)
  return np.concatenate([probs, near[None], np.float32(np.eye(1, vocab_size)) + np.finfo(np.float32).eps])


def _values(num_rows, **values):
  """Values by name of a filter, for rows of which each may have its own."""
  values = {name: np.broadcast_to(value, num_rows) for name, value in values.items()}
  return dict.fromkeys(filters.FILTERS_BY_NAME) | values


@functools.cache
def _filtered_by(platform):
  def run(probs, values):
    with tracing_for(platform):
      return filters.filtered(probs, values)

  return jax.jit(run)


def _in_parts(find, probs, values):
  size = -(-probs.shape[1] // 3)
  parts = jnp.pad(probs, ((0, 0), (0, 3 * size - probs.shape[1]))).reshape(len(probs), 3, size)
  columns = filter_rows.find_in_rows(find, parts, values)
  return filters._keep(probs, columns[:, :1], columns[:, 1:])


@pytest.fixture(params=['rows', 'parts', 'cpu', 'gpu'])
def filter_rows_by(request, monkeypatch):
  """Filters by the kernel for whole rows, by the one for three parts of each, or by another platform's form."""
  calls, filter_all = [], _filtered_by(request.param)
  if request.param in ('rows', 'parts'):
    monkeypatch.setattr(filters, 'launch', launch_into(calls))
    filter_all = jax.jit(_filtered_by('tpu').__wrapped__)
  if request.param == 'parts':
    monkeypatch.setattr(filters, 'keep_in_rows', _in_parts)

  def run(probs, **values):
    kept = filter_all(jnp.asarray(probs)[:, None], _values(len(probs), **values))[:, 0]
    assert {shapes[0] for shapes in calls} <= {probs.shape}
    calls.clear()
    return np.asarray(kept)

  return run


@pytest.mark.parametrize('vocab_size', [100, 2356, 5000])
def test_the_tokens_kept_have_the_mass_and_no_fewer_would(filter_rows_by, vocab_size):
  probs = rows_of_many_shapes(vocab_size)
  for goal in (1e-4, 0.95, 0.999):
    for row, own in zip(np.float64(probs), filter_rows_by(probs, top_p=np.float32(goal)) > 0):
      # Sums are rounded, so a goal that is met by a hair may be missed.
      assert row[own].sum() >= goal - 2e-6
      smallest = row[own].min()
      assert own.sum() == (row >= smallest).sum()  # the largest ones, with all ties
      larger = row[row > smallest]
      assert len(larger) == 0 or larger.sum() < goal + 2e-6


def test_counts_are_exact(filter_rows_by):
  """Also among neighboring floats, which only the last pass tells apart."""
  probs = np.maximum(rows_of_many_shapes(1300), np.float32(1e-37))
  for goal in (1, 37, 1300, 2000):
    smallest = -np.sort(-probs, axis=1)[:, min(goal, 1300) - 1 :][:, :1]
    kept = filter_rows_by(probs, top_k=goal)
    np.testing.assert_array_equal(kept > 0, probs >= smallest)
    whole = np.where(probs >= smallest, probs, 0).astype(np.float64)
    np.testing.assert_allclose(kept, whole / whole.sum(1, keepdims=True), rtol=2e-6)


def test_all_filters_at_once_keep_what_the_plain_form_keeps(filter_rows_by):
  probs = np.float32(np.random.default_rng(0).dirichlet(np.full(700, 0.1), 30))
  own = dict(
    top_k=np.arange(30) * 7 % 60, top_p=np.linspace(0.1, 1, 30, dtype=np.float32), min_p=np.float32([0, 0.1, 0.3] * 10)
  )
  plain = np.asarray(_filtered_by('cpu')(probs[:, None], _values(30, **own)))[:, 0]
  kept = filter_rows_by(probs, **own)
  np.testing.assert_array_equal(kept > 0, plain > 0)
  np.testing.assert_allclose(kept, plain, rtol=2e-6)
  few = {name: values[:3] for name, values in own.items()}
  np.testing.assert_array_equal(filter_rows_by(probs[:3], **few), kept[:3])


def test_rows_without_filters_stay_as_they_are(filter_rows_by):
  """To the bit, and also one that is not a distribution, which must be seen by whoever reads it."""
  probs = np.array(rows_of_many_shapes(300))
  probs[3] = np.nan
  is_used = np.arange(len(probs)) % 2 == 0
  top_p, min_p = np.where(is_used, np.float32(0.9), 1), np.where(is_used, np.float32(0.2), 0)
  kept = filter_rows_by(probs, top_k=np.where(np.arange(len(probs)) == 4, 5, 0), top_p=top_p, min_p=min_p)
  np.testing.assert_array_equal(kept[~is_used], probs[~is_used])
  np.testing.assert_allclose(kept[is_used].sum(1), 1, rtol=2e-6)


def test_rows_too_long_for_the_kernel_have_the_plain_form(monkeypatch):
  monkeypatch.setattr(filters, 'launch', None)
  monkeypatch.setattr(filters, 'MOST_TOKENS', 299)
  probs = rows_of_many_shapes(300)[:5]
  found = jax.jit(_filtered_by('tpu').__wrapped__)(probs[:, None], _values(5, top_k=7))[:, 0]
  np.testing.assert_array_equal(found > 0, probs >= np.sort(probs, axis=1)[:, -7:-6])


@pytest.mark.parametrize(('platform', 'asks'), [('gpu', False), ('cpu', True)])
def test_filters_of_a_gpu_do_not_wait_for_the_host(platform, asks):
  """It waits at a choice, and at a loop that may end early."""
  values = _values(2, top_k=np.array([3, 0]), top_p=np.array([0.9, 1.0]), min_p=np.array([0.0, 0.1]))
  program = str(jax.make_jaxpr(_filtered_by(platform).__wrapped__)(jnp.full((2, 1, 300), 1 / 300), values))
  assert ('cond[' in program, 'while[' in program) == (asks, asks)


def test_passes_are_enough():
  """The last pass leaves neighboring floats, whichever section is kept."""
  highest = filter_rows._HIGHEST
  low, high = jnp.zeros(100, jnp.int32), jnp.full(100, highest)
  goal = jnp.asarray(np.random.default_rng(0).integers(0, highest, 100), jnp.int32)
  found = thresholds.search(
    lambda point: (sum((point(i) <= goal).astype(jnp.int32) for i in range(1, filter_rows._SECTIONS)),),
    low,
    high,
    num_sections=filter_rows._SECTIONS,
    num_passes=filter_rows._num_passes(),
  )
  np.testing.assert_array_equal(found, goal)
