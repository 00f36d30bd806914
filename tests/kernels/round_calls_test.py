"""What a round computes beside its networks, in C++: distributions and draws, against NumPy and the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import draws, native, softmax

pytestmark = pytest.mark.skipif(native.form() is None, reason=f'no products in C++: {native.why_not()}')


@pytest.fixture(params=['avx512', 'avx2'])
def form(request):
  best = native.form()
  if not native.use_form(request.param):
    pytest.skip(f'this processor has no {request.param}')
  yield request.param
  native.use_form(best)


@pytest.mark.parametrize('width', [1, 7, 16, 100, 4096, 5003])
def test_distributions(form, width):
  random = np.random.default_rng(width)
  logits = (8 * random.standard_normal((3, 5, width))).astype(np.float32)
  logits[0, 1, width // 2] = -np.inf if width > 1 else 0
  scale, is_greedy = np.array([[1], [0.3], [1]], np.float32), np.array([[False], [False], [True]])
  found = np.asarray(native.softmax(logits, scale, is_greedy))
  weights = np.exp((logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)) / scale[..., None])
  np.testing.assert_allclose(found[:2], (weights / weights.sum(axis=-1, keepdims=True))[:2], rtol=1e-5, atol=1e-37)
  np.testing.assert_array_equal(found[2], np.arange(width) == logits[2].argmax(axis=-1)[:, None])
  alone = [
    native.softmax(logits[i : i + 1, j : j + 1], scale[i : i + 1], is_greedy[i : i + 1]) for i, j in np.ndindex(3, 5)
  ]
  np.testing.assert_array_equal(np.concatenate(alone).reshape(found.shape), found)  # to the bit


@pytest.mark.parametrize('value', [np.nan, np.inf])
@pytest.mark.parametrize('place', [0, 20, 39])
def test_logits_that_are_not_finite_give_nan(form, value, place):
  logits = np.zeros((2, 1, 40), np.float32)
  logits[:, 0, place] = value
  scale, is_greedy = np.ones((2, 1), np.float32), np.array([[False], [True]])
  assert np.isnan(native.softmax(logits, scale, is_greedy)).all()
  assert np.isnan(native.softmax(np.full_like(logits, -np.inf), scale, is_greedy)).all()


def test_the_first_of_equal_logits_is_the_point(form):
  logits = np.zeros((1, 1, 40), np.float32)
  logits[0, 0, [17, 33]] = 1
  point = native.softmax(logits, np.ones((1, 1), np.float32), np.array([[True]]))
  assert np.flatnonzero(point).tolist() == [17]


@pytest.mark.parametrize('size', [1, 5, 63, 64, 65, 1000, 4096])
def test_draws_are_those_of_the_plain_form(size):
  random = np.random.default_rng(size)
  weights = np.where(random.random((6, size)) < 0.5, random.random((6, size)) ** 4, 0).astype(np.float32)
  weights[:, random.integers(size)] = 1
  # Uniforms that rounding cannot move over the edge of a token.
  uniforms = random.random((6, 50)).astype(np.float32)
  edges = np.cumsum(weights.astype(np.float64), axis=1) / weights.sum(axis=1, dtype=np.float64, keepdims=True)
  is_clear = np.abs(uniforms[:, :, None] - edges[:, None]).min(axis=2) > 1e-5
  found = np.asarray(jax.jit(jax.vmap(native.draw_several))(uniforms, weights))
  plain = np.asarray(jax.jit(jax.vmap(draws.draw_several.plain))(uniforms, weights))
  np.testing.assert_array_equal(found[is_clear], plain[is_clear])
  assert is_clear.mean() > 0.5 or size > 1000
  assert (np.take_along_axis(weights, found, axis=1) > 0).all()


def test_the_ends_of_a_draw():
  weights = np.array([0, 0.25, 0, 0.5, 0.25, 0], np.float32)
  below_one = np.nextafter(np.float32(1), np.float32(0))
  assert native.draw_several(np.array([0, 0.25, below_one], np.float32), weights).tolist() == [1, 3, 4]


def test_rows_under_maps_of_different_depth():
  uniforms, weights = jnp.array([[0.1, 0.9], [0.5, 0.2]]), jnp.array([[1, 0, 1.0], [0, 1, 1]])
  of_rows = jax.vmap(draws.draw_several, (None, 0))
  expected = [[draws.draw_several.plain(own, row).tolist() for row in weights] for own in uniforms]
  assert jax.vmap(of_rows, (0, None))(uniforms, weights).tolist() == expected


def test_both_are_taken_in_float32_alone():
  logits = jnp.zeros((1, 1, 4))
  assert softmax.softmax.form_for(logits, logits[0], logits[0] > 0) is native.softmax
  half = logits.astype(jnp.bfloat16)
  assert softmax.softmax.form_for(half, half[0], half[0] > 0) is not native.softmax


def test_a_wrong_call_leaves_all_to_xla(monkeypatch):
  monkeypatch.setattr(native, 'draw_several', lambda uniforms, weights: jnp.full(uniforms.shape, 39, jnp.int32))
  with pytest.raises(native._UnavailableError, match='draws or writes differ from those of NumPy'):
    native._check_products()
