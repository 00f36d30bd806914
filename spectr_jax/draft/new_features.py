"""What drafters share that read the target's hidden states: parameters, embedded tokens, and states new to them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import Commitment, DraftContext
from spectr_jax.draft.drawing import DrawingDrafter
from spectr_jax.kernels.matrices import kernels_for_decoding
from spectr_jax.kernels.vocabulary import over_vocabulary
from spectr_jax.model import PREFILL_CHUNK, static_field

State = TypeVar('State')


class NewFeatures(NamedTuple):
  """Some of a row's hidden states that a drafter has not read, in order; those behind `num_kept` are 0."""

  features: jax.Array  # [B, C, F, D], the target's hidden states
  next_tokens: jax.Array  # int32 [B, C], the token after each
  positions: jax.Array  # int32 [B, C], of the token that each belongs to
  num_kept: jax.Array  # int32 [B], the number that belong to the text


def read_features(
  context: DraftContext,
  num_read: jax.Array,
  num_new: int,
  state: State,
  read_fn: Callable[[State, NewFeatures], State],
) -> State:
  """The last state of `read_fn`, `(state, new) -> state`, on the hidden states that a drafter has not read.

  It takes at most `PREFILL_CHUNK` of a row at a time. The drafter has read int32 `[B]` of each row and lacks at most
  `num_new`; ValueError if the context holds no tokens or no features.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NetworkDrafter(DrawingDrafter):
  """A network that reads the text and the target's hidden states."""

  params: Mapping[str, Any]
  config: Any = static_field()
  vocab_size: int = static_field()
  reads_tokens = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenStatesDrafter(NetworkDrafter):
  """One whose state is that of the text; guesses leave nothing in it."""

  @property
  def reads_target(self) -> bool:
    return 'embedding' not in self.params

  @property
  def feature_layers(self) -> tuple[int, ...]:
    return self.config.feature_layers

  @abc.abstractmethod
  def extend(self, state: Any, context: DraftContext, num_new: int) -> Any:
    """The state of the whole text, given that of a shorter one, which lacks at most `num_new` tokens, static."""

  def commit(self, state: Any, context: DraftContext, commitment: Commitment) -> Any:
    return self.extend(state, context, commitment.path.shape[1])

  def over_target(self, logits: jax.Array) -> jax.Array:
    """Logits `[..., Vd]` over the target's vocabulary, `[..., V]`; -inf for tokens that cannot be guessed."""
    return over_vocabulary(logits, self.params['target_ids'] if self.config.is_reduced else None, self.vocab_size)

  def for_decoding(self) -> Self:
    return dataclasses.replace(self, params=kernels_for_decoding(self.params))


def embed(params: Mapping[str, Any], context: DraftContext, tokens: jax.Array) -> jax.Array:
  """Embedded tokens `[..., D]`, by the drafter's own `embedding` `[V, D]`, else the target's; ValueError without
  either.
  """
  if 'embedding' in params:
    return jnp.take(params['embedding'], tokens, axis=0)
  target = context.target
  if target.embed_fn is None:
    raise ValueError('this head reads embeddings of the target, but the target has no embed_fn')
  return target.embed_fn(target.params, tokens)
