"""Decoding more prompts than fit into a batch: a row that is done takes the next prompt."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.draft import Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.loose_sampling import takes_loose_sampling
from spectr_jax.engine.result import Generation, NotFiniteError
from spectr_jax.engine.state import DecodeState, constrain, finish, init_decode
from spectr_jax.engine.stop import StopSearch, StopStrings, finish_reason
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import fetch
from spectr_jax.tree import TokenTree


@functools.partial(jax.jit, donate_argnames='state')
def _replace_rows(decoder: Decoder, state: DecodeState, fresh: DecodeState, rows: jax.Array) -> DecodeState:
  """`state` with `rows` `[R]` replaced by the rows of `fresh`; entries that are not rows are dropped."""
  own, new = state.sampling.with_filters_of(fresh.sampling), fresh.sampling.with_filters_of(state.sampling)
  state, fresh = dataclasses.replace(state, sampling=own), dataclasses.replace(fresh, sampling=new)
  replaced = jax.tree.map(lambda old, new: old.at[rows].set(new, mode='drop') if old.ndim else old, state, fresh)
  return constrain(decoder, replaced)


@takes_loose_sampling
def refill(
  decoder: Decoder,
  state: DecodeState,
  rows: ArrayLike,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  sampling: SamplingParams | None = None,
) -> DecodeState:
  """Gives rows, done or not, to other prompts; their old contents are lost. Each pair of R and P is a program.

  Rows that use filters which no row used before make the loop compile once more.

  `state` is donated: only the returned one may be used afterwards. A row decodes as it would by itself.

  Args:
    decoder: The decoder that `state` was made with; its `cache_size` must hold the prompts and the new tokens.
    state: Between rounds.
    rows: Integers `[R]`, different rows; entries of B or more are dropped, with their prompts.
    rng_key: One typed key or a key array `[R]`, as for `generate`.
    prompts: Integers `[R, P]`, right-padded.
    prompt_lengths: Integers `[R]`, from 1 to P.
    sampling: Of scalars or arrays `[R]`, as for `generate`.

  Raises:
    ValueError: As for `generate`, or a row is negative or occurs twice.
  """
  rows = np.asarray(rows)
  batch_size = state.keys.shape[0]
  kept = rows[rows < batch_size]
  if rows.shape != np.shape(prompts)[:1] or (kept < 0).any() or len(set(kept.tolist())) < len(kept):
    raise ValueError(f'rows must be one different row of {batch_size} for each prompt, got {rows.tolist()}')
  fresh = init_decode(decoder, rng_key, prompts, prompt_lengths, sampling=sampling)
  return _replace_rows(decoder, state, fresh, rows.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue.

  Attributes:
    name: The name of its continuation.
    tokens: Ids, at least one.
    key: A typed key; the continuation depends on it and the prompt alone.
  """

  name: Hashable
  tokens: Sequence[int]
  key: jax.Array


@dataclasses.dataclass(frozen=True)
class Continuation:
  """The continuation of a request.

  Attributes:
    name: The request's name.
    tokens: int32 `[length]`, new tokens; an EOS is part of them.
    origins: int32 `[length]`, as in `Generation`.
    num_target_calls: The number of rounds that it took.
    finish_reason: The reason why it ended, as of `finish_reason`.
    logprobs: float32 `[length]`, as in `Generation`; None if they were not asked for.
  """

  name: Hashable
  tokens: np.ndarray
  origins: np.ndarray
  num_target_calls: int
  finish_reason: str
  logprobs: np.ndarray | None = None

  @property
  def tokens_per_call(self) -> float:
    """New tokens per call of the target."""
    return len(self.tokens) / self.num_target_calls


def padded_lengths(longest: int, shortest: int = 16) -> list[int]:
  """The few lengths that prompts are padded to, since each is a program: doubled from `shortest` on, and `longest`.

  Args:
    longest: Tokens of the longest prompt.
    shortest: The smallest length, in tokens, if it is below `longest`.
  """
  lengths = list(itertools.takewhile(lambda length: length < longest, (shortest << i for i in itertools.count())))
  return [*lengths, longest]


