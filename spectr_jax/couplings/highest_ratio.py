"""Picks the candidate that the target prefers the most over the draft."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from spectr_jax.couplings.coupling import SelectionExplanation
from spectr_jax.couplings.selection import Pick, Selection


@dataclasses.dataclass(frozen=True)
class HighestRatio(Selection):
  """Picks the candidate with the highest q/p; of tokens with equal ratios that with the highest number.

  A token is picked if all n candidates are at most it in this order, and not all below it. So with F the cumulative sum
  of p in ascending order, the picked token is x with probability F(x)^n - F(before x)^n. `Race` comes closer to the
  target: this rule picks tokens of high ratios more often than the target uses them.

  Source: the order in which greedy multi-path block verification (Thomas and Pal 2026) picks a path.
  """

  explanation = SelectionExplanation(
    path='At each position the candidate with the highest q/p is picked; p̃ is the distribution of what is picked.',
    token='The candidate with the highest q/p is picked, and accepted with min(1, q/p̃), where p̃ is the distribution of'
    ' what is picked.',
    law='p̃',
    plain_path='At each position the candidate that the target prefers most over the draft is picked.',
    plain_token='The candidate that the target prefers most over the draft is picked, and only it is judged.',
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Pick:
    size, number = len(draft_probs), jnp.sum(is_valid)
    is_drawn = draft_probs > 0
    ratios = jnp.where(is_drawn, target_probs / jnp.where(is_drawn, draft_probs, 1), jnp.inf)
    order = jnp.argsort(ratios)
    mass = draft_probs[order]
    upto = jnp.cumsum(mass)
    total = upto[-1]
    # F(x)^n - F(before x)^n as p(x) times a sum of products, which cancels nothing.
    above, below = upto / total, jnp.maximum(upto - mass, 0) / total
    log_above = jnp.log(jnp.where(above > 0, above, 1))
    quotient = jnp.where(above > 0, below / jnp.where(above > 0, above, 1), 0)
    step = -jnp.expm1(number * jnp.log(jnp.where(quotient > 0, quotient, 1)))
    probs = jnp.exp(number * log_above) * jnp.where(quotient > 0, step, 1) * (mass > 0)
    probs = jnp.zeros(size, draft_probs.dtype).at[order].set(probs)
    probs = jnp.where(number > 1, probs, jnp.where(number > 0, draft_probs, 0))
    rank = jnp.zeros(size, jnp.int32).at[order].set(jnp.arange(size, dtype=jnp.int32))
    best = jnp.max(jnp.where(is_valid, rank[candidates], -1))
    is_best = is_valid & (rank[candidates] == best)
    share = is_best / jnp.maximum(jnp.sum(is_best), 1)
    return Pick(share.astype(draft_probs.dtype), probs, jnp.where(is_valid, probs[candidates], 0))
