"""The whole loop on tiny transformers, and what ordinary sampling gives there: the ground for proofs of the engine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.engine.loop import generate
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.models import transformer
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.tree import TokenTree


def tiny_transformers(seed: int = 12, *, vocab_size: int = 5, width: int = 16) -> tuple[Model, Model]:
  """A target of two layers with random parameters, and a draft: the same without its second layer.

  There is something to accept, to reject and to cut with top-k and top-p: with the default seed, four tokens and the
  sampling of `spectr_jax.testing.proof`, first-token laws differ by .2 to .35 in total variation and have an entropy of
  about 1.4 bits.

  Args:
    seed: Seed of the parameters.
    vocab_size: V.
    width: Width of the residual stream, a multiple of 4.

  Returns:
    Target and draft.
  """
  config = transformer.TransformerConfig(
    vocab_size, embed_dim=width, num_layers=2, num_heads=2, mlp_dim=2 * width, max_length=32
  )
  params = jax.jit(transformer.init_params, static_argnames='config')(jax.random.key(seed), config=config)
  # Fresh blocks add little to the embedding and every token would predict itself: with larger ones the context counts.
  params = {k: jax.tree.map(lambda x: 3 * x, v) if k.startswith('layer') else v for k, v in params.items()}
  target = transformer.transformer_model(params, config)
  params = {k: v for k, v in params.items() if k != 'layer_1'}
  return target, transformer.transformer_model(params, dataclasses.replace(config, num_layers=1))


@jax.jit
def _uncached_logits(model: Model, tokens: jax.Array) -> jax.Array:
  """Logits after every token of texts `[B, T]`, by one causal forward on an empty cache; `[B, T, V]`."""
  batch_size, size = tokens.shape
  causal = jnp.tril(jnp.ones((size, size), bool))
  positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  return model.apply(tokens, positions, causal, model.init_cache_fn(batch_size, 1)).logits


_to_probs = jax.jit(logits_to_probs)


def ordinary_law(model: Model, prompt: Sequence[int], num_tokens: int, **sampling) -> np.ndarray:
  """The joint law of the first tokens that ordinary sampling gives, from forwards without a cache.

  Args:
    model: The model.
    prompt: int `[P]`.
    num_tokens: T; all `V^(T - 1)` texts are run.
    **sampling: `temperature`, `top_k`, `top_p`.

  Returns:
    float64 `[V] * num_tokens`.
  """
  vocab_size = model.vocab_size
  texts = np.array(list(itertools.product(range(vocab_size), repeat=num_tokens - 1)), np.int32)
  tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(texts), 1)), texts], axis=1)
  tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 8)))  # not seen by what stands before; few programs
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
  """Counts of the first tokens that `generate` emits after each of some prompts, decoded together in ragged batches.

  Args:
    rng_key: One typed key.
    target: The target.
    draft: The draft.
    prompts: One or more, of any lengths from 1.
    method: The method.
    tree: The tree.
    num_tokens: T.
    num_samples: Rows to draw per prompt, rounded up to whole batches.
    batch_size: Rows per prompt at a time; more than what fits into a processor's cache take longer.
    **sampling: `temperature`, `top_k`, `top_p`.

  Returns:
    int64 `[len(prompts)] + [V] * num_tokens`.

  Raises:
    ValueError: Something was emitted that is not a token.
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
      **sampling,
    )
    tokens = np.asarray(generation.tokens)
    # Otherwise it would be counted as another text.
    if tokens.min() < 0 or tokens.max() >= vocab_size:
      raise ValueError(f'emitted ids from {tokens.min()} to {tokens.max()}, the vocabulary is 0 to {vocab_size - 1}')
    for index in range(num_prompts):
      counts[index] += np.bincount(tokens[index::num_prompts] @ weights, minlength=counts.shape[1])
  return counts.reshape((num_prompts,) + (vocab_size,) * num_tokens)


def sample_counts(
  rng_key: jax.Array, target: Model, draft: Model | None, prompt: Sequence[int], **options
) -> np.ndarray:
  """`engine_counts` of one prompt, `[P]`; int64 `[V] * num_tokens`."""
  return engine_counts(rng_key, target, draft, [prompt], **options)[0]
