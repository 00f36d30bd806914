import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels.softmax import scaled_softmax


@pytest.mark.parametrize('vocab_size', [640, 128 * 67])  # one turn of the kernel's loops, and a last one that overlaps
def test_the_kernel_equals_a_softmax(vocab_size):
  logits = 5 * jax.random.normal(jax.random.key(0), (11, vocab_size)).at[2, 7].set(-jnp.inf)
  scales = jnp.linspace(0.1, 3, 11)
  probs = scaled_softmax(logits, scales, interpret=True)
  # An exponent of -100 is known to 100 2^-24, and so is its power.
  np.testing.assert_allclose(probs, jax.nn.softmax(logits / scales[:, None], axis=-1), rtol=1e-4, atol=1e-30)
  np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)
  assert probs[2, 7] == 0


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_a_row_without_a_finite_largest_logit_is_nan(bad):
  logits = jnp.zeros((3, 640)).at[1, 200].set(bad)
  probs = scaled_softmax(logits, jnp.ones(3), interpret=True)
  np.testing.assert_array_equal(jnp.isnan(probs).all(axis=1), [False, True, False])
  assert not jnp.isnan(probs[jnp.array([0, 2])]).any()


def test_a_small_temperature_does_not_overflow():
  logits = jnp.zeros((1, 640)).at[0, 5].set(300.0)
  probs = scaled_softmax(logits, jnp.full(1, 1e-30), interpret=True)
  np.testing.assert_array_equal(probs, jnp.zeros((1, 640)).at[0, 5].set(1))
