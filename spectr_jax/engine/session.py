"""A text that grows turn by turn: what the caches hold of it is kept for the next prompt."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.draft import DraftContext
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.refill import padded_lengths
from spectr_jax.engine.sharding import tracing_with
from spectr_jax.engine.state import DecodeState, Rows, checked_rows, first_state, init_decode
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import fetch


def reprompt(
  decoder: Decoder,
  state: DecodeState,
  num_kept: ArrayLike,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  sampling: SamplingParams | None = None,
  shortest: int = 16,
  constraint: ArrayLike | None = None,
) -> DecodeState:
  """Gives all rows other prompts that begin like their texts; the models read the rest of the prompts only.

  The caches of `state` are donated: only the returned one may be used afterwards. Rows decode as after `init_decode`
  with the prompts, up to rounding. There is one program per doubling of the number of tokens to read.

  Args:
    decoder, state: As for `decode_rounds`.
    num_kept: Integers `[B]`, the number of tokens that a row's prompt and its text share at their beginning. The text
      consists of the row's last prompt and its new tokens. The caller vouches for it; it is not checked.
    rng_key, sampling: As for `generate`.
    prompts, prompt_lengths: As for `init_decode`; P and the new tokens fit into `decoder.cache_size`.
    shortest: The fewest tokens that a program reads.
    constraint: As for `init_decode`.

  Raises:
    ValueError: As for `init_decode`; or `num_kept` is not `[B]`, from 0 to the prompt's length.
  """
  prompts, lengths, num_kept = (
    np.asarray(checks.as_integers(name, values))
    for name, values in (('prompts', prompts), ('prompt_lengths', prompt_lengths), ('num_kept', num_kept))
  )
  rows = checked_rows(decoder, rng_key, prompts, lengths, sampling, None, constraint=constraint)
  if num_kept.shape != lengths.shape or (num_kept < 0).any() or (num_kept > lengths).any():
    raise ValueError(f'num_kept must be [{len(lengths)}], from 0 to the length of each prompt, got {num_kept.tolist()}')
  if len(lengths) != len(state.keys):
    raise ValueError(f'there must be a prompt for each of the {len(state.keys)} rows, got {len(lengths)}')
  # The target's cache lacks the last token of the text, and the last token of a prompt is the root of the next tree.
  num_kept = np.minimum(num_kept, np.minimum(fetch(state.root_position), lengths - 1))
  longest = decoder.cache_size - int(decoder.max_new_tokens)
  num_new = next(size for size in padded_lengths(longest, shortest) if size >= max(1, (lengths - num_kept - 1).max()))
  prompts = np.pad(prompts, ((0, 0), (0, decoder.cache_size - prompts.shape[1]))).astype(np.int32)
  kept = num_kept.astype(np.int32)
  if decoder.sharding is not None:
    prompts, kept = decoder.sharding.put_rows((prompts, kept))
  caches = state.target_cache, state.features, state.draft_state
  return _reprompt(decoder, caches, rows._replace(prompts=prompts), kept, num_new)


@functools.partial(jax.jit, static_argnames='num_new', donate_argnames='caches')
def _reprompt(decoder: Decoder, caches: Any, rows: Rows, num_kept: jax.Array, num_new: int) -> DecodeState:
  cache, features, draft_state = caches
  prompts, lengths = rows.prompts, rows.lengths
  with tracing_with(decoder.sharding):
    cache, new_features = decoder.target.prefill_rest(prompts, lengths - 1, cache, num_kept, num_new)
    if features is not None:
      places = num_kept[:, None] + jnp.arange(num_new)
      features = jax.vmap(lambda row, places, new: row.at[places].set(new, mode='drop'))(features, places, new_features)
    if decoder.drafter is not None:
      context = DraftContext(lengths, decoder.target, prompts, features)
      draft_state = decoder.drafter.reprompt(draft_state, context, num_kept, num_new, decoder.cache_size)
  return first_state(decoder, rows, cache, features, draft_state)


# Tokens that the models read at a time: of a message, and of a long prompt. Each is a program.
_FEW, _MANY = 32, 256


class Session:
  """One text that prompts and continuations extend in turns, as in a chat.

  It begins empty. Prompts are read in parts of two sizes, so few programs serve prompts of all lengths.

  Attributes:
    decoder: The decoder; its `cache_size` bounds the text, the new tokens of a turn included.
    tokens: The text so far: the last prompt, and the new tokens that were taken from `stream`.
    sampling: The sampling parameters of the next prompt; scalars, as for `generate`. It may be replaced between two.
    num_read: Tokens of the last prompt that the models read, which is what its text did not share with the one before.
    prompt_seconds: How long they read, and compiled for it.
    constraint: Which of the decoder's constraints the next continuation follows, -1 for none. It may be replaced, too.
  """

  def __init__(self, decoder: Decoder, *, sampling: SamplingParams | None = None, constraint: int = -1):
    self.decoder, self.constraint = decoder, constraint
    self.tokens: list[int] = []
    self.num_target_calls = self.num_read = 0
    self.prompt_seconds = 0.0
    self.sampling = sampling
    self._state: DecodeState | None = None

  @property
  def longest_prompt(self) -> int:
    """The most tokens of a prompt."""
    return self.decoder.cache_size - int(self.decoder.max_new_tokens)

  def stream(self, rng_key: jax.Array, prompt: Sequence[int], *, rounds_at_a_time: int = 1) -> Iterator[list[int]]:
    """Continues a prompt, and yields the new tokens as they come, at least one at a time.

    The models read only what follows the beginning that the prompt shares with the text so far. A caller that has seen
    enough may stop: the text ends with the tokens that it was given.

    Args:
      rng_key: A typed key.
      prompt: Ids, at least one: as a rule the text so far and what follows it.
      rounds_at_a_time: Rounds between two looks at the new tokens.

    Raises:
      ValueError: The prompt is empty or too long, or holds an id that is not in the vocabulary.
      NotFiniteError: A model's logits are not finite.
    """
    ids = checks.as_ids('the prompt', prompt, self.decoder.target.vocab_size, self.longest_prompt)
    own, start = ids.tolist(), time.perf_counter()
    self.num_read = len(own) - _num_shared(self.tokens, own)
    state = jax.block_until_ready(self._begin(rng_key, own))
    self.prompt_seconds = time.perf_counter() - start
    num_seen, is_done = 0, False
    while not is_done:
      state = self._state = decode_rounds(self.decoder, state, rounds_at_a_time)
      result = fetch(state.result)
      self.decoder.check(result)
      is_done = bool(fetch(state.is_done)[0])
      self.num_target_calls = int(result.num_target_calls[0])
      new = result.tokens[0, num_seen : result.lengths[0]].tolist()
      num_seen += len(new)
      self.tokens += new
      if new:
        yield new

  def compile(
    self, notify: Callable[[int, int], None] = lambda done, total: None, prompt_length: int | None = None
  ) -> None:
    """Compiles what turns run, or only a first prompt of so many tokens, and begins anew.

    `notify` is called with the programs done and their number.
    """
    limits = self.longest_prompt, (self.decoder.context_length or _MANY) - int(self.decoder.max_new_tokens), _MANY
    long = max(1, min(limits))

    def read(size: int) -> DecodeState:
      state = jax.block_until_ready(self._begin(jax.random.key(0), [0] * size))
      self._state, self.tokens = state, []
      return state

    if prompt_length is not None:
      notify(0, 2)
      self._state = None
      state = read(prompt_length)
      notify(1, 2)
      jax.block_until_ready(decode_rounds(self.decoder, state, 1))
      self._state = None
      notify(2, 2)
      return
    notify(0, 4)
    read(1)
    notify(1, 4)
    read(min(long, _FEW))
    notify(2, 4)
    state = read(long)
    notify(3, 4)
    self._state = jax.block_until_ready(decode_rounds(self.decoder, state, 1))
    notify(4, 4)

  def _begin(self, rng_key: jax.Array, prompt: list[int]) -> DecodeState:
    """The state of a prompt, of which the models have read what the caches lacked."""
    state, keys = self._state, rng_key[None]
    if state is None:
      padded = np.zeros(
        (1, next(size for size in padded_lengths(self.longest_prompt) if size >= len(prompt))), np.int32
      )
      padded[0, : len(prompt)] = prompt
      own = {'sampling': self.sampling, 'constraint': self.constraint}
      state = init_decode(self.decoder, keys, padded, np.array([len(prompt)]), **own)
      self.tokens = prompt
      return state
    num_shared, end = _num_shared(self.tokens, prompt), 0
    self.tokens = prompt
    while end < len(prompt):
      # Without the last of the shared tokens: the caches lack that of a text, and that of a prompt is the next root.
      num_read = max(0, num_shared - 1)
      size = _FEW if len(prompt) - num_read <= _MANY // 2 else _MANY
      end = min(len(prompt), num_read + size + 1)
      part, length = np.array([prompt[:end]]), np.array([end])
      kept = np.array([num_shared])
      own = {'sampling': self.sampling, 'constraint': self.constraint, 'shortest': size}
      state = reprompt(self.decoder, state, kept, keys, part, length, **own)
      self._state, num_shared = state, end
    return state


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
  """The number of equal tokens at the beginning of two texts."""
  return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
