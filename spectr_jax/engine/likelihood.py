"""The log likelihood of given texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.engine import checks
from spectr_jax.engine.result import FAILED_TARGET, NotFiniteError
from spectr_jax.kernels.softmax import log_totals
from spectr_jax.model import NO_LIMIT, Model

CHUNK = 64  # tokens per call: their logits are kept for all of them
_SHORTEST = 16  # tokens that a text is padded to
_MOST_TOP = 256


class LogLikelihood(NamedTuple):
  """How likely given texts are, token by token, under the model's own distribution: no temperature, no filters.

  Place t of a row stands for its token t given those before it. The first token, which nothing precedes, and places
  behind a row's end are NaN, False and -1.

  Attributes:
    logprobs: float32 `[B, P]`, the log probability of each token, in nats.
    is_greedy: bool `[B, P]`, whether the token is the first likeliest one, as greedy decoding takes it.
    top_tokens: int32 `[B, P, T]`, the likeliest tokens in the token's place, the likeliest first.
    top_logprobs: float32 `[B, P, T]`, their log probabilities.
  """

  logprobs: np.ndarray
  is_greedy: np.ndarray
  top_tokens: np.ndarray
  top_logprobs: np.ndarray

  def of(self, row: int, start: int, stop: int) -> tuple[float, bool]:
    """The log likelihood of tokens `start` to `stop` of a row given those before, and whether all are greedy ones."""
    return float(self.logprobs[row, start:stop].sum(dtype=np.float64)), bool(self.is_greedy[row, start:stop].all())


def log_likelihood(
  target: Model, texts: Sequence[ArrayLike], *, num_top: int = 0, width: int | None = None
) -> LogLikelihood:
  """Reads texts once and says how likely their tokens are.

  Texts are padded to one of few lengths (16, 32, 64 and so on), each of which is a program for each number of rows.

  Args:
    target: The model.
    texts: B texts, integers `[P]` each, at least one token.
    num_top: T, how many of the likeliest tokens to name in each place, at most 256 and the vocabulary.
    width: Tokens that texts are padded to, a multiple of 64: one program for all lengths, whose time is that of the
      tokens there are. None for one of few lengths.

  Returns:
    Arrays on the host, with P the tokens of the longest text.

  Raises:
    ValueError: There is no text, one is empty or longer than the model's context or the width, an id is not in the
      vocabulary, or a number is out of range.
    NotFiniteError: The model's logits are not finite.
  """
  if not isinstance(num_top, int) or not 0 <= num_top <= min(_MOST_TOP, target.vocab_size):
    raise ValueError(f'num_top must be from 0 to {min(_MOST_TOP, target.vocab_size)}, got {num_top!r}')
  rows = [checks.as_ids(f'text {number}', text, target.vocab_size) for number, text in enumerate(texts)]
  if not rows:
    raise ValueError('there is no text')
  lengths = np.array([len(row) for row in rows], np.int32)
  longest, most = int(lengths.max()), target.context_length
  if most is not None and longest > most:
    raise ValueError(f'text {lengths.argmax()} has {longest} tokens, the model takes {most}')
  if width is not None and (width % CHUNK or width < longest):
    raise ValueError(f'width must be a multiple of {CHUNK} of at least {longest}, the longest text, got {width}')
  width = max(_SHORTEST, 1 << (longest - 1).bit_length()) if width is None else width
  tokens = np.zeros((len(rows), width), np.int32)
  for row, ids in zip(tokens, rows):
    row[: len(ids)] = ids
  reading = jax.device_get(_read(target, tokens, lengths, num_top=num_top))
  if not reading.is_finite.all():
    error = NotFiniteError(int(np.argmin(reading.is_finite)), 0, FAILED_TARGET)
    raise error if most is not None else error.with_hint(NO_LIMIT)
  # What is known after token t is about token t + 1.
  shifted = [np.roll(array, 1, axis=1)[:, :longest] for array in reading.after]
  is_known = (np.arange(longest) > 0) & (np.arange(longest) < lengths[:, None])
  unknown = np.nan, False, -1, np.nan
  blank = (np.where(is_known.reshape(*is_known.shape, *[1] * (x.ndim - 2)), x, y) for x, y in zip(shifted, unknown))
  return LogLikelihood(*blank)


class _Reading(NamedTuple):
  """What the program returns: the fields of `LogLikelihood`, about the token after each, and which rows are finite."""

  after: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
  is_finite: jax.Array


@functools.partial(jax.jit, static_argnames='num_top')
def _read(target: Model, tokens: jax.Array, lengths: jax.Array, *, num_top: int) -> _Reading:
  batch_size, num_tokens = tokens.shape
  size = min(CHUNK, num_tokens)
  offsets = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch_size, size))
  causal = np.tril(np.ones((size, size), bool))
  next_tokens = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))

  def add(number, carry):
    cache, all_after, is_finite = carry
    first = number * size
    chunk, wanted = (jax.lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (tokens, next_tokens))
    positions = jnp.minimum(first + offsets, lengths[:, None] - 1)  # padding may be wider than the context
    output = target.apply(chunk, positions, causal, cache)
    logits = output.logits.astype(jnp.promote_types(output.logits.dtype, jnp.float32))
    total = log_totals(logits)
    own = jnp.take_along_axis(logits, wanted[..., None], axis=-1)
    top = jax.lax.top_k(logits, num_top) if num_top else (logits[..., :0], jnp.zeros((*chunk.shape, 0), jnp.int32))
    is_read = first + offsets < lengths[:, None]
    is_finite &= jnp.all(jnp.isfinite(jnp.max(logits, axis=-1)) | ~is_read, axis=1)
    after = (
      (own - total)[..., 0].astype(jnp.float32),
      jnp.argmax(logits, axis=-1) == wanted,
      top[1].astype(jnp.int32),
      (top[0] - total).astype(jnp.float32),
    )
    all_after = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, 1), all_after, after)
    cache = target.commit_fn(output.cache, offsets, jnp.clip(lengths - first, 0, size))
    return cache, all_after, is_finite

  # The barrier keeps XLA from folding attention over a cache of zeros, as in `Model.prefill`.
  cache = jax.lax.optimization_barrier(target.init_cache_fn(batch_size, num_tokens))
  shape = batch_size, num_tokens
  nothing = (
    jnp.zeros(shape, jnp.float32),
    jnp.zeros(shape, bool),
    jnp.zeros((*shape, num_top), jnp.int32),
    jnp.zeros((*shape, num_top), jnp.float32),
  )
  num_chunks = (jnp.max(lengths) + size - 1) // size
  _, after, is_finite = jax.lax.fori_loop(0, num_chunks, add, (cache, nothing, jnp.ones(batch_size, bool)))
  return _Reading(after, is_finite)
