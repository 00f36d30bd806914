"""Sums by class, and the entries of classes.

A CPU has a form of its own for many tokens, because it scatters faster than it compares; vector units do the opposite.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spectr_jax.kernels.dispatch import operation
from spectr_jax.kernels.token_sums import token_sums

_NUM_PARTS = 128
_SUMS_AT_ONCE = 16  # of a kernel, in registers


@operation
def sums_by_class(values: tuple[jax.Array, ...], classes: jax.Array, num_classes: int) -> jax.Array:
  """The sums `[C, K]` of K arrays `[V]`, not negative, over the tokens of each class int32 `[V]`."""

  def plain(*arrays):
    *values, classes = arrays
    is_own = classes == jnp.arange(num_classes)[:, None]
    return jnp.stack([jnp.sum(jnp.where(is_own, own, 0), axis=-1) for own in values], axis=-1).reshape(-1)

  def some(params, own):
    del params

    def of_token(token):
      *values, here = token
      return [jnp.where(here == c, value, 0.0) for c in own for value in values]

    return of_token

  at_once = max(_SUMS_AT_ONCE // len(values), 1)
  token_fns = [
    functools.partial(some, own=range(start, min(start + at_once, num_classes)))
    for start in range(0, num_classes, at_once)
  ]
  return token_sums(plain, token_fns, (*values, classes)).reshape(num_classes, len(values))


@sums_by_class.form('cpu', takes=lambda values, classes, num_classes: len(classes) > _NUM_PARTS)
def _scatter(values, classes, num_classes):
  """Adds every value to the sum of its class, in parts that are added afterwards.

  Tiny numbers added one by one to a large float32 would be lost. And neighboring values, often of one class, must not
  wait for each other's sum. With fewer tokens there would be more parts than tokens.
  """
  parts = jnp.arange(len(classes), dtype=jnp.int32) % _NUM_PARTS

  def sums(values):
    sums = jnp.zeros(_NUM_PARTS * num_classes, values.dtype).at[parts * num_classes + classes].add(values)
    return jnp.sum(sums.reshape(_NUM_PARTS, num_classes), axis=0)

  return jnp.stack([sums(own) for own in values], axis=-1)


@operation
def entries_of(table: jax.Array, classes: jax.Array) -> jax.Array:
  """`table[classes]`: the entry of `[C]` of each class, int32 of any shape."""
  return table[classes]


@entries_of.form('tpu')
def _entries_by_comparison(table, classes):  # it looks up entry by entry, and compares in passing
  if classes.ndim == 0:
    return jnp.sum(jnp.where(classes == jnp.arange(len(table)), table, 0))
  entries = jnp.broadcast_to(table[0], classes.shape)
  for c in range(1, len(table)):
    entries = jnp.where(classes == c, table[c], entries)
  return entries
