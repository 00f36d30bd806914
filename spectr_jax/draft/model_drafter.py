"""A smaller language model as a drafter."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafterState:
  """A drafting model's cache and the committed tokens that are not in it.

  The cache lags two tokens behind the committed text, and each round begins with a forward call on both. So no token is
  ever missing, even after a round whose last accepted guess is a leaf, on which drafting does not run the model.

  Attributes:
    cache: The model's cache.
    tail: int32 `[B, 2]`, the last two committed tokens; the second is the root of the next tree.
    has_previous: bool `[B]`, whether the first of them exists; False only right after a prompt of one token.
    tokens: int32 `[B, N]`, the guesses of the round in progress; None between rounds.
  """

  cache: Any
  tail: jax.Array
  has_previous: jax.Array
  tokens: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Level:
  """The parent nodes of one depth, as ranges of `tree.parent_nodes` relative to the first of the depth.

  In `TokenTree.from_parents((0, 0, 0, 1, 1, 2, 3, 3))` depth 1 has three parents, with 2, 1 and 2 children: the groups
  are (0, 1, 2), (1, 1, 1) and (2, 1, 2).

  Attributes:
    width: The number of parents.
    groups: (start, width, number of children) of runs of neighbours with equally many children.
  """

  width: int
  groups: tuple[tuple[int, int, int], ...]


def _levels(tree: TokenTree) -> list[_Level]:
  levels = []
  for _, nodes in itertools.groupby(tree.parent_nodes.tolist(), key=lambda node: tree.depths[node]):
    groups, start = [], 0
    for num_children, group in itertools.groupby(nodes, key=lambda node: int(tree.num_children[node])):
      width = len(list(group))
      groups.append((start, width, num_children))
      start += width
    levels.append(_Level(start, tuple(groups)))
  return levels


def _init(model: Model, context: DraftContext, cache_size: int) -> ModelDrafterState:
  prompts, lengths = context.tokens, context.lengths
  if prompts is None:
    raise ValueError('a model drafter starts from the prompts: its first context must hold tokens')
  cache = model.init_cache_fn(prompts.shape[0], cache_size)
  cache, _ = model.prefill(prompts, jnp.maximum(lengths - 2, 0), cache)
  places = jnp.maximum(lengths[:, None] - jnp.array([2, 1]), 0)
  return ModelDrafterState(cache, tail=jnp.take_along_axis(prompts, places, axis=1), has_previous=lengths > 1)


def _slot_of(tree: TokenTree) -> np.ndarray:
  """The pending slot of each parent node, int32 `[N + 1]`; slot 0 holds the token before the root."""
  return tree.law_index + 1


def _masks(state: ModelDrafterState, tree: TokenTree) -> tuple[jax.Array, jax.Array]:
  """The pending slots seen by the token before the root, `[B, 1, R + 1]`, and by the parent nodes, `[B, R, R + 1]`."""
  among_parents = tree.ancestors[np.ix_(tree.parent_nodes, tree.parent_nodes)]
  exists = jnp.pad(state.has_previous[:, None], ((0, 0), (0, len(tree.parent_nodes))), constant_values=True)
  mask = jnp.pad(jnp.asarray(among_parents), ((0, 0), (1, 0)), constant_values=True) & exists[:, None]
  # If there is no previous token, its slot attends to itself alone and no other slot attends to it.
  return jnp.zeros_like(mask[:, :1]).at[:, :, 0].set(True), mask


def _propose(model: Model, state: ModelDrafterState, context: DraftContext, request: DraftRequest) -> Proposal:
  tree, sampling, keys = request.tree, request.sampling, request.keys
  batch_size = state.tail.shape[0]
  root_position = context.lengths[:, None] - 1
  parent_nodes, first_child, depths = map(jnp.asarray, (tree.parent_nodes, tree.first_child, tree.depths))
  previous_mask, mask = _masks(state, tree)

  def score(carry, first, width):
    """Computes the distributions of `width` parent nodes from number `first` on, whose tokens are known."""
    cache, tokens, probs = carry
    nodes = jax.lax.dynamic_slice_in_dim(parent_nodes, first, width)
    rows = jax.lax.dynamic_slice_in_dim(mask, first, width, axis=1)
    # A node that does not exist has the token -1; nothing below it is ever accepted, so any valid id will do.
    output = model.apply(jnp.maximum(tokens[:, nodes - 1], 0), root_position + depths[nodes], rows, cache)
    laws = logits_to_probs(output.logits, sampling)
    return output.cache, tokens, jax.lax.dynamic_update_slice_in_dim(probs, laws, first, axis=1)

  def draw(carry, first, width, num_children):
    """Draws `num_children` children for each of `width` parent nodes from number `first` on."""
    cache, tokens, probs = carry
    parents = jax.lax.dynamic_slice_in_dim(parent_nodes, first, width)
    children = first_child[parents]
    laws = jax.lax.dynamic_slice_in_dim(probs, first, width, axis=1)
    draw_row = jax.vmap(lambda row_key, law, child: request.rule(row_key, law, child, num_children), (None, 0, 0))
    drawn = jax.vmap(draw_row, (0, 0, None))(keys[:, depths[parents[0]]], laws, children).reshape(batch_size, -1)
    return cache, jax.lax.dynamic_update_slice_in_dim(tokens, drawn, children[0] - 1, axis=1), probs

  def descend(carry, first, level):
    for start, width, num_children in level.groups:
      carry = draw(carry, first + start, width, num_children)
    return carry

  positions = jnp.maximum(root_position + jnp.array([-1, 0]), 0)
  output = model.apply(state.tail, positions, jnp.concatenate([previous_mask, mask[:, :1]], axis=1), state.cache)
  laws = logits_to_probs(output.logits[:, 1:], sampling)
  tokens = jnp.zeros((batch_size, tree.num_nodes), jnp.int32)
  probs = jnp.zeros((batch_size, len(tree.parent_nodes), model.vocab_size), laws.dtype).at[:, :1].set(laws)
  root, *levels = _levels(tree)
  carry = descend((output.cache, tokens, probs), 0, root)
  first = 1
  for level, run in itertools.groupby(levels):
    # Neighbouring depths of one shape, as in long chains, are one loop, so the program does not grow with the depth.
    count = len(list(run))

    def one_depth(i, carry, level=level, first=first):
      at = first + i * level.width
      return descend(score(carry, at, level.width), at, level)

    with jax.named_scope('depths'):
      carry = jax.lax.fori_loop(0, count, one_depth, carry)
    first += count * level.width
  cache, tokens, probs = carry
  return Proposal(tokens, probs, dataclasses.replace(state, cache=cache, tokens=tokens))


def _commit(model: Model, state: ModelDrafterState, context: DraftContext, commitment: Commitment) -> ModelDrafterState:
  del context
  if state.tokens is None:
    raise ValueError("a model drafter commits the state of its proposal, which holds the round's guesses")
  path, num_committed = commitment.path, commitment.num_committed
  # The round scored the token before the root, then parent nodes. All committed tokens but the last move to the cache:
  # the token before the root, if there is one, and the path down to the last but one.
  slots = jnp.pad(jnp.asarray(_slot_of(commitment.tree))[path[:, :-1]], ((0, 0), (1, 0)))
  missing = jnp.where(state.has_previous, 0, 1)
  places = jnp.minimum(jnp.arange(path.shape[1]) + missing[:, None], path.shape[1] - 1)
  is_active = num_committed > 0
  cache = model.commit_fn(
    state.cache,
    jnp.take_along_axis(slots, places, axis=1),
    jnp.where(is_active, num_committed - missing, 0),
  )
  guesses = jnp.take_along_axis(state.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
  on_path = jnp.concatenate([state.tail[:, 1:], guesses], axis=1)
  last = jnp.take_along_axis(on_path, jnp.maximum(num_committed - 1, 0)[:, None], axis=1)
  tail = jnp.concatenate([last, commitment.next_token[:, None]], axis=1)
  return ModelDrafterState(
    cache=cache, tail=jnp.where(is_active[:, None], tail, state.tail), has_previous=state.has_previous | is_active
  )


def _param_shardings(sharding, model: Model):
  return sharding.of_model(model, is_divided=sharding.is_draft_divided)


def _state_shardings(sharding, model: Model, state: ModelDrafterState):
  rows = sharding.of_rows(dataclasses.replace(state, cache=None))
  cache = sharding.of_cache(state.cache, model, role='draft', is_divided=sharding.is_draft_divided)
  return dataclasses.replace(rows, cache=cache)


def model_drafter(model: Model) -> Drafter:
  """A drafter that draws from a model, depth by depth. The model runs on every node that has children.

  Args:
    model: A model with the target's vocabulary.
  """
  return Drafter(
    params=model,
    init_fn=_init,
    propose_fn=_propose,
    commit_fn=_commit,
    vocab_size=model.vocab_size,
    context_length=model.context_length,
    param_shardings_fn=_param_shardings,
    state_shardings_fn=_state_shardings,
  )


def as_drafter(draft: Model | Drafter | None) -> Drafter | None:
  """The drafter of a draft as `generate` takes it: a model becomes a drafter, all else passes through."""
  return model_drafter(draft) if isinstance(draft, Model) else draft
