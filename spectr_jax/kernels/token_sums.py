"""Sums over the tokens of distributions as TPU kernels: what is added up is a function of each token alone.

XLA adds up along the lanes of a register with every few tokens, and holds what is added up in between. A kernel reads
the distributions once and adds up registers; lanes are added at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spectr_jax.kernels.dispatch import launch, operation
from spectr_jax.kernels.on_demand import rows_at
from spectr_jax.sharding import dividing_axes, shards_in_program

_LANES = 128
_ROWS = 8
_UNROLLED = 5  # registers of tokens per turn of a loop
_MOST_TOKENS = 2**18  # per row on a device: eight rows of three arrays are in the vector memory, twice
_MOST_TOTALS = 16  # registers in which a loop adds up
_MOST_BYTES = 8 * 2**20  # of tables that are in the vector memory, twice, at a time
_MEMORY = 64 * 2**20

# From one number per parameter to a function of the values of a token, which gives the numbers that are added up.
TokenFn = Callable[[Sequence[jax.Array]], Callable[[Sequence[jax.Array]], Sequence[jax.Array]]]


@operation
def token_sums(
  plain: Callable[..., jax.Array],
  token_fns: Sequence[TokenFn],
  values: Sequence[jax.Array],
  params: jax.Array | None = None,
) -> jax.Array:
  """Sums over tokens, K in all; on a TPU by a kernel, for all entries of a `vmap` in one launch.

  Tokens may be divided over devices by the compiler. Then each adds up its own, and the sums are added.

  Args:
    plain: `plain(*values, params)`, or `plain(*values)` without parameters, computes the sums `[K]`.
    token_fns: For the kernel, each gives some of the sums, in order. Those of one are kept in registers at the same
      time, so they should be about 16. They must not close over traced values.
    values: Arrays `[V]`, one number for each token.
    params: `[P]`, what the functions take besides; None for nothing.

  Returns:
    `[K]`.
  """
  return plain(*values) if params is None else plain(*values, params)


def _are_covered(*arrays: jax.Array) -> bool:
  """Whether kernels take arrays `[..., V]`, and the parameters: whole, or with tokens divided over one axis."""
  size, axes = arrays[0].shape[-1], dividing_axes()
  num_shards = shards_in_program(size)
  if any(x.dtype.itemsize != 4 for x in arrays) or size % (num_shards * _LANES) or size // num_shards > _MOST_TOKENS:
    return False
  return not axes or (len(axes) == 1 and num_shards > 1)


def _on_each_part(sums, *arrays):
  """`sums` of the tokens on each device, added up.

  Args:
    sums: A function of the arrays.
    *arrays: Arrays `[..., V]`, and the parameters.
  """
  axes = dividing_axes()
  if not axes:
    return sums(*arrays)
  return jax.shard_map(
    lambda *arrays: jax.lax.psum(sums(*arrays), axes),
    in_specs=(*(PartitionSpec(*[None] * (x.ndim - 1), axes[0]) for x in arrays[:-1]), PartitionSpec()),
    out_specs=PartitionSpec(),
    axis_names=set(axes),
    check_vma=False,
  )(*arrays)


def _takes_values(plain, token_fns, values, params=None):
  return _are_covered(*values, *([] if params is None else [params]))


@token_sums.form('tpu', takes=_takes_values)
def _token_sums(plain, token_fns, values, params=None):
  of_params = plain
  if params is None:  # a kernel has no arrays without entries
    params, of_params = jnp.zeros(1, jnp.float32), lambda *arrays: plain(*arrays[:-1])

  def sums(*arrays):
    kernel = functools.partial(token_sums_kernel, token_fns=tuple(token_fns))
    return launch(jax.vmap(of_params), kernel, *(x[None] for x in arrays))[0]

  return _on_each_part(sums, *values, params)


def token_sums_kernel(*arrays: jax.Array, token_fns: Sequence[TokenFn], interpret: bool = False) -> jax.Array:
  """`token_sums` of M rows as a TPU kernel.

  Args:
    *arrays: The values, `[M, V]` each, V a multiple of 128, and the parameters, float32 `[M, P]`.
    token_fns: As of `token_sums`.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    `[M, K]`.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  *values, params = arrays
  num_rows, size = values[0].shape
  num_registers = size // _LANES
  num_turns = num_registers // _UNROLLED
  wide = _ROWS, _LANES

  def count(token_fn):
    token = [jax.ShapeDtypeStruct((), x.dtype) for x in values]
    own = [jax.ShapeDtypeStruct((), params.dtype)] * params.shape[1]
    return len(jax.eval_shape(lambda own, token: token_fn(own)(token), own, token))

  counts = [count(token_fn) for token_fn in token_fns]

  def kernel(params_ref, *refs):
    values_refs, sums_ref = refs[:-1], refs[-1]
    params = [jnp.broadcast_to(params_ref[:, i : i + 1], wide) for i in range(params_ref.shape[1])]

    def add(of_token, register, totals):
      place = pl.ds(pl.multiple_of(register * _LANES, _LANES), _LANES)
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

  if num_rows < _ROWS:  # fewer would be in a layout of their own
    params, *values = (jnp.pad(x, ((0, _ROWS - num_rows), (0, 0))) for x in (params, *values))

  def block(width):
    return pl.BlockSpec((_ROWS, width), lambda i: (i, 0))

  sums = pl.pallas_call(
    kernel,
    grid=(pl.cdiv(len(params), _ROWS),),
    in_specs=[block(x.shape[1]) for x in (params, *values)],
    out_specs=block(sum(counts)),
    out_shape=jax.ShapeDtypeStruct((len(params), sum(counts)), jnp.float32),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    interpret=interpret,
    name='token_sums',
  )(params, *values)
  return sums[:num_rows]


