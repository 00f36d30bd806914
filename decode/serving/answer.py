"""A request on its way to an answer: its continuations as they come, and what is sent of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from decode.serving.compiling import Compiler
from decode.serving.faults import RefusedError, refusing
from decode.serving.protocol import DEFAULT_TOKENS, MOST_SAMPLES, CompletionRequest
from decode.serving.tools import Reader, Style, style_of
from decode.serving.worker import CHOICE_TOKENS, PENALTIES, Job, Piece, Worker
from spectr_jax import ChoiceProbs, Constraint, LogLikelihood, StopStrings
from spectr_jax.engine import sample_keys
from spectr_jax.engine.choices import Choices
from spectr_jax.io.hub.chat_template import texts_of
from spectr_jax.io.token_bytes import TextToken, TokenDecoder
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import named

_T = TypeVar('_T')
_READERS = 2  # requests that are read, or responses that are written, at once


@dataclasses.dataclass(frozen=True)
class Served:
  worker: Worker
  tokenizer: TokenizerBase
  name: str  # the model's
  max_new_tokens: int  # of a continuation
  api_key: str | None = None  # what clients must send
  together: int | None = None  # the most tokens of a prompt with its continuation, if the two bounds are not enough
  # names that may be asked by, beside those of this machine for itself; `*` is all, None any
  hosts: frozenset[str] | None = None
  # read requests and write responses, for which the event loop has no time
  threads: concurrent.futures.Executor = dataclasses.field(
    default_factory=lambda: concurrent.futures.ThreadPoolExecutor(_READERS, 'reading')
  )
  compiler: Compiler = dataclasses.field(default_factory=Compiler)
  tool_format: str | None = None  # None for that of the chat template
  constraint_after: str | None = None  # where the constraints of requests begin that do not say it

  def prepare(self) -> None:
    """Does what is done once, and what the first requests would wait for: a look at the vocabulary, and programs."""
    assert self.most_characters
    list(_keys(0, 2, 2))
    self.compiler.prepare(self.tokenizer, self.worker.vocab_size)
    with contextlib.suppress(ValueError):  # a template's process begins, and requests hear what it refuses
      self.tokenizer.encode_chat([{'role': 'user', 'content': 'a'}])
    try:
      assert self.style
    except ValueError:  # requests with tools are refused
      if self.tool_format is not None:
        raise

  @property
  def style(self) -> Style:
    """How the model writes calls of tools; `ValueError` if it writes none, or in an unknown form."""
    with named(f'the model {self.name}'):
      return style_of(self.tokenizer, self.tool_format)

  def constraint_of(self, request: CompletionRequest) -> tuple[str, Any, str] | None:
    """`CompletionRequest.constraint`, or that of calls; a `RefusedError` if the model takes no tools."""
    if request.tools is None:
      return request.constraint
    with refusing('tools'):
      return request.tools.constraint(self.style)

  @functools.cached_property
  def most_characters(self) -> int:
    """Characters of a prompt beyond which it is refused unread: those of as many of the longest token as may be."""
    tokens = (self.tokenizer.token(index) for index in range(self.tokenizer.vocab_size))
    return self.worker.longest_prompt * max(len(token) for token in tokens if token is not None)

  def most_new(self, prompt: Sequence[int]) -> int:
    return self.max_new_tokens if self.together is None else min(self.max_new_tokens, self.together - len(prompt))


def _keys(seed: int, num_prompts: int, num_samples: int) -> Iterator[jax.Array]:
  """A key for each continuation: the first one has the seed's own, whatever else is asked for."""
  key = jax.random.key(seed, impl='threefry2x32')
  for place in range(num_prompts):
    own = jax.random.fold_in(key, place) if place else key
    # One program for any number of samples, since the first of many are those of few.
    yield from [own] if num_samples == 1 else itertools.islice(sample_keys(own[None], MOST_SAMPLES), num_samples)


