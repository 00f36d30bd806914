"""The weights of races; on a TPU by a kernel with many races in one launch, each in a lane.

The plain form and the kernel have one body, `fit`. Its arrays have an axis of classes in front, and in the kernel one
of races behind it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.dispatch import operation


@operation
def fit_race(
  masses: jax.Array,
  num_candidates: jax.Array,
  has_given: jax.Array | None = None,
  *,
  nodes: Sequence[float],
  spacing: Sequence[float],
  num_rounds: int,
  step: float,
  log_range: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The fitted weights of a race, and the distribution of the class that is picked with them.

  Each round computes the distribution that the weights give, and multiplies every weight by a power of the factor that
  its class lacks. Suppose that one of three classes above the cut is picked half as often as the goal asks. Its log
  weight rises by `step` log 2, minus the rise of the largest of the three. Beside given candidates, whose class is the
  first, it is the factor that the odds lack with which a class is picked where it occurs: where odds of 9 should be 99,
  the probability lacks a tenth alone, and the weight eleven times.

  Args:
    masses: `[C, 2]`, the masses of draft and target by class, in ascending order of q/p.
    num_candidates: n, scalar above 1; with given candidates the number of the drawn ones, at least 1.
    has_given: bool scalar, whether there are given candidates; None if there is no such class.
    nodes, spacing: The points of the integral and their weights.
    num_rounds, step, log_range: As in `couplings.race.Race`.

  Returns:
    Log weights `[C]`; bool `[C]`, the classes that win against the others; the distribution `[C]` of the picked class.
  """
  points, lengths = np.asarray(nodes, masses.dtype), np.asarray(spacing, masses.dtype)
  # Full precision, since losslessness depends on the distribution that these products give.
  multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  def probs(weights, mass, is_high, low_mass):
    sides = jnp.stack([is_high, ~is_high])
    decay = jnp.exp(-weights[:, None] * points)
    # Samples that fall among the given candidates hold no ticket, so they never arrive.
    arrival = decay if has_given is None else decay.at[0].set(1)
    phi = multiply(jnp.where(sides, mass, 0), arrival) + np.array([1, 0], mass.dtype)[:, None] * low_mass
    others = jnp.exp((num_candidates - 1) * jnp.log(jnp.maximum(phi, jnp.finfo(mass.dtype).tiny))) * lengths
    if has_given is not None:  # their ticket competes on its own side
      others *= jnp.where(sides[:, :1] & has_given, decay[0], 1)
    both = multiply(others, decay.T)
    picked = num_candidates * mass * weights * jnp.where(is_high, both[0], both[1])
    if has_given is not None:
      picked = picked.at[0].set(weights[0] * jnp.sum(jnp.where(sides[:, :1], others * phi, 0)))
    return picked

  sums = Sums(jnp.cumsum, jax.lax.cummax, functools.partial(jax.lax.cummax, reverse=True), jnp.power, jnp.expm1)
  options = {'num_rounds': num_rounds, 'step': step, 'log_range': log_range}
  mass, target = masses.T
  return fit(sums, probs, mass, target, num_candidates, has_given, **options)


@dataclasses.dataclass(frozen=True)
class Sums:
  """Operations on classes that the kernel computes in ways of its own."""

  up_to: Callable[[jax.Array], jax.Array]  # cumulative sums over classes
  largest_up_to: Callable[[jax.Array], jax.Array]  # the largest of the values up to each class; none is negative
  largest_from: Callable[[jax.Array], jax.Array]  # the largest of the values from each class on
  power: Callable[[jax.Array, jax.Array], jax.Array]  # of numbers from 0 to 1
  expm1: Callable[[jax.Array], jax.Array]


def _occurs(sums: Sums, mass, number, has_given):
  """The probability that a candidate of a class is there, from the draft's masses."""
  occurs = -sums.expm1(number * jnp.log1p(-jnp.minimum(mass, 1)))
  return occurs if has_given is None else occurs.at[0].set(has_given)


def _goal(sums: Sums, mass, target, number, has_given=None):
  """The best distribution of the picked class, the classes picked wherever they occur, the draft's mass in the others.

  For example, with two candidates, p = (.75, .25) and q = (.5, .5) in two classes, both candidates lie in the lower
  class with probability .5625. So it is picked at least that often, .0625 more than the target wants, and the goal is
  (.5625, .4375), which overlaps with q by the optimum .9375. The lower class is cut off: a candidate of the upper one
  is picked wherever it occurs.
  """
  place = jax.lax.broadcasted_iota(jnp.int32, mass.shape, 0)
  below = sums.up_to(mass)
  # If all candidates lie in a set, the picked class does too. This is by how much that probability exceeds the target's
  # mass of the set.
  excess = jnp.maximum(sums.power(jnp.minimum(below, 1), number) - sums.up_to(target), 0)
  most = jnp.max(excess, axis=0, keepdims=True)
  tightest = jnp.min(jnp.where(excess == most, place, len(mass)), axis=0, keepdims=True)
  reserved = jnp.where(place <= tightest, sums.largest_up_to(excess), sums.largest_from(excess))
  before = jnp.concatenate([jnp.zeros_like(reserved[:1]), reserved[:-1]], axis=0)
  # No class is picked more often than it occurs. Rounded sums can ask for more of a very rare class, whose weight would
  # then grow until all others are cut off.
  probs = jnp.clip(target + (reserved - before), 0, _occurs(sums, mass, number, has_given))
  cut_off = jnp.sum(jnp.where(place == tightest, below, 0), axis=0, keepdims=True)
  return probs, ~(most > 0) | (place > tightest), jnp.where(most > 0, cut_off, 0)


def fit(sums: Sums, probs_fn, mass, target, number, has_given=None, *, num_rounds, step, log_range) -> tuple[Any, ...]:
  """The body of `fit_race`; `probs_fn` takes weights, the draft's masses, classes above the cut, the mass below."""
  goal, is_high, low_mass = _goal(sums, mass, target, number, has_given)
  is_possible = mass > 0 if has_given is None else (mass > 0).at[0].set(has_given)
  lowest = jnp.finfo(mass.dtype).min

  def winner(log_weights):
    return jnp.where(is_possible, probs_fn(jnp.exp(log_weights), mass, is_high, low_mass), 0)

  def measure(probs):
    log_probs = jnp.log(jnp.maximum(probs, 1e-30))
    if has_given is None:
      return log_probs
    # With some slack, since a class that is nearly always picked where it occurs has nothing to gain: its weight would
    # grow without end and leave no range to the others.
    occurs = _occurs(sums, mass, number, has_given)
    return log_probs - jnp.log(jnp.maximum(occurs - probs, 0) + 0.01 * occurs + 1e-4)

  wanted = measure(goal)

  def improve(_, log_weights):
    moved = log_weights + step * (wanted - measure(winner(log_weights)))
    high, low = (
      jnp.max(jnp.where(is_side & is_possible, moved, lowest), axis=0, keepdims=True) for is_side in (is_high, ~is_high)
    )
    # A class that cannot occur has the smallest weight, also on a side without any that can.
    relative = jnp.where(is_possible, moved - jnp.where(is_high, high, low), -log_range)
    return jnp.maximum(relative, -log_range)

  log_weights = jax.lax.fori_loop(0, num_rounds, improve, jnp.zeros_like(mass))
  # The distribution must belong to the final weights; then every choice of weights is lossless.
  return log_weights, is_high, winner(log_weights)


def _takes_races(masses, num_candidates, has_given=None, **options):
  return has_given is None and masses.dtype == jnp.float32


fit_race.register_kernel('tpu', 'tpu.recursions:fit_races', takes=_takes_races)
