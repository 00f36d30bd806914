"""A drafter that is a head on the target's hidden states (EAGLE, MTP): it runs on each token once per round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.draft.drawing import ScoredNodes, draw_by_depth, draw_tree
from spectr_jax.draft.new_features import NewFeatures, embed, read_features
from spectr_jax.kernels.matrices import kernels_for_decoding
from spectr_jax.kernels.vocabulary import over_vocabulary
from spectr_jax.model import KVCache
from spectr_jax.models import head, layers
from spectr_jax.models.head import HeadConfig
from spectr_jax.proposal import Proposal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  """A head after the committed text.

  The head runs on pairs: a token, and the target's hidden states of the token before it. Pair i belongs to token i + 1.

  Attributes:
    cache: The head's keys and values of all pairs of the committed text.
    hidden: `[B, embed_dim]`, its output at the last pair, 0 for a text of one token.
    output: `[B, embed_dim]`, likewise the input of its output head.
  """

  cache: KVCache
  hidden: jax.Array
  output: jax.Array


def _extend(
  params: Mapping[str, Any],
  state: _State,
  context: DraftContext,
  num_new: int,
  *,
  config: HeadConfig,
) -> _State:
  """The state with all pairs of the text, given that of a shorter text.

  Args:
    params: The head's parameters.
    state: After the first tokens of each row's text.
    context: The texts and features.
    num_new: The most pairs that a row lacks, static.
    config: The head.
  """

  def add(state, new: NewFeatures):
    size = new.next_tokens.shape[1]
    embedded = embed(params, context, new.next_tokens)
    hidden = head.hidden_of_features(params, config, new.features)
    causal = jnp.tril(jnp.ones((size, size), bool))
    hidden, output, cache = head.apply(params, config, embedded, hidden, new.positions, causal, state.cache)
    last = jnp.maximum(new.num_kept - 1, 0)[:, None, None]

    def latest(new_rows, old):
      return jnp.where(new.num_kept[:, None] > 0, jnp.take_along_axis(new_rows, last, axis=1)[:, 0], old)

    cache = cache.commit(jnp.broadcast_to(jnp.arange(size), new.next_tokens.shape), new.num_kept)
    return _State(cache, latest(hidden, state.hidden), latest(output, state.output))

  return read_features(context, state.cache.lengths, num_new, state, add)


def _init(params, context: DraftContext, cache_size: int, *, config: HeadConfig) -> _State:
  batch_size, width = len(context.lengths), config.block.embed_dim
  nothing = jnp.zeros((batch_size, width), config.block.dtype)
  # Without the barrier XLA folds attention over the cache of zeros, which takes longer than the rest of compilation.
  cache = jax.lax.optimization_barrier(head.init_cache(config, batch_size, cache_size))
  state = _State(cache, nothing, nothing)
  num_pairs = 0 if context.tokens is None else context.tokens.shape[1] - 1
  return state if num_pairs == 0 else _extend(params, state, context, num_pairs, config=config)


def _reprompt(
  params, state: _State, context: DraftContext, num_kept: jax.Array, num_new: int, *, config: HeadConfig
) -> _State:
  # The last pair runs anew, since the state needs its output.
  kept = jnp.maximum(num_kept - 2, 0)
  state = dataclasses.replace(state, cache=state.cache.truncate(jnp.minimum(kept, state.cache.lengths)))
  state = dataclasses.replace(state, hidden=jnp.zeros_like(state.hidden), output=jnp.zeros_like(state.output))
  return _extend(params, state, context, num_new + 1, config=config)


def target_logits(params: Mapping[str, Any], config: HeadConfig, output: jax.Array, vocab_size: int) -> jax.Array:
  """Logits over the target's vocabulary, `[..., V]`; -inf for tokens that the head cannot guess.

  Args:
    params: The head's parameters.
    config: The head.
    output: `[..., embed_dim]`, from `head.advance`.
    vocab_size: V.
  """
  ids = params['target_ids'] if config.is_reduced else None
  return over_vocabulary(head.unembed(params, output), ids, vocab_size)


def _propose_at_once(
  params, state: _State, context: DraftContext, request: DraftRequest, *, config: HeadConfig
) -> Proposal:
  """The guesses of a head that reads a mask token in place of guesses (P-EAGLE): one pass, whatever the tree."""
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
  proposal = draw_by_depth(request, target_logits(params, config, outputs, context.target.vocab_size))
  return dataclasses.replace(proposal, state=state)


def _propose(params, state: _State, context: DraftContext, request: DraftRequest, *, config: HeadConfig) -> Proposal:
  if config.mask_id is not None:
    return _propose_at_once(params, state, context, request, config=config)
  tree, vocab_size = request.tree, context.target.vocab_size
  # The root's pair is committed. The pending ones are those of the other nodes with children.
  num_parents = len(tree.parent_nodes)

  def score(carry, nodes: ScoredNodes):
    cache, outputs = carry
    positions = jnp.broadcast_to(context.lengths[:, None] - 2 + nodes.depth, nodes.tokens.shape)
    embedded = embed(params, context, nodes.tokens)
    hidden = jnp.take_along_axis(outputs, nodes.above[..., None], axis=1)
    hidden, output, cache = head.apply(params, config, embedded, hidden, positions, nodes.seen[:, :, 1:], cache)
    outputs = jax.lax.dynamic_update_slice_in_dim(outputs, hidden, nodes.first, axis=1)
    return (cache, outputs), target_logits(params, config, output, vocab_size)

  outputs = jnp.zeros((len(context.lengths), num_parents, config.block.embed_dim), state.hidden.dtype)
  carry = state.cache.with_pending_slots(num_parents - 1), outputs.at[:, 0].set(state.hidden)
  root_logits = target_logits(params, config, state.output, vocab_size)
  proposal, _ = draw_tree(request, root_logits, carry, score)
  # What the head makes of its own guesses is dropped: kept ones are read again with the target's hidden states.
  return dataclasses.replace(proposal, state=state)


def _commit(params, state: _State, context: DraftContext, commitment: Commitment, *, config: HeadConfig) -> _State:
  return _extend(params, state, context, commitment.path.shape[1], config=config)


@functools.lru_cache
def _functions(config: HeadConfig):
  """The functions of a `Drafter`, by field; one object per configuration, so that equal heads share programs."""
  return {
    'init_fn': functools.partial(_init, config=config),
    'propose_fn': functools.partial(_propose, config=config),
    'commit_fn': functools.partial(_commit, config=config),
    'reprompt_fn': functools.partial(_reprompt, config=config),
  }


def head_drafter(params: Mapping[str, Any], config: HeadConfig, vocab_size: int) -> Drafter:
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
  return Drafter(
    params=params,
    vocab_size=vocab_size,
    reads_tokens=True,
    reads_target='embedding' not in params,
    feature_layers=config.feature_layers,
    for_decoding_fn=kernels_for_decoding,
    **_functions(config),
  )


def config_of(drafter: Drafter) -> HeadConfig:
  """The configuration that a drafter was made with.

  Args:
    drafter: The drafter.

  Raises:
    ValueError: It was not made by `head_drafter`.
  """
  if not isinstance(drafter.init_fn, functools.partial) or drafter.init_fn.func is not _init:
    raise ValueError('not a drafter made by head_drafter')
  return drafter.init_fn.keywords['config']
