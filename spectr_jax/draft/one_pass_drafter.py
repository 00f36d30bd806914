"""A drafter that guesses a block in one pass (DFlash, DFlash 2, DSpark): one call of its network, whatever the tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import Estimates, ScoredNodes, draw_tree
from spectr_jax.draft.new_features import HiddenStatesDrafter, NewFeatures, embed, read_features
from spectr_jax.model import KVCache, static_field
from spectr_jax.models import layers, one_pass
from spectr_jax.models.head import check_target_ids
from spectr_jax.models.one_pass_config import OnePassConfig
from spectr_jax.proposal import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnePassDrafter(HiddenStatesDrafter):
  """A drafter that draws a whole tree from one pass of its network, see `one_pass_drafter`.

  Its state is the cache of the context: keys and values of all tokens of the text but the last, whose hidden states the
  target has not computed yet.
  """

  config: OnePassConfig = static_field()
  lookahead = 0

  @property
  def max_depth(self) -> int:
    return self.config.max_depth

  @property
  def estimates(self) -> bool:
    return self.config.confidence is not None

  def init(self, batch_size: int, cache_size: int) -> KVCache:
    return self.config.backbone.empty_cache(batch_size, cache_size)

  def read(self, state: KVCache, context: DraftContext, num_kept: jax.Array, num_new: int) -> KVCache:
    # The last token of a text is not in the cache, so a prompt that the text begins with drops one more.
    kept = jnp.minimum(jnp.minimum(num_kept, state.lengths), context.lengths - 1)
    return self.extend(state.truncate(kept), context, num_new)

  def extend(self, state: KVCache, context: DraftContext, num_new: int) -> KVCache:
    def add(cache, new: NewFeatures):
      cache = one_pass.read_context(self.params, self.config, new.features, new.positions, cache)
      path = jnp.broadcast_to(jnp.arange(new.positions.shape[1]), new.positions.shape)
      return cache.commit(path, new.num_kept)

    return read_features(context, state.lengths, num_new, state, add)

  def propose(self, state: KVCache, context: DraftContext, request: DraftRequest) -> Proposal:
    params, config = self.params, self.config
    if context.tokens is None:
      raise ValueError('a drafter of one pass begins at the last token: the context must hold tokens')
    root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    masks = jnp.full((len(root), config.num_slots - 1), config.mask_id, root.dtype)
    embedded = embed(params, context, jnp.concatenate([root, masks], axis=1))
    outputs = one_pass.run_block(params, config, embedded, state)
    block = one_pass.begin(params, config, outputs, root, request.tree.max_depth)

    def after(tokens, depth, states):
      logits, states = one_pass.logits_after(params, config, block, depth, tokens, states)
      return self.over_target(logits), states

    def score(states, nodes: ScoredNodes):
      if states is None:
        return None, after(nodes.tokens, nodes.depth, None)[0]
      above = jnp.take_along_axis(states, nodes.above[..., None], axis=1)
      logits, own = after(nodes.tokens, nodes.depth, above)
      assert own is not None  # a network with states returns them
      return jax.lax.dynamic_update_slice_in_dim(states, own, nodes.first, axis=1), logits

    def estimate(tokens, depth):
      return one_pass.confidence_after(params, config, block, depth, tokens)

    root_logits, own = after(root, jnp.int32(0), block.state)
    states = None  # of every parent node, for a sequential part that has them
    if own is not None:
      num_parents = len(request.tree.parent_nodes)
      states = jnp.zeros((len(root), num_parents, own.shape[-1]), own.dtype).at[:, :1].set(own)
    estimates = None
    if self.estimates:
      estimates = Estimates(estimate(root, jnp.int32(0))[:, 0], lambda nodes: estimate(nodes.tokens, nodes.depth))
    proposal, _ = draw_tree(request, root_logits[:, 0], states, score, growth=self.growth, estimates=estimates)
    return dataclasses.replace(proposal, state=state)


def one_pass_drafter(params: Mapping[str, Any], config: OnePassConfig, vocab_size: int) -> OnePassDrafter:
  """A drafter that draws a whole tree from one pass of its network.

  A round runs the network's layers once over W slots, and computes keys and values for the tokens that the round before
  has committed. What is left per depth is one product of the sequential part, if there is one. Without it (DFlash) the
  guesses of different depths are independent of each other: greedy rows do better with the likeliest paths, given
  (`growing` with `Likeliest`).

  Args:
    params: The parameters, see `one_pass.param_shapes`.
    config: The network. Trees are at most `config.max_depth` deep.
    vocab_size: V, the target's.

  Raises:
    ValueError: A parameter is missing, surplus, or of another shape, or an id is not in the vocabulary.
  """
  layers.check_params(params, one_pass.param_shapes(config))
  check_target_ids(params, config.is_reduced, config.backbone.vocab_size, vocab_size)
  sequential = config.markov or config.selector
  if sequential is not None and sequential.num_tokens < vocab_size:
    raise ValueError(f'the sequential part reads {sequential.num_tokens} tokens, but the target has {vocab_size}')
  if config.num_embedded is None and config.mask_id >= vocab_size:
    raise ValueError(f"mask_id {config.mask_id} is not among the target's {vocab_size} tokens")
  return OnePassDrafter(params, config, vocab_size)


def config_of(drafter: Drafter) -> OnePassConfig:
  """The configuration of a drafter that `one_pass_drafter` made; ValueError for others."""
  if not isinstance(drafter, OnePassDrafter):
    raise ValueError('not a drafter made by one_pass_drafter')
  return drafter.config
