"""Bits of a round's noise: those of JAX's own Threefry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.kernels import noise

_KEYS = jax.random.split(jax.random.key(3, impl='threefry2x32'), 4)


@pytest.mark.parametrize('width', [8, 16, 32])
@pytest.mark.parametrize('shape', [(), (5,), (2, 3)])
def test_bits_are_those_of_jax(width, shape):
  draw = jax.jit(jax.vmap(lambda key: jax.random.bits(key, shape, f'uint{width}')))
  np.testing.assert_array_equal(draw(noise.for_rounds(_KEYS)), draw(_KEYS))


def test_keys_are_those_of_jax():
  def derived(keys):
    fold_each = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold_each(keys, jnp.array([0, 1, 2**31 - 1])), jax.random.split(keys[1], (2, 3))

  for own, expected in zip(derived(noise.for_rounds(_KEYS)), derived(_KEYS), strict=True):
    np.testing.assert_array_equal(jax.random.key_data(own), jax.random.key_data(expected))


def test_published_words():
  """The known answers of Random123 for Threefry-2x32-20."""
  cases = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
  ]
  for key, counter, expected in cases:
    words = noise.threefry(jnp.array(key, jnp.uint32), jnp.array(counter, jnp.uint32))
    assert tuple(map(int, words)) == expected
