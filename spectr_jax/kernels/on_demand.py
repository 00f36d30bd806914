"""Maps that skip rows or nodes that do not need the work, for work that is a pass over the vocabulary.

A CPU has a form of its own because it saves all work that it skips, while an accelerator takes no longer for all rows
than for the slowest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.kernels.dispatch import operation

# From this operand size on, a loop over rows pays on a CPU.
_MANY = 4096


def _rows_of(num_rows, in_batched, arguments):
  """Arguments of a `vmap` over rows, all with rows."""
  return jax.tree.map(
    lambda is_batched, x: x if is_batched else jnp.broadcast_to(x, (num_rows, *jnp.shape(x))),
    tuple(in_batched),
    arguments,
  )


def where_needed(is_needed: jax.Array, function: Callable[..., Any], otherwise: Any, *operands: Any) -> Any:
  """`function(*operands)` if it is needed, else `otherwise`; rows that do not need it cost no time, under vmap too.

  A `lax.cond` under vmap computes both branches for every row. Here a CPU visits the rows one by one and skips those
  that do not need the function. An accelerator computes all rows together, or nothing if no row needs it: the loop in
  `rows_where_needed` runs once or not at all. The function must not close over traced values, and returns arrays of the
  shapes and dtypes of `otherwise`.
  """

  @jax.custom_batching.custom_vmap
  def call(is_needed, otherwise, operands):  # one row
    return jax.lax.cond(is_needed, lambda: function(*operands), lambda: otherwise)

  @call.def_vmap
  def call_rows(num_rows, in_batched, *arguments):
    result = rows_where_needed(function, *_rows_of(num_rows, in_batched, arguments))
    return result, jax.tree.map(lambda _: True, result)

  return call(jnp.asarray(is_needed), otherwise, operands)


@operation
def rows_where_needed(function: Callable[..., Any], is_needed: jax.Array, otherwise: Any, operands: Any) -> Any:
  """`where_needed` of B rows: all arguments but the function have the shape `[B, ...]`."""

  def is_waiting(carry):
    return jnp.any(carry[0])

  def compute(carry):
    # The barrier ties the operands to the loop's own variable. Otherwise the compiler would see that they do not change
    # between iterations, move the computation out of the loop, and always run it.
    is_waiting, tied = jax.lax.optimization_barrier((carry[0], operands))
    computed = jax.vmap(function)(*tied)
    return jnp.zeros_like(is_waiting), _choose(is_waiting, computed, carry[1])

  return jax.lax.while_loop(is_waiting, compute, (is_needed, otherwise))[1]


def _has_large_operands(function, is_needed, otherwise, operands):
  return max(x[0].size for x in jax.tree.leaves(operands)) >= _MANY


@rows_where_needed.form('cpu', takes=_has_large_operands)
def _rows_one_by_one(function, is_needed, otherwise, operands):
  def one(row):
    def of_row(tree):
      return jax.tree.map(lambda x: x[row], tree)

    # The slices are inside the branch, so that skipped rows are not copied either.
    return jax.lax.cond(is_needed[row], lambda: function(*of_row(operands)), lambda: of_row(otherwise))

  return jax.lax.map(one, jnp.arange(len(is_needed)))


def _choose(is_chosen, new, old):
  """Entries of one tree or of the other, by bool `[M]`."""
  return jax.tree.map(lambda x, y: jnp.where(is_chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def rows_at(probs: jax.Array, places: np.ndarray) -> jax.Array:
  """`probs[places]` of distributions `[R, V]`, without a copy if the static places `[M]` are the first in order."""
  is_start = np.array_equal(places, np.arange(len(places)))
  return probs[: len(places)] if is_start else probs[places]


@operation
def pick(probs: jax.Array, rows: jax.Array) -> jax.Array:
  """`probs[rows]` of distributions `[R, V]` and rows int32 `[M]` that exist."""
  return probs[rows]


@pick.form('tpu')
@jax.custom_batching.custom_vmap
def _pick_by_product(probs, rows):
  """By a TPU, which would convert all distributions to a layout of single rows before it reads some.

  The product with zeros and ones keeps every bit of a float32 that is not close to the smallest one. If a distribution
  is NaN, all are.
  """
  is_row = (rows[:, None] == jnp.arange(probs.shape[0])).astype(probs.dtype)
  return jnp.matmul(is_row, probs, precision=jax.lax.Precision.HIGHEST)


@_pick_by_product.def_vmap
def _pick_for_rows(axis_size, in_batched, probs, rows):
  # A product reads all distributions. For several rows these are too many to be on the chip.
  if axis_size == 1:
    return _pick_by_product(probs.reshape(probs.shape[-2:]), rows.reshape(-1))[None], True
  return jax.vmap(pick.plain, [0 if is_batched else None for is_batched in in_batched])(probs, rows), True


def _sum_over(is_own: jax.Array, values: jax.Array) -> jax.Array:
  """The value of each of K places, of `values` `[M, ...]`; 0 or False for a place without one.

  `is_own`, bool `[K, M]`, has in every row at most one True: the entry at that place.
  """
  is_own = is_own.reshape(*is_own.shape, *[1] * (values.ndim - 1))
  if values.dtype == bool:
    return jnp.any(is_own & values, axis=1)
  return jnp.sum(jnp.where(is_own, values, jnp.zeros((), values.dtype)), axis=1, dtype=values.dtype)


def map_needed(
  function: Callable[..., Any],
  is_needed: jax.Array,
  otherwise: Any,
  probs: tuple[tuple[jax.Array, np.ndarray], ...],
  items: Any = (),
  *,
  at_once: int | None = None,
  all_fn: Callable[..., Any] | None = None,
  is_heavy: bool = False,
) -> Any:
  """`function` of some distributions and an item for each of M entries that needs it, and `otherwise` for the rest.

  A CPU visits the needed entries one by one; under vmap these are the needed entries of all rows. An accelerator
  computes `at_once` needed entries together and repeats this until the row with the most of them is done. A GPU waits
  for the host whenever it asks whether all are, so it computes the first ones without asking. With `at_once` None an
  accelerator computes all entries in one pass without a loop. For a small vocabulary all entries are computed on every
  device, unless the work is heavy whatever the vocabulary.

  Args:
    function: Takes one distribution `[V]` of each array of `probs`, then one item; must not close over traced values.
    is_needed: bool `[M]`.
    otherwise: Arrays `[M, ...]` of the shapes and dtypes that `function` returns.
    probs: Pairs of an array `[R, V]`, read in place, and static int `[M]`: the row that belongs to each entry.
    items: Arrays `[M, ...]`.
    all_fn: `function` of all entries at once, of the arrays of `probs`, then the items; by default its `vmap`, for
      which distributions may be copied.
  """
  arrays, places = zip(*probs)
  work = _Work(function, places, at_once, all_fn)

  @jax.custom_batching.custom_vmap
  def call(*arguments):
    return map_entries(work, *arguments)

  @call.def_vmap
  def call_rows(num_rows, in_batched, *arguments):
    results = map_rows(work, *_rows_of(num_rows, in_batched, arguments))
    return results, jax.tree.map(lambda _: True, results)

  arguments = is_needed, otherwise, arrays, items
  # Little work is done in one pass on every device, also under `vmap`.
  is_much = is_heavy or arrays[0].shape[-1] >= _MANY
  return call(*arguments) if is_much else _in_one_pass(work, *arguments)


@dataclasses.dataclass(frozen=True)
class _Work:
  """The static arguments of `map_needed`; `places` are those of its `probs`."""

  function: Callable[..., Any]
  places: tuple[np.ndarray, ...]
  at_once: int | None
  all_fn: Callable[..., Any] | None


@operation
def map_entries(work: _Work, is_needed: jax.Array, otherwise: Any, arrays: Any, items: Any) -> Any:
  """`map_needed` of one row."""
  return (_in_one_pass if work.at_once is None else _in_parts)(work, is_needed, otherwise, arrays, items)


@map_entries.form('gpu', takes=lambda work, *_: work.at_once is not None)
def _first_without_asking(work, is_needed, otherwise, arrays, items):
  return _in_parts(work, is_needed, otherwise, arrays, items, asks_first=False)


@map_entries.form('cpu')
def _entries_one_by_one(work, *arguments):
  rows = _one_by_one(work, *jax.tree.map(lambda x: x[None], arguments))
  return jax.tree.map(lambda x: x[0], rows)


@operation
def map_rows(work: _Work, is_needed: jax.Array, otherwise: Any, arrays: Any, items: Any) -> Any:
  """`map_needed` of B rows: all arguments but the first have the shape `[B, ...]`."""
  return jax.vmap(functools.partial(map_entries, work))(is_needed, otherwise, arrays, items)


def _in_one_pass(work, is_needed, otherwise, arrays, items):
  if work.all_fn is None:
    computed = jax.vmap(work.function)(*map(rows_at, arrays, work.places), *jax.tree.leaves(items))
  else:
    computed = work.all_fn(*arrays, *jax.tree.leaves(items))
  return _choose(is_needed, computed, otherwise)


def _in_parts(work, is_needed, otherwise, arrays, items, *, asks_first=True):
  size = min(work.at_once, len(is_needed))
  entries = jnp.arange(len(is_needed))
  # The place of each needed entry among all needed ones, as a sum, which is one operation.
  rank = jnp.sum(is_needed & (entries <= entries[:, None]), axis=1) - 1

  def is_unfinished(carry):
    return carry[0] < jnp.sum(is_needed)

  def compute(carry):
    start, results = carry
    # Masks take the entries and put the results, which is one operation each where a gather or a scatter is several.
    is_place = is_needed & (rank == start + jnp.arange(size)[:, None])
    own = (pick(array, _sum_over(is_place, jnp.asarray(place))) for array, place in zip(arrays, work.places))
    computed = jax.vmap(work.function)(*own, *(_sum_over(is_place, x) for x in jax.tree.leaves(items)))
    is_here = jnp.any(is_place, axis=0)
    return start + size, jax.tree.map(lambda x, y: _choose(is_here, _sum_over(is_place.T, y), x), results, computed)

  start = jnp.zeros((), jnp.int32), otherwise
  return jax.lax.while_loop(is_unfinished, compute, start if asks_first else compute(start))[1]


@map_rows.form('cpu')
def _one_by_one(work, is_needed, otherwise, arrays, items):
  num_rows, num_entries = is_needed.shape

  def flat(tree):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

  probs, items, order = flat(arrays), flat(items), _needed_first(flat(is_needed))

  def compute(i, results):
    entry = order[i]
    row, own = entry // num_entries, entry % num_entries
    of_entry = (
      x[row * array.shape[1] + jnp.asarray(place)[own]] for x, array, place in zip(probs, arrays, work.places)
    )
    computed = work.function(*of_entry, *(x[entry] for x in jax.tree.leaves(items)))
    return jax.tree.map(lambda x, y: x.at[entry].set(y), results, computed)

  results = jax.lax.fori_loop(0, jnp.sum(is_needed), compute, flat(otherwise))
  return jax.tree.map(lambda x: x.reshape(num_rows, num_entries, *x.shape[1:]), results)


def _needed_first(is_needed):
  """The indices of the needed entries, padded with M."""
  order = jnp.full(is_needed.shape, len(is_needed), jnp.int32)
  to = jnp.where(is_needed, jnp.cumsum(is_needed) - 1, len(is_needed))
  return order.at[to].set(jnp.arange(len(is_needed), dtype=jnp.int32), mode='drop')