def _arrange(requests: Sequence[Request], num_rows: int, length: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
  """Keys `[R]`, tokens `[R, P]` and lengths `[R]` of requests; rows without a request repeat the last one."""
  filled = [*requests, *[requests[-1]] * (num_rows - len(requests))]
  tokens = np.zeros((num_rows, length), np.int32)
  for row, request in zip(tokens, filled):
    row[: len(request.tokens)] = request.tokens
  return jnp.stack([request.key for request in filled]), tokens, np.array([len(each.tokens) for each in filled])


@takes_loose_sampling
def generate_many(
  target: Model,
  draft: Model | Drafter | None,
  requests: Iterable[Request],
  *,
  batch_size: int,
  longest_prompt: int,
  max_new_tokens: int,
  method: str | Method,
  tree: TokenTree | None = None,
  rounds_at_a_time: int = 4,
  stop: StopStrings | None = None,
  sampling: SamplingParams | None = None,
  **options: Any,
) -> Iterator[Continuation]:
  """Continues any number of prompts, as many at a time as there are rows, and yields each as soon as it is done.

  Every `rounds_at_a_time` rounds, rows that are done take the next requests, several at a time, padded to one of
  `padded_lengths`. So the programs do not depend on the number of requests. A request is taken only when there is a row
  for it, and nothing of it is kept after it is done. Each is continued as `generate` with its key would, up to
  rounding.

  Args:
    target: The model whose distribution the output has.
    draft: A model or drafter, or None for methods that draft nothing.
    requests: The prompts, with their names and keys.
    batch_size: B, rows.
    longest_prompt: The most tokens of a prompt.
    max_new_tokens: Limit of new tokens per prompt.
    method: A name of `METHODS`, or a `Method`.
    tree: The guesses of a round.
    rounds_at_a_time: Rounds between two checks for rows that are done. More rounds leave rows idle for longer, fewer
      wait for the device more often.
    stop: Texts that end a continuation, or None; looked for every `rounds_at_a_time` rounds.
    sampling: Of scalars, for all prompts, as for `generate`.
    **options: `eos_id`, `sharding` and `logprobs` of `generate`.

  Yields:
    One continuation per request, in the order in which they are done.

  Raises:
    ValueError: As for `generate`; or a prompt is empty or too long, or has an id that is not in the vocabulary; or a
      number is below 1.
  """
  if min(batch_size, longest_prompt, rounds_at_a_time) < 1:
    raise ValueError('batch_size, longest_prompt and rounds_at_a_time must be at least 1')
  waiting = map(_checked(longest_prompt, target.vocab_size), requests)
  first = list(itertools.islice(waiting, batch_size))
  if not first:
    return
  sharding = options.get('sharding')

  def divisible(num_rows: int) -> int:
    return num_rows if sharding is None else sharding.round_up(num_rows)

  batch_size = divisible(len(first))
  # Refilling an eighth of the rows at a time takes few programs, and not too much work for a single row.
  rows_at_a_time = divisible(max(1, batch_size // 8))
  decoder = Decoder.make(
    target,
    draft,
    method=method,
    tree=tree,
    max_new_tokens=max_new_tokens,
    cache_size=longest_prompt + max_new_tokens,
    **options,
  )
  state = init_decode(decoder, *_arrange(first, batch_size, longest_prompt), sampling=sampling)
  owners = dict(enumerate(first))  # the requests in progress, by row
  search = None if stop is None else StopSearch(stop)
  while owners:
    state = decode_rounds(decoder, state, rounds_at_a_time)
    try:
      state.result.check()
    except NotFiniteError as error:
      raise ValueError(f'prompt {owners[error.row].name}: {error}') from error
    ended = [] if search is None else search.look(state.result, owners)
    if ended:
      state = finish(decoder, state, ended)
    is_done = fetch(state.is_done)
    done = [row for row in range(batch_size) if row in owners and is_done[row]]
    if done:
      result = fetch(dataclasses.replace(state.result, statistics=None))
      if search is not None:
        result = result.cut({row: search.found[row] for row in done if row in search.found})
      for row in done:
        if search is not None:
          search.forget(row)
        yield _continuation(owners.pop(row).name, result, row, decoder.eos_ids, stop)
    free = [row for row in range(batch_size) if row not in owners]
    # Refilling one row costs as much as refilling `rows_at_a_time` of them.
    if len(free) >= rows_at_a_time or not owners:
      taken = list(zip(free, waiting))
      owners.update(taken)
      state = _give(decoder, state, taken, padded_lengths(longest_prompt), rows_at_a_time, sampling)


def _checked(longest_prompt: int, vocab_size: int) -> Callable[[Request], Request]:
  def check(request: Request) -> Request:
    if not 1 <= len(request.tokens) <= longest_prompt:
      raise ValueError(f'prompt {request.name} has {len(request.tokens)} tokens, allowed are 1 to {longest_prompt}')
    checks.as_ids(f'prompt {request.name}', request.tokens, vocab_size)
    return request

  return check


def _give(
  decoder: Decoder,
  state: DecodeState,
  taken: Sequence[tuple[int, Request]],
  lengths: Sequence[int],
  rows_at_a_time: int,
  sampling: SamplingParams | None,
) -> DecodeState:
  """Gives rows to requests, those of similar length together."""

  def padded(pair: tuple[int, Request]) -> int:
    return next(length for length in lengths if len(pair[1].tokens) <= length)

  for length, group in itertools.groupby(sorted(taken, key=padded), key=padded):
    group = list(group)
    for start in range(0, len(group), rows_at_a_time):
      part = group[start : start + rows_at_a_time]
      # Entries of B fill the shape; they are no rows and are dropped.
      rows = np.array([row for row, _ in part] + [len(state.keys)] * (rows_at_a_time - len(part)))
      requests = [request for _, request in part]
      state = refill(decoder, state, rows, *_arrange(requests, rows_at_a_time, length), sampling=sampling)
  return state


def _continuation(
  name: Hashable, result: Generation, row: int, eos_ids: Sequence[int], stop: StopStrings | None
) -> Continuation:
  length = int(result.lengths[row])
  tokens = np.array(result.tokens[row, :length])
  return Continuation(
    name,
    tokens=tokens,
    origins=np.array(result.origins[row, :length]),
    num_target_calls=int(result.num_target_calls[row]),
    finish_reason=finish_reason(tokens, eos_ids, stop),
    logprobs=None if result.logprobs is None else np.array(result.logprobs[row, :length]),
  )
