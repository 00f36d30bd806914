"""The thread that decodes: it gives rows to continuations as they come, and hands out their tokens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from decode.serving.metrics import Metrics
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.likelihood import LogLikelihood, log_likelihood
from spectr_jax.engine.refill import Pool, Request, padded_lengths
from spectr_jax.engine.result import Generation, NotFiniteError
from spectr_jax.engine.stop import StopStrings
from spectr_jax.io.text_stream import TextStream
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Piece:
  """New tokens of a continuation.

  Attributes:
    text: The new text; it may lag behind the tokens.
    tokens: Ids.
    logprobs: Their log probabilities under the target's own distribution, in nats.
    finish_reason: `stop` or `length` in the last piece, else None.
    num_target_calls: Target calls so far.
    num_accepted: Accepted guesses so far.
  """

  text: str
  tokens: Sequence[int]
  logprobs: Sequence[float]
  finish_reason: str | None
  num_target_calls: int
  num_accepted: int


@dataclasses.dataclass(eq=False)
class Job:
  """A continuation that is asked for.

  Attributes:
    tokens: The prompt's ids.
    key: Its typed key.
    sampling: Scalars.
    max_tokens: The most new tokens.
    stop: Texts that end it, or None.
    tell: Called by the thread with a `Piece`, or with the error that ended it.
    is_cancelled: Whether nobody waits for it any more.
  """

  tokens: Sequence[int]
  key: jax.Array
  sampling: SamplingParams
  max_tokens: int
  stop: StopStrings | None
  tell: Callable[[Piece | Exception], None]
  is_cancelled: bool = False
  begun: float = dataclasses.field(default_factory=time.monotonic)


class Growing:
  """A job in its row: what of its tokens was handed out."""

  def __init__(self, job: Job, tokenizer: TokenizerBase):
    self.job = job
    self._tokenizer = tokenizer
    self._stream = TextStream(tokenizer, job.stop)

  @property
  def num_tokens(self) -> int:
    """Tokens that were handed out."""
    return len(self._stream.tokens)

  def take(self, result: Generation, row: int) -> Piece | None:
    """The piece of new tokens, or None if there are none."""
    seen = self.num_tokens
    end = min(int(result.lengths[row]), self.job.max_tokens)
    text, reason = '', None
    for place in range(seen, end):  # one by one, since the first that completes a stop text is the last
      token = int(result.tokens[row, place])
      is_eos = token in self._tokenizer.eos_ids
      text += self._stream.add([token])
      if self._stream.is_stopped or is_eos:
        end, reason = place + 1, 'stop'
        break
    if reason is None and end == self.job.max_tokens:
      reason = 'length'
    if end == seen:
      return None
    if reason is not None:
      text += self._stream.finish()
    return Piece(
      text,
      [int(token) for token in result.tokens[row, seen:end]],
      [float(value) for value in result.logprobs[row, seen:end]],
      reason,
      int(result.num_target_calls[row]),
      int((result.origins[row, :end] == 0).sum()),
    )


class FullError(Exception):
  """Too many continuations wait."""


class EndedError(Exception):
  """The thread decodes no more."""

  def __str__(self) -> str:
    return 'the server is ending'


class Worker:
  """The thread, its rows, and the continuations that wait for one.

  Attributes:
    metrics: What it counts.
    longest_prompt: The most tokens of a prompt.
    most_waiting: Continuations that may wait for a row.
  """

  def __init__(
    self,
    decoder: Decoder,
    tokenizer: TokenizerBase,
    *,
    batch_size: int,
    longest_prompt: int,
    most_waiting: int,
    rounds_at_a_time: int,
  ):
    """Prepares the rows; `start` begins.

    Args:
      decoder: Of log probabilities as well.
      tokenizer: The target's tokenizer.
      batch_size: Rows.
      longest_prompt: The most tokens of a prompt.
      most_waiting: Continuations that may wait for a row.
      rounds_at_a_time: Rounds between two looks at what is new.
    """
    self.metrics, self.longest_prompt, self.most_waiting = Metrics(), longest_prompt, most_waiting
    self._decoder, self._tokenizer = decoder, tokenizer
    self._rounds = rounds_at_a_time
    self._waiting: collections.deque[Job] = collections.deque()
    self._tasks: collections.deque[tuple[Callable[[], Any], Callable[[Any], None]]] = collections.deque()
    self._ready = threading.Condition()
    self._is_stopping, self.fault = False, None
    self._thread = threading.Thread(target=self._run, name='decoding', daemon=True)
    # A row with every filter, so that requests with filters compile nothing anew.
    filters = SamplingParams(1.0, top_k=1, top_p=0.5, min_p=0.5)
    nothing = Request('nothing', [0], jax.random.key(0, impl='threefry2x32'), filters)
    self._pool = Pool(decoder, [nothing], batch_size=batch_size, longest_prompt=longest_prompt)
    self._pool.end([0])
    self._pool.owners.clear()

  def compile(self, notify: Callable[[int, int], None]) -> None:
    """Runs every program once: a prompt of each padded length, and a round.

    Args:
      notify: Called with the programs that have run, and their number.
    """
    lengths = padded_lengths(self.longest_prompt)
    for number, length in enumerate(lengths):
      notify(number, len(lengths))
      self._pool.put([Request('compiling', [0] * length, jax.random.key(0, impl='threefry2x32'))])
      self._pool.advance(1)
      self._pool.end(list(self._pool.owners))
      self._pool.owners.clear()
    notify(len(lengths), len(lengths))

  def start(self) -> None:
    """Begins to decode."""
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread after its current rounds; continuations that are not complete are told so."""
    with self._ready:
      self._is_stopping = True
      self._ready.notify()
    if self._thread.ident is not None:
      self._thread.join()

  @property
  def is_alive(self) -> bool:
    """Whether the thread decodes."""
    return self._thread.is_alive()

  @property
  def vocab_size(self) -> int:
    """V, of the target."""
    return self._decoder.target.vocab_size

  @property
  def num_waiting(self) -> int:
    """Continuations without a row."""
    return len(self._waiting)

  @property
  def num_rows(self) -> int:
    """Rows that decode."""
    return len(self._pool.owners)

  def submit(self, jobs: Sequence[Job]) -> None:
    """Lets continuations wait for rows.

    Raises:
      FullError: Too many wait already; none of them is taken.
      EndedError: The thread has ended.
    """
    with self._ready:
      self._check_room(len(self._waiting) + len(jobs) - 1)
      self._waiting += jobs
      self._ready.notify()

  def score(self, texts: Sequence[Sequence[int]], num_top: int, tell: Callable[[Any], None]) -> None:
    """Lets the thread read texts between two rounds.

    Args:
      texts: Ids of each.
      num_top: As of `log_likelihood`.
      tell: Called with a `LogLikelihood`, or with the error.

    Raises:
      FullError: Too much waits already.
      EndedError: The thread has ended.
    """
    with self._ready:
      self._check_room(len(self._tasks))
      self._tasks.append((functools.partial(self._read, texts, num_top), tell))
      self._ready.notify()

  def _check_room(self, num_waiting: int) -> None:
    if self._is_stopping:
      raise EndedError
    if num_waiting >= self.most_waiting:
      raise FullError

  def _read(self, texts: Sequence[Sequence[int]], num_top: int) -> LogLikelihood:
    return log_likelihood(self._decoder.target, texts, num_top=num_top)

  def _run(self) -> None:
    growing: dict[int, Growing] = {}
    try:
      while not self._is_stopping:
        self._take(growing)
        self._do_task()
        if growing:
          self._advance(growing)
    except BaseException as error:  # whatever it is, those who wait must be told
      self.fault = error
    self._is_stopping = True
    error = EndedError()
    with self._ready:
      left = [each.job for each in growing.values()] + list(self._waiting)
      self._waiting.clear()
      tasks = list(self._tasks)
    for job in left:
      job.tell(error)
    for _, tell in tasks:
      tell(error)

  def _take(self, growing: dict[int, Growing]) -> None:
    """Waits until there is work, and gives free rows to those who wait."""
    pool, taken = self._pool, []
    with self._ready:
      while not (growing or self._waiting or self._tasks or self._is_stopping):
        self._ready.wait()
      free = pool.free
      while self._waiting and len(taken) < len(free):
        job = self._waiting.popleft()
        if not job.is_cancelled:
          taken.append(job)
    if taken:
      pool.put([Request(row, job.tokens, job.key, job.sampling) for row, job in zip(free, taken)])
      growing.update((row, Growing(job, self._tokenizer)) for row, job in zip(free, taken))

  def _do_task(self) -> None:
    with self._ready:
      task = self._tasks.popleft() if self._tasks else None
    if task is not None:
      do, tell = task
      try:
        tell(do())
      except ValueError as error:
        tell(error)

  def _advance(self, growing: dict[int, Growing]) -> None:
    pool, metrics = self._pool, self.metrics
    try:
      pool.advance(self._rounds)
    except NotFiniteError as error:
      pool.forgive(error.row)
      metrics.add('requests_total', label='outcome="failed"')
      growing.pop(error.row).job.tell(error)
    result = pool.result()
    ended = []
    for row, each in list(growing.items()):
      piece = None if each.job.is_cancelled else each.take(result, row)
      if each.job.is_cancelled or (piece is not None and piece.finish_reason is not None):
        ended.append(row)
        del growing[row], pool.owners[row]
        self._count(result, row, each.num_tokens, is_cancelled=piece is None)
      if piece is not None:
        each.job.tell(piece)
    if ended:
      pool.end(ended)

  def _count(self, result: Generation, row: int, num_tokens: int, *, is_cancelled: bool) -> None:
    metrics = self.metrics
    metrics.add('requests_total', label=f'outcome="{"cancelled" if is_cancelled else "done"}"')
    metrics.add('tokens_total', num_tokens)
    metrics.add('target_calls_total', int(result.num_target_calls[row]))
    for depth, number in enumerate(np.asarray(result.accepted_by_depth[row]).tolist(), 1):
      metrics.add('accepted_total', number, f'depth="{depth}"')
