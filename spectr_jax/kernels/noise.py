"""Random bits by counters: Threefry-2x32 as one expression, with the bits of JAX's own.

JAX computes the rounds of Threefry on CPUs in a loop of some twenty kernels, five times for every `fold_in` and draw. A
round of decoding folds and draws some ten times for a hundred numbers, so that these launches cost more than a draft.
As one expression XLA joins them to what reads them.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Threefry with 2 words of 32 bits and 20
rounds.
"""

from __future__ import annotations

import math

import jax
import jax.extend.random
import jax.numpy as jnp
from jax.typing import ArrayLike

from spectr_jax.kernels.dispatch import operation

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def threefry(keys: jax.Array, counters: jax.Array) -> jax.Array:
  """The words of `counters` under `keys`, all uint32 `[..., 2]` of one shape."""
  schedule = keys[..., 0], keys[..., 1], keys[..., 0] ^ keys[..., 1] ^ jnp.uint32(_PARITY)
  left, right = counters[..., 0] + schedule[0], counters[..., 1] + schedule[1]
  for step in range(5):
    for distance in _ROTATIONS[step % 2]:
      left = left + right
      right = left ^ (right << distance | right >> (32 - distance))
    left = left + schedule[(step + 1) % 3]
    right = right + schedule[(step + 2) % 3] + jnp.uint32(step + 1)
  return jnp.stack([left, right], axis=-1)


def _of_counters(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The words `[*shape, 2]` of the numbers from 0 on, of which there are fewer than 2^32, in this order."""
  low = jnp.arange(math.prod(shape), dtype=jnp.uint32)
  counters = jnp.stack([jnp.zeros_like(low), low], axis=-1)
  return threefry(jnp.broadcast_to(key, counters.shape), counters).reshape(*shape, 2)


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
  words = _of_counters(key, shape)
  if width == 64:
    return words[..., 0].astype(jnp.uint64) << 32 | words[..., 1].astype(jnp.uint64)
  bits = words[..., 0] ^ words[..., 1]
  return bits if width == 32 else bits.astype(f'uint{width}')


def _fold_in(key: jax.Array, data: ArrayLike) -> jax.Array:
  return threefry(key, jnp.stack([jnp.uint32(0), jnp.asarray(data).astype(jnp.uint32)]))


def _seed(seed: jax.Array) -> jax.Array:
  return jax.random.key_data(jax.random.key(seed, impl='threefry2x32'))


_IMPL = jax.extend.random.define_prng_impl(
  key_shape=(2,),
  seed=_seed,
  split=_of_counters,
  random_bits=_random_bits,
  fold_in=_fold_in,
  name='spectr_threefry2x32',
  tag='sfry',
)


@operation
def for_rounds(keys: jax.Array) -> jax.Array:
  """Typed keys of `threefry2x32` as keys of equal bits whose `fold_in`, `split` and draws launch little."""
  return keys


@for_rounds.form('cpu')
def _as_one_expression(keys):
  return jax.random.wrap_key_data(jax.random.key_data(keys), impl=_IMPL)
