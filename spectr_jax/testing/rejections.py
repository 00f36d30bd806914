"""Rejections counted in real decoding, to compare with the theory of expected rejections."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.engine.generate import generate
from spectr_jax.engine.result import ORIGIN_CORRECTION
from spectr_jax.methods import Method
from spectr_jax.models.table import table_model
from spectr_jax.theory import MarkovChains
from spectr_jax.tree import TokenTree


def simulated_rejections(
  rng_key: jax.Array,
  chains: MarkovChains,
  *,
  method: str | Method = 'batch',
  num_drafts: int = 1,
  num_runs: int,
  batch_size: int = 512,
) -> np.ndarray:
  """Decodes texts of T tokens with lookahead to the horizon and counts the rejections in each.

  Every round drafts T tokens, so every emitted token was guessed. Tokens beyond the horizon are neither kept nor
  counted. `theory.expected_rejections` is the expectation for `speculative`, and for `batch` with any number of drafts.

  Args:
    rng_key: One typed key.
    chains: Draft and target.
    method: The method.
    num_drafts: M.
    num_runs: N, number of texts to decode.
    batch_size: Number of texts decoded together.

  Returns:
    int64 `[N]`. The mean estimates the expectation; its standard error is the standard deviation over sqrt(N).

  Raises:
    ValueError: The method does not take such drafts, or a number is below 1.
  """
  if num_runs < 1 or batch_size < 1:
    raise ValueError(f'num_runs and batch_size must be at least 1, got {num_runs} and {batch_size}')
  batch_size = min(batch_size, num_runs)
  with np.errstate(divide='ignore'):  # impossible tokens have log probability -inf
    target, draft = (
      table_model(jnp.asarray(np.log(probs), jnp.float32)) for probs in (chains.target_probs, chains.draft_probs)
    )
    prompt_logits = jnp.asarray(np.log(chains.prompt_probs), jnp.float32)
  counts = []
  for batch in range(-(-num_runs // batch_size)):
    prompt_key, decode_key = jax.random.split(jax.random.fold_in(rng_key, batch))
    result = generate(
      decode_key,
      target,
      draft,
      jax.random.categorical(prompt_key, prompt_logits, shape=(batch_size, 1)),
      jnp.ones(batch_size, jnp.int32),
      method=method,
      tree=TokenTree.chains(num_drafts, chains.num_tokens),
      max_new_tokens=chains.num_tokens,
    )
    counts.append(np.sum(np.asarray(result.origins) == ORIGIN_CORRECTION, axis=1))
  return np.concatenate(counts)[:num_runs]
