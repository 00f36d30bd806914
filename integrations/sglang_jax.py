"""sglang-jax: its tree layout, first child and next sibling, in this library's, and back.

The engine numbers a request's nodes from 0, the last committed token. `next_token[i]` is the first child of node i and
`next_sibling[i]` its next sibling, -1 for none. Its trees hold the draft's likeliest tokens, which are given guesses.
"""

import jax
import jax.numpy as jnp

from spectr_jax import TokenTree, verify


def parents_of(next_token, next_sibling):
  """int32 `[B, N]`, the parent of each node, -1 for the root and for nodes that hang nowhere, from the first child and
  the next sibling of each node, int32 `[B, N]` each, or -1.
  """
  size = next_token.shape[1]
  nodes = jnp.arange(size)
  first = jnp.where(next_token[:, None, :] == nodes[:, None], nodes, -1).max(axis=2)  # whose first child it is
  before = jnp.where(next_sibling[:, None, :] == nodes[:, None], nodes, -1).max(axis=2)  # whose next sibling it is
  for _ in range(size.bit_length()):  # twice as far along the siblings with every turn
    reached = jnp.where(before >= 0, jnp.take_along_axis(first, jnp.maximum(before, 0), axis=1), -1)
    first = jnp.where(first >= 0, first, reached)
    before = jnp.where(before >= 0, jnp.take_along_axis(before, jnp.maximum(before, 0), axis=1), -1)
  return first


def pointers_of(parents):
  """The engine's `next_token` and `next_sibling` of parents, int32 `[B, N]` each; siblings are in the order of
  their numbers.
  """
  nodes, none = jnp.arange(parents.shape[1]), parents.shape[1]
  is_child = parents[:, None, :] == nodes[:, None]
  next_token = jnp.where(is_child, nodes, none).min(axis=2)
  is_later = (parents[:, :, None] == parents[:, None, :]) & (nodes > nodes[:, None]) & (parents[:, :, None] >= 0)
  next_sibling = jnp.where(is_later, nodes, none).min(axis=2)
  return tuple(jnp.where(pointers == none, -1, pointers) for pointers in (next_token, next_sibling))


def verify_tree(key, tokens, next_token, next_sibling, target_probs, *, widths, method='race_traversal'):
  """Verifies trees in the engine's layout.

  Args:
    key: As for `spectr_jax.verify`.
    tokens: int32 `[B, N]`, the nodes' tokens; that of the root is not read.
    next_token, next_sibling: int32 `[B, N]`.
    target_probs: `[B, N, V]`, the target's distributions after the nodes.
    widths: The most nodes at depth 1, 2, ..., static; nodes beyond them are left out, with all below them.
    method: A method that takes given guesses and trees of the rows' own.

  Returns:
    int32 `[B, D + 1]`, the accepted nodes, the root's 0 first, then -1; int32 `[B, D + 1]`, the tokens after them, and
    -1; int32 `[B]`, the number of accepted guesses.
  """
  bounds, parents = TokenTree.slots(widths), parents_of(next_token, next_sibling)
  size = bounds.num_nodes + 1
  slots = jax.vmap(lambda row: _slots_of(row, widths))(parents)
  at = jax.vmap(lambda values, index: jnp.where(index < 0, -1, values[index]))
  nodes = jax.vmap(lambda row: jnp.full(size, -1).at[row].set(jnp.arange(len(row)), mode='drop'))(
    jnp.where(slots < 0, size, slots)
  )
  probs = jnp.take_along_axis(target_probs, jnp.maximum(nodes, 0)[..., None], axis=1)
  own_parents = at(slots, at(parents, nodes))[:, 1:]
  verified = verify(key, bounds, at(tokens, nodes)[:, 1:], None, probs, parents=own_parents, method=method)
  return jnp.pad(at(nodes, verified.path), ((0, 0), (1, 0))), verified.tokens, verified.num_accepted


def _slots_of(parents, widths):
  """Of one row: int32 `[N]`, each node's slot in `TokenTree.slots(widths)`; -1 for nodes that have none."""
  slots, above, start = jnp.where(jnp.arange(len(parents)) == 0, 0, -1), 0, 1
  for width in widths:
    of_parents = jnp.where(parents < 0, -1, slots[parents])
    is_here = (of_parents >= above) & (of_parents < start)
    rank = jnp.cumsum(is_here) - 1
    slots = jnp.where(is_here & (rank < width), start + rank, slots)
    above, start = start, start + width
  return slots
