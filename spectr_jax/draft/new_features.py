"""What drafters share that read the target's hidden states: embedded tokens, and the states that are new to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import DraftContext
from spectr_jax.model import PREFILL_CHUNK

State = TypeVar('State')


class NewFeatures(NamedTuple):
  """Some of a row's hidden states that a drafter has not read, in order; those behind `num_kept` are 0.

  Attributes:
    features: `[B, C, F, D]`, the target's hidden states.
    next_tokens: int32 `[B, C]`, the token after each.
    positions: int32 `[B, C]`, the position of the token that each belongs to.
    num_kept: int32 `[B]`, the number that belong to the text.
  """

  features: jax.Array
  next_tokens: jax.Array
  positions: jax.Array
  num_kept: jax.Array


def read_features(
  context: DraftContext,
  num_read: jax.Array,
  num_new: int,
  state: State,
  read_fn: Callable[[State, NewFeatures], State],
) -> State:
  """Passes the hidden states that a drafter has not read to a function, at most `PREFILL_CHUNK` of a row at a time.

  Args:
    context: The texts and features. Every token but a text's last has hidden states.
    num_read: int32 `[B]`, the number that the drafter has read of each row.
    num_new: The most that a row lacks, static.
    state: What `read_fn` begins with.
    read_fn: `(state, new) -> state`.

  Returns:
    The last state.

  Raises:
    ValueError: The context holds no tokens or no features.
  """
  if context.tokens is None or context.features is None:
    raise ValueError("a head reads the text and the target's hidden states: the context must hold tokens and features")
  text, features = context.tokens, context.features
  size = min(num_new, PREFILL_CHUNK)
  offsets = jnp.arange(size)
  missing = context.lengths - 1 - num_read

  def read(first, state):
    positions = num_read[:, None] + first + offsets
    places = jnp.minimum(positions, text.shape[1] - 2)
    tokens = jnp.take_along_axis(text, places + 1, axis=1)
    # Behind the text both may be anything. Nothing that is kept attends to them, but it must not be NaN.
    is_new = offsets < (missing - first)[:, None]
    states = jax.vmap(lambda row, places: row[places])(features, places)
    states = jnp.where(is_new[..., None, None], states, 0)
    num_kept = jnp.clip(missing - first, 0, size)
    return read_fn(state, NewFeatures(states, jnp.where(is_new, tokens, 0), positions, num_kept))

  if size == num_new:
    return read(0, state)
  num_chunks = -(-jnp.clip(jnp.max(missing), 0, num_new) // size)
  return jax.lax.fori_loop(0, num_chunks, lambda i, state: read(i * size, state), state)


def embed(params: Mapping[str, Any], context: DraftContext, tokens: jax.Array) -> jax.Array:
  """Embedded tokens, `[..., D]`, by a drafter's own `embedding` `[V, D]` if it has one, else by the target's.

  Raises:
    ValueError: Neither has one.
  """
  if 'embedding' in params:
    return jnp.take(params['embedding'], tokens, axis=0)
  target = context.target
  if target.embed_fn is None:
    raise ValueError('this head reads embeddings of the target, but the target has no embed_fn')
  return target.embed_fn(target.params, tokens)
