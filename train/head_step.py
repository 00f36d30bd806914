"""The loss of a head: its guesses some tokens ahead of the target, from the target's hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from spectr_jax.models import layers

# Inputs of an output head, `[B, T, D]`, and the output head, `[D, Vd]`.
Step: TypeAlias = tuple[jax.Array, jax.Array]
_MAX_LOGITS = 2**25  # numbers that an array of logits may have


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
  """Conversations of a batch.

  Attributes:
    tokens: int32 `[B, S]`.
    lengths: int32 `[B]`.
    starts: int32 `[B]`, the first token of each row that counts in the loss.
    features: `[B, S, F + 1, D]`, the target's hidden states: those that the head reads, then the input of the output
      head. The last token of a row needs none.
  """

  tokens: jax.Array
  lengths: jax.Array
  starts: jax.Array
  features: jax.Array


def _sum_over_chunks(sums: Callable[..., list[jax.Array]], size: int, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
  """The sums of `sums(*arrays)` over chunks of `size` entries of axis 1, computed anew for the gradient."""
  length = arrays[0].shape[1]
  num_chunks = -(-length // size)
  if num_chunks == 1:
    return sums(*arrays)

  def chunks(x):
    padded = jnp.pad(x, [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(len(x), num_chunks, size, *x.shape[2:]), 1, 0)

  body = jax.checkpoint(lambda totals, some: (jax.tree.map(jnp.add, totals, sums(*some)), None))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums, *arrays))
  return jax.lax.scan(body, zeros, tuple(map(chunks, arrays)))[0]


def head_loss(
  steps: Sequence[Step],
  unembedding: jax.Array,
  batch: HeadBatch,
  *,
  decay: float,
  tv_weight: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch.

  The head learns the target's distributions over its Vd tokens: cross entropy plus `tv_weight` times the total
  variation, weighted by `decay ** s` for step s.

  Args:
    steps: For each step the inputs `[B, S - 2, D]` of an output head, and that output head, as `HeadKind.steps` returns
      them.
    unembedding: `[D, Vd]`, the target's output head.
    batch: The conversations.
    decay: Weight of a step relative to the one before.
    tv_weight: Weight of the total variation.

  Returns:
    The mean over tokens, and means by step: `cross_entropy` `[num_steps]`, `acceptance`, 1 minus the total variation,
    `greedy`, the share of equal likeliest tokens, and the number of tokens `count`.
  """
  outputs, kernels = zip(*steps, strict=True)
  places = jnp.arange(batch.tokens.shape[1] - 2)
  # Entry i guesses token i + 2, whose distribution the target has at token i + 1.
  counts_here = (places + 2 < batch.lengths[:, None]) & (places + 2 >= batch.starts[:, None])
  masks = [counts_here & (places >= step) for step in range(len(steps))]
  features = batch.features[:, 1:-1, -1].astype(outputs[0].dtype)

  def sums(features, masks, *outputs):
    """Cross entropy, overlap and equal likeliest tokens, each `[num_steps]`.

    They are arrays of their own, so that those that a program does not use are not computed.
    """
    log_q = jax.nn.log_softmax(layers.matmul(features, unembedding), axis=-1)
    q, best = jnp.exp(log_q), jnp.argmax(log_q, axis=-1)
    found = []
    for step, (output, kernel) in enumerate(zip(outputs, kernels, strict=True)):
      log_p = jax.nn.log_softmax(layers.matmul(output, kernel), axis=-1)
      cross_entropy, overlap = -jnp.sum(q * log_p, axis=-1), jnp.sum(jnp.minimum(q, jnp.exp(log_p)), axis=-1)
      is_best = jnp.argmax(log_p, axis=-1) == best
      mask = masks[..., step].astype(log_p.dtype)
      found.append([jnp.sum(x * mask) for x in (cross_entropy, overlap, is_best)])
    return [jnp.stack(sums_of_steps) for sums_of_steps in zip(*found, strict=True)]

  arrays = features, jnp.stack(masks, axis=-1), *outputs
  chunk_size = max(1, _MAX_LOGITS // (len(batch.tokens) * unembedding.shape[-1]))
  totals = _sum_over_chunks(sums, chunk_size, arrays)
  counts = jnp.maximum(jnp.stack([mask.sum() for mask in masks]), 1).astype(totals[0].dtype)
  cross_entropy, acceptance, greedy = (total / counts for total in totals)
  weights = decay ** jnp.arange(len(steps), dtype=counts.dtype)
  loss = jnp.sum(weights * (cross_entropy + tv_weight * (1 - acceptance))) / jnp.sum(weights)
  return loss, {'cross_entropy': cross_entropy, 'acceptance': acceptance, 'greedy': greedy, 'count': counts}
