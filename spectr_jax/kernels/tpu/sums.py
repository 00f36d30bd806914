"""Kernels of sums over the tokens of distributions, which they read once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from spectr_jax.kernels.token_sums import TokenFn
from spectr_jax.kernels.tpu.calls import LANES, ROWS, call_by_rows, call_kernel

_UNROLLED = 5  # registers of tokens per turn of a loop
_MOST_TOTALS = 16  # registers in which a loop adds up
_MOST_BYTES = 8 * 2**20  # of tables that are in the vector memory, twice, at a time


def token_sums(*arrays: jax.Array, token_fns: Sequence[TokenFn]) -> jax.Array:
  """`token_sums` of M rows, `[M, K]`: of values `[M, V]`, V a multiple of 128, and parameters, float32 `[M, P]`."""
  *values, params = arrays
  num_registers = values[0].shape[1] // LANES
  num_turns = num_registers // _UNROLLED
  wide = ROWS, LANES

  def count(token_fn):
    token = [jax.ShapeDtypeStruct((), x.dtype) for x in values]
    own = [jax.ShapeDtypeStruct((), params.dtype)] * params.shape[1]
    return len(jax.eval_shape(lambda own, token: token_fn(own)(token), own, token))

  counts = [count(token_fn) for token_fn in token_fns]

  def kernel(params_ref, *refs):
    values_refs, sums_ref = refs[:-1], refs[-1]
    params = [jnp.broadcast_to(params_ref[:, i : i + 1], wide) for i in range(params_ref.shape[1])]

    def add(of_token, register, totals):
      place = pl.ds(pl.multiple_of(register * LANES, LANES), LANES)
      return tuple(map(jnp.add, totals, of_token([ref[:, place] for ref in values_refs])))

    def add_several(turn, totals, of_token):
      for i in range(_UNROLLED):
        totals = add(of_token, turn * _UNROLLED + i, totals)
      return totals

    start = 0
    for token_fn, number in zip(token_fns, counts):
      of_token, totals = token_fn(params), (jnp.zeros(wide, jnp.float32),) * number
      totals = jax.lax.fori_loop(0, num_turns, functools.partial(add_several, of_token=of_token), totals)
      for register in range(num_turns * _UNROLLED, num_registers):
        totals = add(of_token, register, totals)
      for i, total in enumerate(totals, start):
        sums_ref[:, i : i + 1] = jnp.sum(total, axis=1, keepdims=True)
      start += number

  results = [(sum(counts), jnp.float32)]
  return call_by_rows(kernel, params, *values, results=results, fewest=ROWS, needs_memory=True, name='token_sums')[0]


def runs_of(rows):
  """Entries that follow one another in every table: triples of the first entry, its rows, and their number."""
  rows = np.stack(rows)
  is_first = np.any(np.diff(rows, axis=1) != 1, axis=0)
  starts = [0]
  for entry, first in enumerate(is_first, 1):
    if first or entry - starts[-1] == ROWS:
      starts.append(entry)
  return [
    (start, tuple(map(int, rows[:, start])), end - start) for start, end in zip(starts, [*starts[1:], rows.shape[1]])
  ]


def sums_of_rows(*arrays: jax.Array, token_fn: TokenFn, rows: Sequence[np.ndarray]) -> jax.Array:
  """`sums_of_rows` of B groups of entries, `[B, M]`: of tables `[B, R, V]` each and parameters, float32 `[B, M, P]`."""
  *tables, params = arrays
  runs = runs_of(rows)
  num_groups, num_entries, _ = params.shape
  num_registers = tables[0].shape[2] // LANES
  most = max(1, _MOST_BYTES // sum(4 * LANES * x.shape[1] for x in tables))
  # As many tokens at a time as there is memory for, in parts of equal size but for the last.
  num_parts = -(-num_registers // most)
  at_once = -(-num_registers // num_parts)
  num_turns = at_once // _UNROLLED

  def kernel(params_ref, *refs):
    tables_refs, sums_ref = refs[:-1], refs[-1]

    @pl.when(pl.program_id(1) == 0)
    def _():
      sums_ref[...] = jnp.zeros(sums_ref.shape, sums_ref.dtype)

    def add_up(some):
      own = [
        token_fn(
          [jnp.broadcast_to(params_ref[start : start + n, i : i + 1], (n, LANES)) for i in range(params.shape[2])]
        )
        for start, _, n in some
      ]

      def add(register, totals):
        place = pl.ds(pl.multiple_of(register * LANES, LANES), LANES)

        def of_run(of_token, run):
          _, firsts, n = run
          (numbers,) = of_token([ref[first : first + n, place] for ref, first in zip(tables_refs, firsts)])
          if num_registers % at_once:  # beyond the end there is anything
            numbers = jnp.where(pl.program_id(1) * at_once + register < num_registers, numbers, 0)
          return numbers

        return tuple(total + of_run(*each) for total, *each in zip(totals, own, some))

      def add_several(turn, totals):
        for i in range(_UNROLLED):
          totals = add(turn * _UNROLLED + i, totals)
        return totals

      totals = jax.lax.fori_loop(0, num_turns, add_several, tuple(jnp.zeros((n, LANES), jnp.float32) for *_, n in some))
      for register in range(num_turns * _UNROLLED, at_once):
        totals = add(register, totals)
      for (start, _, n), total in zip(some, totals):
        sums_ref[start : start + n] += jnp.sum(total, axis=1, keepdims=True)

    for i in range(0, len(runs), _MOST_TOTALS):
      add_up(runs[i : i + _MOST_TOTALS])

  width = at_once * LANES
  sums = call_kernel(
    kernel,
    params,
    *tables,
    grid=(num_groups, num_parts),
    in_specs=[
      pl.BlockSpec((None, *params.shape[1:]), lambda i, _: (i, 0, 0)),
      *(pl.BlockSpec((None, x.shape[1], width), lambda i, j: (i, 0, j)) for x in tables),
    ],
    out_specs=pl.BlockSpec((None, num_entries, 1), lambda i, _: (i, 0, 0)),
    out_shape=jax.ShapeDtypeStruct((num_groups, num_entries, 1), jnp.float32),
    needs_memory=True,
    name='sums_of_rows',
  )
  return sums[..., 0]
