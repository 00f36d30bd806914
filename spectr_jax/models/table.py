"""A Markov chain as a `Model`: the next-token law depends on the last token. Algorithms are tested on it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.model import Model, ModelOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableCache:
  """Committed tokens per row, int32 `[B]`: a Markov chain remembers nothing else."""

  lengths: jax.Array


def _apply(params, tokens, positions, mask, cache):
  del positions, mask
  return ModelOutput(params[tokens], cache)


def _init_cache(batch_size, max_length):
  del max_length
  return TableCache(jnp.zeros(batch_size, jnp.int32))


def _commit(cache, path, num_accepted):
  del path
  return TableCache(cache.lengths + num_accepted)


def table_model(log_probs: jax.Array) -> Model:
  """A Markov chain.

  Args:
    log_probs: `[V, V]`, row x holds the logits of the token after x; -inf for what never follows.

  Raises:
    ValueError: It is not square.
  """
  log_probs = jnp.asarray(log_probs)
  if log_probs.ndim != 2 or log_probs.shape[0] != log_probs.shape[1]:
    raise ValueError(f'log_probs must be [V, V], got shape {log_probs.shape}')
  if not jnp.issubdtype(log_probs.dtype, jnp.floating) or log_probs.dtype.itemsize < 4:
    raise ValueError(f'log_probs must be float32 or float64, got {log_probs.dtype}')
  return Model(log_probs, _apply, _init_cache, log_probs.shape[0], _commit)
