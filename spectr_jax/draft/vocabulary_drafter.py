"""A smaller language model as a drafter whose vocabulary is not the target's.

Source: "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(Timor et al. 2025), Algorithm 4, token-level intersection. Here the draft's text stays on the device: it is the
concatenation of the committed tokens, each in the draft's tokens by a table, and not the tokenizer's encoding of the
whole text. This costs some acceptance, and no exactness.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import Commitment, DraftContext, DraftRequest
from spectr_jax.draft.drawing import ScoredNodes, draw_tree
from spectr_jax.draft.model_drafter import CachedModelDrafter
from spectr_jax.draft.shared_vocabulary import DraftTexts, SharedVocabulary
from spectr_jax.model import PREFILL_CHUNK, Model, ModelOutput
from spectr_jax.proposal import Proposal

# Draft tokens that a round reads at a time. Most rounds have fewer new ones, which are then read in one call.
_READ = 4
_LEAST_ROOM = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """A draft's cache, and how much of each row's text it has read."""

  cache: Any
  start: jax.Array  # int32 [B], the first of the target's tokens that was read: 0 unless the text became too long
  num_read: jax.Array  # int32 [B], the draft's tokens in the cache
  num_pending: jax.Array | None = None  # int32 [B], those that the round has read besides; None between rounds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VocabularyDrafter(CachedModelDrafter):
  """A drafter that draws from a model with another vocabulary, see `vocabulary_drafter`."""

  vocabulary: SharedVocabulary
  reads_tokens = True

  @property
  def vocab_size(self) -> int:
    return len(self.vocabulary.num_draft_ids)

  def room(self, cache_size: int) -> int:
    """The most of its tokens that the draft holds of a text for which the target's cache has `cache_size` tokens."""
    room = max(2 * cache_size, _LEAST_ROOM)
    return room if self.model.context_length is None else min(room, self.model.context_length)

  def _begin_anew(self, state: _State, context: DraftContext, most: int, room: int) -> tuple[_State, DraftTexts]:
    """The state and the texts; of a text of more than `most` tokens its end alone, at most half of the room."""
    if context.tokens is None:
      raise ValueError('a drafter with another vocabulary reads the text: the context must hold tokens')
    texts = self.vocabulary.texts(context.tokens, context.lengths, state.start)
    is_long = texts.lengths > most
    before = jnp.pad(texts.ends[:, :-1], ((0, 0), (1, 0)))
    first = jnp.sum(texts.lengths[:, None] - before > room // 2, axis=1, dtype=jnp.int32)
    start = jnp.where(is_long, jnp.minimum(first, context.lengths - 1), state.start)
    num_read = jnp.where(is_long, 0, state.num_read)
    cache = self.model.truncate_fn(state.cache, num_read)
    return _State(cache, start, num_read), self.vocabulary.texts(context.tokens, context.lengths, start)

  def _call(
    self, model: Model, state: _State, texts: DraftTexts, num_new: jax.Array, size: int, num_slots: int
  ) -> tuple[ModelOutput, jax.Array]:
    """A call on the next `num_new` `[B]` tokens of texts, at most `size`, and the pending slots that these are."""
    offsets = jnp.arange(size, dtype=jnp.int32)
    is_new = offsets < num_new[:, None]
    positions = state.num_read[:, None] + offsets
    ids = jnp.where(is_new, self.vocabulary.ids_at(texts, positions), 0)
    slots = jnp.arange(num_slots)
    # Slots behind the new tokens attend to themselves, and nothing attends to them.
    own = slots == offsets[:, None]
    is_before = (slots < offsets[:, None]) & (slots < num_new[:, None, None])
    return model.apply(ids, positions, own | is_before, state.cache), offsets

  def _read(self, state: _State, texts: DraftTexts, goal: jax.Array, size: int) -> _State:
    """The state with the first `goal` `[B]` tokens of each text in the cache, of which it may lack any number."""

    def read(state):
      num_new = jnp.clip(goal - state.num_read, 0, size)
      output, offsets = self._call(self.model, state, texts, num_new, size, size)
      cache = self.model.commit_fn(output.cache, jnp.broadcast_to(offsets, (len(goal), size)), num_new)
      return dataclasses.replace(state, cache=cache, num_read=state.num_read + num_new)

    return jax.lax.while_loop(lambda state: jnp.any(state.num_read < goal), read, state)

  def init(self, batch_size: int, cache_size: int) -> _State:
    nothing = jnp.zeros(batch_size, jnp.int32)
    return _State(self.model.init_cache_fn(batch_size, self.room(cache_size)), nothing, nothing)

  def read(self, state: _State, context: DraftContext, num_kept: jax.Array, num_new: int) -> _State:
    """The state with all of each prompt but the last of the target's tokens, which the first round reads."""
    if context.tokens is None:
      raise ValueError('a drafter with another vocabulary reads the text: the context must hold tokens')
    room = self.room(context.tokens.shape[1])
    start = jnp.where(num_kept > state.start, state.start, 0)
    texts = self.vocabulary.texts(context.tokens, context.lengths, start)
    kept = jnp.where(num_kept > state.start, texts.num_down_to(num_kept), 0)
    state = _State(state.cache, start, jnp.minimum(kept, state.num_read))
    state, texts = self._begin_anew(state, context, room - room // 4, room)
    goal = texts.num_down_to(context.lengths - 1)
    num_read = jnp.minimum(state.num_read, goal)
    state = dataclasses.replace(state, cache=self.model.truncate_fn(state.cache, num_read), num_read=num_read)
    return self._read(state, texts, goal, min(PREFILL_CHUNK, 2 * num_new, room))

  def _read_last(
    self, state: _State, texts: DraftTexts, num_pending: jax.Array, num_slots: int
  ) -> tuple[Any, jax.Array]:
    """The cache with the last `num_pending` tokens of each text pending, and the logits `[B, Vd]` after the last.

    A vocabulary may be most of a small model, so its output head runs on the last token alone where that is known.
    """
    model, last = self.model, jnp.maximum(num_pending - 1, 0)[:, None, None]
    unembed = None if model.features_fn is None else model.unembed_fn
    reader = model if unembed is None else model.with_features((-1,))
    output, _ = self._call(reader, state, texts, num_pending, _READ, num_slots)
    if unembed is None or output.features is None:
      return output.cache, jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
    hidden = jnp.take_along_axis(output.features[:, :, 0], last, axis=1)
    return output.cache, unembed(model.params, hidden)[:, 0]

  def propose(self, state: _State, context: DraftContext, request: DraftRequest) -> Proposal:
    assert context.tokens is not None
    vocabulary, room = self.vocabulary, self.room(context.tokens.shape[1])
    state, texts = self._begin_anew(state, context, room - request.tree.max_depth, room)
    # All but the last few tokens, if there are more; these are read with room for the tree behind them.
    state = self._read(state, texts, jnp.maximum(texts.lengths - _READ, 0), _READ)
    num_pending = jnp.clip(texts.lengths - state.num_read, 0, _READ)
    num_slots = _READ + len(request.tree.parent_nodes) - 1
    cache, root_logits = self._read_last(state, texts, num_pending, num_slots)
    is_read = jnp.arange(_READ) < num_pending[:, None, None]

    def score(cache, nodes: ScoredNodes):
      positions = jnp.broadcast_to(texts.lengths[:, None] - 1 + nodes.depth, nodes.tokens.shape)
      seen = jnp.broadcast_to(is_read, (*nodes.tokens.shape, _READ))
      mask = jnp.concatenate([seen, nodes.seen[:, :, 1:]], axis=2)
      output = self.model.apply(vocabulary.last_ids(nodes.tokens), positions, mask, cache)
      return output.cache, vocabulary.restrict(output.logits)

    logits = vocabulary.restrict(root_logits)
    proposal, cache = draw_tree(request, logits, cache, score, growth=self.growth)
    return dataclasses.replace(proposal, state=dataclasses.replace(state, cache=cache, num_pending=num_pending))

  def commit(self, state: _State, context: DraftContext, commitment: Commitment) -> _State:
    if state.num_pending is None or context.tokens is None:
      raise ValueError('a drafter with another vocabulary commits the state of its proposal, and reads the text')
    path, num_committed, tree = commitment.path, commitment.num_committed, commitment.tree
    # What was read, and accepted nodes that were scored: all but the last, which may be a leaf. Below a node that was
    # given and is not shared the draft has seen another text; it reads from there again.
    places = jnp.arange(path.shape[1] - 1)
    tokens = jnp.take_along_axis(
      context.tokens,
      jnp.clip((context.lengths - num_committed)[:, None] + places, 0, context.tokens.shape[1] - 1),
      axis=1,
    )
    is_kept = (places < num_committed[:, None] - 2) & self.vocabulary.is_shared(tokens)
    num_kept = jnp.sum(jnp.cumprod(is_kept, axis=1), axis=1, dtype=jnp.int32)
    num_read = state.num_pending[:, None]
    slots = jnp.arange(_READ + path.shape[1] - 1)
    nodes = jnp.take_along_axis(path, jnp.clip(slots - num_read + 1, 0, path.shape[1] - 1), axis=1)
    slots = jnp.where(slots < num_read, slots, jnp.maximum(_READ - 1 + jnp.asarray(tree.parent_index)[nodes], 0))
    num_new = jnp.where(num_committed > 0, state.num_pending + num_kept, 0)
    cache = self.model.commit_fn(state.cache, slots.astype(jnp.int32), num_new)
    return _State(cache, state.start, state.num_read + num_new)


def vocabulary_drafter(model: Model, vocabulary: SharedVocabulary) -> VocabularyDrafter:
  """A drafter that draws from a model with another vocabulary than the target's, depth by depth.

  The draft's distribution is restricted to the tokens that the target has as well, and renormalised, so that guesses
  are the target's tokens, and every method and tree is as lossless as with any draft. The draft reads the committed
  tokens in its own, by the tables of `vocabulary`. A text that has more of them than the draft's context holds is cut:
  the draft goes on with its end.

  Args:
    model: The draft.
    vocabulary: What its vocabulary and the target's share, see `SharedVocabulary.make` and `fit_draft`.

  Raises:
    ValueError: The tables are for another number of tokens than the model has, or its cache cannot truncate.
  """
  if len(vocabulary.to_target) != model.vocab_size:
    raise ValueError(f'the shared vocabulary has {len(vocabulary.to_target)} tokens, the draft {model.vocab_size}')
  if not model.can_truncate:
    raise ValueError('a draft with another vocabulary reads texts anew: its model needs a truncate_fn')
  return VocabularyDrafter(model, vocabulary)
