"""Prompts in, continuations out: `generate` for one batch, `generate_many` for more prompts than fit into one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from spectr_jax.constraint import Constraint, numbered
from spectr_jax.draft import Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.budget import Budget
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.reading import init_decode
from spectr_jax.engine.request import Request
from spectr_jax.engine.result import Generation
from spectr_jax.engine.rows import Rows
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.stop import StopStrings, decode_until_stopped, finish_reason
from spectr_jax.methods import Method
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree


def generate(
  rng_key: jax.Array,
  target: Model,
  draft: Model | Drafter | None,
  prompts: checks.Prompts,
  prompt_lengths: ArrayLike | None = None,
  *,
  method: str | Method | None = None,
  tree: TokenTree | None = None,
  max_new_tokens: ArrayLike,
  sampling: SamplingParams | None = None,
  constraint: Constraint | Sequence[Constraint | None] | None = None,
  eos_id: int | tuple[int, ...] | None = None,
  statistics: bool = False,
  sharding: DecodeSharding | None = None,
  logprobs: bool = False,
  num_samples: int = 1,
  stop: StopStrings | None = None,
  rounds_at_a_time: int = 4,
) -> Generation:
  """Continues prompts with the target's distribution, guessing ahead with a draft.

  The loop is one program, compiled once per shape, method and tree, and for each set of filters and penalties that rows
  use. The values of sampling parameters, keys, prompt lengths, EOS ids and the limit of new tokens may change without
  compiling again, as long as prompt and new tokens need caches and buffers of the same size.

  Args:
    rng_key: One typed key, from which row i takes `fold_in(rng_key, i)`, or a key array `[B]`. With a key array a row's
      tokens depend on its key and prompt alone; up to rounding, its batch and padding have no effect.
    target: The model whose distribution the output has.
    draft: A model with the same vocabulary, or a drafter (`fit_draft` makes one of any model), or None for methods that
      draft nothing.
    prompts: Integers `[B, P]`, right-padded; padding is not read. Or B lists of ids, which may differ in length.
      `generate_text` takes texts.
    prompt_lengths: Integers `[B]`, from 1 to P; None for lists of ids, or if all prompts have P tokens.
    method: A name of `METHODS`, or a `Method`; None for `race_traversal`, or `autoregressive` without a draft.
    tree: The guesses of a round, such as `TokenTree.chains(K, L)`; None for a small one, see `Decoder.make`. Methods
      that draft nothing ignore it.
    max_new_tokens: Limit of new tokens per row, an int, or integers `[B]`, one per prompt.
    sampling: Temperature, filters and penalties, of scalars or arrays `[B]`; None for temperature 1 and no others.
    constraint: What continuations must follow, see `compile_constraint`: one for all prompts, or B of them, in which
      None stands for none. At every step the target's distribution is that of the allowed tokens, before temperature
      and filters; a continuation is cut where its limit ends it. The ids of `eos_id` end it where it is complete.
    eos_id: Id or ids that end a row, or None.
    statistics: Whether to count `Statistics`; this sorts the distributions of the positions visited and takes time.
    sharding: The sharding of rows, models and caches over the devices of a mesh, or None for one device. Models that
      `DecodeSharding.put_models` has sharded already are not moved. Tokens are the same up to rounding.
    logprobs: Whether to return the target's log probabilities of the new tokens, from calls that are made anyway; with
      a constraint those among the allowed tokens, without penalties.
    num_samples: Continuations of each prompt, with the keys of `sample_keys`. Row `b * num_samples + i` of the result
      is sample i of prompt b, and sample 0 is what a single one would be. A prompt is prefilled once, and its row
      of the caches is copied: decoding takes the memory of `B * num_samples` rows.
    stop: Texts that end a row, or None. They are looked for on the host every `rounds_at_a_time` rounds, and the result
      consists of NumPy arrays; the token that completes a stop text is the last of its row.
    rounds_at_a_time: Rounds between two searches for `stop`; tokens and counts do not depend on it.

  Returns:
    The new tokens and how they came about, of `B * num_samples` rows.

  Raises:
    ValueError: A shape, range, vocabulary, method or tree does not fit; the message names what would fit.
    NotFiniteError: A model's logits are not finite; raised outside of a trace only.
  """
  prompts, prompt_lengths = checks.as_prompts(prompts, prompt_lengths)
  limits = checks.as_limits(max_new_tokens, len(prompts))
  most_new = int(limits.max())
  checks.check_count('rounds_at_a_time', rounds_at_a_time)
  if stop is not None and (statistics or isinstance(prompts, Tracer)):
    raise ValueError('stop is for calls outside of a trace and without statistics, which are of whole rounds')
  constraints, numbers = numbered(constraint, len(prompts))
  decoder = Decoder.make(
    target,
    draft,
    method=method,
    tree=tree,
    max_new_tokens=most_new,
    cache_size=choose_cache_size(target, draft, prompts.shape[1] + most_new),
    eos_id=eos_id,
    statistics=statistics,
    sharding=sharding,
    logprobs=logprobs,
    constraints=constraints,
  )
  rows = {'sampling': sampling, 'num_samples': num_samples, 'max_new_tokens': limits, 'constraint': numbers}
  state = init_decode(decoder, rng_key, prompts, prompt_lengths, **rows)
  if stop is None:
    result = decode_rounds(decoder, state).result
  else:
    result = decode_until_stopped(decoder, state, stop, rounds_at_a_time=rounds_at_a_time)
  if not isinstance(result.failures, Tracer):
    decoder.check(result)
  return result.of_size(most_new)


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
    num_kept: The tokens of its prompt that were not read, since they began an earlier text.
  """

  name: Hashable
  tokens: np.ndarray
  origins: np.ndarray
  num_target_calls: int
  finish_reason: str
  logprobs: np.ndarray | None = None
  num_kept: int = 0

  @property
  def tokens_per_call(self) -> float:
    """New tokens per call of the target."""
    return len(self.tokens) / self.num_target_calls


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
  prefix_cache_bytes: int | None = None,
  budget: Budget | Literal['auto'] | int | None = None,
  **options: Any,
) -> Iterator[Continuation]:
  """Continues any number of prompts, as many at a time as there are rows, and yields each as soon as it is done.

  Every `rounds_at_a_time` rounds, rows that are done take the next requests, several at a time. The programs do not
  depend on the number of requests and of their tokens. What a prompt shares with the beginning of a text that a row or
  the cache of prefixes holds is not read again, see `Rows`. A request is taken only when there is a row for it, and is
  continued as `generate` with its key would, up to rounding.

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
    prefix_cache_bytes: The most bytes of what is kept of earlier texts besides the rows, None for none; see `Rows`.
    budget: The most guesses of all rows of a call together; rows that are left alone share what others leave. `auto`
      measures what calls with fewer guesses cost, none included, and takes those with the most tokens per second. The
      tree is the largest that a row gets. Continuations keep their distribution, and greedy ones are the same; others
      depend on when rows draft how much, but for `ersd`. A `Budget` tells afterwards what it chose. None for the tree
      in every round.
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
  sizes = {'batch_size': batch_size, 'longest_prompt': longest_prompt, 'prefix_cache_bytes': prefix_cache_bytes}
  rows = Rows(decoder, **sizes, sampling=sampling, budget=budget)
  rows.put(first)
  eos_ids = [int(i) for i in decoder.eos_ids]
  while rows.owners:
    done = [piece for piece in rows.step(rounds_at_a_time, stop=stop) if piece.is_done]
    if error := next((piece.error for piece in done if piece.error is not None), None):
      raise ValueError(f'prompt {rows.owners[error.row].name}: {error}') from error
    rows.end(piece.row for piece in done)
    result = rows.result if stop is None else rows.result.cut({piece.row: piece.end for piece in done})
    for piece in done:
      is_ended = not (piece.request.sampling or sampling or SamplingParams()).ignore_eos
      ends, num_kept = eos_ids if is_ended else (), int(rows.num_kept[piece.row])
      yield _continuation(piece.request.name, result, piece.row, ends, stop, num_kept)
    # Reading for one row costs as much as for `rows_at_a_time` of them.
    if len(rows.free) >= rows.rows_at_a_time or not rows.owners:
      rows.put(list(itertools.islice(waiting, len(rows.free))))


def _continuation(
  name: Hashable, result: Generation, row: int, eos_ids: Sequence[int], stop: StopStrings | None, num_kept: int
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
    num_kept=num_kept,
  )
