"""Softmax, and draws by the inversion of a cumulative sum: the kernels against NumPy and the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels.dispatch import tracing_for
from spectr_jax.kernels.draws import draw_several, first_above
from spectr_jax.kernels.tpu.distributions import draw_tokens, scaled_softmax
from spectr_jax.kernels.tpu.distributions import first_above as first_above_kernel


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
  index, before = first_above_kernel(weights, level)
  np.testing.assert_array_equal(index, picked)
  np.testing.assert_allclose(before, sums[rows, picked] - weights[rows, picked], atol=3e-7)
  plain = jax.vmap(first_above.plain)(weights, level)
  np.testing.assert_array_equal(plain[0], picked)
  np.testing.assert_allclose(before, plain[1], atol=5e-7)


def test_a_sum_that_is_reached_exactly_is_not_exceeded():
  weights = np.float32([[0.25, 0, 0.25, 0.5], [0, 0, 0, 1], [0.5, 0.5, 0, 0]])
  level = np.float32([0.25, 0, 1])
  for found in (first_above_kernel(weights, level), jax.vmap(first_above.plain)(weights, level)):
    np.testing.assert_array_equal(found[0], [2, 3, 1])
    np.testing.assert_array_equal(found[1], [0.25, 0, 0.5])


def test_draws_of_rows_and_nodes_are_those_of_one_after_another():
  rng = np.random.default_rng(0)
  weights, level = np.float32(rng.random((2, 3, 200))), np.float32(rng.random((2, 3)) * 90)
  with tracing_for('tpu'):  # all of them by one call, which is lowered plainly here
    index, _ = jax.jit(jax.vmap(jax.vmap(first_above)))(weights, level)
  expected = [[first_above.plain(w, u)[0] for w, u in zip(*row)] for row in zip(weights, level)]
  np.testing.assert_array_equal(index, expected)


def _laws(num_laws, vocab_size, seed=0):
  """Distributions with many tokens of probability 0, at the end of the vocabulary too."""
  laws = np.random.default_rng(seed).gamma(0.1, size=(num_laws, vocab_size))
  laws[:, ::3] = 0
  laws[:, -vocab_size // 4 :] = 0
  return jnp.asarray(laws / laws.sum(axis=1, keepdims=True), jnp.float32)


@pytest.mark.parametrize(
  ('num_laws', 'num_draws', 'vocab_size'), [(3, 4, 1280), (8, 1, 128 * 67), (17, 2, 640), (2, 3, 128), (5, 2, 32000)]
)
def test_the_kernel_draws_the_plain_form_s_tokens(num_laws, num_draws, vocab_size):
  laws = _laws(num_laws, vocab_size)
  uniforms = jax.random.uniform(jax.random.key(1), (num_laws, num_draws))
  tokens = draw_tokens(uniforms, laws)
  # Sums in another order may move the borders between tokens by a rounding error, which no uniform here is close to.
  np.testing.assert_array_equal(tokens, jax.vmap(draw_several)(uniforms, laws))


@pytest.mark.parametrize('uniform', [0.0, 1 - 2.0**-24])
def test_the_kernel_never_draws_what_has_no_probability(uniform):
  laws = _laws(9, 128 * 70)
  # Some of the first and of the last blocks have no probability at all.
  laws = laws.at[::2, : 128 * 9].set(0).at[::3, -128 * 30 :].set(0)
  tokens = draw_tokens(jnp.full((9, 2), uniform), laws)
  assert (jnp.take_along_axis(laws, tokens, axis=1) > 0).all()
  place = jnp.arange(laws.shape[1])
  for row, token in enumerate(tokens[:, 0]):
    beyond = place < token if uniform == 0 else place > token
    # Nothing comes before the first token; the last ones may weigh less than the sums' rounding errors.
    assert jnp.sum(jnp.where(beyond, laws[row], 0)) <= (0 if uniform == 0 else 1e-6)


def test_rounding_leads_to_no_block_without_probability():
  """Sums over blocks and over a group of them round apart, so that a level may lie beyond all blocks of its group."""
  laws = np.random.default_rng(0).gamma(0.5, size=(400, 128 * 16)).astype(np.float32)
  laws[:, : 128 * 8] = laws[:, -128 * 5 :] = 0  # of four groups of four blocks three are left, all in the third
  tokens = draw_tokens(jnp.full((400, 1), 1 - 2.0**-24), jnp.asarray(laws))
  assert (np.take_along_axis(laws, np.asarray(tokens), axis=1) > 0).all()


def test_the_kernel_follows_the_distribution():
  law = jnp.asarray([0.1, 0, 0.6, 0.3], jnp.float32)
  spread = jnp.zeros((1, 512)).at[0, jnp.asarray([3, 130, 131, 400])].set(law)
  uniforms = (jnp.arange(160) + 0.5).reshape(10, 16) / 160
  tokens = draw_tokens(uniforms, jnp.broadcast_to(spread, (10, 512)))
  counts = [int((tokens == token).sum()) for token in (3, 130, 131, 400)]
  assert counts == [16, 0, 96, 48]


@pytest.mark.parametrize('vocab_size', [640, 128 * 67])  # one turn of the kernel's loops, and a last one that overlaps
def test_the_kernel_equals_a_softmax(vocab_size):
  logits = 5 * jax.random.normal(jax.random.key(0), (11, vocab_size)).at[2, 7].set(-jnp.inf)
  scales = jnp.linspace(0.1, 3, 11)
  probs = scaled_softmax(logits, scales)
  # An exponent of -100 is known to 100 2^-24, and so is its power.
  np.testing.assert_allclose(probs, jax.nn.softmax(logits / scales[:, None], axis=-1), rtol=1e-4, atol=1e-30)
  np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-6)
  assert probs[2, 7] == 0


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf])
def test_a_row_without_a_finite_largest_logit_is_nan(bad):
  logits = jnp.zeros((3, 640)).at[1, 200].set(bad)
  probs = scaled_softmax(logits, jnp.ones(3))
  np.testing.assert_array_equal(jnp.isnan(probs).all(axis=1), [False, True, False])
  assert not jnp.isnan(probs[jnp.array([0, 2])]).any()


def test_a_small_temperature_does_not_overflow():
  logits = jnp.zeros((1, 640)).at[0, 5].set(300.0)
  probs = scaled_softmax(logits, jnp.full(1, 1e-30))
  np.testing.assert_array_equal(probs, jnp.zeros((1, 640)).at[0, 5].set(1))
