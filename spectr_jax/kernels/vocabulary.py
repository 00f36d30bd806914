"""Logits of some of a vocabulary's tokens, put at their places among all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.layouts import in_rows


def over_vocabulary(logits: jax.Array, target_ids: jax.Array | None, vocab_size: int) -> jax.Array:
  """Logits `[..., V]` from those `[..., Vd]` of the tokens `target_ids`, or of all; -inf for all other tokens."""
  if target_ids is None:
    return logits
  return _spread(logits, target_ids, vocab_size)


@operation
def _spread(logits: jax.Array, target_ids: jax.Array, vocab_size: int) -> jax.Array:
  num_ids = logits.shape[-1]
  own = jnp.full(vocab_size, num_ids, jnp.int32).at[target_ids].set(jnp.arange(num_ids, dtype=jnp.int32))
  padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
  return jnp.take(padded, own, axis=-1)


@_spread.form('tpu')
def _scattered(logits, target_ids, vocab_size):
  """A scatter moves Vd numbers of each row where a gather moves V.

  A TPU scatters columns, and would compute all that follows on columns; behind the barrier it takes rows. A CPU's
  compiler cannot give a product in bfloat16 to a scatter.
  """
  rows = logits.reshape(-1, logits.shape[-1])
  rows = jnp.full((len(rows), vocab_size), -jnp.inf, logits.dtype).at[:, target_ids].set(rows)
  return jax.lax.optimization_barrier(in_rows(rows)).reshape(*logits.shape[:-1], vocab_size)
