"""Rows that take one request after another while one compiled loop runs; what they hold is not read again."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.constraint import FEWEST, Constraint, TableSizes, numbered, place_of
from spectr_jax.engine import checks
from spectr_jax.engine.budget import Budget, name_of, with_tree
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.held_texts import HeldTexts
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.prefixes import Found, PrefixCache, why_not
from spectr_jax.engine.reading import (
  empty_state,
  forget_rows,
  put_part,
  read_draft,
  read_rows,
  take_part,
  take_rows,
)  # fmt: skip
from spectr_jax.engine.request import Call, Piece, Request
from spectr_jax.engine.result import Generation
from spectr_jax.engine.state import DecodeState, Held, checked_prompts, finish
from spectr_jax.engine.stop import StopStrings
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import fetch

_TURNS, _CALLS = 6, 4  # in which a budget's programs are measured once more, and the calls of each


class Rows:
  """The rows of a batch, which take one request after another while one compiled loop runs.

  A row keeps what it holds of its text after it has ended. A request begins with the longest prefix of its prompt that
  any row holds, and goes to that row if it is free; the models read the rest. So the next turn of a conversation, or
  a prompt behind a header that an earlier one had, reads what is new. Tokens do not depend on it, up to rounding. A
  prefix cache holds more texts than there are rows.

  Attributes:
    decoder: The decoder; its constraints follow the requests'.
    budget: What chooses the rows and the tree of each step, or None for all rows and the decoder's tree.
    call: What the last step ran.
    owners: The requests in progress, by row.
    free: The rows without a request, the one that ended first in front.
    result: All tokens so far, as NumPy arrays, of the last step.
    num_kept: int `[B]`, tokens of each row's prompt that were not read, since a row or the cache of prefixes held them.
    num_read: The tokens of prompts that the target has read in all.
    prefixes: The cache of prefixes, or None.
  """

  def __init__(
    self,
    decoder: Decoder,
    *,
    batch_size: int,
    longest_prompt: int | None = None,
    sampling: SamplingParams | None = None,
    filters: SamplingParams | None = None,
    sizes: TableSizes = FEWEST,
    prefix_cache_bytes: int | None = None,
    budget: Budget | Literal['auto'] | int | None = None,
  ):
    """Begins without a request.

    It warns if what a row holds cannot be kept, or that of the draft. ValueError if `prefix_cache_bytes` is negative.

    Args:
      decoder: Its `cache_size` holds the longest prompt and the new tokens.
      batch_size: B, rows; with a sharding a multiple of what divides them.
      longest_prompt: The most tokens of a prompt; None for what the caches hold.
      sampling: Of requests that have none of their own.
      filters: Those that requests may use without compiling the loop anew, of scalars; None for those that come.
      sizes: What tables of the requests' constraints have room for before they make the loop compile anew.
      prefix_cache_bytes: The most bytes of a `PrefixCache` of texts that rows held; None for none. With 0 no prompt
        begins with what rows hold either: all of it is read.
      budget: What a call may cost, as for `generate_many`. Where its calls have fewer rows, copies of these are held
        beside all rows while they run.
    """
    self.decoder, self._batch_size = decoder, batch_size
    self._sampling, self._sizes = sampling or SamplingParams(), sizes
    self._longest = decoder.cache_size - int(decoder.max_new_tokens) if longest_prompt is None else longest_prompt
    # Reading for an eighth of the rows at a time takes few programs, and not too much work for a single row.
    self.rows_at_a_time = max(1, batch_size // 8)
    if decoder.sharding is not None:
      self.rows_at_a_time = decoder.sharding.round_up(self.rows_at_a_time)
    self._is_numbered = decoder.constraints is not None
    self._constraints: list[Constraint] = []
    self.budget = budget if budget is None or isinstance(budget, Budget) else Budget(budget)
    if self.budget is not None:
      self.budget.bind(decoder, batch_size)
    self.call = Call(batch_size, name_of(decoder.tree), 0)
    self._state = empty_state(decoder, batch_size, filters)
    self._part: tuple[np.ndarray, DecodeState] | None = None  # rows that run without the others
    self.owners: dict[int, Request] = {}
    self.free, self._is_new = list(range(batch_size)), True
    self.result: Generation = fetch(dataclasses.replace(self.state.result, statistics=None))
    self._texts = HeldTexts(batch_size, decoder.cache_size)
    self._num_seen, self._is_done = np.zeros(batch_size, np.int64), np.ones(batch_size, bool)
    # Whether the device may be at work that is no round, and the last decoder with another tree.
    self._is_busy, self._planned = False, (decoder, decoder.tree, decoder)
    self.num_kept, self.num_read = np.zeros(batch_size, np.int64), 0
    if prefix_cache_bytes is not None and prefix_cache_bytes < 0:
      raise ValueError(f'prefix_cache_bytes must be at least 0, got {prefix_cache_bytes}')
    self._shares = prefix_cache_bytes != 0 and (decoder.can_truncate or decoder.keeps_ends)
    self.prefixes: PrefixCache | None = None
    if prefix_cache_bytes and (reason := why_not(decoder)):
      warnings.warn(f'texts are not kept beyond their rows: {reason}', stacklevel=2)
    elif prefix_cache_bytes:
      self.prefixes = PrefixCache(decoder, self.state.held, prefix_cache_bytes)
      if self.prefixes.least_bytes > prefix_cache_bytes:
        warnings.warn(
          f'prefix_cache_bytes {prefix_cache_bytes} keep nothing: a block takes {self.prefixes.least_bytes}',
          stacklevel=2,
        )
      if not self.prefixes.keeps_draft:
        warnings.warn('the draft reads prompts from their start: its state is not kept', stacklevel=2)

  @property
  def state(self) -> DecodeState:
    """The state of all rows, between two rounds."""
    self._join()
    return self._state

  def _join(self) -> None:
    """Puts rows that run without the others back among these."""
    if self._part is not None:
      (rows, part), self._part, self._is_busy = self._part, None, True
      self._state = put_part(self._state, rows, part)

  @state.setter
  def state(self, state: DecodeState) -> None:
    self._state, self._part = state, None

  def compile_prefixes(self) -> None:
    """Compiles what copies prefixes, before any request, and by what a drafter reads whose state is not kept."""
    if self.prefixes is not None and not self.prefixes.keeps_draft:
      self.state = self._read_texts(self.state, slice(None), self._texts.lengths + 1)
    if self.prefixes is not None and self._batch_size == 1:  # read in place
      self.state = dataclasses.replace(self.state, **self.prefixes.compile(self.state.held)._asdict())
    elif self.prefixes is not None:
      self.prefixes.compile(take_rows(self.decoder, self.state, np.zeros(self.rows_at_a_time, np.int32)))

  def check(self, request: Request) -> Request:
    """The request itself; ValueError if its prompt is empty or too long, or has an id that is not in the vocabulary."""
    checks.as_ids(f'prompt {request.name}', request.tokens, self.decoder.target.vocab_size, self._longest)
    if request.constraint is not None and isinstance(request.constraint, int) != self._is_numbered:
      what = "the number of one of the decoder's" if self._is_numbered else 'a Constraint, as the decoder has none'
      raise ValueError(f'prompt {request.name}: its constraint must be {what}')
    return request

  def put(self, requests: Sequence[Request]) -> None:
    """Gives free rows to requests, several at a time, those with similar numbers of tokens to read together.

    Raises:
      ValueError: As for `check`, or there are more requests than free rows.
    """
    if len(requests) > len(self.free):
      raise ValueError(f'{len(requests)} requests do not fit into {len(self.free)} free rows')
    waiting = [(request, np.asarray(self.check(request).tokens, np.int32)) for request in requests]
    self._add_constraints(requests)
    waiting.sort(key=lambda each: len(each[1]) - max(self._num_held(each[1]).max(), self._found(each[1]).num_tokens))
    batch_size = self._batch_size
    # The first requests are read all together, as those of a single row always are; then there is no copy.
    is_whole = batch_size == 1 or (self._is_new and 2 * len(requests) > batch_size)
    size = batch_size if is_whole else self.rows_at_a_time
    for start in range(0, len(waiting), size):
      self._is_new = False
      self._read(waiting[start : start + size], size, is_whole)

  def _num_held(self, tokens: np.ndarray) -> np.ndarray:
    """The tokens at the beginning of a prompt that need not be read in each row, `[B]`."""
    if not self._shares:
      return np.zeros(self._batch_size, np.int64)
    held = self._texts.num_shared(tokens)
    if self.decoder.can_truncate:
      return held
    ends = np.asarray(fetch(self.state.root_position))
    return np.where(held == ends, held, 0)

  def _found(self, tokens: np.ndarray) -> Found:
    return Found() if self.prefixes is None else self.prefixes.find(tokens)

  def _places(self, prompts: Sequence[np.ndarray]) -> tuple[list[tuple[int, int, int]], list[Found | None]]:
    """For each prompt a free row, the row that holds the most of it, and how much that is; or itself and what was found
    in the cache of prefixes, if that is more.
    """
    held, free = [self._num_held(tokens) for tokens in prompts], list(self.free)
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(prompts)
    found: list[Found | None] = [None] * len(prompts)
    # The row itself if it is free, before it is taken for another prompt; of equal ones that which ended first.
    order = [*self.free, *self.owners]
    for i in sorted(range(len(prompts)), key=lambda i: -held[i].max()):
      source, kept = max(order, key=lambda row: (held[i][row], row in free)), self._found(prompts[i])
      num_kept, row = int(held[i][source]), source if source in free else free[0]
      if kept.num_tokens > num_kept:
        found[i], num_kept = kept, kept.num_tokens
      if found[i] or not num_kept:
        source = row = free[0]
      free.remove(row)
      places[i] = row, source, num_kept
    return places, found

  def _read(self, waiting: Sequence[tuple[Request, np.ndarray]], size: int, is_whole: bool) -> None:
    start = time.perf_counter()
    requests, prompts = zip(*waiting, strict=True)
    found_rows, found = self._places(prompts)
    rows, sources, kept = np.array(found_rows).T
    num_more = size - len(waiting)
    none = np.arange(len(waiting), size) if is_whole else np.full(num_more, self._batch_size)
    # Entries without a request fill the shape. They repeat the last one.
    filled, lengths = [*requests, *[requests[-1]] * num_more], np.array([len(each) for each in prompts])
    tokens = np.zeros((size, self._longest), np.int32)
    for row, each in zip(tokens, [*prompts, *[prompts[-1]] * num_more]):
      row[: len(each)] = each
    limit = int(self.decoder.max_new_tokens)
    limits = [limit if each.max_new_tokens is None else each.max_new_tokens for each in filled]
    numbers = [
      each.constraint if isinstance(each.constraint, int) else place_of(each.constraint, self._constraints)
      for each in filled
    ]
    padded_lengths, padded_kept = (np.pad(x, (0, num_more), 'edge') for x in (lengths, kept))
    checked = checked_prompts(
      self.decoder,
      jnp.stack([each.key for each in filled]),
      tokens,
      padded_lengths,
      SamplingParams.of_rows([each.sampling or self._sampling for each in filled]),
      np.array(limits),
      like=self.state.sampling,
      constraint=np.array(numbers, np.int32),
      width=self.decoder.cache_size,
    )
    places = np.append(rows, none), np.append(sources, none)

    def fill(held: Held) -> Held:
      for place, each in enumerate(found):
        held = held if each is None or self.prefixes is None else self.prefixes.load(held, place, each)
      return held

    keeps_draft = self.prefixes is None or self.prefixes.keeps_draft
    is_found = np.array([each is not None for each in found])
    drafted = np.where(is_found, kept if keeps_draft else 0, np.minimum(kept, self._texts.num_drafted[sources]))
    reads_draft = not (self.budget is not None and self.budget.is_paused or (drafted < kept).any())
    prompts_of = self.decoder, self.state, *places, checked, padded_lengths, padded_kept
    self.state = read_rows(*prompts_of, fill=fill, reads_draft=reads_draft)
    if is_whole and num_more:
      self.state = finish(self.decoder, self.state, none)
    for row, request in zip(rows.tolist(), requests):
      self.owners[row] = request
      self.free.remove(row)
    self._texts.begin(rows.tolist(), prompts)
    self._texts.num_drafted[rows] = lengths - 1 if reads_draft else drafted
    self._num_seen[rows], self._is_done[rows] = 0, False
    self.result = self._with_results(rows, jax.tree.map(lambda x: np.zeros_like(x[rows]), self.result))
    self.num_kept[rows] = kept
    num_read, self._is_busy = int((lengths - 1 - kept).sum()), True
    self.num_read += num_read
    if self.budget is not None:
      if self.budget.forced is not None:  # otherwise the next prompts are prepared meanwhile
        jax.block_until_ready(self.state)
      self.budget.note_reading(time.perf_counter() - start, num_read, reads_draft=reads_draft)
    if not self.decoder.can_truncate:  # before the state goes on
      self._keep(rows.tolist())

  def _keep(self, rows: Sequence[int]) -> None:
    """Keeps the beginnings of what rows hold."""
    if self.prefixes is None or (self.budget is not None and self.budget.forced is not None):
      return
    if self.prefixes.keeps_draft:
      self._join()
      self._read_draft(rows)
    ends = None if self.decoder.can_truncate else np.asarray(fetch(self.state.root_position))
    for row in rows:
      length = int(self._texts.lengths[row])
      is_end = ends is None or ends[row] == length - 1
      self.prefixes.keep(self.state.held, row, self._texts.tokens[row, :length], is_end=is_end)

  def _add_constraints(self, requests: Sequence[Request]) -> None:
    """Makes tables for the constraints of requests that have come, beside those of the rows in progress."""
    new = [each.constraint for each in requests if isinstance(each.constraint, Constraint)]
    used = [each.constraint for each in self.owners.values() if isinstance(each.constraint, Constraint)]
    if self.budget is not None and self._constraints and not [*new, *used]:
      # Without tables rounds take less time, and there are more programs to choose from.
      self.state = dataclasses.replace(self.state, constraint_states=None)
      self.decoder, self._constraints = dataclasses.replace(self.decoder, constraints=None), []
    if all(place_of(each, self._constraints) >= 0 for each in new):
      return
    constraints, _ = numbered([*used, *new], len(used) + len(new))
    decoder = self.decoder.with_constraints(constraints, keeps_sizes=True, sizes=self._sizes)
    self.state = decoder.adopt(self.state, self.decoder, [place_of(each, constraints) for each in self._constraints])
    self.decoder, self._constraints = decoder, constraints

  def step(self, num_rounds: int | None = 1, *, stop: StopStrings | None = None) -> list[Piece]:
    """Runs up to so many rounds, or without a limit; the requests with new tokens, or that have come to their end.

    A request whose logits are not finite ends by itself. The rows of requests that are done stay theirs until `end`.

    Args:
      num_rounds: As for `decode_rounds`.
      stop: Texts that end requests, or None: the token that completes one is a request's last.
    """
    decoder = self._plan()
    before, state = self.result, self._state if self._part is None else self._part[1]
    if self.budget is not None and self._is_busy:
      jax.block_until_ready(state)  # what was read before is not what a round costs
      self._is_busy = False
    start = time.perf_counter()
    state = decode_rounds(decoder, state, num_rounds)
    own, is_done = fetch((dataclasses.replace(state.result, statistics=None), state.is_done))
    rows = np.arange(self._batch_size)
    if self._part is None:
      self.state, self.result, self._is_done = state, own, np.array(is_done)
    else:
      rows = self._part[0]
      self._part = rows, state
      self.result, self._is_done[rows] = self._with_results(rows, own), is_done
    result: Any = self.result
    is_done = self._is_done
    calls, kept = (getattr(result, name) - getattr(before, name) for name in ('num_target_calls', 'accepted_by_depth'))
    running = [*self.owners]
    self.call = Call(len(rows), name_of(decoder.tree), int(calls[running].max(initial=0)))
    if self.budget is not None:
      seconds, sums = time.perf_counter() - start, (int(calls[running].sum()), kept[running].sum(axis=0))
      self.budget.note(seconds, self.call.num_rounds, *sums, has_tables=decoder.constraints is not None)
    if result.failures.any():
      self.state = forget_rows(self.decoder, self.state, result.failures != 0)
    pieces = []
    for row, request in self.owners.items():
      start, end, is_over = int(self._num_seen[row]), int(result.lengths[row]), bool(is_done[row])
      failure = int(result.failures[row])
      error = self.decoder.error(row, int(result.num_target_calls[row]), failure) if failure else None
      if stop is not None and (found := stop.find(result.tokens[row, :end], start)) is not None:
        end, is_over = found.num_tokens, True
      if error is None and end == start and not is_over:
        continue
      self._num_seen[row] = end
      if error is None:
        self._texts.extend(row, result.tokens[row, start:end])
      else:
        self._texts.lengths[row] = 0
      if self.budget is None or not self.budget.is_paused or error is not None:
        self._texts.num_drafted[row] = max(0, self._texts.lengths[row] - 1)
      pieces.append(Piece(row, request, start, end, is_over or error is not None, error))
    return pieces

  def _with_results(self, rows: np.ndarray, own: Generation) -> Generation:
    """All rows' result with that of some; what failed before is not said again."""
    whole = dataclasses.replace(self.result, failures=np.zeros_like(self.result.failures))

    def put(old, new):
      old = np.array(old)
      old[rows] = new
      return old

    return jax.tree.map(put, whole, own)

  def _plan(self) -> Decoder:
    """The decoder of the next step, after its rows are together and their drafter holds their texts."""
    running, budget = [row for row in self.owners if not self._is_done[row]], self.budget
    if budget is None:
      self._read_draft(running)
      return self.decoder
    keeps_tree = any(self.owners[row].keeps_tree for row in running)
    has_tables = self.decoder.constraints is not None
    size, tree = budget.choose(max(1, len(running)), has_tables=has_tables, keeps_tree=keeps_tree)
    if size == self._batch_size:
      self._join()
    elif self._part is None or len(self._part[0]) != size or not {*running} <= {*self._part[0].tolist()}:
      others = [row for row in range(self._batch_size) if row not in running]
      state, rows = self.state, np.array([*running, *others][:size], np.int32)
      self._part, self._is_busy = (rows, take_part(state, rows)), True
    if tree.num_nodes:
      self._read_draft(running)
    decoder, of_tree, _ = self._planned
    if decoder is not self.decoder or of_tree is not tree:
      self._planned = self.decoder, tree, with_tree(self.decoder, tree)
    return self._planned[2]

  def _read_draft(self, running: Sequence[int]) -> None:
    """Lets the drafter read what it does not hold of the texts of rows in progress, after a pause."""
    behind = self._texts.behind(running)
    if not behind:
      return
    self._is_busy = True
    rows, state = self._part or (np.arange(self._batch_size), self._state)
    lengths = self._texts.num_drafted + 1
    lengths[behind] = self._texts.lengths[behind]
    state = self._read_texts(state, rows, lengths)
    self._texts.num_drafted[behind] = lengths[behind] - 1
    if self._part is None:
      self._state = state
    else:
      self._part = rows, state

  def _read_texts(self, state: DecodeState, rows: np.ndarray | slice, lengths: np.ndarray) -> DecodeState:
    texts = self._texts
    return read_draft(self.decoder, state, texts.tokens[rows], lengths[rows], texts.num_drafted[rows])

  def measure(self, *constraints: Constraint | int | None) -> Iterator[Call]:
    """Compiles and measures all that the budget may choose, and from the first step on it chooses among what is known.

    Each step runs one program, that of the whole tree and all rows first, and gives its last call; all rows must be
    free before it, and are free after it.

    Args:
      *constraints: Of the rows, in turn; tables, or None for none, are part of the programs.
    """
    budget = self.budget
    if budget is None:
      return
    key, length = jax.random.key(0, impl='threefry2x32'), min(self._longest, 64)
    prompts = ([first, *[0] * (length - 1)] for first in itertools.cycle(range(self.decoder.target.vocab_size)))
    room = min(self.decoder.cache_size, self.decoder.context_length or self.decoder.cache_size) - length
    most = min(int(self.decoder.max_new_tokens), room)
    self._is_new, budget.is_closed = False, True  # requests that come are read by the program of those that come later
    for constraint, size in itertools.product(constraints or (None,), reversed(budget.sizes)):
      is_whole = budget.guesses is None and size == budget.sizes[-1]  # of requests that keep their tree
      has_tables, known = constraint is not None, []
      own = itertools.chain([len(budget.trees) - 1] * is_whole, budget.places(size, has_tables=has_tables))
      # Then in turns, since what else the machine does changes from second to second.
      in_turns = (place for _ in range(0 if has_tables or budget.guesses is not None else _TURNS) for place in known)
      for place in itertools.chain(own, in_turns):
        is_new = place not in known
        known += [place] * is_new
        budget.forced, num_steps = (size, place), 0
        while num_steps < (2 if is_new else _CALLS) or not (has_tables or budget.is_measured(size, place)):
          if not self.owners:
            self.put([Request('measuring', next(prompts), key, None, most, constraint) for _ in range(size)])
            if is_new:  # the program by which drafters go on after a pause runs, too
              self._texts.num_drafted[:] = 0
          is_done = any(piece.is_done for piece in self.step())
          num_steps += self.call.num_rounds > 0
          if is_done:
            self.end(list(self.owners))
        self.end(list(self.owners))
        budget.forced = None
        yield self.call

  def end(self, rows: Iterable[int]) -> None:
    """Ends requests, done or not, and frees their rows, which keep what they hold."""
    rows = list(rows)
    if running := [row for row in rows if not self._is_done[row]]:
      self.state = finish(self.decoder, self.state, running)
      self._is_done[running] = True
    self._keep(rows)
    for row in rows:
      del self.owners[row]
      self.free.append(row)
