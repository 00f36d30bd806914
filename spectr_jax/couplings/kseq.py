"""K-SEQ: n i.i.d. candidates tried in turn against one threshold."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome, one_after_another, ratio
from spectr_jax.couplings.explanation import Explanation
from spectr_jax.kernels.dispatch import by_platform
from spectr_jax.kernels.gamma_sections import narrow_sections, sections
from spectr_jax.kernels.on_demand import where_needed
from spectr_jax.kernels.token_sums import token_sums
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


def overlap(draft_probs: jax.Array, target_probs: jax.Array, gamma: jax.Array) -> jax.Array:
  """The probability beta(gamma) = sum_x min(p(x), q(x)/gamma) that one candidate is accepted; scalar.

  Args:
    draft_probs: `[V]`, p.
    target_probs: `[V]`, q.
    gamma: Scalar, the threshold.
  """
  return jnp.sum(jnp.minimum(draft_probs, target_probs / gamma))


def any_accepted(beta: jax.Array, num_candidates: jax.Array) -> jax.Array:
  """The probability 1 - (1 - beta)^n that any of n candidates is accepted, without cancellation for small beta.

  Args:
    beta: The probability that one candidate is accepted.
    num_candidates: n.
  """
  return -jnp.expm1(num_candidates * jnp.log1p(-jnp.minimum(beta, 1)))


def solve_gamma(draft_probs: jax.Array, target_probs: jax.Array, num_candidates: jax.Array, *, num_rounds: int):
  """The threshold gamma*: the root in [1, n] of 1 - (1 - beta)^n = gamma beta(gamma), approached from above.

  The excess, left side minus right side, falls as gamma grows. K-SEQ is lossless for every gamma from the root up to n
  and for no gamma below the root. So the search returns the upper end of its last bracket. For example, with p = (.75,
  .25), q = (.5, .5) and n = 2 the excess is .1875 at 1 and -.25 at 2, and the root is (7 + sqrt(17)) / 8 = 1.390.

  A CPU evaluates the excess at one point after another, an accelerator at many in one pass over the vocabulary.

  Args:
    draft_probs: `[V]`.
    target_probs: `[V]`.
    num_candidates: n, scalar; may be traced.
    num_rounds: Rounds of a bisection of the same accuracy: the bracket shrinks to (n - 1) / 2^num_rounds.

  Returns:
    Scalar in [1, n], 1 for n = 1.
  """
  by_chords, by_sections = (functools.partial(form, num_rounds=num_rounds) for form in (_by_chords, _by_sections))
  return by_platform(draft_probs, target_probs, num_candidates, cpu=by_chords, default=by_sections)


_SECTIONS_LOG2 = 4  # of the sections of a bracket in a pass of an accelerator


def _excess(draft_probs, target_probs, num_candidates, gamma):
  beta = overlap(draft_probs, target_probs, gamma)
  return any_accepted(beta, num_candidates) - gamma * beta


def _overlaps(draft_probs, target_probs, gammas):
  # One by one: as a batch they would be sums over another layout, in which a TPU wants the distributions first.
  return jnp.stack([overlap(draft_probs, target_probs, gamma) for gamma in gammas])


def _overlaps_of_token(gammas):
  inverses = [1 / gamma for gamma in gammas]  # a product takes a fraction of a division's time

  def of_token(token):
    draft_prob, target_prob = token
    return [jnp.minimum(draft_prob, target_prob * inverse) for inverse in inverses]

  return of_token


def _by_sections(draft_probs, target_probs, num_candidates, *, num_rounds):
  """`solve_gamma` in passes that each cut the bracket into equal sections and keep the one with the root.

  On a mesh a pass is one transfer between devices.
  """
  one, number = jnp.ones((), draft_probs.dtype), num_candidates.astype(draft_probs.dtype)

  def shrink(_, points):
    betas = token_sums(_overlaps, [_overlaps_of_token], (draft_probs, target_probs), points)
    return narrow_sections(betas, points, number)

  num_passes = (num_rounds + _SECTIONS_LOG2 - 1) // _SECTIONS_LOG2
  return jax.lax.fori_loop(0, num_passes, shrink, sections(one[None], number[None], 2**_SECTIONS_LOG2))[-1]


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


@dataclasses.dataclass(frozen=True)
class KSeq:
  """K-SEQ (SpecTr, Algorithm 2) for i.i.d. candidates; lossless, at least (1 - 1/e) of the optimal acceptance.

  Each candidate in turn is accepted with probability min(1, q/(gamma p)). If all are rejected, the token is drawn from
  [q - min(p, q/gamma) (1 - (1 - beta)^n) / beta]+.

  Attributes:
    num_rounds: The accuracy of gamma, as rounds of bisection. At 16 the acceptance is within 1e-4 of its limit. The
      distribution of the emitted token does not depend on it.
  """

  num_rounds: int = 16
  proposal_rules = (Independent,)
  explanation = Explanation(
    'K-SEQ tries the candidates in turn against one threshold γ: each is accepted with min(1, q/(γp)).',
    '[q − min(p, q/γ) · (1 − (1 − β)ⁿ)/β]₊',
  )

  def gamma(self, draft_probs, target_probs, num_candidates):
    """The threshold in use. Negative controls override this method.

    Args:
      draft_probs: `[V]`.
      target_probs: `[V]`.
      num_candidates: n, scalar.
    """
    return solve_gamma(draft_probs, target_probs, num_candidates, num_rounds=self.num_rounds)

  def _gamma_of(self, draft_probs, target_probs, num_candidates):
    one = jnp.ones((), draft_probs.dtype)
    return where_needed(num_candidates > 1, self.gamma, one, draft_probs, target_probs, num_candidates)

  def numbers(self, draft_probs, target_probs, candidates, is_valid) -> dict[str, jax.Array]:
    """The threshold at a position, for display.

    Args:
      draft_probs, target_probs, candidates, is_valid: As in `Coupling.__call__`.
    """
    del candidates
    return {'gamma': self._gamma_of(draft_probs, target_probs, jnp.maximum(jnp.sum(is_valid), 1))}

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    num_candidates = jnp.maximum(jnp.sum(is_valid), 1)
    gamma = self._gamma_of(draft_probs, target_probs, num_candidates)
    return self.outcome(draft_probs, target_probs, candidates, is_valid, gamma)

  def accept_probs(self, draft_probs, target_probs, is_valid, gamma) -> jax.Array:
    """The probability that each candidate is accepted, `[n]`.

    Args:
      draft_probs, target_probs: `[n]`, the probabilities of the candidates.
      is_valid: bool `[n]`.
      gamma: Scalar, the threshold.
    """
    return one_after_another(jnp.minimum(1, ratio(target_probs, draft_probs) / gamma), is_valid)

  def outcome(self, draft_probs, target_probs, candidates, is_valid, gamma) -> Outcome:
    """The possible outcomes with a given threshold.

    Args:
      draft_probs, target_probs, candidates, is_valid: As in `Coupling.__call__`.
      gamma: Scalar, the threshold.
    """
    num_candidates = jnp.maximum(jnp.sum(is_valid), 1)
    beta = overlap(draft_probs, target_probs, gamma)
    # The limit of (1 - (1 - beta)^n) / beta for beta -> 0 is n.
    is_possible = beta > 0
    scale = jnp.where(is_possible, any_accepted(beta, num_candidates) / jnp.where(is_possible, beta, 1), num_candidates)
    covered = jnp.minimum(draft_probs, target_probs / gamma) * scale
    return Outcome(
      self.accept_probs(draft_probs[candidates], target_probs[candidates], is_valid, gamma),
      positive_part_or(target_probs - covered, target_probs),
    )
