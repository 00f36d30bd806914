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

from spectr_jax.kernels.dispatch import launch, lazy, operation
from spectr_jax.kernels.on_demand import rows_at
from spectr_jax.sharding import dividing_axes, shards_in_program

_LANES = 128
_MOST_TOKENS = 2**18  # per row on a device: eight rows of three arrays are in the vector memory, twice

# From one number per parameter to a function of the values of a token, which gives the numbers that are added up.
TokenFn = Callable[[Sequence[jax.Array]], Callable[[Sequence[jax.Array]], Sequence[jax.Array]]]


@operation
def token_sums(
  plain: Callable[..., jax.Array],
  token_fns: Sequence[TokenFn],
  values: Sequence[jax.Array],
  params: jax.Array | None = None,
) -> jax.Array:
  """Sums over tokens, `[K]`; on a TPU by a kernel, for all entries of a `vmap` in one launch.

  Tokens may be divided over devices by the compiler. Then each adds up its own, and the sums are added.

  `plain(*values, params)`, or `plain(*values)` without parameters `[P]`, computes the sums over arrays `[V]`. For the
  kernel each of the functions gives some of them, in order; those of one are kept in registers at the same time, so
  they should be about 16. They must not close over traced values.
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
  """`sums` of the tokens of arrays `[..., V]` on each device, added up; the last array holds the parameters."""
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
    kernel = functools.partial(lazy('tpu.sums:token_sums'), token_fns=tuple(token_fns))
    return launch(jax.vmap(of_params), kernel, *(x[None] for x in arrays))[0]

  return _on_each_part(sums, *values, params)


@operation
def sums_of_rows(
  token_fn: TokenFn, tables: Sequence[jax.Array], rows: Sequence[np.ndarray], params: jax.Array
) -> jax.Array:
  """Sums `[M]` over the tokens of entries with a row of every table each; a TPU's kernel reads rows in place.

  `token_fn` gives one number per token of tables `[R, V]`, each with an R of its own, and of `params` `[M, P]`; it must
  not close over traced values. `rows` has for each table static int `[M]`, the row of every entry.
  """
  (numbers,) = token_fn(jnp.split(params, params.shape[1], axis=1))([*map(rows_at, tables, rows)])
  return jnp.sum(numbers, axis=1)


@sums_of_rows.form('tpu', takes=lambda token_fn, tables, rows, params: _are_covered(*tables, params))
def _sums_of_rows(token_fn, tables, rows, params):
  def plain(*arrays):
    *tables, params = arrays
    return sums_of_rows.plain(token_fn, tables, rows, params)

  def sums(*arrays):
    kernel = functools.partial(lazy('tpu.sums:sums_of_rows'), token_fn=token_fn, rows=rows)
    return launch(jax.vmap(plain), kernel, *(x[None] for x in arrays))[0]

  return _on_each_part(sums, *tables, params)
