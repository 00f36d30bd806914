"""A drafter that guesses a block in one pass (DFlash, DFlash 2, DSpark): one call of its network, whatever the tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import Estimates, ScoredNodes, draw_tree
from spectr_jax.draft.new_features import NewFeatures, embed, read_features
from spectr_jax.kernels.matrices import kernels_for_decoding
from spectr_jax.kernels.vocabulary import over_vocabulary
from spectr_jax.model import KVCache
from spectr_jax.models import layers, one_pass
from spectr_jax.models.head import check_target_ids
from spectr_jax.models.one_pass_config import OnePassConfig
from spectr_jax.proposal import Proposal

# The state is the cache of the context: keys and values of all tokens of the text but the last, whose hidden states the
# target has not computed yet.


def _extend(
  params: Mapping[str, Any], cache: KVCache, context: DraftContext, num_new: int, *, config: OnePassConfig
) -> KVCache:
  """The cache with the whole text's context, given that of a shorter text, which lacks at most `num_new` tokens."""

  def add(cache, new: NewFeatures):
    cache = one_pass.read_context(params, config, new.features, new.positions, cache)
    path = jnp.broadcast_to(jnp.arange(new.positions.shape[1]), new.positions.shape)
    return cache.commit(path, new.num_kept)

  return read_features(context, cache.lengths, num_new, cache, add)


def _init(params, context: DraftContext, cache_size: int, *, config: OnePassConfig) -> KVCache:
  # Without the barrier XLA folds attention over the cache of zeros, which takes longer than the rest of compilation.
  cache = jax.lax.optimization_barrier(one_pass.init_cache(config, len(context.lengths), cache_size))
  num_read = 0 if context.tokens is None else context.tokens.shape[1] - 1
  return cache if num_read == 0 else _extend(params, cache, context, num_read, config=config)


def _reprompt(
  params, cache: KVCache, context: DraftContext, num_kept: jax.Array, num_new: int, *, config: OnePassConfig
) -> KVCache:
  # The last token of a text is not in the cache, so a prompt that the text begins with drops one more.
  kept = jnp.minimum(jnp.minimum(num_kept, cache.lengths), context.lengths - 1)
  return _extend(params, cache.truncate(kept), context, num_new, config=config)


def _propose(
  params, cache: KVCache, context: DraftContext, request: DraftRequest, *, config: OnePassConfig
) -> Proposal:
  if context.tokens is None:
    raise ValueError('a drafter of one pass begins at the last token: the context must hold tokens')
  root = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
  masks = jnp.full((len(root), config.num_slots - 1), config.mask_id, root.dtype)
  embedded = embed(params, context, jnp.concatenate([root, masks], axis=1))
  outputs = one_pass.run_block(params, config, embedded, cache)
  block = one_pass.begin(params, config, outputs, root, request.tree.max_depth)
  ids = params['target_ids'] if config.is_reduced else None

  def after(tokens, depth, states):
    logits, states = one_pass.logits_after(params, config, block, depth, tokens, states)
    return over_vocabulary(logits, ids, context.target.vocab_size), states

  def score(states, nodes: ScoredNodes):
    if states is None:
      return None, after(nodes.tokens, nodes.depth, None)[0]
    above = jnp.take_along_axis(states, nodes.above[..., None], axis=1)
    logits, own = after(nodes.tokens, nodes.depth, above)
    assert own is not None  # a network with states returns them
    return jax.lax.dynamic_update_slice_in_dim(states, own, nodes.first, axis=1), logits

  def estimate(tokens, depth):
    return one_pass.confidence_after(params, config, block, depth, tokens)

  root_logits, state = after(root, jnp.int32(0), block.state)
  states = None  # of every parent node, for a sequential part that has them
  if state is not None:
    num_parents = len(request.tree.parent_nodes)
    states = jnp.zeros((len(root), num_parents, state.shape[-1]), state.dtype).at[:, :1].set(state)
  estimates = None
  if config.confidence is not None:
    estimates = Estimates(estimate(root, jnp.int32(0))[:, 0], lambda nodes: estimate(nodes.tokens, nodes.depth))
  proposal, _ = draw_tree(request, root_logits[:, 0], states, score, estimates)
  return dataclasses.replace(proposal, state=cache)


def _commit(params, cache: KVCache, context: DraftContext, commitment: Commitment, *, config: OnePassConfig) -> KVCache:
  return _extend(params, cache, context, commitment.path.shape[1], config=config)


@functools.lru_cache
def _functions(config: OnePassConfig):
  """The functions of a `Drafter`, by field; one object per configuration, so that equal networks share programs."""
  return {
    'init_fn': functools.partial(_init, config=config),
    'propose_fn': functools.partial(_propose, config=config),
    'commit_fn': functools.partial(_commit, config=config),
    'reprompt_fn': functools.partial(_reprompt, config=config),
  }


def one_pass_drafter(params: Mapping[str, Any], config: OnePassConfig, vocab_size: int) -> Drafter:
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
  return Drafter(
    params=params,
    vocab_size=vocab_size,
    max_depth=config.max_depth,
    reads_tokens=True,
    reads_target='embedding' not in params,
    feature_layers=config.feature_layers,
    estimates=config.confidence is not None,
    for_decoding_fn=kernels_for_decoding,
    **_functions(config),
  )


def config_of(drafter: Drafter) -> OnePassConfig:
  """The configuration that a drafter was made with.

  Args:
    drafter: The drafter.

  Raises:
    ValueError: It was not made by `one_pass_drafter`.
  """
  if not isinstance(drafter.init_fn, functools.partial) or drafter.init_fn.func is not _init:
    raise ValueError('not a drafter made by one_pass_drafter')
  return drafter.init_fn.keywords['config']
