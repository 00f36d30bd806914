"""The distributions of a pair of models at the positions of a text."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax import Model, SamplingParams, get_method
from spectr_jax.sampling import logits_to_probs
from spectr_jax.sharding import fetch


@jax.jit(static_argnames='num_new')
def distributions_after(model: Model, prompts, lengths, tokens, sampling: SamplingParams, *, num_new: int) -> jax.Array:
  """The distributions `[B, num_new, V]` of the `tokens` `[B, num_new]` after prompts `[B, P]` of `lengths`."""
  batch_size, longest = prompts.shape
  cache = model.init_cache_fn(batch_size, longest)
  # The call starts with the prompt's last token, which gives the first distribution.
  cache, _ = model.prefill(prompts, lengths - 1, cache)
  last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)
  called = jnp.concatenate([last, tokens[:, :-1]], axis=1)
  positions = lengths[:, None] - 1 + jnp.arange(num_new)
  causal = jnp.tril(jnp.ones((num_new, num_new), bool))
  return logits_to_probs(model.apply(called, positions, causal, cache).logits, sampling)


@jax.jit(static_argnames='num_new')
def _probs_after(model: Model, prompts, lengths, tokens, sampling: SamplingParams, *, num_new: int) -> jax.Array:
  """The probabilities `[B, num_new]` of the tokens themselves under `distributions_after`."""
  probs = distributions_after(model, prompts, lengths, tokens, sampling, num_new=num_new)
  return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def _along(function, workload: Workload, model: Model, rows: np.ndarray, tokens: np.ndarray) -> jax.Array:
  """`distributions_after` or `_probs_after` on a batch of continuations."""
  if not isinstance(model, Model):
    draft = workload.options.draft
    raise ValueError(f'this needs the probabilities of a draft model along texts, and {draft} is not a model')
  written, sampling = np.maximum(tokens[rows], 0), workload.options.sampling.for_rows(len(rows))
  return function(model, workload.tokens[rows], workload.lengths[rows], written, sampling, num_new=tokens.shape[1])


def written_distributions(
  workload: Workload, models: tuple[Model, ...], tokens: np.ndarray
) -> Iterator[tuple[np.ndarray, tuple[jax.Array, ...]]]:
  """Indices of each batch's prompts, without copies, and distributions `[B, num_new, V]` of each model.

  They are along continuations of all prompts: `tokens` int32 `[prompts, num_new]`, negative after the end of a row.
  """
  size = workload.batch_size
  for rows in workload.batches:
    probs = tuple(_along(distributions_after, workload, model, rows, tokens) for model in models)
    kept = np.arange(size) < len(np.unique(rows))
    yield rows[kept], tuple(each[: kept.sum()] for each in probs)


def written_log_probs(workload: Workload, models: tuple[Model, ...], tokens: np.ndarray) -> tuple[np.ndarray, ...]:
  """The log probability of each token of continuations of all prompts, under each model.

  `tokens` is int32 `[prompts, num_new]`, negative after the end of a row. Returns float64 `[prompts, num_new]` for each
  model: -inf for a token that it never draws, NaN after the end of a row. A `ValueError` says which prompt has logits
  that are not finite.
  """
  is_there = tokens >= 0
  every = tuple(np.full(tokens.shape, np.nan) for _ in models)
  for rows in workload.batches:
    for model, own in zip(models, every):
      own[rows] = fetch(_along(_probs_after, workload, model, rows, tokens))
  for probs in every:
    is_wrong = (np.isnan(probs) & is_there).any(axis=1)
    if is_wrong.any():
      raise ValueError(f'prompt {workload.prompts[np.argmax(is_wrong)].id}: the logits of a model are not finite')
  with np.errstate(divide='ignore'):
    return tuple(np.where(is_there, np.log(probs), np.nan) for probs in every)


def target_texts(workload: Workload, seed: int) -> np.ndarray:
  """The target's own continuations of all prompts, int32 `[prompts, max_new_tokens]`, -1 after a row's end."""
  keys, setting = workload.keys(seed), Setting(get_method('autoregressive'))
  tokens = [fetch(workload.generate(setting, keys, rows).tokens) for rows in workload.batches]
  return np.concatenate(tokens)[: len(workload.prompts)]
