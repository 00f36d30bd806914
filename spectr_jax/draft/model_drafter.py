"""A smaller language model as a drafter."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import DrawingDrafter, ScoredNodes, draw_tree
from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """A drafting model's cache, which lags two tokens behind the committed text, and the tokens that are not in it.

  Each round begins with a forward call on both, so none is ever missing, even after a round whose last accepted guess
  is a leaf, on which drafting does not run the model.
  """

  cache: Any
  tail: jax.Array  # int32 [B, 2], the last two committed tokens; the second is the root of the next tree
  has_previous: jax.Array  # bool [B], whether the first of them exists; False only right after a prompt of one token
  tokens: jax.Array | None = None  # int32 [B, N], the guesses of the round in progress; None between rounds


def _slot_of(tree: TokenTree) -> np.ndarray:
  """The pending slot of each parent node, int32 `[N + 1]`; slot 0 holds the token before the root."""
  return tree.parent_index + 1


def _with_previous(state: _State, seen: jax.Array) -> jax.Array:
  """The pending slots that nodes see, `[B, W, R + 1]`: the token before the root, if there is one, and `seen`."""
  previous = jnp.broadcast_to(state.has_previous[:, None, None], (*seen.shape[:2], 1))
  return jnp.concatenate([previous, seen], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CachedModelDrafter(DrawingDrafter):
  """A drafter that draws from one model, whose cache is the field `cache` of its state."""

  model: Model

  @property
  def can_truncate(self) -> bool:
    return self.model.can_truncate

  @property
  def keeps_ends(self) -> bool:
    return self.model.keeps_ends

  def shardings(self, sharding) -> Self:
    return dataclasses.replace(
      super().shardings(sharding), model=sharding.of_model(self.model, is_divided=sharding.is_draft_divided)
    )

  def state_shardings(self, sharding, state: Any) -> Any:
    rows = sharding.of_rows(dataclasses.replace(state, cache=None))
    cache = sharding.of_cache(state.cache, self.model, role='draft', is_divided=sharding.is_draft_divided)
    return dataclasses.replace(rows, cache=cache)

  def for_decoding(self) -> Self:
    return dataclasses.replace(self, model=self.model.for_decoding())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter(CachedModelDrafter):
  """A drafter that draws from a model, see `model_drafter`."""

  lookahead = 0

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def context_length(self) -> int | None:
    return self.model.context_length

  def init(self, batch_size: int, cache_size: int) -> _State:
    nothing = jnp.zeros((batch_size, 2), jnp.int32)
    return _State(self.model.init_cache_fn(batch_size, cache_size), nothing, nothing[:, 0] > 0)

  def read(self, state: _State, context: DraftContext, num_kept: jax.Array, num_new: int) -> _State:
    prompts, lengths = context.tokens, context.lengths
    if prompts is None:
      raise ValueError('a model drafter reads the prompts: the context must hold tokens')
    # The cache lacks two tokens of its text, one more than the target's.
    kept = jnp.maximum(num_kept - 1, 0)
    cache, _ = self.model.prefill_rest(prompts, jnp.maximum(lengths - 2, 0), state.cache, kept, num_new)
    tail = jnp.take_along_axis(prompts, jnp.maximum(lengths[:, None] - jnp.array([2, 1]), 0), axis=1)
    return _State(cache, tail, has_previous=lengths > 1)

  def propose(self, state: _State, context: DraftContext, request: DraftRequest) -> Proposal:
    root_position = context.lengths[:, None] - 1

    def score(cache, nodes: ScoredNodes):
      positions = jnp.broadcast_to(root_position + nodes.depth, nodes.tokens.shape)
      output = self.model.apply(nodes.tokens, positions, _with_previous(state, nodes.seen), cache)
      return output.cache, output.logits

    positions = jnp.maximum(root_position + jnp.array([-1, 0]), 0)
    places = jnp.arange(len(request.tree.parent_nodes) + 1)
    # If there is no previous token, its slot attends to itself alone and no other slot attends to it.
    mask = (places == 0) & jnp.ones((len(root_position), 1, 1), bool)
    mask = jnp.concatenate([mask, (places == 1) | (places == 0) & state.has_previous[:, None, None]], axis=1)
    output = self.model.apply(state.tail, positions, mask, state.cache)
    proposal, cache = draw_tree(request, output.logits[:, 1], output.cache, score, growth=self.growth)
    return dataclasses.replace(proposal, state=dataclasses.replace(state, cache=cache, tokens=proposal.tokens))

  def commit(self, state: _State, context: DraftContext, commitment: Commitment) -> _State:
    del context
    if state.tokens is None:
      raise ValueError("a model drafter commits the state of its proposal, which holds the round's guesses")
    path, num_committed = commitment.path, commitment.num_committed
    # The round scored the token before the root, then parent nodes. All committed tokens but the last move to the
    # cache: the token before the root, if there is one, and the path down to the last but one.
    slots = jnp.pad(jnp.asarray(_slot_of(commitment.tree))[path[:, :-1]], ((0, 0), (1, 0)))
    missing = jnp.where(state.has_previous, 0, 1)
    places = jnp.minimum(jnp.arange(path.shape[1]) + missing[:, None], path.shape[1] - 1)
    is_active = num_committed > 0
    cache = self.model.commit_fn(
      state.cache,
      jnp.take_along_axis(slots, places, axis=1),
      jnp.where(is_active, num_committed - missing, 0),
    )
    guesses = jnp.take_along_axis(state.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    on_path = jnp.concatenate([state.tail[:, 1:], guesses], axis=1)
    last = jnp.take_along_axis(on_path, jnp.maximum(num_committed - 1, 0)[:, None], axis=1)
    tail = jnp.concatenate([last, commitment.next_token[:, None]], axis=1)
    return _State(
      cache=cache, tail=jnp.where(is_active[:, None], tail, state.tail), has_previous=state.has_previous | is_active
    )


def model_drafter(model: Model) -> ModelDrafter:
  """A drafter that draws from a model, depth by depth. It has the target's vocabulary, and runs on all parents."""
  return ModelDrafter(model)


def as_drafter(draft: Model | Drafter | None) -> Drafter | None:
  """The drafter of a draft as `generate` takes it: a model becomes a drafter, all else passes through."""
  return model_drafter(draft) if isinstance(draft, Model) else draft
