"""e^x - 1 for kernels, where `jnp.expm1` is not available."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expm1(x: jax.Array) -> jax.Array:
  """e^x - 1 for kernels, where `jnp.expm1` is not available; with a relative error of a few units in the last place."""
  # x (1 + x/2 (1 + x/3 (...))) to x^9, which is below 1e-9 of the sum for |x| < .5.
  series = jnp.ones_like(x)
  for i in range(9, 1, -1):
    series = 1 + x / i * series
  return jnp.where(jnp.abs(x) < 0.5, x * series, jnp.exp(x) - 1)
