"""The threshold of K-SEQ: how much of the target one candidate covers, and the search for gamma*.

A CPU evaluates the excess at one point after another, an accelerator at many in one pass over the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.token_sums import token_sums

_SECTIONS_LOG2 = 4  # of the sections of a bracket in a pass of an accelerator


def overlap(draft_probs: jax.Array, target_probs: jax.Array, gamma: jax.Array) -> jax.Array:
  """The probability beta(gamma) = sum_x min(p(x), q(x)/gamma) that one candidate is accepted."""
  return jnp.sum(jnp.minimum(draft_probs, target_probs / gamma))


def any_accepted(beta: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """The probability 1 - (1 - beta)^n that any of n candidates is accepted, without cancellation for small beta."""
  return -jnp.expm1(num_candidates * jnp.log1p(-jnp.minimum(beta, 1)))


@operation
def solve_gamma(draft_probs: jax.Array, target_probs: jax.Array, num_candidates: jax.Array, *, num_rounds: int):
  """The threshold gamma*: the root in [1, n] of 1 - (1 - beta)^n = gamma beta(gamma), approached from above.

  The excess, left side minus right side, falls as gamma grows. K-SEQ is lossless for every gamma from the root up to n
  and for no gamma below the root. So the search returns the upper end of its last bracket. For example, with p = (.75,
  .25), q = (.5, .5) and n = 2 the excess is .1875 at 1 and -.25 at 2, and the root is (7 + sqrt(17)) / 8 = 1.390.

  It makes passes that each cut the bracket into equal sections and keep the one with the root. On a mesh a pass is one
  transfer between devices.

  `draft_probs` and `target_probs` are `[V]`; n may be traced. The bracket shrinks to (n - 1) / 2^num_rounds, as in so
  many rounds of a bisection. The result is in [1, n], 1 for n = 1.
  """
  one, number = jnp.ones((), draft_probs.dtype), num_candidates.astype(draft_probs.dtype)

  def shrink(_, points):
    betas = token_sums(_overlaps, [_overlaps_of_token], (draft_probs, target_probs), points)
    return narrow_sections(betas, points, number)

  num_passes = (num_rounds + _SECTIONS_LOG2 - 1) // _SECTIONS_LOG2
  return jax.lax.fori_loop(0, num_passes, shrink, sections(one[None], number[None], 2**_SECTIONS_LOG2))[-1]


def _overlaps(draft_probs, target_probs, gammas):
  # One by one: as a batch they would be sums over another layout, in which a TPU wants the distributions first.
  return jnp.stack([overlap(draft_probs, target_probs, gamma) for gamma in gammas])


def _overlaps_of_token(gammas):
  inverses = [1 / gamma for gamma in gammas]  # a product takes a fraction of a division's time

  def of_token(token):
    draft_prob, target_prob = token
    return [jnp.minimum(draft_prob, target_prob * inverse) for inverse in inverses]

  return of_token


def sections(low: jax.Array, high: jax.Array, num_sections: int) -> jax.Array:
  """The borders of equal sections, `[..., S + 1]`, of brackets `[..., 1]`; the last is exactly the upper end."""
  steps = jax.lax.broadcasted_iota(jnp.int32, (*low.shape[:-1], num_sections + 1), low.ndim - 1)
  return jnp.where(steps < num_sections, low + (high - low) * steps.astype(low.dtype) / num_sections, high)


@operation
def narrow_sections(betas: jax.Array, points: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """The sections of the section in which the excess 1 - (1 - beta)^n - gamma beta changes its sign, `[S + 1]`.

  `betas` are those at `points` `[S + 1]`, which ascend, without an excess at the last. Without one at the first, as for
  n = 1, the root is there.
  """
  return narrow_rows(betas, points, num_candidates[None], jnp.expm1)


def narrow_rows(betas, points, number, expm1_fn):
  """`narrow_sections`; `number` is `[1]`, and all arrays may have an axis of rows in front."""
  num_sections = points.shape[-1] - 1
  place = jax.lax.broadcasted_iota(jnp.int32, points.shape, points.ndim - 1)
  excess = -expm1_fn(number * jnp.log1p(-jnp.minimum(betas, 1))) - points * betas
  is_end = (excess <= 0) | (place == num_sections)
  first = jnp.min(jnp.where(is_end, place, num_sections), axis=-1, keepdims=True)

  def at(index):  # a sum with one term, which is one operation where an index is several
    return jnp.sum(jnp.where(place == index, points, 0), axis=-1, keepdims=True)

  return sections(at(jnp.maximum(first - 1, 0)), at(first), num_sections)


narrow_sections.register_kernel(
  'tpu', 'tpu.recursions:narrow_sections', takes=lambda betas, points, num_candidates: betas.dtype == jnp.float32
)


def _excess(draft_probs, target_probs, num_candidates, gamma):
  beta = overlap(draft_probs, target_probs, gamma)
  return any_accepted(beta, num_candidates) - gamma * beta


@solve_gamma.form('cpu')
def _by_chords(draft_probs, target_probs, num_candidates, *, num_rounds):
  """`solve_gamma` in rounds that each evaluate the excess at one point of the bracket, in one pass.

  The point lies near the zero of the chord between the ends, in the example 1.429. Its distance from the middle is
  limited, so that the next bracket is no wider than bisection's was four rounds earlier (the ITP method, Oliveira and
  Takahashi 2020). It never takes more than four rounds longer than bisection. On a CPU, with 32,000 tokens and n = 8,
  it takes .55 of its time.
  """
  dtype = draft_probs.dtype

  def excess(gamma):
    return _excess(draft_probs, target_probs, num_candidates, gamma)

  low, end = jnp.ones((), dtype), num_candidates.astype(dtype)
  low_excess = excess(low)
  # Without an excess at 1 the root is 1, as for n = 1.
  high = jnp.where(low_excess > 0, end, low)
  goal = (end - 1) / jnp.asarray(2.0**num_rounds, dtype)

  def is_wide(carry):
    reach, low, high, *_ = carry
    return (reach >= goal) & (high - low > goal)

  def shrink(carry):
    reach, low, high, low_excess, high_excess, was_below = carry
    middle, half = (low + high) / 2, (high - low) / 2
    chord = low + 2 * half * low_excess / jnp.maximum(low_excess - high_excess, jnp.finfo(dtype).tiny)
    # The point moves a little towards the middle, so that the end far from the root moves as well.
    to_middle = middle - chord
    nudge = jnp.minimum(jnp.maximum(0.08 * half**2 / (end - 1), 0.45 * goal), jnp.abs(to_middle))
    allowed = jnp.maximum(reach - half, 0)
    point = middle + jnp.clip(nudge * jnp.sign(to_middle) - to_middle, -allowed, allowed)
    point_excess = excess(point)
    is_below = point_excess > 0
    # An end that stays a second time gets a smaller excess, so that the next chord crosses 0 nearer to it (Anderson and
    # Bjorck 1973).
    moved = jnp.where(is_below, low_excess, high_excess)
    share = 1 - point_excess / jnp.where(moved == 0, 1, moved)
    stayed = jnp.where(is_below, high_excess, low_excess)
    stayed = jnp.where(is_below == was_below, stayed * jnp.where(share > 0, share, 0.5), stayed)
    return (
      reach / 2,
      jnp.where(is_below, point, low),
      jnp.where(is_below, high, point),
      jnp.where(is_below, point_excess, stayed),
      jnp.where(is_below, stayed, point_excess),
      is_below,
    )

  # A chord needs excesses of opposite signs.
  end_excess = jnp.minimum(excess(end), -jnp.finfo(dtype).tiny)
  with jax.named_scope('search'):
    return jax.lax.while_loop(is_wide, shrink, (8 * (end - 1), low, high, low_excess, end_excess, False))[2]
