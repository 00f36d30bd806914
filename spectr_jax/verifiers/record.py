"""Records of verdicts, for display: the uniform numbers, and the probabilities that they were compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decisions:
  """Up to T choices among W nodes each, in the order in which they are made.

  The shares of the nodes lie side by side from 0 on, in the order of `nodes`. The node in whose share the uniform falls
  is chosen; no node is chosen if it falls behind the last share.

  Attributes:
    is_made: bool `[T]`, the entries that are choices; all others are to be ignored.
    node: int32 `[T]`, the place of the choice: the node below which the others stand, or the one that is tested.
    nodes: int32 `[T, W]`, the nodes that could be chosen.
    is_valid: bool `[T, W]`, which of them exist.
    shares: `[T, W]`, the probability of each; 0 for those that do not exist. None if no uniform decides.
    uniform: `[T]`, in [0, 1), or None.
    chosen: int32 `[T]`, the node that is chosen, or -1 for none.
    numbers: Arrays `[T]` or `[T, W]` from which the shares are computed, by name.
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
  def of_one(
    cls,
    *,
    is_made: jax.Array,
    node: jax.Array,
    share: jax.Array,
    uniform: jax.Array,
    is_chosen: jax.Array,
    numbers: dict[str, jax.Array],
  ) -> Decisions:
    """A choice of one node or none, without the leading axis.

    Args:
      is_made: bool scalar, whether the entry is a choice.
      node: int32 scalar, the node that is tested.
      share: Scalar, the probability that it is chosen.
      uniform: Scalar in [0, 1) that the share is compared with.
      is_chosen: bool scalar, whether the node is chosen.
      numbers: Scalars by name.
    """
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
  """The decisions that led to a verdict on one row.

  Attributes:
    decisions: The decisions by kind: `accept` takes one of the candidates of a position or none, `pick` takes one
      without deciding whether it is kept, `keep` keeps the path down to a node, `race` compares arrival times. Empty
      if there was no guess.
    node: int32 scalar, the deepest accepted node.
    weights: `[V]`, the weights of the next token, not normalized.
    uniform: Scalar in [0, 1), by which the next token is drawn from them; None if it is not drawn by a uniform.
    credits: `[N + 1]`, the probability that each node or one below it is kept, once it is tried; None for verifiers
      that try no branches by credit.
  """

  decisions: dict[str, Decisions]
  node: jax.Array
  weights: jax.Array
  uniform: jax.Array | None
  credits: jax.Array | None = None


def run_steps(
  is_going: Callable[[Any], jax.Array],
  step: Callable[[Any], tuple[Any, Any]],
  carry: Any,
  *,
  num_steps: int,
  describe: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
  """Repeats `step` while `is_going`, and describes every step if a description is asked for.

  `verify` and `explain` of a verifier both run their steps here, so they make the same decisions.

  Args:
    is_going: `carry -> bool scalar`.
    step: `carry -> (next carry, seen)`, with a second value `seen` for `describe`.
    carry: The first carry.
    num_steps: The largest number of steps, and one more if the carry after the last is to be described.
    describe: `(number, carry, next carry, seen) -> arrays` for step `number`. Steps after the last are described too,
      with a carry that does not change any more. None to run without descriptions.

  Returns:
    The last carry, and the descriptions with a leading axis `[num_steps]`, or None.
  """
  if describe is None:
    return jax.lax.while_loop(is_going, lambda carry: step(carry)[0], carry), None

  def one(carry, number):
    following, seen = step(carry)
    described = describe(number, carry, following, seen)
    is_on = is_going(carry)
    return jax.tree.map(lambda new, old: jnp.where(is_on, new, old), following, carry), described

  return jax.lax.scan(one, carry, jnp.arange(num_steps))
