"""The inversion of a cumulative sum: the kernel, interpreted, against NumPy and the plain form."""

import jax
import numpy as np
import pytest

from spectr_jax.kernels import first_above as module


@pytest.mark.parametrize('size', [5, 128, 250])
def test_the_kernel_finds_what_the_plain_form_finds(size):
  rng = np.random.default_rng(size)
  weights = np.float32(rng.dirichlet(np.full(size, 0.2), 11))
  weights[rng.random(weights.shape) < 0.3] = 0
  weights[:, 0] += np.float32(0.01)
  # Levels between the sums, at zero, and beyond every sum.
  sums = np.cumsum(np.float64(weights), axis=1)
  picked = np.array([rng.choice(np.flatnonzero(row > 1e-5)) for row in weights])
  rows = np.arange(11)
  level = np.float32(sums[rows, picked] - weights[rows, picked] / 2)
  level[0], level[1] = 0, 2 * sums[1, -1]
  picked[0], picked[1] = 0, np.flatnonzero(weights[1])[-1]
  index, before = module.first_above_kernel(weights, level, interpret=True)
  np.testing.assert_array_equal(index, picked)
  np.testing.assert_allclose(before, sums[rows, picked] - weights[rows, picked], atol=3e-7)
  plain = jax.vmap(module.search)(weights, level)
  np.testing.assert_array_equal(plain[0], picked)
  np.testing.assert_allclose(before, plain[1], atol=5e-7)


def test_a_sum_that_is_reached_exactly_is_not_exceeded():
  weights = np.float32([[0.25, 0, 0.25, 0.5], [0, 0, 0, 1], [0.5, 0.5, 0, 0]])
  level = np.float32([0.25, 0, 1])
  for found in (module.first_above_kernel(weights, level, interpret=True), jax.vmap(module.search)(weights, level)):
    np.testing.assert_array_equal(found[0], [2, 3, 1])
    np.testing.assert_array_equal(found[1], [0.25, 0, 0.5])


def test_draws_of_rows_and_nodes_are_those_of_one_after_another():
  rng = np.random.default_rng(0)
  weights, level = np.float32(rng.random((2, 3, 200))), np.float32(rng.random((2, 3)) * 90)
  index, _ = jax.jit(jax.vmap(jax.vmap(module.first_above)))(weights, level)
  expected = [[module.search(w, u)[0] for w, u in zip(*row)] for row in zip(weights, level)]
  np.testing.assert_array_equal(index, expected)
