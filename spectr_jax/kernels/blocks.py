"""Distributions in blocks of 128 tokens, over which sums and minima are taken in two steps."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spectr_jax.sharding import dividing_axes, shards_in_program

BLOCK = 128  # tokens whose sum or minimum is taken at a time, the lanes of a TPU's register
SMALL = 4 * BLOCK  # vocabularies that are not cut into blocks


def fits_kernels(probs: jax.Array) -> bool:
  """Whether kernels take distributions `[..., V]`: in float32, of whole registers, and not divided over devices."""
  width = probs.shape[-1]
  return probs.dtype == jnp.float32 and width > SMALL and width % BLOCK == 0 and not dividing_axes()


def in_blocks(values: jax.Array, fill: float) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
  """`values` `[V]` in order in blocks `[R, BLOCK]`, and a function from the index of a block to its first token.

  `fill` is the value of the padding at the end of each shard.
  """
  num_shards = shards_in_program(values.shape[0])
  width = values.shape[0] // num_shards
  padded = jnp.pad(values.reshape(num_shards, width), ((0, 0), (0, -width % BLOCK)), constant_values=fill)
  num_blocks = padded.shape[1] // BLOCK
  return padded.reshape(-1, BLOCK), lambda row: row // num_blocks * width + row % num_blocks * BLOCK


def on_each_device(values: jax.Array) -> jax.Array:
  """`values` of the blocks of a distribution, sent to every device at once; each then goes on by itself."""
  if not dividing_axes():
    return values
  return jax.lax.with_sharding_constraint(values, PartitionSpec())


def argmin(values: jax.Array) -> jax.Array:
  """The index of the smallest of `values` `[V]`, int32 scalar; of equal ones the lowest.

  An argmin over the whole vocabulary is not vectorised on CPU, so it takes the minimum of every block first.
  """
  blocks, first_of = in_blocks(values, jnp.inf)
  row = jnp.argmin(on_each_device(jnp.min(blocks, axis=-1)))
  return (first_of(row) + jnp.argmin(blocks[row])).astype(jnp.int32)