@operation
def sums_of_rows(
  token_fn: TokenFn, tables: Sequence[jax.Array], rows: Sequence[np.ndarray], params: jax.Array
) -> jax.Array:
  """Sums over the tokens of M entries, each with a row of every table; on a TPU rows are read in place, by a kernel.

  Args:
    token_fn: Gives one number per token. It must not close over traced values.
    tables: Arrays `[R, V]`, each with an R of its own.
    rows: For each table static int `[M]`, the row of every entry.
    params: `[M, P]`, what the function takes besides.

  Returns:
    `[M]`.
  """
  (numbers,) = token_fn(jnp.split(params, params.shape[1], axis=1))([*map(rows_at, tables, rows)])
  return jnp.sum(numbers, axis=1)


@sums_of_rows.form('tpu', takes=lambda token_fn, tables, rows, params: _are_covered(*tables, params))
def _sums_of_rows(token_fn, tables, rows, params):
  def plain(*arrays):
    *tables, params = arrays
    return sums_of_rows.plain(token_fn, tables, rows, params)

  def sums(*arrays):
    kernel = functools.partial(sums_of_rows_kernel, token_fn=token_fn, runs=_runs(rows))
    return launch(jax.vmap(plain), kernel, *(x[None] for x in arrays))[0]

  return _on_each_part(sums, *tables, params)


def _runs(rows):
  """Entries that follow one another in every table: triples of the first entry, its rows, and their number."""
  rows = np.stack(rows)
  is_first = np.any(np.diff(rows, axis=1) != 1, axis=0)
  starts = [0]
  for entry, first in enumerate(is_first, 1):
    if first or entry - starts[-1] == _ROWS:
      starts.append(entry)
  return [
    (start, tuple(map(int, rows[:, start])), end - start) for start, end in zip(starts, [*starts[1:], rows.shape[1]])
  ]


def sums_of_rows_kernel(
  *arrays: jax.Array,
  token_fn: TokenFn,
  runs: Sequence[tuple[int, tuple[int, ...], int]],
  interpret: bool = False,
) -> jax.Array:
  """`sums_of_rows` of B groups of entries as a TPU kernel.

  Args:
    *arrays: The tables, `[B, R, V]` each, V a multiple of 128, and the parameters, float32 `[B, M, P]`.
    token_fn: As of `sums_of_rows`.
    runs: Of all entries in order: the first of some, at most eight, that follow one another in every table, its rows,
      and their number.
    interpret: Whether to run without a TPU, for tests.

  Returns:
    `[B, M]`.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  *tables, params = arrays
  num_groups, num_entries, _ = params.shape
  num_registers = tables[0].shape[2] // _LANES
  most = max(1, _MOST_BYTES // sum(4 * _LANES * x.shape[1] for x in tables))
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
          [jnp.broadcast_to(params_ref[start : start + n, i : i + 1], (n, _LANES)) for i in range(params.shape[2])]
        )
        for start, _, n in some
      ]

      def add(register, totals):
        place = pl.ds(pl.multiple_of(register * _LANES, _LANES), _LANES)

        def of_run(of_token, run):
          _, firsts, n = run
          (found,) = of_token([ref[first : first + n, place] for ref, first in zip(tables_refs, firsts)])
          if num_registers % at_once:  # beyond the end there is anything
            found = jnp.where(pl.program_id(1) * at_once + register < num_registers, found, 0)
          return found

        return tuple(total + of_run(*each) for total, *each in zip(totals, own, some))

      def add_several(turn, totals):
        for i in range(_UNROLLED):
          totals = add(turn * _UNROLLED + i, totals)
        return totals

      totals = jax.lax.fori_loop(
        0, num_turns, add_several, tuple(jnp.zeros((n, _LANES), jnp.float32) for *_, n in some)
      )
      for register in range(num_turns * _UNROLLED, at_once):
        totals = add(register, totals)
      for (start, _, n), total in zip(some, totals):
        sums_ref[start : start + n] += jnp.sum(total, axis=1, keepdims=True)

    for i in range(0, len(runs), _MOST_TOTALS):
      add_up(runs[i : i + _MOST_TOTALS])

  width = at_once * _LANES
  sums = pl.pallas_call(
    kernel,
    grid=(num_groups, num_parts),
    in_specs=[
      pl.BlockSpec((None, *params.shape[1:]), lambda i, _: (i, 0, 0)),
      *(pl.BlockSpec((None, x.shape[1], width), lambda i, j: (i, 0, j)) for x in tables),
    ],
    out_specs=pl.BlockSpec((None, num_entries, 1), lambda i, _: (i, 0, 0)),
    out_shape=jax.ShapeDtypeStruct((num_groups, num_entries, 1), jnp.float32),
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_MEMORY),
    interpret=interpret,
    name='sums_of_rows',
  )(params, *tables)
  return sums[..., 0]