class _Place(NamedTuple):
  """A token that a response shows, its log probability, and those of the likeliest tokens in its place."""

  token: int
  shown: TextToken
  logprob: float | None
  top: dict[int, float] | None


@dataclasses.dataclass
class Choice:
  index: int
  prompt: Sequence[int]  # ids
  job: Job | None = None
  text: str = ''
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  is_cut: bool = False  # before a stop text
  num_target_calls: int = 0
  num_accepted: int = 0
  likelihood: LogLikelihood | None = None  # of prompt and continuation, if a response shows more than the new tokens
  probs: ChoiceProbs | None = None  # of the constraint's choices, behind the prompt
  name_next: TokenDecoder | None = None  # names the tokens of a stream, each from where the last piece ended
  unsent: list[_Place] = dataclasses.field(default_factory=list)  # of a stream: their text may be that of a stop
  reader: Reader | None = None  # of calls
  delta: dict[str, Any] = dataclasses.field(default_factory=dict)  # that a stream sends next

  def add(self, piece: Piece) -> None:
    self.text += piece.text if self.reader is None else self.reader.style.plain(piece.text)
    self.tokens += piece.tokens
    self.logprobs += piece.logprobs
    self.finish_reason, self.is_cut = piece.finish_reason, piece.is_cut
    self.num_target_calls, self.num_accepted = piece.num_target_calls, piece.num_accepted
    self.delta = {'content': piece.text}
    if self.reader is not None:
      self.delta = self.reader.add(piece.text, piece.finish_reason is not None)
      if piece.finish_reason == 'stop' and self.reader.calls and not self.reader.is_open:
        self.finish_reason = 'tool_calls'


