"""The distributions of a pair of models at the positions of a text."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from decode.experiment.settings import Setting
from decode.experiment.workload import Workload
from spectr_jax import Model, SamplingParams, TokenTree, logits_to_probs
from spectr_jax.methods import get_method
from spectr_jax.sharding import fetch


@jax.jit(static_argnames='tree')
def distributions_after(model: Model, prompts, lengths, tokens, sampling: SamplingParams, *, tree: TokenTree):
  """Distributions `[B, N + 1, V]` after prompts `[B, P]` of `lengths`, and the tokens `[B, N]` of a tree below each."""
  # The call starts with the prompt's last token, which gives the first distribution.
  cache, _ = model.prefill(prompts, lengths - 1, model.init_cache_fn(*prompts.shape))
  last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)
  positions = lengths[:, None] - 1 + jnp.asarray(tree.depths)
  called = jnp.concatenate([last, tokens], axis=1)
  return logits_to_probs(model.apply(called, positions, jnp.asarray(tree.ancestors), cache).logits, sampling)


def _distributions_of(model: Model, prompts, lengths, tokens, sampling: SamplingParams) -> jax.Array:
  """The distributions `[B, num_new, V]` of the tokens of a text `[B, num_new]`."""
  chain = TokenTree(tuple(range(tokens.shape[1] - 1)))
  return distributions_after(model, prompts, lengths, tokens[:, :-1], sampling, tree=chain)


@jax.jit
def _probs_of(model: Model, prompts, lengths, tokens, sampling: SamplingParams) -> jax.Array:
  """The probabilities `[B, num_new]` of the tokens themselves."""
  probs = _distributions_of(model, prompts, lengths, tokens, sampling)
  return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]


def _along(function, workload: Workload, model: Model, rows: np.ndarray, tokens: np.ndarray) -> jax.Array:
  """`_distributions_of` or `_probs_of` on a batch of continuations."""
  if not isinstance(model, Model):
    draft = workload.info['flags']['draft']
    raise ValueError(f'this needs the probabilities of a draft model along texts, and {draft} is not a model')
  if penalties := workload.options.sampling.penalties:
    raise ValueError(f'distributions along texts are those without {min(penalties)}: leave it out')
  written, sampling = np.maximum(tokens[rows], 0), workload.sampling.for_rows(len(rows))
  return function(model, workload.tokens[rows], workload.lengths[rows], written, sampling)


def written_distributions(
  workload: Workload, models: tuple[Model, ...], tokens: np.ndarray
) -> Iterator[tuple[np.ndarray, tuple[jax.Array, ...]]]:
  """Indices of each batch's prompts, without copies, and distributions `[B, num_new, V]` of each model.

  They are along continuations of all prompts: `tokens` int32 `[prompts, num_new]`, negative after the end of a row.
  """
  size = workload.batch_size
  for rows in workload.batches:
    probs = tuple(_along(_distributions_of, workload, model, rows, tokens) for model in models)
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
      own[rows] = fetch(_along(_probs_of, workload, model, rows, tokens))
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
