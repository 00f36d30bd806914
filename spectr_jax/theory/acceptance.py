"""Exact acceptance probabilities of rules for one token from n independent candidates, on any vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spectr_jax.couplings.kseq import KSeq, any_accepted, overlap
from spectr_jax.couplings.race import Race
from spectr_jax.theory.arguments import whole_number

_KSEQ, _RACE = KSeq(), Race()


def _of_distributions(function):
  """Extends `function(p, q, num_drafts)` from `[V]` to `[..., V]` and checks the arguments."""

  @functools.wraps(function)
  def on_leading_axes(draft_probs, target_probs, num_drafts, **options):
    draft_probs, target_probs = jnp.asarray(draft_probs), jnp.asarray(target_probs)
    if draft_probs.shape != target_probs.shape or not draft_probs.shape[-1:] or not draft_probs.shape[-1]:
      raise ValueError(
        f'draft_probs and target_probs must have the same shape [..., V], V at least 1; got {draft_probs.shape} and'
        f' {target_probs.shape}'
      )
    number, dtype = whole_number(num_drafts, 'num_drafts'), jnp.result_type(draft_probs, target_probs, jnp.float32)

    def one(p, q):
      return function(p, q, number, **options)

    return jnp.vectorize(one, signature='(v),(v)->()')(draft_probs.astype(dtype), target_probs.astype(dtype))

  return on_leading_axes


@_of_distributions
def kseq_gamma(
  draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int, *, coupling: KSeq = _KSEQ
) -> jax.Array:
  """The least threshold gamma* for which K-SEQ is lossless: the root in [1, n] of 1 - (1 - beta)^n = gamma beta.

  Here beta = sum min(p, q/gamma) is the probability that one candidate is accepted. The coupling's search approaches
  the root from above, to within (n - 1) / 2^num_rounds.

  Source: SpecTr (Sun et al. 2023), Theorem 2 and equation (6). Left side minus right side falls in gamma; the paper
  says that it rises.

  It is `[...]`, from 1 to n, for distributions p and q, `[..., V]`; ValueError for other shapes or n below 1.
  `KSeq(num_rounds=60)` gives all digits of float64.
  """
  return coupling.gamma(draft_probs, target_probs, jnp.asarray(num_drafts))


@_of_distributions
def kseq_acceptance(
  draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int, *, coupling: KSeq = _KSEQ
) -> jax.Array:
  """The acceptance of K-SEQ: 1 - (1 - beta)^n at the threshold that `coupling` uses.

  At gamma* it is at least (1 - 1/e) of `optimal_acceptance`.

  Source: SpecTr (Sun et al. 2023), Algorithm 2 and Theorem 2.

  It is `[...]` for distributions p and q, `[..., V]`; ValueError for other shapes or n below 1.
  """
  num_candidates = jnp.asarray(num_drafts)
  gamma = coupling.gamma(draft_probs, target_probs, num_candidates)
  return any_accepted(overlap(draft_probs, target_probs, gamma), num_candidates)


@_of_distributions
def recursive_acceptance(draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int) -> jax.Array:
  """The acceptance of recursive rejection with replacement (SpecInfer, Miao et al. 2024, Algorithm 2).

  The residual of the target after each rejection does not depend on which tokens were rejected. So the acceptance
  probability follows from the two distributions alone.

  It is `[...]` for distributions p and q, `[..., V]`; ValueError for other shapes or n below 1.
  """

  def try_next(_, carry):
    rejected, residual = carry
    left = jnp.maximum(residual - draft_probs, 0)
    mass = jnp.sum(left)
    rejected *= 1 - jnp.sum(jnp.minimum(draft_probs, residual))
    return rejected, jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), residual)

  one = jnp.ones((), draft_probs.dtype)
  return 1 - jax.lax.fori_loop(0, num_drafts, try_next, (one, target_probs))[0]


@_of_distributions
def race_acceptance(
  draft_probs: jax.Array, target_probs: jax.Array, num_drafts: int, *, selection: Race = _RACE
) -> jax.Array:
  """The acceptance of the race: 1 - TV(pt, q), where pt is the distribution of the candidate that wins the race.

  The winner is coupled maximally with q.

  It is `[...]` for distributions p and q, `[..., V]`; ValueError for other shapes or n below 1.
  """
  candidates = jnp.zeros(num_drafts, jnp.int32)  # the winner's distribution does not depend on the tokens
  winner = selection(draft_probs, target_probs, candidates, jnp.ones(num_drafts, bool)).probs
  return jnp.sum(jnp.minimum(winner, target_probs))
