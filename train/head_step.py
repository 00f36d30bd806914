"""The loss of a draft: its guesses some tokens ahead of the target, from the target's hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spectr_jax.kernels.matrices import matmul
from spectr_jax.kernels.products import accumulation_dtype
from train.block_sums import sum_over_blocks

_MAX_LOGITS = 2**25  # numbers that an array of logits may have


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadBatch:
  """Conversations of a batch."""

  tokens: jax.Array  # int32 `[B, S]`
  lengths: jax.Array  # int32 `[B]`
  starts: jax.Array  # int32 `[B]`, the first token of each row that counts in the loss
  features: jax.Array  # `[B, S, F + 1, D]`: hidden states that the head reads, then the input of the output head
  offsets: jax.Array  # int32 `[B]`, at least 0; drafts that guess from some places of a text alone choose them by it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guesses:
  """A draft's guesses of the tokens of a text, at most one of each; entry i is token i + 2, after token i + 1."""

  # Inputs `[B, S - 2, D]` and kernels `[D, Vd]` whose products add up to the logits.
  products: tuple[tuple[jax.Array, jax.Array], ...]
  # int32 `[S - 2]` or `[B, S - 2]`: how many guesses of the draft stand between what the target has read and this
  # one; -1 for none.
  depths: jax.Array
  confidence: jax.Array | None = None  # `[B, S - 2]`, logits of the estimated chance that the guess is accepted.


def guesses_ahead(output: jax.Array, unembedding: jax.Array, step: int) -> Guesses:
  """Guesses that all stand `step` guesses behind what the target has read, from inputs of the output head `[B, S - 2,
  D]`, whose first `step` are not valid, and the head `[D, Vd]`.
  """
  places = jnp.arange(output.shape[1])
  return Guesses(((output, unembedding),), jnp.where(places >= step, step, -1))


@dataclasses.dataclass(frozen=True)
class LossWeights:
  """Weights of what a draft learns of the target's distribution q over its Vd tokens, with p its own."""

  decay: float  # of a guess relative to one that is one token less ahead
  ce_weight: float = 1.0  # of the cross entropy, -sum q log p
  tv_weight: float = 1.0  # of the total variation, TV, which is 1 less the chance that the guess is accepted
  lk_weight: float = 0.0  # of -log(1 - TV) (LK losses, arXiv:2602.23881)
  # Of the cross entropy of the estimates, whose goal is 1 - TV (DSpark, arXiv:2607.05147). Tokens that are not among
  # the Vd are left out, so estimates are too high by what the target has there.
  confidence_weight: float = 1.0

  @classmethod
  def of(cls, config) -> LossWeights:
    """Those of an experiment, as far as it has such fields."""
    names = (field.name for field in dataclasses.fields(cls))
    return cls(**{name: config[name] for name in names if name in config})


def head_loss(
  guesses: Sequence[Guesses], unembedding: jax.Array, batch: HeadBatch, *, num_depths: int, weights: LossWeights
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch, from guesses whose depths are below `num_depths` and the target's output head `[D, Vd]`: the
  mean over depths of the mean over tokens, depths weighted by `weights.decay`.

  Also means by depth `[num_depths]`: `cross_entropy`, `acceptance`, 1 minus the total variation, `greedy`, the share of
  equal likeliest tokens, `confidence_error`, the mean distance of estimate and acceptance if there are estimates, and
  the number of tokens `count`.
  """
  dtype = guesses[0].products[0][0].dtype
  wide = accumulation_dtype(dtype)
  places = jnp.arange(batch.tokens.shape[1] - 2)
  # Entry i guesses token i + 2, whose distribution the target has at token i + 1.
  counts_here = (places + 2 < batch.lengths[:, None]) & (places + 2 >= batch.starts[:, None])
  of_depth = [each.depths[..., None] == jnp.arange(num_depths) for each in guesses]
  masks = jnp.stack([counts_here[..., None] & each for each in of_depth], axis=2).astype(wide)
  counts = jnp.maximum(masks.sum((0, 1, 2)), 1)
  share = weights.decay ** jnp.arange(num_depths, dtype=wide)
  data = {'features': batch.features[:, 1:-1, -1].astype(dtype), 'masks': masks}
  constants = {'unembedding': unembedding, 'scales': share / jnp.sum(share) / counts}
  # Guesses may share a kernel, whose gradient is then one.
  kernels = {id(kernel): kernel for each in guesses for _, kernel in each.products}
  kernel_of = [[list(kernels).index(id(kernel)) for _, kernel in each.products] for each in guesses]
  inputs = [([x for x, _ in each.products], each.confidence) for each in guesses]

  def sums(kernels, inputs, constants, data):
    """The loss, but for a constant, and sums by depth, `[num_depths]` each."""
    log_q = jax.nn.log_softmax(matmul(data['features'], constants['unembedding']), axis=-1)
    q, best = jnp.exp(log_q), jnp.argmax(log_q, axis=-1)
    total, by_depth = jnp.zeros((), wide), {}
    for i, (outputs, confidence) in enumerate(inputs):
      mask = data['masks'][:, :, i]
      logits = sum(matmul(x, kernels[k]) for x, k in zip(outputs, kernel_of[i], strict=True))
      log_p = jax.nn.log_softmax(logits, axis=-1)
      cross_entropy, overlap = -jnp.sum(q * log_p, axis=-1), jnp.sum(jnp.minimum(q, jnp.exp(log_p)), axis=-1)
      loss = weights.ce_weight * cross_entropy - weights.tv_weight * overlap
      if weights.lk_weight:
        # Entries that do not count may have any overlap; 0 would give them a gradient that is no number.
        loss -= weights.lk_weight * jnp.log(jnp.maximum(overlap, jnp.finfo(wide).tiny))
      values = {'cross_entropy': cross_entropy, 'acceptance': overlap, 'greedy': jnp.argmax(log_p, axis=-1) == best}
      if confidence is not None:
        estimate, goal = confidence.astype(wide), jax.lax.stop_gradient(overlap)
        loss += weights.confidence_weight * (jax.nn.softplus(estimate) - goal * estimate)
        values['confidence_error'] = jnp.abs(jax.nn.sigmoid(estimate) - goal)
      total += jnp.sum(jnp.einsum('btd,d->bt', mask, constants['scales']) * loss)
      for name, value in values.items():
        by_depth[name] = by_depth.get(name, 0) + jnp.einsum('bt,btd->d', value.astype(wide), mask)
    return total, by_depth

  size = max(1, _MAX_LOGITS // (len(batch.tokens) * unembedding.shape[-1]))
  total, by_depth = sum_over_blocks(sums, list(kernels.values()), inputs, constants, data, size=size)
  means = {name: value / counts for name, value in by_depth.items()}
  return total + weights.tv_weight, means | {'count': counts}
