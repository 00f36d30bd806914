"""Candidates: what a drafter hands to a verifier, and how children are drawn from a law."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from spectr_jax.sampling import draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
  """Guesses for every node of a tree, and the laws they were drawn from.

  A drafter makes it for a batch; a verifier sees one row, without the leading axis and with `state` None.

  Attributes:
    tokens: int32 `[B, N]`, the tokens of nodes 1..N.
    probs: `[B, R, V]`, the laws that the children of `tree.parent_nodes` were drawn from: after temperature, top-k and
      top-p, exactly as used.
    state: The drafter's state while the guesses are pending.
  """

  tokens: jax.Array
  probs: jax.Array
  state: Any = None


class ProposalRule(Protocol):
  """How the children of a node are drawn from its law; part of a method, since losslessness rests on it."""

  name: str

  def __call__(self, key: jax.Array, probs: jax.Array, first_child: jax.Array, num_children: int) -> jax.Array:
    """Draws children.

    Args:
      key: The round's key for drafting; keys are folded with node numbers, so that no two draws share noise.
      probs: `[V]`, the law after the parent.
      first_child: The number of the first child; the others follow.
      num_children: How many, static.

    Returns:
      int32 `[num_children]`.
    """

  def probability(self, probs: jax.Array, tokens: jax.Array) -> jax.Array:
    """Probability of drawing `tokens` `[num_children]`, in this order; for exact proofs."""


@dataclasses.dataclass(frozen=True)
class Independent:
  """Children are independent draws from the law, with replacement."""

  name: str = 'i.i.d.'

  def __call__(self, key, probs, first_child, num_children):
    def draw_child(child):
      return draw(jax.random.uniform(jax.random.fold_in(key, child), dtype=probs.dtype), probs)

    return jax.vmap(draw_child)(first_child + jnp.arange(num_children))

  def probability(self, probs, tokens):
    return jnp.prod(probs[tokens])
