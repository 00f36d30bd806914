"""Sums over tokens, and by class: the kernel, run operation by operation, and other forms, against the plain one."""

import functools

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import class_sums, gamma, token_sums
from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.tpu import recursions, sums
from tests.kernels.interpreted import launch_into


@pytest.fixture
def kernels(monkeypatch):
  """The kernel in the place of the plain form; also the shapes that it was called with."""
  seen = []
  monkeypatch.setattr(token_sums, 'launch', launch_into(seen))
  with tracing_for('tpu'):
    yield seen


def _laws(num_rows, vocab_size):
  rng = np.random.default_rng(vocab_size)
  return np.float32(rng.dirichlet(np.full(vocab_size, 0.1), (2, num_rows)))


# A register and parts of a turn, turns and a rest of one, and whole turns.
@pytest.mark.parametrize('vocab_size', [128, 1408, 1280])
def test_the_kernel_adds_up_classes(kernels, vocab_size):
  p, q = _laws(1, vocab_size)[:, 0]
  classes = np.int32(np.random.default_rng(1).integers(0, 19, vocab_size))  # 8 at a time and a rest
  found = class_sums.sums_by_class((p, q), classes, 19)
  expected = [np.bincount(classes, own.astype(np.float64), 19) for own in (p, q)]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=2e-6)
  assert kernels == [[(1, vocab_size)] * 3 + [(1, 1)]]


def test_the_kernel_finds_the_thresholds_of_k_seq(kernels):
  p, q = _laws(1, 1280)[:, 0]
  number = jnp.asarray(4)
  found = gamma.solve_gamma(p, q, number, num_rounds=16)
  assert len(kernels) == 1  # traced once for all passes
  np.testing.assert_allclose(found, gamma._by_chords(p, q, number, num_rounds=16), atol=3 / 2**15)


@pytest.mark.parametrize('num_rows', [1, 8, 11])  # fewer rows than a register has, as many, and a rest
def test_rows_have_sums_of_their_own(num_rows):
  p, q = _laws(num_rows, 640)
  gammas = np.float32(np.linspace(1, 3, num_rows * 5).reshape(num_rows, 5))
  found = sums.token_sums(p, q, gammas, token_fns=[gamma._overlaps_of_token])
  expected = [[np.minimum(a, b / gamma).sum() for gamma in own] for a, b, own in zip(p, q, gammas)]
  assert found.shape == (num_rows, 5)
  np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_what_does_not_fit_is_computed_by_the_plain_form(kernels):
  p, q = _laws(1, 130)[:, 0]
  classes = np.int32(np.arange(130) % 3)
  found = class_sums.sums_by_class((p, q), classes, 3)
  np.testing.assert_allclose(found[:, 0], np.bincount(classes, p, 3), rtol=2e-6)
  with jax.enable_x64(True):
    found = class_sums.sums_by_class(tuple(jnp.float64(_laws(1, 128)[:, 0])), jnp.zeros(128, jnp.int32), 1)
  assert found.dtype == np.float64
  rows = [np.asarray([1, 0]), np.arange(2)]
  arrays = *_laws(2, 130), np.ones((2, 2), np.float32)
  found = token_sums.sums_of_rows(_kept_fn, arrays[:2], rows, arrays[2])
  np.testing.assert_allclose(found, _kept_plainly(*arrays, rows=rows), rtol=2e-6)
  assert not kernels


def _kept_fn(params):
  """Of a token with two values: the first times one parameter where that is more than another."""
  factor, least = params
  return lambda token: [jnp.where(factor * token[0] > least, factor * token[0], 0) + token[1]]


def _kept_plainly(first, second, params, *, rows):
  kept = params[:, :1] * first[rows[0]]
  return jnp.sum(jnp.where(kept > params[:, 1:], kept, 0) + second[rows[1]], axis=1)


# Neighbors in both tables, more than eight of them; rows far from each other, and again; more runs than a loop takes.
@pytest.mark.parametrize(
  'rows',
  [(range(11), range(2, 13)), ((0, 1, 2, 5, 6, 3), (4, 5, 6, 7, 8, 4)), (range(20), range(20)[::-1]), ((7,), (0,))],
)
@pytest.mark.parametrize('vocab_size', [128, 1408])
def test_the_kernel_reads_rows_in_place(kernels, rows, vocab_size):
  rows = [np.asarray(list(each)) for each in rows]
  first, second = _laws(20, vocab_size)
  params = np.float32(np.random.default_rng(0).uniform((0, 0), (2, 0.1), (len(rows[0]), 2)))
  found = token_sums.sums_of_rows(_kept_fn, (first, second), rows, params)
  np.testing.assert_allclose(found, _kept_plainly(first, second, params, rows=rows), rtol=2e-6)
  assert kernels == [[(1, 20, vocab_size)] * 2 + [(1, len(rows[0]), 2)]]


