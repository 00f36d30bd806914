"""The loss of a head: its guesses some tokens ahead of the target, from the target's hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from spectr_jax.kernels.products import accumulation_dtype
from spectr_jax.models.products import matmul
from train.blocks import sum_over_blocks

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
  masks = jnp.stack([counts_here & (places >= step) for step in range(len(steps))], axis=-1)
  counts = jnp.maximum(masks.sum((0, 1)), 1).astype(accumulation_dtype(outputs[0].dtype))
  weights = decay ** jnp.arange(len(steps), dtype=counts.dtype)
  data = {'features': batch.features[:, 1:-1, -1].astype(outputs[0].dtype), 'masks': masks.astype(counts.dtype)}
  constants = {'unembedding': unembedding, 'scales': weights / jnp.sum(weights) / counts}
  own_kernels = list({id(kernel): kernel for kernel in kernels}.values())  # steps may share one
  kernel_of = [next(i for i, own in enumerate(own_kernels) if own is kernel) for kernel in kernels]

  def sums(own_kernels, outputs, constants, data):
    """The loss, but for a constant; and cross entropy, overlap and equal likeliest tokens, each `[num_steps]`."""
    log_q = jax.nn.log_softmax(matmul(data['features'], constants['unembedding']), axis=-1)
    q, best = jnp.exp(log_q), jnp.argmax(log_q, axis=-1)
    found = []
    for step, output in enumerate(outputs):
      log_p = jax.nn.log_softmax(matmul(output, own_kernels[kernel_of[step]]), axis=-1)
      cross_entropy, overlap = -jnp.sum(q * log_p, axis=-1), jnp.sum(jnp.minimum(q, jnp.exp(log_p)), axis=-1)
      is_best = jnp.argmax(log_p, axis=-1) == best
      found.append([jnp.sum(x * data['masks'][..., step]) for x in (cross_entropy, overlap, is_best)])
    cross_entropy, overlap, greedy = (jnp.stack(sums_of_steps) for sums_of_steps in zip(*found, strict=True))
    return jnp.sum(constants['scales'] * (cross_entropy - tv_weight * overlap)), (cross_entropy, overlap, greedy)

  size = max(1, _MAX_LOGITS // (len(batch.tokens) * unembedding.shape[-1]))
  total, means = sum_over_blocks(sums, own_kernels, list(outputs), constants, data, size=size)
  cross_entropy, acceptance, greedy = (each / counts for each in means)
  found = {'cross_entropy': cross_entropy, 'acceptance': acceptance, 'greedy': greedy, 'count': counts}
  return total + tv_weight, found
