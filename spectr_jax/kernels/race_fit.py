"""The weights of races; on a TPU by a kernel with many races in one launch, each in a lane.

The plain form and the kernel have one body, `_fit`. Its arrays have an axis of classes in front, and in the kernel one
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
from spectr_jax.kernels.expm1 import expm1

_LANES = 128
_UNROLLED = 8  # nodes of an integral that are added up before their sum is


def _takes_races(masses, num_candidates, has_given=None, **options):
  return has_given is None and masses.dtype == jnp.float32


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
  its class lacks. In the example of `_goal` each side of the cut holds one class. So every weight is the largest of its
  side and stays 1, and the distribution is the goal from the start. Suppose instead that one of three classes above the
  cut is picked half as often as the goal asks. Its log weight rises by `step` log 2, minus the rise of the largest of
  the three.

  Beside given candidates it is the factor that the odds lack with which a class is picked where it occurs. A single
  drawn candidate has odds of w/W against the given ones. Where these are 9 and should be 99, the probability lacks a
  tenth alone, and the weight eleven times.

  Args:
    masses: `[C, 2]`, the masses of draft and target by class, in ascending order of q/p.
    num_candidates: n, scalar above 1; with given candidates the number of the drawn ones, at least 1.
    has_given: bool scalar, whether there are given candidates; their class is the first. None if there is no such
      class.
    nodes, spacing: The points of the integral and their weights.
    num_rounds, step, log_range: As in `couplings.race.Race`.

  Returns:
    Log weights `[C]`; bool `[C]`, the classes that win against the others; the distribution `[C]` of the picked class.
  """
  points, lengths = np.asarray(nodes, masses.dtype), np.asarray(spacing, masses.dtype)
  # Full precision, since losslessness depends on the distribution that these products give.
  multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

  def law(weights, mass, is_high, low_mass):
    sides = jnp.stack([is_high, ~is_high])
    decay = jnp.exp(-weights[:, None] * points)
    # Samples that fall among the given candidates hold no ticket, so they never arrive.
    arrival = decay if has_given is None else decay.at[0].set(1)
    phi = multiply(jnp.where(sides, mass, 0), arrival) + np.array([1, 0], mass.dtype)[:, None] * low_mass
    others = jnp.exp((num_candidates - 1) * jnp.log(jnp.maximum(phi, jnp.finfo(mass.dtype).tiny))) * lengths
    if has_given is not None:  # their ticket competes on its own side
      others *= jnp.where(sides[:, :1] & has_given, decay[0], 1)
    both = multiply(others, decay.T)
    found = num_candidates * mass * weights * jnp.where(is_high, both[0], both[1])
    if has_given is not None:
      found = found.at[0].set(weights[0] * jnp.sum(jnp.where(sides[:, :1], others * phi, 0)))
    return found

  sums = _Sums(jnp.cumsum, jax.lax.cummax, functools.partial(jax.lax.cummax, reverse=True), jnp.power, jnp.expm1)
  options = {'num_rounds': num_rounds, 'step': step, 'log_range': log_range}
  mass, target = masses.T
  return _fit(sums, law, mass, target, num_candidates, has_given, **options)


@dataclasses.dataclass(frozen=True)
class _Sums:
  """What the kernel computes in ways of its own.

  Attributes:
    up_to: Cumulative sums over classes.
    largest_up_to: The largest of the values up to each class; none is negative.
    largest_from: The largest of the values from each class on.
    power: Powers of numbers from 0 to 1.
    expm1: e^x - 1.
  """

  up_to: Callable[[jax.Array], jax.Array]
  largest_up_to: Callable[[jax.Array], jax.Array]
  largest_from: Callable[[jax.Array], jax.Array]
  power: Callable[[jax.Array, jax.Array], jax.Array]
  expm1: Callable[[jax.Array], jax.Array]


def _occurs(sums: _Sums, mass, number, has_given):
  """The probability that a candidate of a class is there, from the draft's masses."""
  occurs = -sums.expm1(number * jnp.log1p(-jnp.minimum(mass, 1)))
  return occurs if has_given is None else occurs.at[0].set(has_given)


