"""A request on its way to an answer: its continuations as they come, and what is sent of them."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decode.serving.protocol import DEFAULT_TOKENS, Asked, RefusedError
from decode.serving.worker import Job, Piece, Worker
from spectr_jax.engine.likelihood import LogLikelihood
from spectr_jax.engine.state import sample_keys
from spectr_jax.engine.stop import StopStrings
from spectr_jax.io.token_bytes import TextToken, TokenDecoder
from spectr_jax.io.tokenizer import TokenizerBase


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
  """

  worker: Worker
  tokenizer: TokenizerBase
  name: str
  max_new_tokens: int
  api_key: str | None = None
  together: int | None = None

  def most_new(self, prompt: Sequence[int]) -> int:
    """The most new tokens behind a prompt."""
    return self.max_new_tokens if self.together is None else min(self.max_new_tokens, self.together - len(prompt))


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
    self.choices = self._choices()

  def _choices(self) -> list[Choice]:
    asked, tokenizer = self.asked, self.served.tokenizer
    field = 'messages' if asked.is_chat else 'prompt'
    try:
      if asked.is_chat:
        prompts = [tokenizer.encode_chat(messages) for messages in asked.prompts]
      else:
        prompts = [tokenizer.encode_prompt(each) if isinstance(each, str) else each for each in asked.prompts]
    except ValueError as error:
      raise RefusedError(str(error), field) from error
    most, vocab_size = self.served.worker.longest_prompt, self.served.worker.vocab_size
    for prompt in prompts:
      if not 1 <= len(prompt) <= most:
        raise RefusedError(f'{field} has {len(prompt)} tokens, allowed are 1 to {most}', field)
      if max(prompt) >= vocab_size:
        raise RefusedError(f'{field} has the id {max(prompt)}, the vocabulary is 0 to {vocab_size - 1}', field)
      if (asked.max_tokens or 0) > (room := self.served.most_new(prompt)):
        message = f'max_tokens must be at most {room} behind {len(prompt)} tokens, got {asked.max_tokens}'
        raise RefusedError(message, 'max_tokens')
    if len(prompts) * asked.num_samples > self.served.worker.most_waiting:
      number = len(prompts) * asked.num_samples
      raise RefusedError(f'{number} continuations are more than {self.served.worker.most_waiting} that may wait', 'n')
    return [
      Choice(place * asked.num_samples + sample, prompt)
      for place, prompt in enumerate(prompts)
      for sample in range(asked.num_samples)
    ]

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

  def submit(self) -> None:
    """Hands all continuations to the worker.

    Raises:
      FullError: Too many wait.
      RefusedError: The limit is above what is served.
    """
    asked, loop = self.asked, asyncio.get_running_loop()
    if self.max_tokens == 0:
      return
    stop = StopStrings(self.served.tokenizer, asked.stop) if asked.stop else None
    for choice, key in zip(self.choices, self._keys(), strict=True):

      def tell(found, pieces=choice.pieces):
        loop.call_soon_threadsafe(pieces.put_nowait, found)

      choice.job = Job(choice.prompt, key, asked.sampling, self._limit(choice), stop, tell)
    jobs = [choice.job for choice in self.choices if choice.job is not None]
    self.served.worker.submit(jobs)

  def _keys(self) -> Iterator[jax.Array]:
    """A key for each continuation: the first one has the seed's own, whatever else is asked for."""
    asked = self.asked
    seed = secrets.randbits(32) if asked.seed is None else asked.seed % 2**32
    key = jax.random.key(seed, impl='threefry2x32')
    for place in range(len(asked.prompts)):
      own = jax.random.fold_in(key, place) if place else key
      yield from [own] if asked.num_samples == 1 else sample_keys(own[None], asked.num_samples)

  def cancel(self) -> None:
    """Lets go of what nobody waits for any more."""
    for choice in self.choices:
      if choice.job is not None and choice.finish_reason is None:
        choice.job.is_cancelled = True

  async def pieces_of(self, choice: Choice) -> AsyncIterator[Piece]:
    """The pieces of a continuation, which are added to it."""
    while choice.job is not None and choice.finish_reason is None:
      found = await choice.pieces.get()
      if isinstance(found, Exception):
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
      'top_logprobs': [top and self._named(top, *pair) for top, pair in zip(tops, zip(ids, found))],
      'text_offset': [token.offset for token in found],
    }

  def _named(self, top: dict[int, float], index: int, token: TextToken) -> dict[str, float]:
    """The likeliest tokens of a place by names of their own; that of the token that stands there is its own."""
    names = {index: token.name}
    for other in top:
      name = self._alone(other).name
      names.setdefault(other, f'token_id:{other}' if name in names.values() else name)
    return {names[other]: value for other, value in top.items()}

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
