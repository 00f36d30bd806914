"""What a verifier decided and why, to be shown: the uniforms, and what they were compared with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decisions:
  """Choices among nodes, in the order in which they are made; T of them at most, between W nodes each.

  The shares of the nodes lie side by side from 0 on, in the order of `nodes`; the node in whose share the uniform falls
  is chosen, and none where it falls behind the last.

  Attributes:
    is_made: bool `[T]`; an entry where it is False means nothing.
    node: int32 `[T]`, where the choice is made: the node below which the others stand, or the one that is tested.
    nodes: int32 `[T, W]`, what could be chosen.
    is_valid: bool `[T, W]`, which of them exist.
    shares: `[T, W]`, the probability of each; 0 for those that do not exist. None if no uniform decides.
    uniform: `[T]`, in [0, 1), or None.
    chosen: int32 `[T]`, the node that is chosen, -1 for none.
    numbers: Arrays `[T]` or `[T, W]` that the shares come from, by name.
  """

  is_made: jax.Array
  node: jax.Array
  nodes: jax.Array
  is_valid: jax.Array
  shares: jax.Array | None
  uniform: jax.Array | None
  chosen: jax.Array
  numbers: dict[str, jax.Array]

  @classmethod
  def of_one(cls, *, is_made, node, share, uniform, is_chosen, numbers) -> Decisions:
    """A choice, without the leading axis, of one node or none."""
    return cls(
      is_made=is_made,
      node=node,
      nodes=node[None],
      is_valid=is_made[None],
      shares=share[None],
      uniform=uniform,
      chosen=jnp.where(is_chosen, node, -1),
      numbers=numbers,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
  """How a verdict came about, on one row.

  Attributes:
    decisions: What was decided, by kind: `accept` takes one of the candidates of a position or none, `pick` takes one
      without deciding whether it is kept, `keep` keeps the path down to a node, `race` compares arrival times.
    node: int32 scalar, the deepest accepted node.
    weights: `[V]`, of the next token, not normalised.
    uniform: Scalar, where in them the next token lies; None if it is not drawn by a uniform.
  """

  decisions: dict[str, Decisions]
  node: jax.Array
  weights: jax.Array
  uniform: jax.Array | None
