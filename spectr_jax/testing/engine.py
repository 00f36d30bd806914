"""Counts from the whole decoding loop on tiny transformers, and the exact distribution to compare them with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.engine.generate import generate
from spectr_jax.engine.result import ORIGIN_CORRECTION
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.models.causal_lm import causal_lm, lm1b_config
from spectr_jax.models.table import table_model
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.theory import MarkovChains
from spectr_jax.tree import TokenTree


def tiny_transformers(seed: int = 16, *, vocab_size: int = 5, width: int = 16) -> tuple[Model, Model]:
  """A target of two layers with random parameters, and a draft that is the target without its second layer.

  The two differ enough that tokens are accepted, rejected and cut by top-k and top-p. With the default seed, a
  vocabulary of four tokens and the sampling of `spectr_jax.testing.proof`, the distributions of the first token differ
  by .2 to .35 in total variation and have an entropy of about 1.4 bits. `width`, a multiple of 4, is that of the
  residual stream.
  """
  from spectr_jax.models.transformer import init_params  # needs Flax, as nothing else of the proofs does

  config = lm1b_config(vocab_size, embed_dim=width, num_layers=2, num_heads=2, mlp_dim=2 * width, context_length=32)
  params = init_params(jax.random.key(seed), config)
  # Freshly initialized blocks add little to the embedding, so that every token would predict itself. Larger ones make
  # the context count.
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  target = causal_lm(params, config)
  params = {k: v for k, v in params.items() if k != 'layer_1'}
  return target, causal_lm(params, dataclasses.replace(config, num_layers=1))


@jax.jit
def _uncached_logits(model: Model, tokens: jax.Array) -> jax.Array:
  """Logits `[B, T, V]` after every token of texts `[B, T]`, by one causal forward pass on an empty cache."""
  batch_size, size = tokens.shape
  causal = jnp.tril(jnp.ones((size, size), bool))
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  return model.apply(tokens, positions, causal, model.init_cache_fn(batch_size, 1)).logits


_to_probs = jax.jit(logits_to_probs)


def ordinary_law(model: Model, prompt: Sequence[int], num_tokens: int, **sampling) -> np.ndarray:
  """The joint distribution of the first tokens under ordinary sampling, computed without a cache.

  It is float64 `[V] * num_tokens`, for a prompt `[P]` and `temperature`, `top_k`, `top_p` and `min_p`. All texts, V to
  the power of `num_tokens - 1`, are evaluated.
  """
  vocab_size = model.vocab_size
  texts = np.array(list(itertools.product(range(vocab_size), repeat=num_tokens - 1)), np.int32)
  tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(texts), 1)), texts], axis=1)
  tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 8)))  # fewer shapes; earlier tokens do not see padding
  logits = _uncached_logits(model, jnp.asarray(tokens))[:, len(prompt) - 1 :][:, :num_tokens]
  probs = np.asarray(_to_probs(logits, SamplingParams.make(len(texts), **sampling)), np.float64)
  before = np.take_along_axis(probs[:, :-1], texts[..., None], axis=-1)[..., 0].prod(axis=1)
  return (before[:, None] * probs[:, -1]).reshape((vocab_size,) * num_tokens)


def engine_counts(
  rng_key: jax.Array,
  target: Model,
  draft: Model | None,
  prompts: Sequence[Sequence[int]],
  *,
  method: str | Method,
  tree: TokenTree,
  num_tokens: int,
  num_samples: int,
  batch_size: int = 8192,
  **sampling,
) -> np.ndarray:
  """Counts of the first tokens that `generate` emits after each prompt; all prompts are decoded in one ragged batch.

  Args:
    prompts: One or more prompts, each of one token or more.
    num_samples: Rows to decode per prompt, rounded up to whole batches.
    batch_size: Rows per prompt in a batch. Batches that do not fit into a CPU's cache take longer per row.
    **sampling: `temperature`, `top_k`, `top_p`, `min_p`.

  Returns:
    int64 `[len(prompts)] + [V] * num_tokens`.

  Raises:
    ValueError: An emitted id is not in the vocabulary.
  """
  vocab_size, num_prompts = target.vocab_size, len(prompts)
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  padded = np.zeros((num_prompts, lengths.max()), np.int32)
  for row, prompt in zip(padded, prompts):
    row[: len(prompt)] = prompt
  padded, lengths = jnp.tile(padded, (batch_size, 1)), jnp.tile(lengths, batch_size)
  weights = vocab_size ** np.arange(num_tokens)[::-1]
  counts = np.zeros((num_prompts, vocab_size**num_tokens), np.int64)
  for batch in range(-(-num_samples // batch_size)):
    generation = generate(
      jax.random.fold_in(rng_key, batch),
      target,
      draft,
      padded,
      lengths,
      method=method,
      tree=tree,
      max_new_tokens=num_tokens,
      sampling=SamplingParams(**sampling),
    )
    tokens = np.asarray(generation.tokens)
    # An id outside the vocabulary would be counted as another text.
    if tokens.min() < 0 or tokens.max() >= vocab_size:
      raise ValueError(f'emitted ids from {tokens.min()} to {tokens.max()}, the vocabulary is 0 to {vocab_size - 1}')
    for index in range(num_prompts):
      counts[index] += np.bincount(tokens[index::num_prompts] @ weights, minlength=counts.shape[1])
  return counts.reshape((num_prompts,) + (vocab_size,) * num_tokens)


def sample_counts(
  rng_key: jax.Array, target: Model, draft: Model | None, prompt: Sequence[int], **options
) -> np.ndarray:
  """Counts int64 `[V] * num_tokens` of the first tokens that `generate` emits after one prompt, as `engine_counts`."""
  return engine_counts(rng_key, target, draft, [prompt], **options)[0]


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
    num_drafts: M.
    num_runs: N, number of texts to decode, `batch_size` of them together.

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
