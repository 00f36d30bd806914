"""The loss of a head: its guesses some tokens ahead of the target, from its own hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.models import head, layers
from spectr_jax.models.head import HeadConfig


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


def _attend(query, keys: Sequence[jax.Array], values: Sequence[jax.Array], *, scale):
  """Attention of the last of several steps over the pairs of a text.

  Step 0 has read the target's hidden states. A guess of step s at pair i has seen these up to pair i - s, and one pair
  of each later step: those of the chain of guesses that it ends, pair i - s + j of step j.

  Args:
    query: `[B, T, H, head_dim]`, of the last step.
    keys: `[B, T, K, head_dim]` of each step.
    values: Likewise.
    scale: Factor of the queries.

  Returns:
    `[B, T, H, head_dim]`.
  """
  batch_size, num_pairs, num_heads, head_dim = query.shape
  num_kv_heads, step = keys[0].shape[2], len(keys) - 1
  grouped = (query * scale).reshape(batch_size, num_pairs, num_kv_heads, -1, head_dim)
  wide = layers.accumulation_dtype(query.dtype)
  scores = jnp.einsum('btkgd,bskd->bkgts', grouped, keys[0], preferred_element_type=wide)
  is_seen = jnp.arange(num_pairs) <= jnp.arange(num_pairs)[:, None] - step
  scores = jnp.where(is_seen, scores, jnp.finfo(wide).min)
  later = [(jnp.roll(key, step - j, 1), jnp.roll(value, step - j, 1))
           for j, (key, value) in enumerate(zip(keys, values, strict=True)) if j > 0]  # fmt: skip
  own = [jnp.einsum('btkgd,btkd->bkgt', grouped, key, preferred_element_type=wide)[..., None] for key, _ in later]
  weights = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1).astype(query.dtype)
  mixed = jnp.einsum('bkgts,bskd->btkgd', weights[..., :num_pairs], values[0])
  for j, (_, value) in enumerate(later):
    mixed += jnp.moveaxis(weights[..., num_pairs + j], 3, 1)[..., None] * value[:, :, :, None]
  return mixed.reshape(query.shape)


def unrolled_outputs(
  params: Any, config: HeadConfig, embedded: jax.Array, features: jax.Array, num_steps: int
) -> list[jax.Array]:
  """Inputs of the output head of guesses that are 1, 2, ... tokens ahead of the target (EAGLE-3, training-time test).

  Args:
    params: The head's parameters.
    config: The head.
    embedded: `[B, T, embedding_dim]`, the embedded tokens 1 to T of each text.
    features: `[B, T, F, target_dim]`, the target's hidden states of tokens 0 to T - 1.
    num_steps: Steps.

  Returns:
    For each step s `[B, T, embed_dim]`. Entry i guesses token i + 2 from the tokens up to i + 1 and the target's hidden
    states up to token i - s; the first s entries are not valid.
  """
  positions = jnp.broadcast_to(jnp.arange(embedded.shape[1]), embedded.shape[:2])
  hidden = head.hidden_of_features(params, config, features)
  keys, values, outputs = [], [], []
  scale = config.block.query_scale or config.block.head_dim**-0.5

  def attend(query, key, value):
    keys.append(key)
    values.append(value)
    return _attend(query, keys, values, scale=scale), None

  for _ in range(num_steps):
    hidden, output, _ = head.advance(params, config, embedded, hidden, positions, attend)
    outputs.append(output)
    hidden = jnp.roll(hidden, 1, axis=1)
  return outputs


def head_loss(
  params: Any,
  frozen: Any,
  config: HeadConfig,
  batch: HeadBatch,
  *,
  num_steps: int,
  decay: float,
  tv_weight: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch.

  The head learns the target's distributions over its Vd tokens: cross entropy plus `tv_weight` times the total
  variation, weighted by `decay ** s` for step s.

  Args:
    params: The head's trained parameters.
    frozen: `embedding` `[V, embedding_dim]` and `unembedding` `[target_dim, Vd]` of the target, and the head's other
      parameters that stay as they are.
    config: The head.
    batch: The conversations.
    num_steps: Steps.
    decay: Weight of a step relative to the one before.
    tv_weight: Weight of the total variation.

  Returns:
    The mean over tokens, and means by step: `cross_entropy` `[num_steps]`, `acceptance`, 1 minus the total variation,
    `greedy`, the share of equal likeliest tokens, and the number of tokens `count`.
  """
  embedded = jnp.take(frozen['embedding'], batch.tokens[:, 1:-1], axis=0)
  outputs = unrolled_outputs(params, config, embedded, batch.features[:, :-2, :-1], num_steps)
  target_logits = layers.matmul(batch.features[:, 1:-1, -1].astype(config.block.dtype), frozen['target_unembedding'])
  log_q = jax.nn.log_softmax(target_logits, axis=-1)
  q, best = jnp.exp(log_q), jnp.argmax(target_logits, axis=-1)
  places = jnp.arange(embedded.shape[1])
  # Entry i guesses token i + 2, whose distribution the target has at token i + 1.
  counts_here = (places + 2 < batch.lengths[:, None]) & (places + 2 >= batch.starts[:, None])
  unembedding = params.get('unembedding', frozen.get('unembedding'))
  totals, loss, total_weight = [], 0.0, 0.0
  for step, output in enumerate(outputs):
    log_p = jax.nn.log_softmax(layers.matmul(output, unembedding), axis=-1)
    mask = (counts_here & (places >= step)).astype(log_p.dtype)
    count = jnp.maximum(mask.sum(), 1)
    cross_entropy = jnp.sum(-jnp.sum(q * log_p, axis=-1) * mask) / count
    overlap = jnp.sum(jnp.sum(jnp.minimum(q, jnp.exp(log_p)), axis=-1) * mask) / count
    greedy = jnp.sum((jnp.argmax(log_p, axis=-1) == best) * mask) / count
    loss += decay**step * (cross_entropy + tv_weight * (1 - overlap))
    total_weight += decay**step
    totals.append((cross_entropy, overlap, greedy, count))
  names = 'cross_entropy', 'acceptance', 'greedy', 'count'
  return loss / total_weight, {name: jnp.stack(each) for name, each in zip(names, zip(*totals))}
