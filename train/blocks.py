"""A sum over tokens, block by block, whose gradient is taken while it is summed.

The logits of all tokens, their probabilities and the gradients of both are the largest arrays of training. Here those
of one block exist at a time, and nothing is computed twice: what a gradient needs of a block is taken when its logits
are at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

# (params, inputs of a block, constants, data of a block) -> the sum that is differentiated, other sums
BlockFn: TypeAlias = Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]


def sum_over_blocks(
  fn: BlockFn, params: Any, inputs: Any, constants: Any, data: Any, *, size: int, unroll: bool = False
) -> tuple[Any, Any]:
  """The sums of `fn` over blocks of tokens. The first one can be differentiated, by `params` and `inputs`.

  Args:
    fn: Sums over a block. It must add nothing for tokens whose inputs and data are 0.
    params: Float arrays that every block uses.
    inputs: Float arrays `[B, T, ...]`, of every token.
    constants: Arrays that every block uses.
    data: Arrays `[B, T, ...]`, of every token.
    size: The most tokens of a row in a block.
    unroll: Whether the loop over blocks is unrolled, for the compiler's count of operations.
  """
  length = jax.tree.leaves(inputs)[0].shape[1]
  num_blocks = -(-length // size)
  if num_blocks == 1:
    return fn(params, inputs, constants, data)
  size = -(-length // num_blocks)

  def divide(x):
    padded = jnp.pad(x, [(0, 0), (0, num_blocks * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(len(x), num_blocks, size, *x.shape[2:]), 1, 0)

  return _sum(fn, unroll, params, jax.tree.map(divide, inputs), constants, jax.tree.map(divide, data))


def _zeros(shapes):
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _add(tree, other):
  return jax.tree.map(jnp.add, tree, other)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(fn, unroll, params, inputs, constants, data):
  def add(sums, block):
    return _add(sums, fn(params, block[0], constants, block[1])), None

  first = jax.tree.map(lambda x: x[0], (inputs, data))
  shapes = jax.eval_shape(lambda block: fn(params, block[0], constants, block[1]), first)
  return jax.lax.scan(add, _zeros(shapes), (inputs, data), unroll=unroll)[0]


def _sum_forward(fn, unroll, params, inputs, constants, data):
  differentiate = jax.value_and_grad(fn, (0, 1), has_aux=True)

  def add(carry, block):
    sums, (by_params, by_inputs) = differentiate(params, block[0], constants, block[1])
    return _add(carry, (sums, by_params)), by_inputs

  first = jax.tree.map(lambda x: x[0], (inputs, data))
  shapes = jax.eval_shape(lambda block: fn(params, block[0], constants, block[1]), first)
  (sums, by_params), by_inputs = jax.lax.scan(add, _zeros((shapes, params)), (inputs, data), unroll=unroll)
  return sums, (by_params, by_inputs)


def _sum_backward(fn, unroll, gradients, cotangents):
  del fn, unroll
  scale, _ = cotangents  # the other sums are not differentiated
  return *jax.tree.map(lambda x: (scale * x).astype(x.dtype), gradients), None, None


_sum.defvjp(_sum_forward, _sum_backward)
