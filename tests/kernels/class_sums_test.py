"""Sums by class: every platform's form against NumPy."""

import functools

import jax
import numpy as np
import pytest

from spectr_jax.kernels import class_sums


@pytest.mark.parametrize('form', ['_compare', '_scatter'])
def test_every_form_sums_the_same(form):
  rng = np.random.default_rng(0)
  values, classes = np.float32(rng.dirichlet(np.ones(1000), 2)), np.int32(rng.integers(0, 6, 1000))
  classes[classes == 4] = 3  # a class without a value
  found = jax.jit(functools.partial(getattr(class_sums, form), num_classes=6))(*values, classes)
  assert found.dtype == np.float32
  expected = [np.bincount(classes, own.astype(np.float64), 6) for own in values]
  np.testing.assert_allclose(found, np.transpose(expected), rtol=1e-6)


def test_tiny_values_are_not_lost_beside_a_large_one():
  values, classes = np.full(4096, 1e-9, np.float32), np.zeros(4096, np.int32)
  values[0] = 1
  # Added to 1 one by one, every one of them would be rounded away.
  found = jax.jit(functools.partial(class_sums._scatter, num_classes=2))(values, classes)
  np.testing.assert_allclose(found[0] - 1, 4.1e-6, rtol=0.3)


@pytest.mark.parametrize(('num_tokens', 'num_forms'), [(128, 0), (129, 2)])
def test_few_tokens_are_compared_everywhere(num_tokens, num_forms, monkeypatch):
  chosen = []

  def choose(*arguments, **forms):
    chosen.extend(forms)
    return forms['default'](*arguments)

  monkeypatch.setattr(class_sums, 'by_platform', choose)
  classes = np.arange(num_tokens, dtype=np.int32) % 3
  found = class_sums.sums_by_class((np.ones(num_tokens, np.float32),), classes, 3)
  np.testing.assert_array_equal(found[:, 0], np.bincount(classes))
  assert len(chosen) == num_forms
