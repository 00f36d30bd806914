"""What `generate` may be asked for: one clear `ValueError` for what does not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter
from spectr_jax.methods import Method
from spectr_jax.model import Model


def _is_concrete(*arrays) -> bool:
  return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def row_keys(rng_key, batch_size: int) -> jax.Array:
  """The keys of all rows, `[B]`, from one key or a key array."""
  if not isinstance(rng_key, jax.Array) or not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
    raise ValueError('rng_key must be a typed key or an array of them, as jax.random.key makes')
  if 'fry' not in str(rng_key.dtype):
    raise ValueError(
      f'rng_key must be of impl threefry2x32, whose draws do not depend on the batch; got {rng_key.dtype}'
    )
  if rng_key.ndim == 0:
    return jax.vmap(lambda row: jax.random.fold_in(rng_key, row))(jnp.arange(batch_size))
  if rng_key.shape != (batch_size,):
    raise ValueError(f'rng_key must be one key or [{batch_size}], one per prompt; got shape {rng_key.shape}')
  return rng_key


def check_models(target: Model, drafter: Drafter | None, method: Method) -> None:
  """Refuses a missing draft, or one of another vocabulary."""
  if drafter is None:
    if method.max_drafts != 0:
      raise ValueError(f'{method.name} needs a draft model, got None')
  elif drafter.vocab_size != target.vocab_size:
    raise ValueError(f'draft and target must share a vocabulary: {drafter.vocab_size} and {target.vocab_size} tokens')


def check_prompts(prompts, prompt_lengths, max_new_tokens: int, vocab_size: int, longest: int | None) -> None:
  """Refuses shapes and types that do not fit and, outside of a trace, lengths, ids and texts that are too long."""
  if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer) or 0 in prompts.shape:
    raise ValueError(f'prompts must be integers [B, P] with B and P at least 1, got {prompts.dtype} {prompts.shape}')
  if prompt_lengths.shape != prompts.shape[:1] or not jnp.issubdtype(prompt_lengths.dtype, jnp.integer):
    raise ValueError(f'prompt_lengths must be integers [{prompts.shape[0]}], got {prompt_lengths.shape}')
  if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
    raise ValueError(f'max_new_tokens must be a positive int, got {max_new_tokens!r}')
  if not _is_concrete(prompts, prompt_lengths):
    return
  lengths = np.asarray(prompt_lengths)
  if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
    raise ValueError(
      f'prompt_lengths must be from 1 to {prompts.shape[1]}: a prompt has at least one token; got {lengths.min()} to'
      f' {lengths.max()}'
    )
  used = np.asarray(prompts)[np.arange(prompts.shape[1]) < lengths[:, None]]
  if used.min() < 0 or used.max() >= vocab_size:
    raise ValueError(f'prompts hold ids from {used.min()} to {used.max()}, the vocabulary is 0 to {vocab_size - 1}')
  if longest is not None and lengths.max() + max_new_tokens > longest:
    raise ValueError(
      f"the longest prompt has {lengths.max()} tokens; with {max_new_tokens} new ones that exceeds the models' limit of"
      f' {longest}'
    )
