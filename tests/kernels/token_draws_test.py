import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels.token_draws import draw_tokens
from spectr_jax.sampling import draw_several


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
  tokens = draw_tokens(uniforms, laws, interpret=True)
  # Sums in another order may move the borders between tokens by a rounding error, which no uniform here is close to.
  np.testing.assert_array_equal(tokens, jax.vmap(draw_several)(uniforms, laws))


@pytest.mark.parametrize('uniform', [0.0, 1 - 2.0**-24])
def test_the_kernel_never_draws_what_has_no_probability(uniform):
  laws = _laws(9, 128 * 70)
  # Some of the first and of the last blocks have no probability at all.
  laws = laws.at[::2, : 128 * 9].set(0).at[::3, -128 * 30 :].set(0)
  tokens = draw_tokens(jnp.full((9, 2), uniform), laws, interpret=True)
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
  tokens = draw_tokens(jnp.full((400, 1), 1 - 2.0**-24), jnp.asarray(laws), interpret=True)
  assert (np.take_along_axis(laws, np.asarray(tokens), axis=1) > 0).all()


def test_the_kernel_follows_the_distribution():
  law = jnp.asarray([0.1, 0, 0.6, 0.3], jnp.float32)
  spread = jnp.zeros((1, 512)).at[0, jnp.asarray([3, 130, 131, 400])].set(law)
  uniforms = (jnp.arange(160) + 0.5).reshape(10, 16) / 160
  tokens = draw_tokens(uniforms, jnp.broadcast_to(spread, (10, 512)), interpret=True)
  counts = [int((tokens == token).sum()) for token in (3, 130, 131, 400)]
  assert counts == [16, 0, 96, 48]
