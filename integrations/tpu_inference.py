"""tpu-inference: a `RejectionSampler` that verifies whole blocks, in place of the engine's own.

  from integrations.tpu_inference import RejectionSampler
  runner.rejection_sampler = RejectionSampler(runner.mesh, max_draft_tokens=num_speculative_tokens)

Temperature, top-k and top-p act in the order of the engine's plain sampling, and greedy rows stay greedy in a batch
with others. Written for tpu-inference 0.32.0.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample import rejection_sampler as engine

from spectr_jax import SamplingParams, TokenTree, logits_to_probs, verify


class RejectionSampler(engine.RejectionSampler):
  """The engine's sampler with another verification.

  Args:
    mesh: The engine's mesh.
    max_draft_tokens: The most drafted tokens of a request. None reads it from every batch, which waits for the device.
    method: A method of `spectr_jax.METHODS` for chains, for guesses with draft distributions. Without these, and in
      greedy batches, token by token keeps as many as any method.
  """

  def __init__(self, mesh, max_draft_tokens=None, method='block'):
    super().__init__(mesh)
    self._depth, self._method = max_draft_tokens, method

  def forward(
    self, draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata, key=None
  ):
    """As the engine's: tokens `[num_tokens + batch_size]`, main ones and bonus ones, with placeholders between."""
    own = sampling_metadata
    if key is None and own.do_sampling:
      raise ValueError('A random key must be provided for sampling.')  # as the engine says it
    key = jax.random.key(0) if key is None else key
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    if not len(draft_token_ids):
      return bonus_token_ids  # no request has a guess
    depth = max(1, int(jnp.max(num_draft_tokens)) if self._depth is None else self._depth)
    arrays = draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids
    return self._verify(depth, arrays, (own.temperature, own.top_k, own.top_p) if own.do_sampling else None, key)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def _verify(self, depth, arrays, parameters, key):
    rows, whole = PartitionSpec(ShardingAxisName.ATTN_DATA), PartitionSpec()
    verify_shard = functools.partial(_verify_shard, depth, self._method)
    return jax.shard_map(verify_shard, mesh=self.mesh, in_specs=(rows, rows, whole), out_specs=rows, check_vma=False)(
      arrays, parameters, key
    )


def _verify_shard(depth, method, arrays, parameters, key):
  draft_tokens, lengths, draft_probs, logits, bonus_tokens = arrays
  size, places = draft_tokens.shape[0], jnp.arange(depth + 1)
  flat = (jnp.cumsum(lengths) - lengths)[:, None] + places[:-1]  # where a request's guesses are among all
  is_there = places < lengths[:, None]
  at = jnp.where(is_there[:, :-1], flat, 0)
  method = 'speculative' if parameters is None or draft_probs is None else method
  temperature, top_k, top_p = parameters or (jnp.zeros(lengths.shape), jnp.zeros(lengths.shape, int), None)
  # A temperature or a top-k of -1 is none.
  sampling = SamplingParams(jnp.maximum(temperature, 0).astype(jnp.float32), top_k=jnp.maximum(top_k, 0), top_p=top_p)
  target_probs = logits_to_probs(logits.astype(jnp.float32)[at], sampling)
  # The engine has drawn the token after the last guess already.
  bonus = jax.nn.one_hot(bonus_tokens, logits.shape[-1])[:, None]
  target_probs = jnp.where(is_there[..., None], jnp.pad(target_probs, ((0, 0), (0, 1), (0, 0))), bonus)
  verified = verify(
    jax.random.fold_in(key, jax.lax.axis_index(ShardingAxisName.ATTN_DATA)),
    TokenTree.chains(1, depth),
    jnp.where(is_there[:, :-1], draft_tokens[at], -1),
    None if draft_probs is None else draft_probs.astype(jnp.float32)[at],
    target_probs,
    method=method,
  )
  main = jnp.full(size, engine.PLACEHOLDER_TOKEN_ID)
  main = main.at[jnp.where(is_there[:, :-1], flat, size)].set(verified.tokens[:, :-1], mode='drop')
  return jnp.concatenate([main, jnp.where(verified.num_accepted == lengths, bonus_tokens, engine.PLACEHOLDER_TOKEN_ID)])
