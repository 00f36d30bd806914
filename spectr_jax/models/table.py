"""A Markov chain as a `Model`, to test algorithms on.

The next token's distribution depends on the last token and, if wanted, on its position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.model import Model, ModelOutput


def _apply(params, tokens, positions, mask, cache):
  del mask
  if params.ndim == 2:
    return ModelOutput(params[tokens], cache)
  return ModelOutput(params[jnp.minimum(positions, len(params) - 1), tokens], cache)


# A Markov chain needs no past tokens: its cache is the number of committed tokens of each row.


def _init_cache(batch_size, cache_size):
  del cache_size
  return jnp.zeros(batch_size, jnp.int32)


def _commit(cache, path, num_committed):
  del path
  return cache + num_committed


def _truncate(cache, lengths):
  del cache
  return lengths


def table_model(log_probs: jax.Array) -> Model:
  """A Markov chain as a model.

  Args:
    log_probs: `[V, V]`, with the logits of the token after x in row x; -inf for tokens that never follow. Or
      `[T, V, V]`, one such table for each position of x from 0 on, the last of which holds for all later positions.

  Raises:
    ValueError: The tables are not square, or not of float32 or float64.
  """
  log_probs = jnp.asarray(log_probs)
  shape = log_probs.shape
  if len(shape) not in (2, 3) or shape[-2] != shape[-1] or not shape[0]:
    raise ValueError(f'log_probs must be [V, V] or [T, V, V], got shape {shape}')
  if not jnp.issubdtype(log_probs.dtype, jnp.floating) or log_probs.dtype.itemsize < 4:
    raise ValueError(f'log_probs must be float32 or float64, got {log_probs.dtype}')
  return Model(log_probs, _apply, _init_cache, shape[-1], _commit, _truncate)
