"""The laws of a pair of models at the positions of a text."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from decode.settings import Setting
from decode.workload import Workload
from spectr_jax import Model, SamplingParams, get_method
from spectr_jax.sampling import logits_to_probs


@jax.jit(static_argnames='num_new')
def laws_after(model: Model, prompts, lengths, tokens, temperature, *, num_new: int) -> jax.Array:
  """A model's laws `[B, num_new, V]` of the tokens that follow each prompt, given those before.

  Args:
    model: The model.
    prompts: int32 `[B, P]`, right-padded.
    lengths: int32 `[B]`.
    tokens: int32 `[B, num_new]`.
    temperature: Scalar.
    num_new: Tokens after the prompt.
  """
  batch_size, longest = prompts.shape
  cache = model.init_cache_fn(batch_size, longest)
  # The prompt's last token is the first of the call, whose laws are wanted.
  cache = model.prefill(prompts, lengths - 1, cache)
  last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)
  called = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  positions = lengths[:, None] - 1 + jnp.arange(num_new)
  causal = jnp.tril(jnp.ones((num_new, num_new), bool))
  logits = model.apply(called, positions, causal, cache).logits
  return logits_to_probs(logits, SamplingParams.make(batch_size, temperature=temperature))


def written_laws(
  workload: Workload, models: tuple[Model, ...], tokens: np.ndarray
) -> Iterator[tuple[np.ndarray, tuple[jax.Array, ...]]]:
  """The laws of each model along continuations of all prompts, batch by batch.

  Args:
    workload: Prompts and options.
    models: The models.
    tokens: int32 `[prompts, num_new]`, negative after the end of a row.

  Yields:
    The prompts of a batch, by number and each once, and laws `[B, num_new, V]` of each model.
  """
  size = workload.batch_size
  for rows in workload.batches:
    written = np.maximum(tokens[rows], 0)
    laws = tuple(
      laws_after(
        model, workload.tokens[rows], workload.lengths[rows], written, workload.options.temperature,
        num_new=tokens.shape[1],
      )
      for model in models
    )  # fmt: skip
    kept = np.arange(size) < len(np.unique(rows))
    yield rows[kept], tuple(law[: kept.sum()] for law in laws)


def target_texts(workload: Workload, seed: int) -> np.ndarray:
  """The target's own continuations of all prompts, int32 `[prompts, max_new_tokens]`, -1 after the end of a row."""
  keys, found = workload.keys(seed), []
  for rows in workload.batches:
    generation = workload.generate(Setting(get_method('autoregressive')), keys, rows)
    found.append(np.asarray(generation.tokens))
  return np.concatenate(found)[: len(workload.prompts)]