def _goal(sums: _Sums, mass, target, number, has_given=None):
  """The best distribution of the picked class that any selection can reach, and the set of classes that it cuts off.

  For example, with two candidates, p = (.75, .25) and q = (.5, .5) in two classes, both candidates lie in the lower
  class with probability .5625. So it is picked at least that often, .0625 more than the target wants, and the goal is
  (.5625, .4375), which overlaps with q by the optimum .9375. The lower class is cut off: a candidate of the upper one
  is picked wherever it occurs.

  Returns:
    The distribution; the classes that are picked wherever they occur; the draft's mass in the others.
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
  law = jnp.clip(target + (reserved - before), 0, _occurs(sums, mass, number, has_given))
  cut_off = jnp.sum(jnp.where(place == tightest, below, 0), axis=0, keepdims=True)
  return law, ~(most > 0) | (place > tightest), jnp.where(most > 0, cut_off, 0)


def _fit(sums: _Sums, law_fn, mass, target, number, has_given=None, *, num_rounds, step, log_range) -> tuple[Any, ...]:
  """The body of `fit_race`.

  Args:
    sums: Functions over classes.
    law_fn: From weights, masses of the draft, the classes above the cut and the mass below, the distribution.
    mass, target: The masses.
    number: n.
    has_given, num_rounds, step, log_range: As of `fit_race`.
  """
  goal, is_high, low_mass = _goal(sums, mass, target, number, has_given)
  is_possible = mass > 0 if has_given is None else (mass > 0).at[0].set(has_given)
  lowest = jnp.finfo(mass.dtype).min

  def winner(log_weights):
    return jnp.where(is_possible, law_fn(jnp.exp(log_weights), mass, is_high, low_mass), 0)

  def measure(law):
    log_law = jnp.log(jnp.maximum(law, 1e-30))
    if has_given is None:
      return log_law
    # With some slack, since a class that is nearly always picked where it occurs has nothing to gain: its weight would
    # grow without end and leave no range to the others.
    occurs = _occurs(sums, mass, number, has_given)
    return log_law - jnp.log(jnp.maximum(occurs - law, 0) + 0.01 * occurs + 1e-4)

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


@fit_race.kernel('tpu', takes=_takes_races)
def fit_races_kernel(
  masses: jax.Array,
  num_candidates: jax.Array,
  *,
  nodes: Sequence[float],
  spacing: Sequence[float],
  num_rounds: int,
  step: float,
  log_range: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`fit_race` of M races without given candidates as a TPU kernel.

  Args:
    masses: float32 `[M, C, 2]`.
    num_candidates: float32 `[M]`.
    nodes, spacing, num_rounds, step, log_range: As of `fit_race`.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    Log weights `[M, C]`, bool `[M, C]`, and the distributions `[M, C]`.
  """
  from jax.experimental import pallas as pl

  num_races, num_classes, _ = masses.shape
  tiny = jnp.finfo(masses.dtype).tiny
  integral = jnp.asarray([nodes, spacing], masses.dtype)
  # A point of weight 0 adds nothing.
  integral = jnp.pad(integral, ((0, 0), (0, -len(nodes) % _UNROLLED))).reshape(2, -1, _UNROLLED, 1)

  def power(base, exponent):
    return jnp.exp(exponent * jnp.log(jnp.maximum(base, tiny)))

  def place_of(values):
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)

  def up_to(values):
    return functools.reduce(
      jnp.add, (jnp.where(place_of(values) >= i, values[i : i + 1], 0) for i in range(num_classes))
    )

  def largest(values, is_reached):
    found = jnp.zeros_like(values)
    for i in range(num_classes):
      found = jnp.maximum(found, jnp.where(is_reached(place_of(values), i), values[i : i + 1], 0))
    return found

  sums = _Sums(
    up_to,
    lambda values: largest(values, lambda place, i: place >= i),
    lambda values: largest(values, lambda place, i: place <= i),
    power,
    expm1,
  )

  def kernel(integral_ref, masses_ref, number_ref, weights_ref, is_high_ref, law_ref):
    number = number_ref[...]

    def law(weights, mass, is_high, low_mass):
      def add(node, spacing):
        decay = jnp.exp(-weights * node)
        arrival = mass * decay
        high = jnp.sum(jnp.where(is_high, arrival, 0), axis=0, keepdims=True) + low_mass
        low = jnp.sum(jnp.where(is_high, 0, arrival), axis=0, keepdims=True)
        others = [power(phi, number - 1) * spacing for phi in (high, low)]
        return jnp.where(is_high, *others) * decay

      def add_several(i, total):
        node, spacing = integral_ref[0, i], integral_ref[1, i]
        return total + sum(add(node[j : j + 1], spacing[j : j + 1]) for j in range(_UNROLLED))

      return number * mass * weights * jax.lax.fori_loop(0, integral_ref.shape[1], add_several, jnp.zeros_like(mass))

    options = {'num_rounds': num_rounds, 'step': step, 'log_range': log_range}
    log_weights, is_high, found = _fit(sums, law, masses_ref[0], masses_ref[1], number, **options)
    weights_ref[...] = log_weights
    is_high_ref[...] = is_high.astype(jnp.int32)
    law_ref[...] = found

  # Few races are one block; many come in blocks of all lanes.
  width = num_races if num_races <= _LANES else _LANES
  padding = -num_races % width
  # A race of padding has one class.
  filled = jnp.pad(jnp.moveaxis(masses, 0, 2), ((0, 0), (0, 0), (0, padding)), constant_values=1 / num_classes)
  number = jnp.pad(num_candidates, (0, padding), constant_values=2)[None]
  size = num_races + padding
  block = pl.BlockSpec((num_classes, width), lambda i: (0, i))
  shape = jax.ShapeDtypeStruct((num_classes, size), masses.dtype)
  log_weights, is_high, law = pl.pallas_call(
    kernel,
    grid=(size // width,),
    in_specs=[
      pl.BlockSpec(integral.shape, lambda i: (0, 0, 0, 0)),
      pl.BlockSpec((2, num_classes, width), lambda i: (0, 0, i)),
      pl.BlockSpec((1, width), lambda i: (0, i)),
    ],
    out_specs=[block] * 3,
    out_shape=[shape, jax.ShapeDtypeStruct(shape.shape, jnp.int32), shape],
    interpret=interpret,
    name='fit_races',
  )(integral, jnp.moveaxis(filled, 1, 0), number)
  return log_weights[:, :num_races].T, (is_high != 0)[:, :num_races].T, law[:, :num_races].T
