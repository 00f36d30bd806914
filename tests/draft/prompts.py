"""Prompts read by a drafter, apart from the engine."""

import dataclasses

import jax.numpy as jnp


def read(drafter, context, cache_size):
  """The drafter's state after the prompts of a context, `[B, P]`."""
  num_rows, num_tokens = context.tokens.shape
  tokens = jnp.pad(context.tokens, ((0, 0), (0, cache_size - num_tokens)))
  state, context = drafter.init(num_rows, cache_size), dataclasses.replace(context, tokens=tokens)
  return drafter.read(state, context, jnp.zeros(num_rows, jnp.int32), num_tokens)
