"""Sums over the tokens of distributions as TPU kernels: what is added up is a function of each token alone.

XLA adds up along the lanes of a register with every few tokens, and holds what is added up in between. A kernel reads
the distributions once and adds up registers; lanes are added at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spectr_jax.ops.kernels import launch
from spectr_jax.ops.platforms import by_platform
from spectr_jax.sharding import dividing_axes, shards_in_program

_LANES = 128
_ROWS = 8
_UNROLLED = 5  # registers of tokens per turn of a loop
_MOST_TOKENS = 2**18  # per row on a device: eight rows of three arrays are in the vector memory, twice
_MEMORY = 64 * 2**20

# From one number per parameter to a function of the values of a token, which gives the numbers that are added up.
TokenFn = Callable[[Sequence[jax.Array]], Callable[[Sequence[jax.Array]], Sequence[jax.Array]]]


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
  of_params = plain
  if params is None:  # a kernel has no arrays without entries
    params, of_params = jnp.zeros(1, jnp.float32), lambda *arrays: plain(*arrays[:-1])
  kernel = functools.partial(_by_kernel, plain=of_params, token_fns=tuple(token_fns))
  return by_platform(*values, params, tpu=kernel, default=of_params)


def _by_kernel(*arrays, plain, token_fns):
  values = arrays[:-1]
  size, axes = len(values[0]), dividing_axes()
  num_shards = shards_in_program(size)
  is_whole = not axes
  is_divided = len(axes) == 1 and num_shards > 1
  is_covered = size % (num_shards * _LANES) == 0 and size // num_shards <= _MOST_TOKENS
  if any(x.dtype.itemsize != 4 for x in arrays) or not is_covered or not (is_whole or is_divided):
    return plain(*arrays)

  def sums(*arrays):
    plain_rows = jax.vmap(lambda *row: (plain(*row),))
    kernel = functools.partial(token_sums_kernel, token_fns=token_fns)
    return launch(plain_rows, kernel, *(x[None] for x in arrays))[0][0]

  if is_whole:
    return sums(*arrays)
  return jax.shard_map(
    lambda *arrays: jax.lax.psum(sums(*arrays), axes),
    in_specs=(*[PartitionSpec(axes[0])] * len(values), PartitionSpec()),
    out_specs=PartitionSpec(),
    axis_names=set(axes),
    check_vma=False,
  )(*arrays)


def token_sums_kernel(*arrays: jax.Array, token_fns: Sequence[TokenFn], interpret: bool = False) -> tuple[jax.Array]:
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
  return (sums[:num_rows],)
