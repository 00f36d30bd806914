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
  """The sums of `fn` over blocks of at most `size` tokens of a row. The first one can be differentiated, by `params`
  and `inputs`. Arrays of `inputs` and `data` are `[B, T, ...]`; for tokens where they are 0 `fn` must add nothing.
  `unroll` writes the loop out, for the compiler's count of operations.
  """
  constants, data = jax.lax.stop_gradient((constants, data))
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


def _keep(tree, is_wanted):
  return jax.tree.map(lambda leaf, wanted: leaf if wanted else None, tree, is_wanted)


def _complete(kept, tree):
  return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, kept, tree, is_leaf=lambda x: x is None)


def _sum_forward(fn, unroll, *primals):
  params, inputs, constants, data = jax.tree.map(lambda x: x.value, primals)
  # Gradients are taken by what they are asked for alone: those of a frozen output head cost as much as its logits.
  by_param, by_input = jax.tree.map(lambda x: x.perturbed, primals[:2])

  def of_block(some_params, some_inputs, inputs, data):
    return fn(_complete(some_params, params), _complete(some_inputs, inputs), constants, data)

  differentiate = jax.value_and_grad(of_block, (0, 1), has_aux=True)
  wanted = _keep(params, by_param)

  def add(carry, block):
    inputs, data = block
    sums, (by_params, by_inputs) = differentiate(wanted, _keep(inputs, by_input), inputs, data)
    return _add(carry, (sums, by_params)), by_inputs

  first = jax.tree.map(lambda x: x[0], (inputs, data))
  shapes = jax.eval_shape(lambda block: fn(params, block[0], constants, block[1]), first)
  (sums, by_params), by_inputs = jax.lax.scan(add, _zeros((shapes, wanted)), (inputs, data), unroll=unroll)
  return sums, (by_params, by_inputs)


def _sum_backward(fn, unroll, gradients, cotangents):
  del fn, unroll
  scale, _ = cotangents  # the other sums are not differentiated
  return *jax.tree.map(lambda x: (scale * x).astype(x.dtype), gradients), None, None


_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)
