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
    max_draft_tokens: The most drafted tokens of a request; None for as many as the batch has, which takes memory for
      as many in every request.
    method: A method of `spectr_jax.METHODS` for chains. `race_traversal` is block verification on a chain, and takes
      guesses without draft distributions as well.
  """

  def __init__(self, mesh, max_draft_tokens=None, method='race_traversal'):
    super().__init__(mesh)
    self._length, self._method = max_draft_tokens, method

  @functools.partial(jax.jit, static_argnums=0)
  def forward(
    self, draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata, key=None
  ):
    """As the engine's: tokens `[num_tokens + batch_size]`, main ones and bonus ones, with placeholders between."""
    if key is None and sampling_metadata.do_sampling:
      raise ValueError('sampling needs a key')
    key = jax.random.key(0) if key is None else key
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    arrays = draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids
    rows, whole = PartitionSpec(ShardingAxisName.ATTN_DATA), PartitionSpec()
    local = jax.shard_map(self._local, mesh=self.mesh, in_specs=(rows, rows, whole), out_specs=rows, check_vma=False)
    parameters = tuple(getattr(sampling_metadata, name) for name in ('temperature', 'top_k', 'top_p'))
    return local(arrays, parameters if sampling_metadata.do_sampling else None, key)

  def _local(self, arrays, parameters, key):
    draft_tokens, lengths, draft_probs, logits, bonus_tokens = arrays
    size = draft_tokens.shape[0]
    depth = max(1, min(self._length or size, size))
    places = (jnp.cumsum(lengths) - lengths)[:, None] + jnp.arange(depth)  # of a request's guesses among all
    is_there = jnp.arange(depth) < lengths[:, None]
    if not size:  # no request has a guess
      draft_tokens, logits = jnp.zeros(1, jnp.int32), jnp.zeros((1, logits.shape[-1]), logits.dtype)
      draft_probs = None if draft_probs is None else jnp.zeros_like(logits)
    at = jnp.where(is_there, places, 0)
    temperature, top_k, top_p = parameters or (jnp.zeros(lengths.shape), None, None)
    sampling = SamplingParams(jnp.maximum(temperature, 0).astype(jnp.float32), top_k=top_k, top_p=top_p)
    target_probs = logits_to_probs(logits.astype(jnp.float32)[at], sampling)
    # The engine has drawn the token after the last guess already.
    bonus = jax.nn.one_hot(bonus_tokens, logits.shape[-1])[:, None]
    target_probs = jnp.concatenate([target_probs, bonus], axis=1)
    target_probs = jnp.where((jnp.arange(depth + 1) < lengths[:, None])[..., None], target_probs, bonus)
    found = verify(
      jax.random.fold_in(key, jax.lax.axis_index(ShardingAxisName.ATTN_DATA)),
      TokenTree.chains(1, depth),
      jnp.where(is_there, draft_tokens[at], -1),
      None if draft_probs is None else draft_probs.astype(jnp.float32)[at],
      target_probs,
      method=self._method,
    )
    main = jnp.full(size, engine.PLACEHOLDER_TOKEN_ID)
    main = main.at[jnp.where(is_there, places, size)].set(found.tokens[:, :-1], mode='drop')
    is_whole = found.num_accepted == lengths
    return jnp.concatenate([main, jnp.where(is_whole, bonus_tokens, engine.PLACEHOLDER_TOKEN_ID)])
