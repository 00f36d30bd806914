"""The seam of couplings: one token from n candidates, as probabilities."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from spectr_jax.proposal import ProposalRule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
  """The possible outcomes at one position, given its candidates.

  Attributes:
    accept_probs: `[n]`, the probability that each candidate is the one accepted; they sum to at most 1.
    residual: `[V]`, weights of the token that is emitted when none is accepted, not normalised.
  """

  accept_probs: jax.Array
  residual: jax.Array


class Coupling(Protocol):
  """A pure function from two distributions and n candidates to an `Outcome`; hashable, options are fields.

  Averaged over the candidates' distribution, the token that is accepted or drawn from the residual must follow
  `target_probs`.

  A coupling may have more members, which `Walk` uses where they are there:

  - `numbers`, a method with the arguments of a call: arrays, scalar or `[n]`, that explain the outcome by name, such as
    a threshold. They are shown and decide nothing.
  - `explanation`, an `Explanation`, which is shown as well.
  - `is_biased`, whether it leaves the target's distribution on purpose.
  - `with_epsilon`, a method that gives the same coupling with another amount of over-acceptance.
  """

  @property
  def proposal_rules(self) -> tuple[type[ProposalRule], ...]:
    """The types of rules whose candidates it is right for; a field or a class attribute will do."""
    ...

  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Outcome:
    """The outcome at one position.

    Args:
      draft_probs: `[V]`, the distribution p that the candidates were drawn from.
      target_probs: `[V]`, the distribution q to be emitted.
      candidates: int32 `[n]`, tokens in the order drawn.
      is_valid: bool `[n]`, which of them exist; any number, at any place.
    """
    ...


def one_after_another(accept: jax.Array, is_valid: jax.Array) -> jax.Array:
  """Probability that each candidate is the first accepted.

  Args:
    accept: `[n]`, the probability that a candidate is accepted once all before it were rejected.
    is_valid: bool `[n]`, which of them exist.

  Returns:
    `[n]`. For example, (.5, .5, 1) gives (.5, .25, .25).
  """
  accept = jnp.where(is_valid, accept, 0)
  missed = jnp.cumprod(1 - accept)
  return accept * jnp.concatenate([jnp.ones_like(missed[:1]), missed[:-1]])


def ratio(target_probs: jax.Array, draft_probs: jax.Array) -> jax.Array:
  """q/p, and 0 where p is 0: a candidate that cannot have been drawn is never accepted.

  Args:
    target_probs: Probabilities q of some tokens under the target, of any shape.
    draft_probs: Those of the same tokens under the draft.
  """
  is_possible = draft_probs > 0
  return jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), 0)
