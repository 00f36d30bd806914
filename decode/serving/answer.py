"""A request on its way to an answer: its continuations as they come, and what is sent of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decode.serving.protocol import DEFAULT_TOKENS, MOST_SAMPLES, Asked, RefusedError
from decode.serving.worker import Job, Piece, Worker
from spectr_jax.engine.likelihood import LogLikelihood
from spectr_jax.engine.state import sample_keys
from spectr_jax.engine.stop import StopStrings
from spectr_jax.io.token_bytes import TextToken, TokenDecoder
from spectr_jax.io.tokenizer import TokenizerBase

_READERS = 2  # requests that are read, or responses that are written, at once


@dataclasses.dataclass(frozen=True)
class Served:
  """What the endpoint serves.

  Attributes:
    worker: The thread that decodes.
    tokenizer: The target's tokenizer.
    name: The model's name.
    max_new_tokens: The most new tokens of a continuation.
    api_key: What clients must send, or None.
    together: The most tokens of a prompt with its continuation; None where the bounds of the two suffice.
    hosts: Names that requests may be sent to, and whose pages may send some, besides those of this machine for itself;
      `*` is all. None for any name, and pages of that name alone.
    threads: Where requests are read and responses are written, which takes time that the event loop does not have.
  """

  worker: Worker
  tokenizer: TokenizerBase
  name: str
  max_new_tokens: int
  api_key: str | None = None
  together: int | None = None
  hosts: frozenset[str] | None = None
  threads: concurrent.futures.Executor = dataclasses.field(
    default_factory=lambda: concurrent.futures.ThreadPoolExecutor(_READERS, 'reading')
  )

  def prepare(self) -> None:
    """Does what is done once, and what the first requests would wait for: a look at the vocabulary, and programs."""
    assert self.most_characters
    list(_keys(0, 2, 2))

  @functools.cached_property
  def most_characters(self) -> int:
    """Characters of a prompt beyond which it is refused unread: those of as many of the longest token as may be."""
    tokens = (self.tokenizer.token(index) for index in range(self.tokenizer.vocab_size))
    return self.worker.longest_prompt * max(len(token) for token in tokens if token is not None)

  def most_new(self, prompt: Sequence[int]) -> int:
    """The most new tokens behind a prompt."""
    return self.max_new_tokens if self.together is None else min(self.max_new_tokens, self.together - len(prompt))


def _keys(seed: int, num_prompts: int, num_samples: int) -> Iterator[jax.Array]:
  """A key for each continuation: the first one has the seed's own, whatever else is asked for."""
  key = jax.random.key(seed, impl='threefry2x32')
  for place in range(num_prompts):
    own = jax.random.fold_in(key, place) if place else key
    # One program for any number of samples, since the first of many are those of few.
    yield from [own] if num_samples == 1 else itertools.islice(sample_keys(own[None], MOST_SAMPLES), num_samples)


@dataclasses.dataclass
class Choice:
  """A continuation as it comes: its prompt's number, its ids and text, and the pieces that wait to be sent.

  Its likelihood comes with the prompt's length; `read` says where in the text the tokens of a stream stand.
  """

  index: int
  prompt: Sequence[int]
  job: Job | None = None
  pieces: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
  text: str = ''
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  num_target_calls: int = 0
  num_accepted: int = 0
  likelihood: tuple[LogLikelihood, int] | None = None
  read: TokenDecoder | None = None

  def add(self, piece: Piece) -> None:
    self.text += piece.text
    self.tokens += piece.tokens
    self.logprobs += piece.logprobs
    self.finish_reason = piece.finish_reason
    self.num_target_calls, self.num_accepted = piece.num_target_calls, piece.num_accepted


