"""A smaller language model as drafter."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.model import Model
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafterState:
  """A drafting model's cache and the committed tokens that are not in it.

  The cache lags two tokens behind the committed text, and each round begins with a forward of both. So it never lacks a
  token, even after the last accepted guess was a leaf, on which drafting does not run the model.

  Attributes:
    cache: The model's cache.
    tail: int32 `[B, 2]`, the last two committed tokens; the second is the root of the next tree.
    has_previous: bool `[B]`, whether the first of them exists; False only right after a prompt of one token.
    root_position: int32 `[B]`, the position of the root.
    tokens: int32 `[B, N]`, the guesses of the round in progress; None between rounds.
  """

  cache: Any
  tail: jax.Array
  has_previous: jax.Array
  root_position: jax.Array
  tokens: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Level:
  """The parent nodes of one depth, as ranges of `tree.parent_nodes` relative to the first of the depth.

  Attributes:
    width: How many they are.
    groups: (start, width, number of children) of neighbours with equally many children.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelDrafter:
  """Drafts with a `Model`, depth by depth; the model runs on every node that has children."""

  model: Model

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def max_length(self) -> int | None:
    return self.model.max_length

  def init(self, prompts, prompt_lengths, max_length) -> ModelDrafterState:
    cache = self.model.init_cache_fn(prompts.shape[0], max_length)
    cache = self.model.prefill(prompts, jnp.maximum(prompt_lengths - 2, 0), cache)
    places = jnp.maximum(prompt_lengths[:, None] - jnp.array([2, 1]), 0)
    return ModelDrafterState(
      cache=cache,
      tail=jnp.take_along_axis(prompts, places, axis=1),
      has_previous=prompt_lengths > 1,
      root_position=prompt_lengths - 1,
    )

  def propose(self, keys, state, tree, sampling, rule) -> Proposal:
    batch_size = state.tail.shape[0]
    parent_nodes, first_child, depths = map(jnp.asarray, (tree.parent_nodes, tree.first_child, tree.depths))
    # Pending slots of the cache: the token before the root, then the parent nodes in order.
    among_parents = tree.ancestors[np.ix_(tree.parent_nodes, tree.parent_nodes)]
    exists = jnp.pad(state.has_previous[:, None], ((0, 0), (0, len(tree.parent_nodes))), constant_values=True)
    mask = jnp.pad(jnp.asarray(among_parents), ((0, 0), (1, 0)), constant_values=True) & exists[:, None]
    # Where there is no previous token its slot sees itself alone, and nothing sees it.
    previous_mask = jnp.zeros_like(mask[:, :1]).at[:, :, 0].set(True)

    def score(carry, first, width):
      """Keeps the laws of `width` parent nodes from the `first` on, whose tokens are known."""
      cache, tokens, probs = carry
      nodes = jax.lax.dynamic_slice_in_dim(parent_nodes, first, width)
      positions = state.root_position[:, None] + depths[nodes]
      rows = jax.lax.dynamic_slice_in_dim(mask, first, width, axis=1)
      # Below a node that does not exist anything may stand.
      output = self.model.apply(jnp.maximum(tokens[:, nodes - 1], 0), positions, rows, cache)
      laws = logits_to_probs(output.logits, sampling)
      return output.cache, tokens, jax.lax.dynamic_update_slice_in_dim(probs, laws, first, axis=1)

    def draw(carry, first, width, num_children):
      """Draws `num_children` children for each of `width` parent nodes from the `first` on, whose laws are known."""
      cache, tokens, probs = carry
      parents = jax.lax.dynamic_slice_in_dim(parent_nodes, first, width)
      children = first_child[parents]
      laws = jax.lax.dynamic_slice_in_dim(probs, first, width, axis=1)
      draw_row = jax.vmap(lambda row_key, law, child: rule(row_key, law, child, num_children), (None, 0, 0))
      drawn = jax.vmap(draw_row, (0, 0, None))(keys[:, depths[parents[0]]], laws, children).reshape(batch_size, -1)
      return cache, jax.lax.dynamic_update_slice_in_dim(tokens, drawn, children[0] - 1, axis=1), probs

    def descend(carry, first, level):
      for start, width, num_children in level.groups:
        carry = draw(carry, first + start, width, num_children)
      return carry

    positions = jnp.maximum(state.root_position[:, None] + jnp.array([-1, 0]), 0)
    output = self.model.apply(state.tail, positions, jnp.concatenate([previous_mask, mask[:, :1]], axis=1), state.cache)
    laws = logits_to_probs(output.logits[:, 1:], sampling)
    tokens = jnp.zeros((batch_size, tree.num_nodes), jnp.int32)
    probs = jnp.zeros((batch_size, len(tree.parent_nodes), self.vocab_size), laws.dtype).at[:, :1].set(laws)
    root, *levels = _levels(tree)
    carry = descend((output.cache, tokens, probs), 0, root)
    first = 1
    for level, run in itertools.groupby(levels):
      # Depths of one shape, as in long chains, are one loop: the program does not grow with the tree's depth.
      count = len(list(run))

      def one_depth(i, carry, level=level, first=first):
        at = first + i * level.width
        return descend(score(carry, at, level.width), at, level)

      with jax.named_scope('depths'):
        carry = jax.lax.fori_loop(0, count, one_depth, carry)
      first += count * level.width
    cache, tokens, probs = carry
    return Proposal(tokens, probs, dataclasses.replace(state, cache=cache, tokens=tokens))

  def commit(self, state, path, num_accepted, features, *, tree, next_token) -> ModelDrafterState:
    del features
    slots = jnp.asarray(tree.law_index)[path[:, :-1]] + 1
    slots = jnp.pad(slots, ((0, 0), (1, 0)))  # the previous token stands in slot 0
    missing = jnp.where(state.has_previous, 0, 1)
    places = jnp.minimum(jnp.arange(path.shape[1]) + missing[:, None], path.shape[1] - 1)
    is_active = num_accepted > 0
    cache = self.model.commit_fn(
      state.cache,
      jnp.take_along_axis(slots, places, axis=1),
      jnp.where(is_active, num_accepted - missing, 0),
    )
    guesses = jnp.take_along_axis(state.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    on_path = jnp.concatenate([state.tail[:, 1:], guesses], axis=1)
    last = jnp.take_along_axis(on_path, jnp.maximum(num_accepted - 1, 0)[:, None], axis=1)
    tail = jnp.concatenate([last, next_token[:, None]], axis=1)
    return ModelDrafterState(
      cache=cache,
      tail=jnp.where(is_active[:, None], tail, state.tail),
      has_previous=state.has_previous | is_active,
      root_position=state.root_position + num_accepted,
    )
