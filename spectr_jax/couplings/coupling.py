"""What a coupling is: one token from n candidates, as a law."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from spectr_jax.proposal import ProposalRule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
  """What may happen at one position, given its candidates.

  Attributes:
    accept_probs: `[n]`, the probability that each candidate is the one accepted; they sum to at most 1.
    residual: `[V]`, weights of the token that is emitted when none is accepted, not normalised.
  """

  accept_probs: jax.Array
  residual: jax.Array


class Coupling(Protocol):
  """A pure function from two laws and n candidates to an `Outcome`; hashable, options are fields.

  Averaged over the candidates' law, the token that is accepted or drawn from the residual must follow `target_probs`.
  A coupling may have a method `numbers`, of the same arguments, that gives arrays, scalar or `[n]`, which explain its
  outcome by name: a threshold, a weight. They are shown, and decide nothing.

  Attributes:
    proposal_rules: The types of rules whose candidates it is right for.
  """

  proposal_rules: tuple[type[ProposalRule], ...]

  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Outcome:
    """The outcome at one position.

    Args:
      draft_probs: `[V]`, the law p the candidates were drawn from.
      target_probs: `[V]`, the law q to be emitted.
      candidates: int32 `[n]`, tokens in the order drawn.
      is_valid: bool `[n]`, which of them exist; any number, at any place.
    """


def one_after_another(accept: jax.Array, is_valid: jax.Array) -> jax.Array:
  """Probability that each candidate is the first accepted, when i is accepted with `accept[i]` on its turn; `[n]`."""
  accept = jnp.where(is_valid, accept, 0)
  missed = jnp.cumprod(1 - accept)
  return accept * jnp.concatenate([jnp.ones_like(missed[:1]), missed[:-1]])


def ratio(target_probs: jax.Array, draft_probs: jax.Array) -> jax.Array:
  """q/p, and 0 where p is 0: a candidate that cannot have been drawn is never accepted."""
  is_possible = draft_probs > 0
  return jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), 0)