class Answer:
  """A request on its way to an answer."""

  def __init__(self, served: Served, asked: Asked):
    self.served, self.asked = served, asked
    self.id = f'{"chatcmpl" if asked.is_chat else "cmpl"}-{secrets.token_hex(12)}'
    self.created = int(time.time())
    self._num_received, self._has_failed = 0, False
    self.choices = self._choices()

  def _choices(self) -> list[Choice]:
    asked = self.asked
    self._check_sizes()
    prompts = [self._encoded(prompt) for prompt in asked.prompts]
    return [
      Choice(place * asked.num_samples + sample, prompt)
      for place, prompt in enumerate(prompts)
      for sample in range(asked.num_samples)
    ]

  def _check_sizes(self) -> None:
    """Refuses what is too large before any of it is encoded."""
    _ = self.max_tokens
    asked, worker, most = self.asked, self.served.worker, self.served.most_characters
    number = len(asked.prompts) * asked.num_samples
    if number > worker.most_waiting:
      raise RefusedError(f'{number} continuations are more than {worker.most_waiting} that may wait', 'n')
    for prompt in asked.prompts:
      if asked.is_chat:
        size = sum(len(text) for message in prompt for text in message.values())
      else:
        size = len(prompt) if isinstance(prompt, str) else 0
      if size > most:
        said = (
          f'{self._field} has {size:,} characters, allowed are {most:,}: {worker.longest_prompt} of the longest token'
        )
        raise RefusedError(said, self._field)

  @property
  def _field(self) -> str:
    return 'messages' if self.asked.is_chat else 'prompt'

  def _encoded(self, prompt: Any) -> Sequence[int]:
    tokenizer, worker, field = self.served.tokenizer, self.served.worker, self._field
    try:
      if self.asked.is_chat:
        ids = tokenizer.encode_chat(prompt)
      else:
        ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    except ValueError as error:
      raise RefusedError(str(error), field) from error
    if not 1 <= len(ids) <= worker.longest_prompt:
      raise RefusedError(f'{field} has {len(ids)} tokens, allowed are 1 to {worker.longest_prompt}', field)
    if max(ids) >= worker.vocab_size:
      raise RefusedError(f'{field} has the id {max(ids)}, the vocabulary is 0 to {worker.vocab_size - 1}', field)
    if (self.asked.max_tokens or 0) > (room := self.served.most_new(ids)):
      message = f'max_tokens must be at most {room} behind {len(ids)} tokens, got {self.asked.max_tokens}'
      raise RefusedError(message, 'max_tokens')
    return ids

  @property
  def max_tokens(self) -> int:
    most = self.served.max_new_tokens
    if self.asked.max_tokens is not None and self.asked.max_tokens > most:
      raise RefusedError(
        f'max_tokens must be at most {most} here (--max_new_tokens), got {self.asked.max_tokens}', 'max_tokens'
      )
    if self.asked.max_tokens is None:
      return most if self.asked.is_chat else min(DEFAULT_TOKENS, most)
    return self.asked.max_tokens

  def _limit(self, choice: Choice) -> int:
    return min(self.max_tokens, self.served.most_new(choice.prompt))

  def submit(self, loop: asyncio.AbstractEventLoop) -> None:
    """Hands all continuations to the worker.

    Args:
      loop: Where their pieces are waited for.

    Raises:
      FullError: Too many wait.
      EndedError: The worker decodes no more.
    """
    asked = self.asked
    if self.max_tokens == 0:
      return
    stop = StopStrings(self.served.tokenizer, asked.stop) if asked.stop else None
    seed = secrets.randbits(32) if asked.seed is None else asked.seed % 2**32
    keys = _keys(seed, len(asked.prompts), asked.num_samples)
    for choice, key in zip(self.choices, keys, strict=True):

      def tell(found, pieces=choice.pieces):
        loop.call_soon_threadsafe(pieces.put_nowait, found)

      choice.job = Job(choice.prompt, key, asked.sampling, self._limit(choice), stop, tell)
    jobs = [choice.job for choice in self.choices if choice.job is not None]
    self._num_received = len(jobs)
    self._count('received_total', self._num_received)
    try:
      self.served.worker.submit(jobs)
    except Exception:
      self._end('refused', len(jobs))
      raise

  def _count(self, name: str, number: int, outcome: str = '') -> None:
    kind = 'chat' if self.asked.is_chat else 'completions'
    label = f'kind="{kind}",outcome="{outcome}"' if outcome else f'kind="{kind}"'
    self.served.worker.metrics.add(f'continuations_{name}', number, label)

  def _end(self, outcome: str, number: int) -> None:
    self._count('total', number, outcome)
    self._num_received -= number

  def close(self) -> None:
    """Lets go of what nobody waits for any more, and counts how the continuations ended."""
    if not self._num_received:
      return
    num_answered = sum(choice.finish_reason is not None for choice in self.choices)
    self._end('answered', num_answered)
    self._end('failed' if self._has_failed else 'left', self._num_received)
    for choice in self.choices:
      if choice.job is not None and choice.finish_reason is None:
        choice.job.is_cancelled = True

  async def pieces_of(self, choice: Choice) -> AsyncIterator[Piece]:
    """The pieces of a continuation, which are added to it."""
    while choice.job is not None and choice.finish_reason is None:
      found = await choice.pieces.get()
      if isinstance(found, Exception):
        self._has_failed = True
        raise found
      if not choice.tokens:
        self.served.worker.metrics.observe_first_token(time.monotonic() - choice.job.begun)
      choice.add(found)
      yield found

  async def finish(self) -> None:
    """Waits for all continuations, and for the log probabilities that a reading of the texts gives."""
    for choice in self.choices:
      async for _ in self.pieces_of(choice):
        pass
    asked = self.asked
    if not (asked.echo and asked.top_logprobs is not None) and not asked.top_logprobs:
      return
    for choice in self.choices:
      loop = asyncio.get_running_loop()
      found: asyncio.Future = loop.create_future()

      def tell(value, loop=loop, found=found):
        loop.call_soon_threadsafe(_settle, found, value)

      self.served.worker.score([[*choice.prompt, *choice.tokens]], asked.top_logprobs or 0, tell)
      choice.likelihood = await found, len(choice.prompt)

  # What is sent.

  def head(self, *, is_chunk: bool) -> dict[str, Any]:
    kind = 'chat.completion' if self.asked.is_chat else 'text_completion'
    kind += '.chunk' if is_chunk and self.asked.is_chat else ''
    return {'id': self.id, 'object': kind, 'created': self.created, 'model': self.served.name}

  def usage(self) -> dict[str, Any]:
    asked = self.asked
    prompt = sum(len(choice.prompt) for choice in self.choices[:: asked.num_samples])
    tokens = sum(len(choice.tokens) for choice in self.choices)
    calls = sum(choice.num_target_calls for choice in self.choices)
    accepted = sum(choice.num_accepted for choice in self.choices)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': tokens,
      'total_tokens': prompt + tokens,
      'completion_tokens_details': {'accepted_prediction_tokens': accepted},
      'spectr_jax': {'target_calls': calls, 'accepted_tokens': accepted},
    }

  def whole(self) -> dict[str, Any]:
    """The response that is not streamed."""
    self.served.worker.metrics.add('prompt_tokens_total', self.usage()['prompt_tokens'])
    choices = [self._whole_choice(choice) for choice in self.choices]
    return self.head(is_chunk=False) | {'choices': choices, 'usage': self.usage()}

  def _whole_choice(self, choice: Choice) -> dict[str, Any]:
    common = {'index': choice.index, 'finish_reason': choice.finish_reason or 'length'}
    if self.asked.is_chat:
      message = {'role': 'assistant', 'content': choice.text}
      return common | {'message': message, 'logprobs': self._chat_logprobs(choice)}
    text = self._echoed(choice) if self.asked.echo else choice.text
    return common | {'text': text, 'logprobs': self._completion_logprobs(choice)}

  def _echoed(self, choice: Choice) -> str:
    """The text of prompt and continuation, in which a character may begin in the one and end in the other."""
    decode = self.served.tokenizer.decode
    text = decode([*choice.prompt, *choice.tokens])
    return text[: len(text) - len(decode(choice.tokens)) + len(choice.text)]

  def _decode(self, choice: Choice, ids: Sequence[int]) -> list[TextToken]:
    """What ids are in the text that is sent: all of its ids, or those of a piece of a stream."""
    return (choice.read or self.served.tokenizer.decode_tokens_stream())(ids)

  def _places(self, choice: Choice) -> tuple[list[int], list[float | None], list[dict[int, float] | None]]:
    """Ids, their log probabilities, and the likeliest ids, of all places that a response shows."""
    if choice.likelihood is None:
      return choice.tokens, list(choice.logprobs), [None] * len(choice.tokens)
    found, start = choice.likelihood
    first = 0 if self.asked.echo else start
    ids = [*choice.prompt, *choice.tokens][first:]
    values = [_number(value) for value in found.logprobs[0, first : first + len(ids)]]
    tops: list[dict[int, float] | None] = []
    for place in range(first, first + len(ids)):
      pairs = zip(found.top_tokens[0, place].tolist(), found.top_logprobs[0, place].tolist())
      tops.append({token: value for token, value in pairs if np.isfinite(value)} if place else None)
    return ids, values, tops

  def _completion_logprobs(self, choice: Choice) -> dict[str, Any] | None:
    if self.asked.top_logprobs is None:
      return None
    ids, values, tops = self._places(choice)
    found = self._decode(choice, ids)
    return {
      'tokens': [token.name for token in found],
      'token_logprobs': values,
      'top_logprobs': [top and self._named(top, *own) for top, own in zip(tops, zip(ids, found, values))],
      'text_offset': [token.offset for token in found],
    }

  def _named(self, top: dict[int, float], index: int, token: TextToken, its: float) -> dict[str, float]:
    """The likeliest tokens of a place, and the one that stands there, by names of their own."""
    names = {index: token.name}
    for other in top:
      name = self._alone(other).name
      names.setdefault(other, f'token_id:{other}' if name in names.values() else name)
    return {names[other]: value for other, value in (top | {index: top.get(index, its)}).items()}

  def _alone(self, token: int) -> TextToken:
    return self.served.tokenizer.decode_tokens([token])[0]

  def _chat_logprobs(self, choice: Choice) -> dict[str, Any] | None:
    if self.asked.top_logprobs is None:
      return None
    ids, values, tops = self._places(choice)
    return {
      'content': [
        _entry(token, value) | {'top_logprobs': [_entry(self._alone(other), its) for other, its in (top or {}).items()]}
        for token, value, top in zip(self._decode(choice, ids), values, tops)
      ]
    }

  def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
    """A piece of a stream."""
    choice.read = choice.read or self.served.tokenizer.decode_tokens_stream()
    part = Choice(choice.index, choice.prompt, tokens=list(piece.tokens), logprobs=list(piece.logprobs))
    part.read = choice.read
    common = {'index': choice.index, 'finish_reason': piece.finish_reason}
    if self.asked.is_chat:
      is_first = len(choice.tokens) == len(piece.tokens)
      delta = ({'role': 'assistant'} if is_first else {}) | {'content': piece.text}
      own = common | {'delta': delta, 'logprobs': self._chat_logprobs(part)}
    else:
      own = common | {'text': piece.text, 'logprobs': self._completion_logprobs(part)}
    usage = {'usage': self.usage()} if self.asked.has_usage_in_chunks else {}
    return self.head(is_chunk=True) | {'choices': [own]} | usage


def _entry(token: TextToken, value: float | None) -> dict[str, Any]:
  return {'token': token.name, 'logprob': value, 'bytes': list(token.content)}


def _number(value: float) -> float | None:
  return None if np.isnan(value) else max(float(value), -1e30)  # JSON has no infinity


def _settle(future: asyncio.Future, value: Any) -> None:
  if not future.done():
    if isinstance(value, Exception):
      future.set_exception(value)
    else:
      future.set_result(value)
