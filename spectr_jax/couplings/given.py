"""The coupling of given candidates, which a rule chose without sampling."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Explanation, Outcome, ratio
from spectr_jax.proposal import Independent, WithoutReplacement
from spectr_jax.sampling import positive_part_or


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GivenSet:
  """The set D of the given candidates of a position."""

  is_there: jax.Array  # scalar, whether any candidate is given
  is_first: jax.Array  # bool `[n]`, given candidates that are no copy of an earlier one
  is_member: jax.Array  # bool `[n]`, candidates, given or drawn, whose token is given
  mass: jax.Array  # q(D)
  shares: jax.Array  # `[n]`, q(x) / q(D) of given candidates, 0 for copies; equal if q(D) is 0, where none is accepted


def given_set(candidates: jax.Array, target_probs: jax.Array, is_given: jax.Array) -> GivenSet:
  """The set of the given candidates of a position: tokens, q of each, and which exist and are given; `[n]` each."""
  is_same = candidates[:, None] == candidates
  is_first = is_given & ~jnp.any(jnp.tril(is_same, -1) & is_given, axis=-1)
  own = jnp.where(is_first, target_probs, 0)
  mass = jnp.sum(own)
  shares = jnp.where(mass > 0, ratio(own, mass), is_first / jnp.maximum(jnp.sum(is_first), 1))
  is_member = jnp.any(is_same & is_given, axis=-1)
  return GivenSet(jnp.any(is_given), is_first, is_member, mass, shares.astype(target_probs.dtype))


def with_given(probs: jax.Array, target_probs: jax.Array, tokens: jax.Array, scale: jax.Array) -> jax.Array:
  """The distribution `[V]` of picked tokens, with `scale` q at the given `tokens` `[n]`, which are V elsewhere."""
  own = target_probs[jnp.minimum(tokens, len(probs) - 1)] * scale
  return probs.at[tokens].set(own, mode='drop')


@dataclasses.dataclass(frozen=True)
class Given(Coupling):
  """Accepts each distinct candidate x with probability q(x), else draws from q without the candidates.

  The draft's distribution is not used. For every fixed set D of candidates the emitted token has the distribution q: a
  candidate x is emitted with probability q(x), any other token with probability (1 - q(D)) q(x) / (1 - q(D)). So the
  candidates may come from anywhere, such as a matched n-gram or the draft's likeliest tokens. No coupling accepts more
  than q(D), since every accepted token lies in D. With a single candidate this is the maximal coupling with a point
  mass in place of p.

  For example, candidates (3, 1, 3) with q(3) = .5 and q(1) = .2 are accepted with probabilities (.5, .2, 0).
  """

  proposal_rules = (Independent, WithoutReplacement)
  explanation = Explanation(
    'Each candidate x is accepted with probability q(x).',
    'q without the candidates',
    'A candidate is accepted as often as the target would have written it. If none is, the token is drawn from all'
    ' others.',
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    is_same = candidates[:, None] == candidates
    is_copy = jnp.any(jnp.tril(is_same, -1) & is_valid, axis=-1)
    accept_probs = jnp.where(is_valid & ~is_copy, target_probs[candidates], 0)
    taken = jnp.where(is_valid, candidates, target_probs.shape[-1])  # V indexes nothing
    return Outcome(accept_probs, positive_part_or(target_probs.at[taken].set(0, mode='drop'), target_probs))
