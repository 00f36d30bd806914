"""Decoding more prompts than fit into a batch: a row that is done takes the next prompt."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.draft import Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.result import Generation, NotFiniteError
from spectr_jax.engine.state import DecodeState, checked_rows, constrain, finish, init_decode, prefilled
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


def refill(
  decoder: Decoder,
  state: DecodeState,
  rows: ArrayLike,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  sampling: SamplingParams | None = None,
  max_new_tokens: ArrayLike | None = None,
) -> DecodeState:
  """Gives rows, done or not, to other prompts; their old contents are lost. Each pair of R and P is a program.

  Rows that use filters which no row used before make the loop compile once more.

  `state` is donated: only the returned one may be used afterwards. A row decodes as it would by itself.

  Args:
    decoder: The decoder that `state` was made with; its `cache_size` must hold the prompts and the new tokens.
    state: Between rounds.
    rows: Integers `[R]`, different rows; entries of B or more are dropped, with their prompts.
    rng_key, sampling: As for `generate`, of R rows.
    prompts, prompt_lengths: Integers `[R, P]`, right-padded, and integers `[R]`, from 1 to P.
    max_new_tokens: Limit of new tokens, one or `[R]`, at most the decoder's; None for the decoder's.

  Raises:
    ValueError: As for `generate`, or a row is negative or occurs twice.
  """
  rows, prompts = np.asarray(rows), checks.as_integers('prompts', prompts)
  batch_size = state.keys.shape[0]
  kept = rows[rows < batch_size]
  if rows.shape != prompts.shape[:1] or (kept < 0).any() or len(set(kept.tolist())) < len(kept):
    raise ValueError(f'rows must be one different row of {batch_size} for each prompt, got {rows.tolist()}')
  new = checked_rows(decoder, rng_key, prompts, prompt_lengths, sampling, max_new_tokens, like=state.sampling)
  return _replace_rows(decoder, state, prefilled(decoder, new), rows.astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue.

  Attributes:
    name: The name of its continuation.
    tokens: Ids, at least one.
    key: A typed key; the continuation depends on it, the prompt and the sampling parameters alone.
    sampling: Its own sampling parameters, scalars; None for those of all.
    max_new_tokens: Its own limit of new tokens, at most that of all; None for that.
  """

  name: Hashable
  tokens: Sequence[int]
  key: jax.Array
  sampling: SamplingParams | None = None
  max_new_tokens: int | None = None


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
  """The few lengths that prompts are padded to, since each is a program: doubled from `shortest` on, and `longest`."""
  lengths = list(itertools.takewhile(lambda length: length < longest, (shortest << i for i in itertools.count())))
  return [*lengths, longest]


