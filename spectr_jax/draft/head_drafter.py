"""A drafter that is a head on the target's hidden states (EAGLE, MTP): it runs on each token once per round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import ScoredNodes, draw_by_depth, draw_tree
from spectr_jax.draft.new_features import HiddenStatesDrafter, NewFeatures, embed, read_features
from spectr_jax.model import KVCache, static_field
from spectr_jax.models import head, layers
from spectr_jax.models.head import HeadConfig
from spectr_jax.proposal import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """A head after the committed text; pair i is token i + 1 and the target's hidden states of the token before it."""

  cache: KVCache  # of all pairs
  hidden: jax.Array  # [B, embed_dim], the head's output at the last pair, 0 for a text of one token
  output: jax.Array  # likewise the input of its output head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadDrafter(HiddenStatesDrafter):
  """A drafter that draws from a head, see `head_drafter`."""

  config: HeadConfig = static_field()
  lookahead = 1

  def init(self, batch_size: int, cache_size: int) -> _State:
    block = self.config.block
    nothing = jnp.zeros((batch_size, block.embed_dim), block.dtype)
    return _State(block.empty_cache(batch_size, cache_size), nothing, nothing)

  def read(self, state: _State, context: DraftContext, num_kept: jax.Array, num_new: int) -> _State:
    # The last pair runs anew, since the state needs its output.
    kept = jnp.maximum(num_kept - 2, 0)
    cache = state.cache.truncate(jnp.minimum(kept, state.cache.lengths))
    state = _State(cache, jnp.zeros_like(state.hidden), jnp.zeros_like(state.output))
    return self.extend(state, context, num_new + 1)

  def extend(self, state: _State, context: DraftContext, num_new: int) -> _State:
    def add(state, new: NewFeatures):
      size = new.next_tokens.shape[1]
      embedded = embed(self.params, context, new.next_tokens)
      hidden = head.hidden_of_features(self.params, self.config, new.features)
      causal = jnp.tril(jnp.ones((size, size), bool))
      hidden, output, cache = head.apply(self.params, self.config, embedded, hidden, new.positions, causal, state.cache)
      last = jnp.maximum(new.num_kept - 1, 0)[:, None, None]

      def latest(new_rows, old):
        return jnp.where(new.num_kept[:, None] > 0, jnp.take_along_axis(new_rows, last, axis=1)[:, 0], old)

      cache = cache.commit(jnp.broadcast_to(jnp.arange(size), new.next_tokens.shape), new.num_kept)
      return _State(cache, latest(hidden, state.hidden), latest(output, state.output))

    return read_features(context, state.cache.lengths, num_new, state, add)

  def propose(self, state: _State, context: DraftContext, request: DraftRequest) -> Proposal:
    draw = self._draw_by_depth if self.config.mask_id is None else self._draw_at_once
    # What the head makes of its own guesses is dropped: kept ones are read again with the target's hidden states.
    return dataclasses.replace(draw(state, context, request), state=state)

  def _logits(self, output: jax.Array) -> jax.Array:
    return self.over_target(head.unembed(self.params, output))

  def _draw_by_depth(self, state: _State, context: DraftContext, request: DraftRequest) -> Proposal:
    params, config = self.params, self.config
    # The root's pair is committed. The pending ones are those of the other nodes with children.
    num_parents = len(request.tree.parent_nodes)

    def score(carry, nodes: ScoredNodes):
      cache, outputs = carry
      positions = jnp.broadcast_to(context.lengths[:, None] - 2 + nodes.depth, nodes.tokens.shape)
      embedded = embed(params, context, nodes.tokens)
      hidden = jnp.take_along_axis(outputs, nodes.above[..., None], axis=1)
      hidden, output, cache = head.apply(params, config, embedded, hidden, positions, nodes.seen[:, :, 1:], cache)
      outputs = jax.lax.dynamic_update_slice_in_dim(outputs, hidden, nodes.first, axis=1)
      return (cache, outputs), self._logits(output)

    outputs = jnp.zeros((len(context.lengths), num_parents, config.block.embed_dim), state.hidden.dtype)
    carry = state.cache.with_pending_slots(num_parents - 1), outputs.at[:, 0].set(state.hidden)
    root_logits = self._logits(state.output)
    return draw_tree(request, root_logits, carry, score, growth=self.growth)[0]

  def _draw_at_once(self, state: _State, context: DraftContext, request: DraftRequest) -> Proposal:
    """The guesses of a head that reads a mask token in place of guesses (P-EAGLE): one pass, whatever the tree."""
    params, config = self.params, self.config
    assert config.mask_id is not None
    outputs = state.output[:, None]  # the root's pair is committed
    num_slots = request.tree.max_depth - 1
    if num_slots:
      shape = len(context.lengths), num_slots
      embedded = embed(params, context, jnp.full(shape, config.mask_id))
      features = params['mask_features'].reshape(1, 1, len(config.feature_layers), config.target_dim)
      hidden = head.hidden_of_features(params, config, jnp.broadcast_to(features, (*shape, *features.shape[2:])))
      positions = context.lengths[:, None] - 1 + jnp.arange(num_slots)
      causal = jnp.tril(jnp.ones((num_slots, num_slots), bool))
      _, more, _ = head.apply(params, config, embedded, hidden, positions, causal, state.cache)
      outputs = jnp.concatenate([outputs, more], axis=1)
    return draw_by_depth(request, self._logits(outputs), growth=self.growth)


def head_drafter(params: Mapping[str, Any], config: HeadConfig, vocab_size: int) -> HeadDrafter:
  """A drafter that draws from a head, depth by depth.

  A round runs the head on the tokens that the round before has committed, with the target's hidden states, and on every
  guess that has children, with its own; with `config.mask_id` once on mask tokens instead. Its state per row is the
  keys and values of its layers, and two vectors.

  Args:
    params: The head's parameters, see `head.param_shapes`.
    config: The head.
    vocab_size: V, the target's.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape, or an id is not in the vocabulary.
  """
  layers.check_params(params, head.param_shapes(config))
  if config.mask_id is not None and config.num_embedded is None and config.mask_id >= vocab_size:
    raise ValueError(f"mask_id {config.mask_id} is not among the target's {vocab_size} tokens")
  head.check_target_ids(params, config.is_reduced, config.block.vocab_size, vocab_size)
  return HeadDrafter(params, config, vocab_size)


def config_of(drafter: Drafter) -> HeadConfig:
  """The configuration of a drafter that `head_drafter` made; ValueError for others."""
  if not isinstance(drafter, HeadDrafter):
    raise ValueError('not a drafter made by head_drafter')
  return drafter.config
