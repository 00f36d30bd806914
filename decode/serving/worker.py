"""The thread that decodes: it gives rows to continuations as they come, and hands out their tokens."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decode.serving.counters import Metrics
from decode.serving.faults import EndedError, FullError, failure
from decode.serving.protocol import MOST_TOP
from spectr_jax import (
  ChoiceProbs,
  Constraint,
  Decoder,
  Generation,
  LogLikelihood,
  Request,
  SamplingParams,
  StopStrings,
  TextStream,
  log_likelihood,
)
from spectr_jax.constraint import TableSizes
from spectr_jax.engine import Budget, Rows
from spectr_jax.engine.choices import Choices, score_choices
from spectr_jax.engine.likelihood import CHUNK
from spectr_jax.engine.request import Call
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.sampling import COUNTED


@dataclasses.dataclass(frozen=True)
class Piece:
  """New tokens of a continuation."""

  text: str  # may lag behind the tokens
  tokens: Sequence[int]  # ids
  logprobs: Sequence[float]  # under the target's own distribution, among allowed tokens, in nats
  finish_reason: str | None  # `stop` or `length` in the last piece
  num_target_calls: int  # so far
  num_accepted: int  # so far
  is_cut: bool = False  # a stop text ended it: the tokens go on behind the text


@dataclasses.dataclass(eq=False)
class Job:
  tokens: Sequence[int]  # the prompt's ids
  key: jax.Array  # typed
  sampling: SamplingParams  # scalars
  max_tokens: int
  stop: StopStrings | None
  tell: Callable[[Piece | Exception], None]  # called by the thread, with the error if one ended it
  is_over: bool = False  # nobody waits for it any more
  begun: float = dataclasses.field(default_factory=time.monotonic)
  stream: TextStream | None = None  # the tokens that were handed out, once it has a row
  constraint: Constraint | None = None
  tokenizer: TokenizerBase | None = None  # that makes the text, if not the worker's
  has_seed: bool = False

  @property
  def as_request(self) -> Request:
    own = {'constraint': self.constraint, 'keeps_tree': self.has_seed and self.sampling.temperature != 0}
    return Request(self, self.tokens, self.key, self.sampling, self.max_tokens, **own)


def _next_piece(job: Job, result: Generation, row: int, eos_ids: Collection[int]) -> Piece | None:
  assert job.stream is not None
  seen, end = len(job.stream.tokens), min(int(result.lengths[row]), job.max_tokens)
  text, reason = '', None
  for place in range(seen, end):  # one by one, since the first that completes a stop text is the last
    token = int(result.tokens[row, place])
    text += job.stream.add([token])
    if job.stream.is_stopped or (token in eos_ids and not job.sampling.ignore_eos):
      end, reason = place + 1, 'stop'
      break
  if end == seen:
    return None
  if reason is None and end == job.max_tokens:
    reason = 'length'
  if reason is not None:
    text += job.stream.finish()
  return Piece(
    text,
    [int(token) for token in result.tokens[row, seen:end]],
    [float(value) for value in result.logprobs[row, seen:end]],
    reason,
    int(result.num_target_calls[row]),
    int((result.origins[row, :end] == 0).sum()),
    job.stream.is_stopped,
  )


# What requests may ask for and compile nothing anew: every filter, a constraint in every row, and choices.
_EVERY_FILTER = SamplingParams(1.0, top_k=1, top_p=0.5, min_p=0.5, ignore_eos=True)
# And what they may if the rows are prepared, which takes memory of the size of the vocabulary in every row.
_EVERY_PENALTY = {**dict.fromkeys(COUNTED, 0.5), 'logit_bias': {0: 1.0}, 'min_tokens': 1}
PENALTIES = tuple(_EVERY_PENALTY)
_SIZES = TableSizes(transitions=2**20, states=2**14, masks=2**10)
CHOICE_TOKENS = 64  # of a choice
_PATIENCE = 30.0  # seconds without an idle moment after which requests wait for one program of the budget's


class Worker:
  """The thread, its rows, and the continuations that wait for one. `fault` is what ended it before it was told to."""

  def __init__(
    self,
    decoder: Decoder,
    tokenizer: TokenizerBase,
    *,
    batch_size: int,
    longest_prompt: int,
    most_waiting: int,
    has_penalties: bool = False,
    prefix_cache_bytes: int = 0,
    budget: Budget | None = None,
  ):
    """Prepares the rows of a decoder of log probabilities as well, perhaps with a budget; `start` begins.

    With `has_penalties` requests may ask for `PENALTIES`.
    """
    self.has_penalties = has_penalties
    self._prefix_cache_bytes, self.prefix_bytes = prefix_cache_bytes, 0  # the most that texts take, and what they do
    self.metrics, self.longest_prompt, self.most_waiting = Metrics(), longest_prompt, most_waiting
    self._decoder, self._tokenizer, self._batch_size, self._budget = decoder, tokenizer, batch_size, budget
    self._waiting: collections.deque[Job] = collections.deque()
    self._taken: list[Job] = []  # on their way from the queue into rows
    self._growing: dict[int, Job] = {}  # by row
    self._tasks: collections.deque[tuple[Callable[[], Any], Callable[[Any], None]]] = collections.deque()
    self._ready = threading.Condition()
    self._is_stopping, self.fault = False, None
    self._thread = threading.Thread(target=self._run, name='decoding', daemon=True)
    self._measuring: Iterator[Call] | None = None
    self._idle_at = 0.0
    self._rows = self._make_rows()

  def _make_rows(self) -> Rows:
    sizes = {'batch_size': self._batch_size, 'longest_prompt': self.longest_prompt}
    sizes['prefix_cache_bytes'] = self._prefix_cache_bytes
    tables = _SIZES._replace(constraints=self._batch_size)
    filters = dataclasses.replace(_EVERY_FILTER, **_EVERY_PENALTY) if self.has_penalties else _EVERY_FILTER
    return Rows(self._decoder, **sizes, filters=filters, sizes=tables, budget=self._budget)

  def compile(self, notify: Callable[[int, int], None]) -> None:
    """Runs every program once that a request needs: a short prompt, a long one, a round, all with and without a
    constraint, beside these readings of a text and of choices.

    What copies beginnings of texts comes first. What else a budget may choose follows while nobody waits, or here if it
    has a number of guesses.
    """
    self._rows.compile_prefixes()
    if self._budget is not None:
      next(self._rows.measure(), None)  # from here on the budget chooses no program that has not run
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
      others = thread.submit(self._compile_others)
      self._compile_rows(notify)
      others.result()
    self._measuring = None if self._budget is None else self._rows.measure(None, self._anything)
    while self._budget is not None and self._budget.guesses is not None and self._measure_next():
      pass
    notify(7, 7)

  def _compile_others(self) -> None:
    self.read([[0]], 0)
    self.score_choices([0], Choices(('',), (((0,),),)))

  def _compile_rows(self, notify: Callable[[int, int], None]) -> None:
    key, sizes = jax.random.key(0, impl='threefry2x32'), (1, self.longest_prompt)
    # Last come rows without tables, which take less time until a constraint comes.
    for number, (constraint, size) in enumerate(itertools.product((None, self._anything, None), sizes)):
      notify(number, 7)
      if number in (2, 4):
        del self._rows
        self._rows = self._make_rows()
      most_new = None if size == 1 else 1  # the longest prompt may leave room for no more
      self._rows.put([Request('compiling', [0] * size, key, max_new_tokens=most_new, constraint=constraint)])
      self._rows.step()
      self._rows.end(list(self._rows.owners))
    notify(6, 7)

  @property
  def _anything(self) -> Constraint:
    return Constraint(np.zeros(self.vocab_size, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool))

  @property
  def is_measured(self) -> bool:
    """Whether the budget, if there is one, chooses among all that it may."""
    return self._measuring is None

  def _measure(self) -> None:
    """Measures what the budget may choose while nobody waits. Where somebody always does, requests' calls do, and run
    one more program now and then.
    """
    while self.is_idle and not self._is_stopping and self._measure_next():
      self._idle_at = time.monotonic()
    if self._measuring is not None and time.monotonic() > self._idle_at + _PATIENCE:
      assert self._budget is not None
      self._idle_at, self._budget.credit = time.monotonic(), 1

  def _measure_next(self) -> bool:
    """Runs one more program, for the time of which requests wait; whether there was one."""
    measuring, is_more = self._measuring, False
    try:
      is_more = measuring is not None and next(measuring, None) is not None
    finally:
      if not is_more:  # nor is what fails tried again
        self._measuring = None
    return is_more

  def start(self) -> None:
    self._idle_at = time.monotonic()
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
    return self._thread.is_alive()

  @property
  def vocab_size(self) -> int:
    return self._decoder.target.vocab_size

  @property
  def num_waiting(self) -> int:
    return len(self._waiting)

  @property
  def num_rows(self) -> int:
    return len(self._growing)

  @property
  def is_idle(self) -> bool:
    return not (self._growing or self._taken or self._waiting or self._tasks)

  @property
  def most_held(self) -> int:
    """The most continuations that have rows or wait."""
    return self._batch_size + self.most_waiting

  @property
  def num_held(self) -> int:
    """The continuations that have rows or wait, and that somebody waits for."""
    # One that moves from one place to the next is in both for a while.
    held = {*list(self._waiting), *list(self._taken), *list(self._growing.values())}
    return sum(not job.is_over for job in held)

  def submit(self, jobs: Sequence[Job]) -> None:
    """Lets continuations wait for rows; none of them is taken if that raises."""
    with self._ready:
      self._check_room(self.num_held + len(jobs), self.most_held)
      self._waiting += jobs
      self._ready.notify()

  def leave(self, jobs: Collection[Job]) -> None:
    """Forgets continuations that nobody waits for any more: their places are free at once, rows after the round."""
    for job in jobs:
      job.is_over = True
    with self._ready:
      kept = [job for job in self._waiting if job not in jobs]
      self._waiting.clear()
      self._waiting += kept

  def do(self, work: Callable[[], Any], tell: Callable[[Any], None]) -> Callable[[], None]:
    """Lets the thread call `read` or `score_choices` between two rounds, and `tell` with the result, or with the error.

    Returns:
      What takes the work back that nobody waits for any more.
    """
    task = work, tell
    with self._ready:
      self._check_room(len(self._tasks) + 1, self.most_waiting)
      self._tasks.append(task)
      self._ready.notify()
    return functools.partial(self._forget, task)

  def _forget(self, task: tuple[Callable[[], Any], Callable[[Any], None]]) -> None:
    with self._ready, contextlib.suppress(ValueError):  # it is done
      self._tasks.remove(task)

  def _check_room(self, number: int, most: int) -> None:
    if self._is_stopping:
      raise EndedError
    if number > most:
      raise FullError

  def read(self, texts: Sequence[Sequence[int]], num_top: int) -> LogLikelihood:
    """`log_likelihood` by one program, for any text and `num_top`."""
    target, width = self._decoder.target, -(-self._decoder.cache_size // CHUNK) * CHUNK
    read = log_likelihood(target, texts, num_top=min(MOST_TOP, target.vocab_size), width=width)
    return read._replace(top_tokens=read.top_tokens[..., :num_top], top_logprobs=read.top_logprobs[..., :num_top])

  def score_choices(self, prompt: Sequence[int], choices: Choices) -> ChoiceProbs:
    """`choice_probs` by the same programs, for any prompt and choices of at most `CHOICE_TOKENS` each."""
    sizes = {'width': self._decoder.cache_size, 'num_nodes': CHOICE_TOKENS}
    return score_choices(self._decoder.target, [prompt], choices, **sizes)

  @property
  def most_tokens(self) -> int:
    """The most tokens of a text."""
    return self._decoder.cache_size

  def _run(self) -> None:
    try:
      while not self._is_stopping:
        try:
          self._measure()
          self._take()
          self._do_task()
          self._advance()
        except BaseException as error:  # a panic of the tokenizers is no Exception
          self._begin_anew(error)
    except BaseException as error:
      self.fault = error
    with self._ready:
      self._is_stopping = True
    self._tell_all(EndedError(), [*self._waiting])
    for _, tell in self._tasks:
      self._tell(tell, EndedError())

  def _begin_anew(self, error: BaseException) -> None:
    """Fails those who have rows, since nobody knows what a fault left in them, and makes new rows."""
    self._tell_all(failure(error))
    self._taken.clear()
    self._growing.clear()
    traceback.clear_frames(error.__traceback__)  # they hold the rows, for whose memory there may be no second place
    is_measured, self._measuring = self.is_measured, None
    del self._rows
    self._rows = self._make_rows()
    if not is_measured:
      self._measuring = self._rows.measure(None, self._anything)

  def _tell_all(self, error: Exception, more: Sequence[Job] = ()) -> None:
    for job in [*self._growing.values(), *self._taken, *more]:
      self._fail(job, error)

  def _fail(self, job: Job, error: BaseException) -> None:
    job.is_over = True
    self._tell(job.tell, failure(error))

  def _tell(self, tell: Callable[[Any], None], value: Any) -> None:
    try:
      tell(value)
    except BaseException as error:
      with contextlib.suppress(BaseException):  # the event loop of whoever waited may be gone
        tell(failure(error))

  def _take(self) -> None:
    """Waits until there is work, and gives free rows to those who wait."""
    with self._ready:
      while self.is_idle and not self._is_stopping:
        self._ready.wait()
      num_free = len(self._rows.free)
      while self._waiting and len(self._taken) < num_free:
        if not self._waiting[0].is_over:
          self._taken.append(self._waiting[0])
        self._waiting.popleft()
    if self._taken:
      self._place(self._taken)
      self._taken.clear()

  def _place(self, jobs: Sequence[Job]) -> None:
    """Gives free rows to jobs, together. If that fails, one by one: those that fail alone are told."""
    rows = self._rows
    try:
      for job in jobs:
        job.stream = TextStream(job.tokenizer or self._tokenizer, job.stop)
      rows.put([job.as_request for job in jobs])
      new = {row: own.name for row, own in rows.owners.items() if own.name in jobs}
      self._growing |= new
      kept = rows.num_kept[list(new)]
      self.metrics.add('prefix_hits_total', int((kept > 0).sum()))
      self.metrics.add('prefix_tokens_total', int(kept.sum()))
    except BaseException as error:
      if any(array.is_deleted() for array in jax.tree.leaves(rows.state) if isinstance(array, jax.Array)):
        raise  # the rows were given to a program that failed
      rows.end(rows.owners.keys() - self._growing.keys())
      if len(jobs) == 1:
        self._fail(jobs[0], error)
        return
      for job in jobs:
        self._place([job])

  def _do_task(self) -> None:
    with self._ready:
      if not self._tasks:
        return
      do, tell = self._tasks[0]
    try:
      value = do()
    except BaseException as error:
      value = failure(error)
    self._tell(tell, value)
    self._forget((do, tell))

  def _advance(self) -> None:
    if not self._growing:
      return
    rows, ended, pieces = self._rows, [], self._rows.step()
    if rows.call.num_rounds:
      self.metrics.add('rounds_total', rows.call.num_rounds, rows=str(rows.call.num_rows), guesses=rows.call.guesses)
    for piece in pieces:
      job = self._growing[piece.row]
      try:
        if piece.error is not None:
          raise piece.error
        is_over = self._hand_out(job, rows.result, piece.row)
      except BaseException as error:
        self._fail(job, error)
        is_over = True
      if is_over:
        ended.append(piece.row)
        del self._growing[piece.row]
    rows.end(ended)
    self.prefix_bytes = 0 if rows.prefixes is None else rows.prefixes.num_bytes

  def _hand_out(self, job: Job, result: Generation, row: int) -> bool:
    """Tells a job its new tokens; returns whether its row is free now."""
    piece = None if job.is_over else _next_piece(job, result, row, self._tokenizer.eos_ids)
    is_over = job.is_over if piece is None else piece.finish_reason is not None
    if is_over and job.stream is not None:
      self.metrics.add('tokens_total', len(job.stream.tokens))
      self.metrics.add('target_calls_total', int(result.num_target_calls[row]))
      for depth, number in enumerate(np.asarray(result.accepted_by_depth[row]).tolist(), 1):
        self.metrics.add('accepted_total', number, depth=str(depth))
    if piece is not None:
      job.is_over = is_over  # before its client can ask for more
      self._tell(job.tell, piece)
    return is_over
