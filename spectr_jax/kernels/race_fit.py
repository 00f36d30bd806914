"""The weights of races as a TPU kernel: many races in one launch, each in a lane."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spectr_jax.kernels.launch import expm1

_LANES = 128
_UNROLLED = 8  # nodes of an integral that are added up before their sum is


def fit_races(
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
  """`couplings.race.Race.fit` of M races without given candidates, the plain form; equal to it up to rounding.

  Args:
    masses: float32 `[M, C, 2]`.
    num_candidates: float32 `[M]`, n.
    nodes, spacing: The points and the weights of the integral.
    num_rounds, step, log_range: As in `Race`.
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

  def kernel(integral_ref, masses_ref, number_ref, weights_ref, is_high_ref, law_ref):
    mass, target = masses_ref[0], masses_ref[1]
    number = number_ref[...]
    place = jax.lax.broadcasted_iota(jnp.int32, mass.shape, 0)

    def up_to(values):
      """Cumulative sums over classes."""
      return sum(jnp.where(place >= i, values[i : i + 1], 0) for i in range(num_classes))

    def largest_up_to(values, is_reached):
      """The largest of the values, none negative, from whose place each class is reached."""
      found = jnp.zeros_like(values)
      for i in range(num_classes):
        found = jnp.maximum(found, jnp.where(is_reached(i), values[i : i + 1], 0))
      return found

    # The goal, as in `race._goal`.
    below = up_to(mass)
    all_below = jnp.exp(number * jnp.log(jnp.maximum(jnp.minimum(below, 1), tiny)))
    excess = jnp.maximum(all_below - up_to(target), 0)
    most = jnp.max(excess, axis=0, keepdims=True)
    tightest = jnp.min(jnp.where(excess == most, place, num_classes), axis=0, keepdims=True)
    reserved = jnp.where(
      place <= tightest,
      largest_up_to(excess, lambda i: place >= i),
      largest_up_to(excess, lambda i: place <= i),
    )
    before = jnp.concatenate([jnp.zeros_like(reserved[:1]), reserved[:-1]], axis=0)
    # 1 - (1 - x)^n, without cancellation where the logarithm of the power is small.
    exponent = number * jnp.log1p(-jnp.minimum(mass, 1))
    occurs = -expm1(exponent)
    goal = jnp.clip(target + (reserved - before), 0, occurs)
    is_excess = most > 0
    is_high = ~is_excess | (place > tightest)
    low_mass = jnp.where(is_excess, jnp.sum(jnp.where(place == tightest, below, 0), axis=0, keepdims=True), 0)
    is_possible = mass > 0

    def winner(log_weights):
      weights = jnp.exp(log_weights)

      def add(node, spacing):
        decay = jnp.exp(-weights * node)
        arrival = mass * decay
        high = jnp.sum(jnp.where(is_high, arrival, 0), axis=0, keepdims=True) + low_mass
        low = jnp.sum(jnp.where(is_high, 0, arrival), axis=0, keepdims=True)
        others = [jnp.exp((number - 1) * jnp.log(jnp.maximum(phi, tiny))) * spacing for phi in (high, low)]
        return jnp.where(is_high, *others) * decay

      def add_several(i, total):
        node, spacing = integral_ref[0, i], integral_ref[1, i]
        return total + sum(add(node[j : j + 1], spacing[j : j + 1]) for j in range(_UNROLLED))

      integral = jax.lax.fori_loop(0, integral_ref.shape[1], add_several, jnp.zeros_like(mass))
      return jnp.where(is_possible, number * mass * weights * integral, 0)

    def improve(_, log_weights):
      floor = 1e-30
      missing = jnp.log(jnp.maximum(goal, floor)) - jnp.log(jnp.maximum(winner(log_weights), floor))
      moved = log_weights + step * missing
      lowest = jnp.finfo(mass.dtype).min
      high, low = (
        jnp.max(jnp.where(is_side & is_possible, moved, lowest), axis=0, keepdims=True)
        for is_side in (is_high, ~is_high)
      )
      # A class that cannot occur has the smallest weight, also on a side without any that can.
      relative = jnp.where(is_possible, moved - jnp.where(is_high, high, low), -log_range)
      return jnp.maximum(relative, -log_range)

    log_weights = jax.lax.fori_loop(0, num_rounds, improve, jnp.zeros_like(mass))
    weights_ref[...] = log_weights
    is_high_ref[...] = is_high.astype(jnp.int32)
    law_ref[...] = winner(log_weights)

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
  return tuple(x[:, :num_races].T for x in (log_weights, is_high != 0, law))
