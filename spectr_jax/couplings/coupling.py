"""The interface of couplings: the probability that each of n candidates becomes the next token."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from spectr_jax.kernels.on_demand import where_needed
from spectr_jax.proposal import ProposalRule

_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class Explanation:
  """A description of how a verifier or a coupling decides, for readers of its decisions.

  The symbols are p for the draft's distribution, q for the target's, and u for a uniform number. Empty strings are not
  displayed.

  Attributes:
    rule: Sentences that say how candidates are judged.
    residual: The distribution of the next token if no candidate is accepted, up to normalization.
    plain: Two sentences without symbols that say what the rule does, displayed before it.
  """

  rule: str = ''
  residual: str = ''
  plain: str = ''


@dataclasses.dataclass(frozen=True)
class SelectionExplanation:
  """A description of how a selection picks, for the verifiers and couplings that are built on it.

  Attributes:
    path: A sentence that says how one candidate per position is picked.
    token: A sentence that says how a position is judged if the picked token is coupled maximally with the target.
    law: The symbol of the picked token's distribution.
    plain_path: A sentence without symbols in place of `path`.
    plain_token: Two sentences without symbols in place of `token`.
  """

  path: str = ''
  token: str = ''
  law: str = ''
  plain_path: str = ''
  plain_token: str = ''


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
  """The possible outcomes at one position, given its candidates.

  Attributes:
    accept_probs: `[n]`, the probability that each candidate is the accepted one. They sum to at most 1.
    residual: `[V]`, unnormalized weights of the token that is emitted when no candidate is accepted.
  """

  accept_probs: jax.Array
  residual: jax.Array


def checked_result(rule: Any, result: _Result, kind: type[_Result], **shapes: tuple[int, ...]) -> _Result:
  """The result of a rule; ValueError unless it is of a kind, and its attributes have the given shapes.

  A scalar in place of an array would be broadcast, and a biased rule come out of it.
  """
  name = type(rule).__name__
  if not isinstance(result, kind):
    raise ValueError(f'{name} must return {kind.__name__}, got {type(result).__name__}')
  for attribute, shape in shapes.items():
    own = jnp.shape(getattr(result, attribute))
    if own != shape:
      raise ValueError(f'{name} must return {kind.__name__} with {attribute} {list(shape)}, got {list(own)}')
  return result


class Coupling(abc.ABC):
  """A pure function from two distributions and n candidates to an `Outcome`.

  Averaged over the candidates, the emitted token must have the distribution `target_probs`, whether it was accepted or
  drawn from the residual. A subclass is a frozen dataclass whose fields are its options, so that it is hashable.

  Attributes:
    proposal_rules: The types of rules for whose candidates it is correct.
    takes_mixed: Whether candidates may be given beside drawn ones. A call and `numbers` then take a fifth argument
      `is_given`, bool `[n]`, which candidates are given.
    is_biased: Whether it deviates from the target's distribution on purpose.
    explanation: Words for its rule, for display.
  """

  proposal_rules: tuple[type[ProposalRule], ...]
  takes_mixed: bool = False
  is_biased: bool = False
  explanation: Explanation = Explanation()

  @abc.abstractmethod
  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Outcome:
    """The outcome at one position.

    `draft_probs` `[V]` is the distribution p that the candidates, int32 `[n]`, were drawn from, in the order drawn;
    `target_probs` `[V]` is the distribution q to be emitted. `is_valid`, bool `[n]`, says which candidates exist; any
    number of them may, at any places.
    """

  def numbers(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> dict[str, jax.Array]:
    """Named arrays, scalar or `[n]`, that explain the outcome of a call, such as a threshold; by default none."""
    del draft_probs, target_probs, candidates, is_valid
    return {}

  def with_epsilon(self, epsilon: float) -> Coupling:
    """The coupling with another amount of over-acceptance; by default itself, which never over-accepts."""
    del epsilon
    return self


class ThresholdCoupling(Coupling):
  """A coupling that needs of whole distributions one threshold, and then the candidates' probabilities alone.

  `Walk` finds the thresholds of several positions together where that is faster.
  """

  @abc.abstractmethod
  def gamma(self, draft_probs: jax.Array, target_probs: jax.Array, num_candidates: jax.Array) -> jax.Array:
    """The threshold of n candidates, a scalar; it is only called for n above 1, and is 1 for n = 1."""

  @abc.abstractmethod
  def accept_probs(
    self, draft_probs: jax.Array, target_probs: jax.Array, is_valid: jax.Array, gamma: jax.Array
  ) -> jax.Array:
    """The probability that each candidate is accepted, from p, q and `is_valid` of the candidates; `[n]` each."""

  @abc.abstractmethod
  def outcome(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array, gamma: jax.Array
  ) -> Outcome:
    """The outcome of a call, with the threshold `gamma`, a scalar."""

  def gamma_at(self, draft_probs: jax.Array, target_probs: jax.Array, is_valid: jax.Array) -> jax.Array:
    """The threshold at a position, a scalar; the arguments are those of a call."""
    num_candidates, one = jnp.maximum(jnp.sum(is_valid), 1), jnp.ones((), draft_probs.dtype)
    return where_needed(num_candidates > 1, self.gamma, one, draft_probs, target_probs, num_candidates)

  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Outcome:
    gamma = self.gamma_at(draft_probs, target_probs, is_valid)
    return self.outcome(draft_probs, target_probs, candidates, is_valid, gamma)


def one_after_another(accept: jax.Array, is_valid: jax.Array) -> jax.Array:
  """The probability `[n]` that each candidate is the first accepted one; (.5, .5, 1) gives (.5, .25, .25).

  `accept` `[n]` is the probability that it is accepted after all earlier ones were rejected.
  """
  accept = jnp.where(is_valid, accept, 0)
  missed = jnp.cumprod(1 - accept)
  return accept * jnp.concatenate([jnp.ones_like(missed[:1]), missed[:-1]])


def ratio(target_probs: jax.Array, draft_probs: jax.Array) -> jax.Array:
  """The ratio q/p, of any shape, and 0 where p is 0: a candidate that cannot have been drawn is never accepted."""
  is_possible = draft_probs > 0
  return jnp.where(is_possible, target_probs / jnp.where(is_possible, draft_probs, 1), 0)
