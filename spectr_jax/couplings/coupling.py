"""The interface of couplings: the probability that each of n candidates becomes the next token."""

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
    accept_probs: `[n]`, the probability that each candidate is the accepted one. They sum to at most 1.
    residual: `[V]`, unnormalised weights of the token that is emitted when no candidate is accepted.
  """

  accept_probs: jax.Array
  residual: jax.Array


class Coupling(Protocol):
  """A pure function from two distributions and n candidates to an `Outcome`. It is hashable; its options are fields.

  Averaged over the candidates, the emitted token must have the distribution `target_probs`, whether it was accepted or
  drawn from the residual.

  A coupling may have further members, which `Walk` uses if they exist:

  - `numbers`, a method with the same arguments as a call. It returns named arrays, scalar or `[n]`, that explain the
    outcome, such as a threshold. They are displayed and decide nothing.
  - `explanation`, an `Explanation`, which is displayed as well.
  - `takes_mixed`, whether candidates may be given beside drawn ones. A call then takes a fifth argument `is_given`,
    bool `[n]`, which candidates are given; so does `numbers`.
  - `is_biased`, whether the coupling deviates from the target's distribution on purpose.
  - `with_epsilon`, a method that returns the same coupling with another amount of over-acceptance.
  """

  @property
  def proposal_rules(self) -> tuple[type[ProposalRule], ...]:
    """The proposal rules for whose candidates the coupling is correct. A field or a class attribute is enough."""
    ...

  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Outcome:
    """The outcome at one position.

    Args:
      draft_probs: `[V]`, the distribution p that the candidates were drawn from.
      target_probs: `[V]`, the distribution q to be emitted.
      candidates: int32 `[n]`, tokens in the order drawn.
      is_valid: bool `[n]`, which candidates exist. Any number of them may, at any places.
    """
    ...


def one_after_another(accept: jax.Array, is_valid: jax.Array) -> jax.Array:
  """The probability that each candidate is the first accepted one.

  Args:
    accept: `[n]`, the probability that a candidate is accepted after all earlier ones were rejected.
    is_valid: bool `[n]`, which candidates exist.

  Returns:
    `[n]`. For example, (.5, .5, 1) gives (.5, .25, .25).
  """
  accept = jnp.where(is_valid, accept, 0)
  missed = jnp.cumprod(1 - accept)
  return accept * jnp.concatenate([jnp.ones_like(missed[:1]), missed[:-1]])


def ratio(target_probs: jax.Array, draft_probs: jax.Array) -> jax.Array:
  """The ratio q/p, and 0 where p is 0, so that a candidate that cannot have been drawn is never accepted.

  Args:
    target_probs: Probabilities q of some tokens under the target, of any shape.
    draft_probs: Probabilities p of the same tokens under the draft, of the same shape.
  """
  is_possible = draft_probs > 0
  return jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), 0)
