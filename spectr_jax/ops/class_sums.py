"""Sums by class.

A CPU has a form of its own because it scatters faster than it compares; vector units do the opposite.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spectr_jax.ops.platforms import by_platform

_NUM_PARTS = 128


def sums_by_class(values: jax.Array, classes: jax.Array, num_classes: int) -> jax.Array:
  """The sum of the values of each class.

  Args:
    values: `[V]`, not negative.
    classes: int32 `[V]`, the class of each value.
    num_classes: C.

  Returns:
    `[C]`.
  """
  return by_platform(
    values,
    classes,
    cpu=functools.partial(_scatter, num_classes=num_classes),
    default=functools.partial(_compare, num_classes=num_classes),
  )


def _compare(values, classes, *, num_classes: int):
  """The plain form."""
  return jnp.sum(jnp.where(classes == jnp.arange(num_classes)[:, None], values, 0), axis=-1)


def _scatter(values, classes, *, num_classes: int):
  """Adds every value to the sum of its class, in parts that are added afterwards.

  Tiny numbers added one by one to a large float32 would be lost. And neighbouring values, often of one class, must not
  wait for each other's sum.
  """
  parts = jnp.arange(values.shape[0], dtype=jnp.int32) % _NUM_PARTS
  sums = jnp.zeros(_NUM_PARTS * num_classes, values.dtype).at[parts * num_classes + classes].add(values)
  return jnp.sum(sums.reshape(_NUM_PARTS, num_classes), axis=0)