class Pool:
  """The rows of a batch, which take one request after another while one compiled loop runs.

  Attributes:
    decoder: The decoder.
    state: Between two rounds.
    owners: The requests in progress, by row.
  """

  def __init__(
    self,
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    batch_size: int,
    longest_prompt: int,
    sampling: SamplingParams | None = None,
  ):
    """Begins with some requests, at least one and at most `batch_size`, which are prefilled together.

    Args:
      decoder: Its `cache_size` holds the longest prompt and the new tokens.
      requests: They are checked as by `check`.
      batch_size: B, rows; with a sharding a multiple of what divides them.
      longest_prompt: The most tokens of a prompt.
      sampling: Of requests that have none of their own.

    Raises:
      ValueError: As for `check`.
    """
    self.decoder, self._longest, self._sampling = decoder, longest_prompt, sampling
    self.owners = dict(enumerate(map(self.check, requests)))
    # Refilling an eighth of the rows at a time takes few programs, and not too much work for a single row.
    self.rows_at_a_time = max(1, batch_size // 8)
    if decoder.sharding is not None:
      self.rows_at_a_time = decoder.sharding.round_up(self.rows_at_a_time)
    rows, options = self._arrange(requests, batch_size, longest_prompt)
    self.state = init_decode(decoder, *rows, **options)
    if len(requests) < batch_size:
      self.end(range(len(requests), batch_size))

  def check(self, request: Request) -> Request:
    """The request itself; ValueError if its prompt is empty or too long, or has an id that is not in the vocabulary."""
    checks.as_ids(f'prompt {request.name}', request.tokens, self.decoder.target.vocab_size, self._longest)
    return request

  def _arrange(self, requests: Sequence[Request], num_rows: int, length: int) -> tuple[tuple, dict[str, Any]]:
    """Keys `[R]`, tokens `[R, P]` and lengths `[R]` of requests, and the options of `refill` for them.

    Rows without a request repeat the last one.
    """
    filled = [*requests, *[requests[-1]] * (num_rows - len(requests))]
    tokens = np.zeros((num_rows, length), np.int32)
    for row, request in zip(tokens, filled):
      row[: len(request.tokens)] = request.tokens
    own = [request.sampling or self._sampling or SamplingParams() for request in filled]
    limits = [
      int(self.decoder.max_new_tokens) if request.max_new_tokens is None else request.max_new_tokens
      for request in filled
    ]
    rows = jnp.stack([request.key for request in filled]), tokens, np.array([len(each.tokens) for each in filled])
    return rows, {'sampling': SamplingParams.of_rows(own), 'max_new_tokens': np.array(limits)}

  @property
  def free(self) -> list[int]:
    """The rows without a request."""
    return [row for row in range(len(self.state.keys)) if row not in self.owners]

  def put(self, requests: Sequence[Request]) -> None:
    """Gives free rows to at most as many requests, checked; those of similar lengths are prefilled together."""
    lengths = padded_lengths(self._longest)

    def padded(pair: tuple[int, Request]) -> int:
      return next(length for length in lengths if len(pair[1].tokens) <= length)

    taken = list(zip(self.free, requests, strict=False))
    for length, group in itertools.groupby(sorted(taken, key=padded), key=padded):
      group = list(group)
      for start in range(0, len(group), self.rows_at_a_time):
        part = group[start : start + self.rows_at_a_time]
        # Entries of B fill the shape; they are no rows and are dropped.
        rows = np.array([row for row, _ in part] + [len(self.state.keys)] * (self.rows_at_a_time - len(part)))
        arranged, options = self._arrange([request for _, request in part], self.rows_at_a_time, length)
        self.state = refill(self.decoder, self.state, rows, *arranged, **options)
    self.owners.update(taken)

  def advance(self, num_rounds: int) -> None:
    """Runs up to so many rounds; NotFiniteError if a model's logits are not finite: `forgive` ends the row."""
    self.state = decode_rounds(self.decoder, self.state, num_rounds)
    self.decoder.check(self.state.result)

  def forgive(self, row: int) -> Request:
    """Ends the row whose logits were not finite, so that the others can go on; returns its request."""
    failures = np.array(fetch(self.state.result.failures))
    failures[row] = 0
    sharding = self.decoder.sharding
    failures = jnp.asarray(failures) if sharding is None else sharding.put_rows(failures)
    self.state = dataclasses.replace(self.state, result=dataclasses.replace(self.state.result, failures=failures))
    self.end([row])
    return self.owners.pop(row)

  def end(self, rows: Iterable[int]) -> None:
    """Ends rows, which stay their owners'."""
    self.state = finish(self.decoder, self.state, list(rows))

  def done(self) -> list[int]:
    """The rows whose requests have come to their end."""
    is_done = fetch(self.state.is_done)
    return [row for row in sorted(self.owners) if is_done[row]]

  def result(self) -> Generation:
    """All tokens so far, as NumPy arrays."""
    return fetch(dataclasses.replace(self.state.result, statistics=None))


def generate_many(
  target: Model,
  draft: Model | Drafter | None,
  requests: Iterable[Request],
  *,
  batch_size: int,
  longest_prompt: int,
  max_new_tokens: int,
  method: str | Method | None = None,
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
    target, draft, method, tree: As for `generate`.
    requests: The prompts, with their names and keys.
    batch_size: B, rows.
    longest_prompt: The most tokens of a prompt.
    max_new_tokens: Limit of new tokens per prompt.
    rounds_at_a_time: Rounds between two checks for rows that are done. More rounds leave rows idle for longer, fewer
      wait for the device more often.
    stop: Texts that end a continuation, or None; looked for every `rounds_at_a_time` rounds.
    sampling: Of scalars, for all requests that have none of their own, as for `generate`.
    **options: `eos_id`, `sharding` and `logprobs` of `generate`.

  Yields:
    One continuation per request, in the order in which they are done.

  Raises:
    ValueError: As for `generate`; or a prompt is empty or too long, or has an id that is not in the vocabulary; or a
      number is below 1.
  """
  if min(batch_size, longest_prompt, rounds_at_a_time) < 1:
    raise ValueError('batch_size, longest_prompt and rounds_at_a_time must be at least 1')
  waiting = iter(requests)
  first = list(itertools.islice(waiting, batch_size))
  if not first:
    return
  sharding = options.get('sharding')
  batch_size = len(first) if sharding is None else sharding.round_up(len(first))
  decoder = Decoder.make(
    target,
    draft,
    method=method,
    tree=tree,
    max_new_tokens=max_new_tokens,
    cache_size=choose_cache_size(target, draft, longest_prompt + max_new_tokens),
    **options,
  )
  pool = Pool(decoder, first, batch_size=batch_size, longest_prompt=longest_prompt, sampling=sampling)
  waiting = map(pool.check, waiting)
  search = None if stop is None else StopSearch(stop)
  while pool.owners:
    try:
      pool.advance(rounds_at_a_time)
    except NotFiniteError as error:
      raise ValueError(f'prompt {pool.owners[error.row].name}: {error}') from error
    ended = [] if search is None else search.look(pool.state.result, pool.owners)
    if ended:
      pool.end(ended)
    done = pool.done()
    if done:
      result = pool.result()
      if search is not None:
        result = result.cut({row: search.ended[row] for row in done if row in search.ended})
      for row in done:
        if search is not None:
          search.forget(row)
        yield _continuation(pool.owners.pop(row).name, result, row, [int(i) for i in decoder.eos_ids], stop)
    free = len(pool.free)
    # Refilling one row costs as much as refilling `rows_at_a_time` of them.
    if free >= pool.rows_at_a_time or not pool.owners:
      pool.put(list(itertools.islice(waiting, free)))


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