class Answer:
  def __init__(self, served: Served, request: CompletionRequest, constraint: Constraint | None = None):
    """Encodes the prompts; a `RefusedError` if they are too long or too many, or ask for too many tokens."""
    self.served, self.request, self.constraint = served, request, constraint
    self.id = f'{"chatcmpl" if request.is_chat else "cmpl"}-{secrets.token_hex(12)}'
    self.created = int(time.time())
    self.max_tokens = self._allowed_tokens()
    self._style = None if request.tools is None else served.style
    self._field = 'messages' if request.is_chat else 'prompt'
    self._arrived: asyncio.Queue[tuple[Choice, Piece | Exception]] = asyncio.Queue()
    self._num_open, self._has_failed = 0, False  # continuations that were received and have not ended
    self._check_sizes()
    self.choices = [
      Choice(place * request.num_samples + sample, prompt)
      for place, prompt in enumerate(map(self._encoded, request.prompts))
      for sample in range(request.num_samples)
    ]
    self._scored = self._encoded_choices() if request.has_choice_probs else None

  def _allowed_tokens(self) -> int:
    max_tokens, most = self.request.max_tokens, self.served.max_new_tokens
    if max_tokens is None:
      return most if self.request.is_chat else min(DEFAULT_TOKENS, most)
    if max_tokens > most:
      message = f'max_tokens must be at most {most} here (--max_new_tokens), got {max_tokens}'
      raise RefusedError(message, 'max_tokens')
    return max_tokens

  def _check_sizes(self) -> None:
    """Refuses what is too large before any of it is encoded."""
    request, worker, most = self.request, self.served.worker, self.served.most_characters
    for name in PENALTIES:
      if getattr(request.sampling, name) is not None and not worker.has_penalties:
        raise RefusedError(f'{name} needs a server that was started without --nopenalties', name)
    if unknown := [token for token in request.sampling.logit_bias or () if token >= worker.vocab_size]:
      raise RefusedError(
        f'logit_bias has the id {unknown[0]}, the vocabulary is 0 to {worker.vocab_size - 1}', 'logit_bias'
      )
    number = len(request.prompts) * request.num_samples
    if number > worker.most_held:
      raise RefusedError(f'{number} continuations are more than {worker.most_held}, the rows and those that wait', 'n')
    for prompt in request.prompts:
      if request.is_chat:
        with refusing(self._field):
          size = sum(map(len, texts_of(prompt, request.tools and request.tools.defined)))
      else:
        size = len(prompt) if isinstance(prompt, str) else 0
      if size > most:
        message = f'has {size:,} characters, allowed are {most:,}: {worker.longest_prompt} of the longest token'
        raise RefusedError(f'{self._field} {message}', self._field)

  def _encoded(self, prompt: Any) -> Sequence[int]:
    tokenizer, worker, field = self.served.tokenizer, self.served.worker, self._field
    with refusing(field):
      if self.request.is_chat:
        ids = tokenizer.encode_chat(prompt, self.request.tools and self.request.tools.defined)
      else:
        ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
    if not 1 <= len(ids) <= worker.longest_prompt:
      raise RefusedError(f'{field} has {len(ids)} tokens, allowed are 1 to {worker.longest_prompt}', field)
    if max(ids) >= worker.vocab_size:
      raise RefusedError(f'{field} has the id {max(ids)}, the vocabulary is 0 to {worker.vocab_size - 1}', field)
    if (self.request.max_tokens or 0) > (room := self.served.most_new(ids)):
      message = f'max_tokens must be at most {room} behind {len(ids)} tokens, got {self.request.max_tokens}'
      raise RefusedError(message, 'max_tokens')
    return ids

  def _encoded_choices(self) -> Choices:
    assert self.request.constraint is not None
    field, worker, longest = 'structured_outputs', self.served.worker, max(len(each.prompt) for each in self.choices)
    with refusing(field):
      choices = Choices.of(self.served.tokenizer, self.request.constraint[1])
      for number, most, words in (
        (choices.depth, CHOICE_TOKENS, 'a choice has'),
        (choices.num_tokens, worker.longest_prompt, 'the choices have'),
        (longest + choices.depth, worker.most_tokens, 'a prompt and a choice have'),
      ):
        if number > most:
          raise ValueError(f'{words} {number} tokens, allowed are {most} for choice_probs')
    return choices

  def submit(self, loop: asyncio.AbstractEventLoop) -> None:
    """Hands all continuations to the worker; `loop` is where their pieces are waited for."""
    request, served = self.request, self.served
    if self.max_tokens == 0:
      return
    tokenizer = served.tokenizer if self._style is None else self._style.tokenizer
    stop = StopStrings(tokenizer, request.stop) if request.stop else None
    seed = secrets.randbits(32) if request.seed is None else request.seed % 2**32
    keys = _keys(seed, len(request.prompts), request.num_samples)
    jobs = []
    for choice, key in zip(self.choices, keys, strict=True):

      def tell(piece: Piece | Exception, choice: Choice = choice) -> None:
        loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, piece))

      limit = min(self.max_tokens, served.most_new(choice.prompt))
      more = {'constraint': self.constraint, 'tokenizer': tokenizer, 'has_seed': request.seed is not None}
      choice.job = Job(choice.prompt, key, request.sampling, limit, stop, tell, **more)
      if self._style is not None and request.tools is not None:
        choice.reader = Reader(self._style, request.tools)
      jobs.append(choice.job)
    self._num_open = len(jobs)
    self._count('received_total', len(jobs))
    try:
      served.worker.submit(jobs)
    except Exception:
      self._end('refused', len(jobs))
      raise

  def _count(self, name: str, number: int, **labels: str) -> None:
    kind = 'chat' if self.request.is_chat else 'completions'
    self.served.worker.metrics.add(f'continuations_{name}', number, kind=kind, **labels)

  def _end(self, outcome: str, number: int) -> None:
    self._count('total', number, outcome=outcome)
    self._num_open -= number

  def close(self) -> None:
    """Lets go of what nobody waits for any more, and counts how the continuations ended."""
    if not self._num_open:
      return
    self._end('answered', sum(choice.finish_reason is not None for choice in self.choices))
    self._end('failed' if self._has_failed else 'left', self._num_open)
    self.served.worker.leave({each.job for each in self.choices if each.job is not None and each.finish_reason is None})

  async def pieces(self) -> AsyncIterator[tuple[Choice, Piece]]:
    """The pieces of all continuations as they come; each was added to its own."""
    while any(choice.job is not None and choice.finish_reason is None for choice in self.choices):
      choice, piece = await self._arrived.get()
      if isinstance(piece, Exception):
        self._has_failed = True
        raise piece
      if choice.job is not None and not choice.tokens:
        self.served.worker.metrics.observe_first_token(time.monotonic() - choice.job.begun)
      choice.add(piece)
      yield choice, piece

  async def finish(self) -> None:
    """Waits for all continuations, and for the log probabilities that a reading of the texts gives."""
    async for _ in self.pieces():
      pass
    num_top, worker, size = self.request.top_logprobs, self.served.worker, self.request.num_samples
    if self._scored is not None:
      for choice in self.choices[::size]:
        probs = await self._worked(functools.partial(worker.score_choices, choice.prompt, self._scored))
        for each in self.choices[choice.index : choice.index + size]:
          each.probs = probs
    if num_top is None or not (num_top or self.request.echo):
      return
    for choice in self.choices:
      text = [*choice.prompt, *choice.tokens]
      choice.likelihood = await self._worked(functools.partial(worker.read, [text], num_top))

  async def _worked(self, work: Callable[[], _T]) -> _T:
    """What the worker's thread returns for some work between two rounds."""
    values: asyncio.Queue[Any] = asyncio.Queue()
    tell = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, values.put_nowait)
    forget = self.served.worker.do(work, tell)
    try:
      value = await values.get()
    finally:
      forget()
    if isinstance(value, Exception):
      raise value
    return value

  # What is sent.

  def head(self, *, is_chunk: bool) -> dict[str, Any]:
    kind = 'chat.completion' if self.request.is_chat else 'text_completion'
    kind += '.chunk' if is_chunk and self.request.is_chat else ''
    return {'id': self.id, 'object': kind, 'created': self.created, 'model': self.served.name}

  def usage(self) -> dict[str, Any]:
    prompt = sum(len(choice.prompt) for choice in self.choices[:: self.request.num_samples])
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

  def count_prompts(self) -> None:
    """Counts the tokens of the prompts, which are those of an answer that is complete."""
    self.served.worker.metrics.add('prompt_tokens_total', self.usage()['prompt_tokens'])

  def whole(self) -> dict[str, Any]:
    self.count_prompts()
    choices = [self._whole_choice(choice) for choice in self.choices]
    return self.head(is_chunk=False) | {'choices': choices, 'usage': self.usage()}

  def _whole_choice(self, choice: Choice) -> dict[str, Any]:
    logprobs = None if self.request.top_logprobs is None else self._logprobs(self._places(choice))
    common = {'index': choice.index, 'finish_reason': choice.finish_reason or 'length', 'logprobs': logprobs}
    if choice.probs is not None:
      texts, values, probs = choice.probs
      each = zip(texts, map(_number, values[0]), probs[0].tolist())
      common['choice_probs'] = [dict(zip(('choice', 'logprob', 'prob'), one)) for one in each]
    if self.request.is_chat:
      message: dict[str, Any] = {'role': 'assistant', 'content': choice.text}
      if choice.reader is not None:
        calls = choice.reader.calls
        message['content'] = choice.reader.content or (None if calls else '')
        message |= {'tool_calls': calls} if calls else {}
      return common | {'message': message}
    return common | {'text': self._echoed(choice) if self.request.echo else choice.text}

  def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
    logprobs = None
    if self.request.top_logprobs is not None:
      choice.name_next = choice.name_next or self.served.tokenizer.decode_tokens_stream()
      named = zip(piece.tokens, choice.name_next(piece.tokens), piece.logprobs, strict=True)
      choice.unsent += [_Place(*each, None) for each in named]
      may_stop = self.request.stop and (choice.finish_reason is None or choice.is_cut)
      places = _within(choice.unsent, len(choice.text)) if may_stop else choice.unsent
      choice.unsent = choice.unsent[len(places) :]
      logprobs = self._logprobs(places)
    own = {'index': choice.index, 'finish_reason': choice.finish_reason, 'logprobs': logprobs}
    if self.request.is_chat:
      is_first = len(choice.tokens) == len(piece.tokens)
      own['delta'] = ({'role': 'assistant'} if is_first else {}) | choice.delta
    else:
      own['text'] = piece.text
    usage = {'usage': self.usage()} if self.request.has_usage_in_chunks else {}
    return self.head(is_chunk=True) | {'choices': [own]} | usage

  def _echoed(self, choice: Choice) -> str:
    """The text of prompt and continuation, in which a character may begin in the one and end in the other."""
    decode = self.served.tokenizer.decode
    text = decode([*choice.prompt, *choice.tokens])
    return text[: len(text) - len(decode(choice.tokens)) + len(choice.text)]

  def _places(self, choice: Choice) -> list[_Place]:
    """The tokens that a response shows: those before a stop text alone."""
    name_all, likelihood = self.served.tokenizer.decode_tokens, choice.likelihood
    if likelihood is None:
      named = zip(choice.tokens, name_all(choice.tokens), choice.logprobs, strict=True)
      places = [_Place(*each, None) for each in named]
      return _within(places, len(choice.text)) if choice.is_cut else places
    first = 0 if self.request.echo else len(choice.prompt)
    ids = [*choice.prompt, *choice.tokens][first:]
    places = []
    for place, (token, shown) in enumerate(zip(ids, name_all(ids), strict=True), first):
      pairs = zip(likelihood.top_tokens[0, place].tolist(), likelihood.top_logprobs[0, place].tolist(), strict=True)
      top = {other: value for other, value in pairs if np.isfinite(value)} if place else None
      places.append(_Place(token, shown, _number(likelihood.logprobs[0, place]), top))
    if not choice.is_cut:
      return places
    num_given = len(choice.prompt) - first
    size = len(self._echoed(choice) if self.request.echo else choice.text)
    return places[:num_given] + _within(places[num_given:], size)

  def _logprobs(self, places: Sequence[_Place]) -> dict[str, Any]:
    if self.request.is_chat:
      return {'content': [self._entry(place) for place in places]}
    return {
      'tokens': [place.shown.name for place in places],
      'token_logprobs': [place.logprob for place in places],
      'top_logprobs': [place.top and self._named(place) for place in places],
      'text_offset': [place.shown.offset for place in places],
    }

  def _entry(self, place: _Place) -> dict[str, Any]:
    def entry(token: TextToken, value: float | None) -> dict[str, Any]:
      return {'token': token.name, 'logprob': value, 'bytes': list(token.content)}

    tops = [entry(self._alone(other), value) for other, value in (place.top or {}).items()]
    return entry(place.shown, place.logprob) | {'top_logprobs': tops}

  def _named(self, place: _Place) -> dict[str, float | None]:
    """The likeliest tokens of a place, and the one that stands there, by names of their own."""
    token, shown, logprob, top = place
    names, values = {token: shown.name}, {**(top or {})}
    for other in values:
      name = self._alone(other).name
      names.setdefault(other, f'token_id:{other}' if name in names.values() else name)
    return {names[other]: value for other, value in (values | {token: values.get(token, logprob)}).items()}

  def _alone(self, token: int) -> TextToken:
    return self.served.tokenizer.decode_tokens([token])[0]


def _within(places: Sequence[_Place], size: int) -> list[_Place]:
  """The first places, as far as they lie in so many characters whole; one without text lies before a character."""
  return list(itertools.takewhile(lambda each: each.shown.end <= size and each.shown.offset < size, places))


def _number(value: float) -> float | None:
  return None if np.isnan(value) else max(float(value), -1e30)  # JSON has no infinity
