"""Levanter: verification of chains of proposals, with the arguments of the engine's own function.

Written for `levanter.inference.speculative.verify_deterministic_proposals`, which takes proposals without
distributions. With `draft_probs`, the distributions that proposals were drawn from, whole blocks are verified.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spectr_jax import SamplingParams, TokenTree, logits_to_probs, verify


class VerifiedTokens(NamedTuple):
  """As the engine's: tokens `[B, K + 1]`, -1 from `lengths` on, with the log probabilities of plain sampling."""

  token_ids: jax.Array
  logprobs: jax.Array
  lengths: jax.Array
  accepted_draft_tokens: jax.Array


def verify_proposals(
  target_logits, draft_token_ids, draft_lengths, temperature, remaining_tokens, cancelled, *,
  key, logprobs_mode='raw_logprobs', stop_token_ids=(), draft_probs=None, method='race_traversal',
):  # fmt: skip
  """Keeps proposals so that the tokens have the target's distribution.

  Args:
    target_logits: `[B, K + 1, V]`.
    draft_token_ids: int32 `[B, K]`.
    draft_lengths, temperature, remaining_tokens, cancelled: `[B]`, as for the engine's function.
    key: A typed key, new in every round.
    logprobs_mode: `raw_logprobs`, or `processed_logprobs` for those at the temperature.
    stop_token_ids: Tokens that end a row.
    draft_probs: `[B, K, V]`, or None for proposals that were not drawn.
    method: A method of `spectr_jax.METHODS` for chains.

  Raises:
    ValueError: The mode is unknown, or as for `spectr_jax.verify`.
  """
  if logprobs_mode not in ('raw_logprobs', 'processed_logprobs'):
    raise ValueError(f'logprobs_mode must be raw_logprobs or processed_logprobs, got {logprobs_mode!r}')
  width, logits = target_logits.shape[1], target_logits.astype(jnp.float32)
  is_there = jnp.arange(width - 1) < draft_lengths[:, None]
  probs = logits_to_probs(logits, SamplingParams(temperature))
  tree = TokenTree.chains(1, width - 1)
  verified = verify(key, tree, jnp.where(is_there, draft_token_ids, -1), draft_probs, probs, method=method)
  lengths = jnp.minimum(verified.lengths, jnp.maximum(remaining_tokens, 0))
  is_stop = jnp.isin(verified.tokens, jnp.asarray(stop_token_ids, jnp.int32)) & (jnp.arange(width) < lengths[:, None])
  lengths = jnp.where(is_stop.any(axis=1), jnp.argmax(is_stop, axis=1) + 1, lengths)
  lengths = jnp.where(cancelled, 0, lengths)
  is_kept = jnp.arange(width) < lengths[:, None]
  tokens = jnp.where(is_kept, verified.tokens, -1)
  if logprobs_mode == 'processed_logprobs':
    logits /= jnp.where(temperature > 0, temperature, 1)[:, None, None]
  log_probs = jax.nn.log_softmax(logits)
  scores = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
  return VerifiedTokens(tokens, jnp.where(is_kept, scores, 0), lengths, jnp.minimum(verified.num_accepted, lengths))