@pytest.mark.parametrize('most', [5, 3])  # registers at a time, of ten: two parts, or four of which one is short
def test_groups_of_entries_and_parts_of_the_tokens_have_sums_of_their_own(monkeypatch, most):
  rows = [np.arange(9), np.arange(9)]
  first, second = (table.reshape(2, 9, 1280) for table in _laws(18, 1280))
  params = np.float32(np.random.default_rng(0).uniform((0, 0), (2, 0.1), (2, 9, 2)))
  monkeypatch.setattr(sums, '_MOST_BYTES', most * 4 * 128 * 18)
  found = sums.sums_of_rows(first, second, params, token_fn=_kept_fn, rows=rows)
  expected = jax.vmap(functools.partial(_kept_plainly, rows=rows))(first, second, params)
  np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_runs_are_neighbors_in_every_table():
  rows = [np.asarray([0, 1, 2, 5, 6, 7, *range(8, 18)]), np.asarray([3, 4, 5, 6, 8, 9, *range(10, 20)])]
  assert sums.runs_of(rows) == [(0, (0, 3), 3), (3, (5, 6), 1), (4, (6, 8), 8), (12, (14, 16), 4)]


@pytest.mark.slow
def test_devices_add_up_their_parts_and_filter_rows_that_they_share():
  assert commands.succeed('tests.kernels.divided_kernels', num_devices=4).strip() == 'equal'


@pytest.mark.parametrize('num_rows', [1, 8, 11])
def test_a_kernel_narrows_the_brackets_of_k_seq(num_rows):
  rng = np.random.default_rng(num_rows)
  number = np.float32(rng.integers(1, 9, (num_rows, 1)))
  points = np.asarray(gamma.sections(jnp.ones((num_rows, 1)), jnp.asarray(number), 16))
  assert (points[:, -1:] == number).all()
  betas = np.float32(rng.random((num_rows, 1)) / points)
  found = recursions.narrow_sections(betas, points, number[:, 0])
  expected = jax.vmap(gamma.narrow_sections)(betas, points, number[:, 0])
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  excess = 1 - (1 - betas) ** number - points * betas
  for row, own, gammas in zip(found, excess, points):
    first = np.argmax((own <= 0) | (np.arange(17) == 16))
    np.testing.assert_allclose([row[0], row[-1]], [gammas[max(first - 1, 0)], gammas[first]], rtol=1e-6)


@pytest.mark.parametrize('form', [class_sums.sums_by_class.plain, class_sums._scatter])
def test_every_form_sums_the_same(form):
  rng = np.random.default_rng(0)
  values, classes = np.float32(rng.dirichlet(np.ones(1000), 2)), np.int32(rng.integers(0, 6, 1000))
  classes[classes == 4] = 3  # a class without a value
  found = jax.jit(form, static_argnums=2)(tuple(values), classes, 6)
  assert found.dtype == np.float32
  expected = [np.bincount(classes, own.astype(np.float64), 6) for own in values]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=1e-6)


def test_tiny_values_are_not_lost_beside_a_large_one():
  values, classes = np.full(4096, 1e-9, np.float32), np.zeros(4096, np.int32)
  values[0] = 1
  # Added to 1 one by one, every one of them would be rounded away.
  found = jax.jit(class_sums._scatter, static_argnums=2)((values,), classes, 2)
  np.testing.assert_allclose(found[0] - 1, 4.1e-6, rtol=0.3)


@pytest.mark.parametrize(('num_tokens', 'is_scattered'), [(128, False), (129, True)])
def test_a_cpu_compares_few_tokens(num_tokens, is_scattered):
  classes = np.arange(num_tokens, dtype=np.int32) % 3
  with tracing_for('cpu'):
    form = class_sums.sums_by_class.form_for((np.ones(num_tokens, np.float32),), classes, 3)
  assert (form is class_sums._scatter) == is_scattered
  np.testing.assert_array_equal(form((np.ones(num_tokens, np.float32),), classes, 3)[:, 0], np.bincount(classes))


def test_a_tpu_compares_where_others_look_up():
  table = np.random.default_rng(0).random(7).astype(np.float32)
  classes = np.arange(7)[::-1].repeat(3)
  with tracing_for('tpu'):
    np.testing.assert_array_equal(class_sums.entries_of(jnp.asarray(table), jnp.asarray(classes)), table[classes])
    for c in classes:
      assert class_sums.entries_of(jnp.asarray(table), jnp.asarray(c)) == table[c]
