"""Top-k, top-p and min-p: filters that keep the tokens whose probability is at least a threshold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from spectr_jax.ops.platforms import by_platform
from spectr_jax.ops.thresholds import keep_largest, largest_threshold

FILTERS = 'filters'  # their scope in compiled programs


def _of_nodes(values: jax.Array, probs: jax.Array) -> jax.Array:
  """Values `[B]` of rows as those of their nodes, `[B, N]`, for distributions `[B, N, V]`."""
  return jnp.broadcast_to(values[:, None].astype(probs.dtype), probs.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Filter:
  """A filter, which keeps the tokens whose probability is at least a threshold.

  Attributes:
    keeps_all: The value with which it keeps all tokens.
    keep: Distributions `[B, N, V]`, filtered by values `[B]`.
    find_threshold: The threshold `[B, N, 1]` of this filter and those before it together, of distributions by values,
      given the threshold of those before it, or None if it is the first.
  """

  keeps_all: float
  keep: Callable[[jax.Array, jax.Array], jax.Array]
  find_threshold: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def _raised(threshold: jax.Array | None, found: jax.Array, is_used: jax.Array) -> jax.Array:
  """The larger of two thresholds `[B, N, 1]` for rows `[B]` that use a filter, and the first, or 0, for the others."""
  before = jnp.zeros_like(found) if threshold is None else threshold
  return jnp.where(is_used[:, None, None], jnp.maximum(before, found), before)


def _keep_top_k(probs: jax.Array, values: jax.Array) -> jax.Array:
  return keep_largest(probs, _of_nodes(values, probs), is_weighted=False)


def _find_top_k(probs: jax.Array, values: jax.Array, threshold: jax.Array | None) -> jax.Array:
  found = largest_threshold(probs, _of_nodes(jnp.maximum(values, 1), probs), is_weighted=False)
  return _raised(threshold, found, values > 0)


def _keep_top_p(probs: jax.Array, values: jax.Array) -> jax.Array:
  return keep_largest(probs, _of_nodes(jnp.where(values < 1, values, 0), probs), is_weighted=True)


def _find_top_p(probs: jax.Array, values: jax.Array, threshold: jax.Array | None) -> jax.Array:
  goal, above = _of_nodes(values, probs), None
  if threshold is not None:
    mass = jnp.sum(jnp.where(probs >= threshold, probs, 0), axis=-1)
    # A row that no filter before has cut gets what it would get alone, without rounding.
    mass = jnp.where(threshold[..., 0] > 0, mass, 1)
    goal, above = mass * goal, (threshold, mass)
  return _raised(threshold, largest_threshold(probs, goal, is_weighted=True, above=above), values < 1)


def _min_p_threshold(probs: jax.Array, values: jax.Array) -> jax.Array:
  return values[:, None, None].astype(probs.dtype) * jnp.max(probs, axis=-1, keepdims=True)


def _keep_min_p(probs: jax.Array, values: jax.Array) -> jax.Array:
  kept = jnp.where(probs >= _min_p_threshold(probs, values), probs, 0)
  return jnp.where(values[:, None, None] > 0, kept / jnp.sum(kept, axis=-1, keepdims=True), probs)


def _find_min_p(probs: jax.Array, values: jax.Array, threshold: jax.Array | None) -> jax.Array:
  return _raised(threshold, _min_p_threshold(probs, values), values > 0)


# In their order.
FILTERS_BY_NAME = {
  'top_k': Filter(0, _keep_top_k, _find_top_k),
  'top_p': Filter(1.0, _keep_top_p, _find_top_p),
  'min_p': Filter(0.0, _keep_min_p, _find_min_p),
}


def filtered(probs: jax.Array, values: Mapping[str, jax.Array | None]) -> jax.Array:
  """Distributions after the filters of their rows. Rows that use none stay as they are, to the bit.

  Args:
    probs: `[B, N, V]`, distributions.
    values: Those of B rows by name of a filter; None for a filter that no row uses.

  Returns:
    Distributions `[B, N, V]`.
  """
  filters = [
    (own, own != each.keeps_all, each) for name, each in FILTERS_BY_NAME.items() if (own := values[name]) is not None
  ]
  if not filters:
    return probs

  def one_by_one(probs):
    for own, is_used, each in filters:
      probs = jax.lax.cond(jnp.any(is_used), each.keep, lambda probs, _: probs, probs, own)
    return probs

  def by_threshold(probs):
    threshold, lowest = None, jnp.zeros((*probs.shape[:-1], 1), probs.dtype)
    for own, is_used, each in filters:
      found = functools.partial(each.find_threshold, probs, own, threshold)
      lowest = threshold = jax.lax.cond(jnp.any(is_used), found, lambda lowest=lowest: lowest)
    is_filtered = functools.reduce(jnp.logical_or, (is_used for _, is_used, _ in filters))
    kept = jnp.where(probs >= threshold, probs, 0)
    return jnp.where(is_filtered[:, None, None], kept / jnp.sum(kept, axis=-1, keepdims=True), probs)

  def filter_all(probs):
    # On a TPU a kernel finds a threshold and writes what it keeps.
    return by_platform(probs, tpu=one_by_one, default=by_threshold)

  has_filters = jnp.any(jnp.stack([is_used for _, is_used, _ in filters]))
  with jax.named_scope(FILTERS):
    return jax.lax.cond(has_filters, filter_all, lambda x: x, probs)
