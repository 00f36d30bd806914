"""Checks of keys and prompts, with one clear `ValueError` for whatever does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

if TYPE_CHECKING:
  from spectr_jax.engine.decoder import Decoder


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """The keys of all rows, `[B]`.

  Args:
    rng_key: One typed key or a key array `[B]`, of impl threefry2x32.
    batch_size: B, rows.

  Raises:
    ValueError: `rng_key` is neither.
  """
  if not isinstance(rng_key, jax.Array) or not jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
    raise ValueError('rng_key must be a typed key or an array of them, as jax.random.key makes')
  if str(jax.random.key_impl(rng_key)) != 'threefry2x32':
    raise ValueError(
      f'rng_key must be of impl threefry2x32, whose draws do not depend on the batch; got {rng_key.dtype}'
    )
  if rng_key.ndim == 0:
    return jax.vmap(lambda row: jax.random.fold_in(rng_key, row))(jnp.arange(batch_size))
  if rng_key.shape != (batch_size,):
    raise ValueError(f'rng_key must be one key or [{batch_size}], one per prompt; got shape {rng_key.shape}')
  return rng_key


def check_count(name: str, value: int) -> None:
  """Checks a number of tokens or rows.

  Args:
    name: Its name.
    value: The number.

  Raises:
    ValueError: It is not a positive int.
  """
  if not isinstance(value, int) or value < 1:
    raise ValueError(f'{name} must be a positive int, got {value!r}')


def as_integers(name: str, values: ArrayLike) -> jax.Array:
  """Ids or lengths as an array of JAX, which has 32 bits: numbers beyond them are refused, and would wrap otherwise.

  Args:
    name: Their name.
    values: An array, or nested sequences.

  Raises:
    ValueError: They are no array of numbers, or a whole number does not fit.
  """
  if isinstance(values, jax.Array):
    return values
  array = np.asarray(values)
  if array.dtype.kind in 'US':
    raise ValueError(f'{name} must be integers, got texts; generate_text takes texts, and a tokenizer')
  if array.dtype.kind not in 'biuf':
    raise ValueError(f'{name} must be integers, got {array.dtype} {array.shape}')
  if array.dtype.kind in 'iu' and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
    raise ValueError(f'{name} must be from -2**31 to 2**31 - 1, got {array.min()} to {array.max()}')
  return jnp.asarray(array)


def as_ids(name: str, ids: ArrayLike | Sequence[int], vocab_size: int) -> np.ndarray:
  """The ids of one text on the host, int32 `[T]`.

  Args:
    name: The text, for messages.
    ids: Integers `[T]`, T at least 1.
    vocab_size: V.

  Raises:
    ValueError: They are no integers `[T]`, or one is not in the vocabulary.
  """
  array = np.asarray(ids)
  if array.ndim != 1 or not array.size or array.dtype.kind not in 'iu':
    raise ValueError(f'{name} must be integers [T], T at least 1, got {array.dtype} {array.shape}')
  if array.min() < 0 or array.max() >= vocab_size:
    raise ValueError(f'{name} has ids from {array.min()} to {array.max()}, the vocabulary is 0 to {vocab_size - 1}')
  return array.astype(np.int32)


def check_shapes(prompts: jax.Array, prompt_lengths: jax.Array) -> None:
  """Checks shapes and types of prompts.

  Args:
    prompts: Integers `[B, P]`.
    prompt_lengths: Integers `[B]`, in tokens.

  Raises:
    ValueError: A shape or a type does not fit.
  """
  if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer) or 0 in prompts.shape:
    raise ValueError(f'prompts must be integers [B, P] with B and P at least 1, got {prompts.dtype} {prompts.shape}')
  if prompt_lengths.shape != prompts.shape[:1] or not jnp.issubdtype(prompt_lengths.dtype, jnp.integer):
    raise ValueError(f'prompt_lengths must be integers [{prompts.shape[0]}], got {prompt_lengths.shape}')


def check_prompts(decoder: Decoder, prompts: jax.Array, prompt_lengths: jax.Array) -> None:
  """Checks that prompts fit the decoder: their shapes and, outside of a trace, their lengths and ids.

  Args:
    decoder: The decoder.
    prompts: Integers `[B, P]`.
    prompt_lengths: Integers `[B]`, in tokens.

  Raises:
    ValueError: A shape, a length or an id does not fit, or a text may exceed the cache or the models' limit.
  """
  check_shapes(prompts, prompt_lengths)
  needed = prompts.shape[1] + decoder.max_new_tokens
  if decoder.cache_size < needed:
    raise ValueError(
      f'cache_size must be at least {needed}, for prompts of {prompts.shape[1]} tokens and new ones; got'
      f' {decoder.cache_size}'
    )
  if isinstance(prompts, Tracer) or isinstance(prompt_lengths, Tracer):
    return
  lengths = np.asarray(prompt_lengths)
  if lengths.min() < 1 or lengths.max() > prompts.shape[1]:
    raise ValueError(
      f'prompt_lengths must be from 1 to {prompts.shape[1]}: a prompt has at least one token; got {lengths.min()} to'
      f' {lengths.max()}'
    )
  used = np.asarray(prompts)[np.arange(prompts.shape[1]) < lengths[:, None]]
  vocab_size, longest = decoder.target.vocab_size, decoder.context_length
  if used.min() < 0 or used.max() >= vocab_size:
    raise ValueError(f'prompts hold ids from {used.min()} to {used.max()}, the vocabulary is 0 to {vocab_size - 1}')
  if longest is not None and lengths.max() + decoder.max_new_tokens > longest:
    raise ValueError(
      f"the longest prompt has {lengths.max()} tokens; with {decoder.max_new_tokens} new ones that exceeds the models'"
      f' limit of {longest}'
    )
