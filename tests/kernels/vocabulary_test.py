"""Logits of some tokens among all, by the plain form and by a TPU's."""

import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import vocabulary


@pytest.mark.parametrize('shape', [(4,), (2, 4), (2, 3, 4)])
def test_logits_reach_their_places_by_either_form(shape):
  logits, ids = np.random.default_rng(0).normal(size=shape).astype(np.float32), np.array([5, 0, 7, 2], np.int32)
  found = np.asarray(vocabulary.over_vocabulary(jnp.asarray(logits), jnp.asarray(ids), 9))
  np.testing.assert_array_equal(found[..., ids], logits)
  assert np.isneginf(np.delete(found, ids, axis=-1)).all()
  np.testing.assert_array_equal(vocabulary._scattered(jnp.asarray(logits), jnp.asarray(ids), 9), found)


def test_all_tokens_stay_as_they_are():
  logits = jnp.ones((2, 9))
  assert vocabulary.over_vocabulary(logits, None, 9) is logits
