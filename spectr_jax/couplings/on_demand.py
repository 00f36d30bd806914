"""Work on the vocabulary that only some rows need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Operands this large are worth a turn of a loop per row on a processor.
_MANY = 4096


def where_needed(is_needed: jax.Array, function: Callable[..., Any], otherwise: Any, *operands: Any) -> Any:
  """`function(*operands)` where it is needed, else `otherwise`, and no time spent where it is not, under vmap too.

  A `lax.cond` under vmap computes both branches for every row. Here a processor goes through the rows one by one and
  leaves out those that need nothing; an accelerator computes all rows together, or nothing if no row needs it.

  Args:
    is_needed: bool scalar.
    function: Of the operands alone: it must not close over traced values.
    otherwise: Like what `function` returns, arrays all.
    *operands: Arrays or trees of arrays.
  """

  @jax.custom_batching.custom_vmap
  def call(is_needed, otherwise, operands):
    return jax.lax.cond(is_needed, lambda: function(*operands), lambda: otherwise)

  @call.def_vmap
  def call_rows(num_rows, in_batched, *arguments):
    is_needed, otherwise, operands = jax.tree.map(
      lambda is_batched, x: x if is_batched else jnp.broadcast_to(x, (num_rows, *jnp.shape(x))),
      tuple(in_batched),
      arguments,
    )

    def one_by_one():
      def one(row):
        def of_row(tree):
          return jax.tree.map(lambda x: x[row], tree)

        # Cut out inside the branch: what is not needed is not even copied.
        return jax.lax.cond(is_needed[row], lambda: function(*of_row(operands)), lambda: of_row(otherwise))

      return jax.lax.map(one, jnp.arange(num_rows))

    def together():
      def is_waiting(carry):
        return jnp.any(carry[0])

      def compute(carry):
        # Tied to the loop's own variable: what does not change from turn to turn would be moved out of the loop, and be
        # computed whether the loop turns or not.
        is_waiting, tied = jax.lax.optimization_barrier((carry[0], operands))
        computed = jax.vmap(function)(*tied)
        chosen = jax.tree.map(
          lambda new, old: jnp.where(is_waiting.reshape(-1, *[1] * (new.ndim - 1)), new, old), computed, carry[1]
        )
        return jnp.zeros_like(is_waiting), chosen

      return jax.lax.while_loop(is_waiting, compute, (is_needed, otherwise))[1]

    if max(x[0].size for x in jax.tree.leaves(operands)) < _MANY:
      result = together()
    else:
      result = jax.lax.platform_dependent(cpu=one_by_one, default=together)
    return result, jax.tree.map(lambda _: True, result)

  return call(jnp.asarray(is_needed), otherwise, operands)
