"""Checks of keys and prompts, with one clear `ValueError` for whatever does not fit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# Integers where they are: on a device, or on the host.
Integers: TypeAlias = jax.Array | np.ndarray
# Integers [B, P], or B lists of ids.
Prompts: TypeAlias = ArrayLike | Sequence[ArrayLike | Sequence[int]]


@functools.partial(jax.jit, static_argnames='batch_size')
def _fold_rows(rng_key: jax.Array, batch_size: int) -> jax.Array:
  return jax.vmap(lambda row: jax.random.fold_in(rng_key, row))(jnp.arange(batch_size))


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """The keys of all rows, `[B]`; ValueError unless `rng_key` is a typed key or `[B]` of them, of impl threefry2x32."""
  if not isinstance(rng_key, jax.Array) or not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
    raise ValueError('rng_key must be a typed key or an array of them, as jax.random.key makes')
  if str(jax.random.key_impl(rng_key)) != 'threefry2x32':
    raise ValueError(
      f'rng_key must be of impl threefry2x32, whose draws do not depend on the batch; got {rng_key.dtype}'
    )
  if rng_key.ndim == 0:
    return _fold_rows(rng_key, batch_size)
  if rng_key.shape != (batch_size,):
    raise ValueError(f'rng_key must be one key or [{batch_size}], one per prompt; got shape {rng_key.shape}')
  return rng_key


def check_count(name: str, value: int) -> None:
  """Checks a number of tokens or rows; ValueError if it is not a positive int."""
  if not isinstance(value, int) or value < 1:
    raise ValueError(f'{name} must be a positive int, got {value!r}')


_MOST_NEW_TOKENS = 2**30  # so that the length of a text is a whole number of 32 bits


def as_limits(max_new_tokens: ArrayLike, batch_size: int) -> np.ndarray:
  """Limits of new tokens, int32 `[B]`; ValueError for what is neither a positive int nor `[B]` of them."""
  limits = _as_array('max_new_tokens', max_new_tokens)
  if limits.shape not in ((), (batch_size,)) or limits.dtype.kind not in 'iu' or limits.min() < 1:
    raise ValueError(f'max_new_tokens must be a positive int, or [{batch_size}] of them, got {max_new_tokens!r}')
  if limits.max() > _MOST_NEW_TOKENS:
    raise ValueError(f'max_new_tokens must be at most {_MOST_NEW_TOKENS:,}, got {limits.max():,}')
  return np.broadcast_to(limits.astype(np.int32), (batch_size,))


def _as_array(name: str, values: Any) -> np.ndarray:
  """An array of NumPy; `ValueError` for lists of different lengths and for what is no array at all."""
  try:
    return np.asarray(values)
  except ValueError:  # numpy's words name neither the argument nor what would fit
    raise ValueError(f'{name} must be one array of integers, got lists of different lengths or depths') from None


def as_prompts(prompts: Prompts, prompt_lengths: ArrayLike | None) -> tuple[Integers, Integers]:
  """Prompts `[B, P]` and their lengths `[B]`, of right-padded arrays, or without lengths of B lists of ids."""
  if prompt_lengths is None and isinstance(prompts, list | tuple):
    rows = [_as_array(f'prompt {number}', row) for number, row in enumerate(prompts)]
    if len({row.shape for row in rows}) > 1 and all(row.ndim == 1 for row in rows):
      lengths = [len(row) for row in rows]
      if not min(lengths):
        raise ValueError(f'prompt {lengths.index(0)} is empty: a prompt has at least one token')
      prompts = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows])
      prompt_lengths = np.array(lengths)
  prompts = as_integers('prompts', prompts)
  if prompt_lengths is None:
    prompt_lengths = np.full(prompts.shape[:1], prompts.shape[-1] if prompts.ndim else 0)
  prompt_lengths = as_integers('prompt_lengths', prompt_lengths)
  check_shapes(prompts, prompt_lengths)
  return prompts, prompt_lengths


def as_integers(name: str, values: Any) -> Integers:
  """Ids or lengths as an array of 32 bits, as JAX has them; numbers beyond them would wrap and are refused."""
  if isinstance(values, jax.Array):
    return values
  array = _as_array(name, values)
  if array.dtype.kind in 'US':
    raise ValueError(f'{name} must be integers, got texts; generate_text takes texts, and a tokenizer')
  if array.dtype.kind not in 'biuf':
    raise ValueError(f'{name} must be integers, got {array.dtype} {array.shape}')
  if array.dtype.kind in 'iu' and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
    raise ValueError(f'{name} must be from -2**31 to 2**31 - 1, got {array.min()} to {array.max()}')
  return array.astype(np.int32) if array.dtype.kind in 'iu' else array


def as_ids(name: str, ids: ArrayLike | Sequence[int], vocab_size: int, longest: int | None = None) -> np.ndarray:
  """The ids of one text on the host, int32 `[T]`, T from 1 to `longest`; ValueError for others."""
  array = _as_array(name, ids)
  if longest is not None and array.ndim == 1 and not 1 <= len(array) <= longest:
    raise ValueError(f'{name} has {len(array)} tokens, allowed are 1 to {longest}')
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
    raise ValueError(f'{name} must be integers [T], T at least 1, got {array.dtype} {array.shape}')
  if array.min() < 0 or array.max() >= vocab_size:
    raise ValueError(f'{name} has ids from {array.min()} to {array.max()}, the vocabulary is 0 to {vocab_size - 1}')
  return array.astype(np.int32)


def check_shapes(prompts: Integers, prompt_lengths: Integers) -> None:
  """Checks that prompts are integers `[B, P]`, and their lengths `[B]`; ValueError if they are not."""
  if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer) or 0 in prompts.shape:
    raise ValueError(f'prompts must be integers [B, P] with B and P at least 1, got {prompts.dtype} {prompts.shape}')
  if prompt_lengths.shape != prompts.shape[:1] or not jnp.issubdtype(prompt_lengths.dtype, jnp.integer):
    raise ValueError(f'prompt_lengths must be integers [{prompts.shape[0]}], got {prompt_lengths.shape}')
