"""Sums by class: every platform's form against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import class_sums
from spectr_jax.kernels.dispatch import tracing_for


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
