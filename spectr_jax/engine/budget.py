"""Budgets across rows: how many rows and guesses the next call has, by what calls cost and how many guesses are kept.

Both are fixed before anything of a round is drawn, by what earlier rounds kept and how long they took. So every method
stays lossless: a guess that is dropped for what it is would bias its row.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np

from spectr_jax.engine.decoder import Decoder
from spectr_jax.methods import METHODS, why_not
from spectr_jax.tree import TokenTree

_HOPE = 0.9  # share of guesses that are kept where none was tried, so that they are tried
_BEST = 0.95  # the largest share that a tree which is not tried at all could keep
_WEIGHT = 8.0  # guesses that this hope counts for
_REMEMBERED = 2000.0  # rounds of a row that count for what is kept
_IDLE = 50_000.0  # those after which trees that are not in use are forgotten
_GAIN = 1.015  # by which another tree must be faster to be changed to
_OFTEN, _VISIT = 16, 8  # calls between two choices: they take some of the time of small models' rounds
_RIVAL, _GAP, _LONGEST_GAP = 0.95, 2, 256  # trees this fast are measured again, after so many choices and then twice
_PATIENCE = 8  # calls of fewer rows before the others are put away
_TOKENS = 20_000.0  # new tokens that count for how long prompts are beside them
_MEASURED, _AFTER = 6, 3  # calls that tell what one costs at first, and after a change of trees


def ladder(tree: TokenTree) -> list[TokenTree]:
  """Trees with fewer guesses, from none on, and the tree itself: those of `chains(2, 4)` are none, 1 x 1, 1 x 2, 1 x 4
  and 2 x 4. Other trees are cut at depths 1, 2, 4 and so on.
  """
  depths = [2**power for power in range(tree.max_depth.bit_length()) if 2**power < tree.max_depth] + [tree.max_depth]
  if tree.is_chains:
    shorter = [TokenTree.chains(1, depth) for depth in depths]
  else:
    shorter = [dataclasses.replace(tree, parents=tree.parents[: int((tree.depths <= d).sum()) - 1]) for d in depths]
  return list(dict.fromkeys([TokenTree(), *(shorter if tree.num_nodes else ()), tree]))


def name_of(tree: TokenTree) -> str:
  """A tree of a ladder in few characters: `0`, `2x4` for chains, `15` nodes of others."""
  return f'{tree.num_children[0]}x{tree.max_depth}' if tree.is_chains else str(tree.num_nodes)


def with_tree(decoder: Decoder, tree: TokenTree) -> Decoder:
  """The decoder with another tree of a ladder; on the empty one it decodes as without a draft, which pauses."""
  if tree == decoder.tree:
    return decoder
  keeps_method = tree.num_nodes > 0 or decoder.method.is_seed_exact
  method = decoder.method if keeps_method else METHODS['autoregressive']
  return dataclasses.replace(decoder, tree=tree, method=method)


@dataclasses.dataclass
class _Kept:
  """What trees with equally many guesses behind the root kept: guesses `[L]` that were tried, and that were kept."""

  tried: np.ndarray
  kept: np.ndarray

  def rates(self, *others: tuple[float, _Kept]) -> np.ndarray:
    """The shares `[L]` kept of the guesses of each depth, once that above them is kept.

    What was not tried is as at the depth above, and as in others, given with how much wider than those the trees are:
    at best more branches fail independently, and fewer keep as much.
    """
    rates, hope = [], _HOPE
    for depth, (tried, kept) in enumerate(zip(self.tried, self.kept)):
      for wider, other in others:
        rate = 1 - (1 - other.kept[depth] / max(1.0, other.tried[depth])) ** max(1.0, wider)
        hope = (other.tried[depth] * rate + _WEIGHT * hope) / (other.tried[depth] + _WEIGHT)
      hope = (kept + _WEIGHT * hope) / (tried + _WEIGHT)
      rates.append(hope)
    return np.array(rates)


class Budget:
  """Chooses how many rows and guesses calls have, between two of them.

  Attributes:
    guesses: The most guesses of a call; None to choose by tokens per second.
    trees: Those to choose from, with the fewest guesses first.
    sizes: Numbers of rows that a call may have, in order.
    size: Rows of the last call.
    place: The place of its tree among `trees`.
    seconds: Those of a round, by size and place, as far as measured.
    reading: Those of a token of a prompt, by whether the draft reads it, too, as far as measured.
    rounds: Those so far, by size and `name_of` their tree.
    forced: Size and place of the next calls, to measure them; None to choose.
    is_closed: Whether only programs that were measured may be chosen, and until then the whole tree for all rows.
    credit: Programs that may be measured though it is closed.
  """

  def __init__(self, guesses: Literal['auto'] | int = 'auto', *, is_resized: bool = False):
    """Begins without measurements.

    Args:
      guesses: `auto` to choose by tokens per second, or the most guesses of all rows of a call together; else
        ValueError.
      is_resized: Whether calls may have a quarter of the rows, a sixteenth and so on, where so few are in progress.
    """
    if guesses != 'auto' and (not isinstance(guesses, int) or isinstance(guesses, bool) or guesses < 0):
      raise ValueError(f"budget must be 'auto', a number of guesses from 0 on, or None; got {guesses!r}")
    self.guesses, self._is_resized = None if guesses == 'auto' else guesses, is_resized
    self.trees: list[TokenTree] = []
    self.sizes: list[int] = []

  def bind(self, decoder: Decoder, batch_size: int) -> None:
    """Begins with a decoder, whose tree is the largest, and B rows at most; what it learned with others is forgotten.

    A method that keeps a state, which is of one tree, keeps to its tree. Calls on several devices have all rows.

    Raises:
      ValueError: Such a method is to have a number of guesses, `Statistics` are counted, or several processes decode
        together.
    """
    if decoder.has_statistics:
      raise ValueError('statistics are of one tree: they are not counted with a budget')
    sharding, (none, *trees) = decoder.sharding, ladder(decoder.tree)
    trees = [none, *(tree for tree in trees if not why_not(decoder.method, tree, decoder.drafter))]
    if sharding is not None and len({device.process_index for device in sharding.mesh.devices.flat}) > 1:
      raise ValueError('a budget is chosen by the clock of one process, and several decode together here')
    if jax.tree.leaves(decoder.method.verifier.init_state(decoder.tree)):
      trees = [decoder.tree]
      if self.guesses is not None:
        raise ValueError(f'{decoder.method.name} keeps a state of its tree: its budget must be auto or None')
    sizes = [batch_size]
    while self._is_resized and sharding is None and sizes[-1] > 2:
      sizes.append(-(-sizes[-1] // 4))
    if (trees, sizes[::-1]) == (self.trees, self.sizes):
      return
    self.trees, self.sizes = trees, sizes[::-1]
    self.size, self.place, self.is_closed, self.credit = batch_size, len(trees) - 1, False, 0
    self.forced: tuple[int, int] | None = None
    self.seconds: dict[tuple[int, int], float] = {}
    self.rounds: collections.Counter[tuple[int, str]] = collections.Counter()
    self.reading: dict[bool, float] = {}
    self._num_read, self._num_new = 0.0, 0.0
    self._times: dict[tuple[int, int], list[float]] = {}
    self._ran: set[tuple[int, int, bool]] = set()
    depth = trees[-1].max_depth
    widths = [int(tree.num_children[0]) for tree in trees if tree.num_nodes]
    self._kept = {width: _Kept(np.zeros(depth), np.zeros(depth)) for width in widths}
    self._num_calls, self._num_smaller, self._num_alike, self._next_choice, self._drift = 0, 0, 0, 0, 0.0
    self._homes: dict[int, int] = {}  # by size, the place of the tree that is in use
    self._gaps = dict.fromkeys(self.sizes, _GAP)
    self._num_home: collections.Counter[int] = collections.Counter()
    self._num_visits: collections.Counter[tuple[int, int]] = collections.Counter()

  @property
  def tree(self) -> TokenTree:
    """The tree of the last call."""
    return self.trees[self.place]

  @property
  def is_paused(self) -> bool:
    """Whether the last call drafted nothing though others may."""
    return len(self.trees) > 1 and not self.tree.num_nodes

  def choose(self, num_rows: int, *, has_tables: bool = False, keeps_tree: bool = False) -> tuple[int, TokenTree]:
    """The rows and the tree of the next call.

    Args:
      num_rows: Those in progress.
      has_tables: Whether there are tables of constraints.
      keeps_tree: Whether, without a number of guesses, the tree is the largest: then what is drawn is repeatable.
    """
    if self.forced is not None:
      size, place = self.forced
    elif keeps_tree and self.guesses is None:
      size, place = self.sizes[-1], len(self.trees) - 1
    else:
      size = self._choose_size(self.sizes[-1] if has_tables else num_rows)
      self._num_calls += 1
      is_known = (
        size == self.size and (size, self.place, has_tables) in self._ran and self.is_measured(size, self.place)
      )
      if self.guesses is not None:
        place = self._fitting(num_rows)
      elif is_known and self._num_calls < self._next_choice:
        place = self.place
      else:
        self._next_choice = self._num_calls + _OFTEN
        place = self._fastest(size, num_rows, has_tables)
    if (size, place) != (self.size, self.place):
      self._num_alike = 0 if size == self.size else _AFTER
    self.size, self.place = size, place
    return size, self.trees[place]

  def places(self, size: int, *, has_tables: bool = False) -> Iterator[int]:
    """The places of trees that calls of a size may have; which come later depends on how long the first ones take.

    With tables of constraints there are fewer, since each is one more program: all rows, no guess or the most.
    """
    if self.guesses is not None:
      least = 1 if has_tables else 1 + max((each for each in self.sizes if each < size), default=0)
      yield from sorted({self._fitting(number) for number in range(least, size + 1)})
    elif has_tables:
      plain = [*self.places(size)]
      yield from sorted({plain[0], plain[-1]} if size == self.sizes[-1] else ())
    else:
      yield from itertools.takewhile(lambda place: self._may_pay(size, place), range(len(self.trees)))

  def note(
    self, seconds: float, num_rounds: int, num_row_rounds: int, kept: np.ndarray, *, has_tables: bool = False
  ) -> None:
    """Learns from the last call.

    Args:
      seconds: Those that it took; they count where it compiled no program and had no tables.
      num_rounds: Its rounds.
      num_row_rounds: Those of all rows together.
      kept: int `[L]`, those that kept at least so many guesses.
      has_tables: As for `choose`.
    """
    if not num_rounds:
      return
    self.rounds[self.size, name_of(self.tree)] += num_rounds
    if self.forced is None:  # what is measured is no text of anybody's
      self._learn_kept(num_row_rounds, kept[: self.tree.max_depth])
      self._num_new += num_row_rounds + kept.sum()
    own, program = (self.size, self.place), (self.size, self.place, has_tables)
    if program in self._ran and not has_tables:
      self._learn_seconds(own, seconds / num_rounds)
    self._ran.add(program)

  def note_reading(self, seconds: float, num_tokens: int, *, reads_draft: bool) -> None:
    """Learns from `num_tokens` of prompts that were read together, by the draft, too, or not.

    The seconds that it took count while programs are measured.
    """
    if self.forced is None:
      share = min(1.0, _TOKENS / max(1.0, self._num_new))
      self._num_read, self._num_new = share * self._num_read + num_tokens, share * self._num_new
    elif num_tokens:  # compiling, and others on the machine, can only make it slower
      self.reading[reads_draft] = min(seconds / num_tokens, self.reading.get(reads_draft, math.inf))

  def is_measured(self, size: int, place: int) -> bool:
    """Whether it is known what such a call costs, or nobody needs it."""
    return self.guesses is not None or len(self.trees) == 1 or (size, place) in self.seconds

  def _choose_size(self, num_rows: int) -> int:
    known = {*self.sizes} if self.credit or not self.is_closed else {size for size, _, _ in self._ran}
    size = next(each for each in self.sizes if each == self.sizes[-1] or (each >= num_rows and each in known))
    self._num_smaller = self._num_smaller + 1 if size < self.size else 0
    if size > self.size or self._num_smaller >= _PATIENCE:
      self._num_smaller = 0
      return size
    return self.size

  def _fitting(self, num_rows: int) -> int:
    assert self.guesses is not None
    return max(place for place, tree in enumerate(self.trees) if num_rows * tree.num_nodes <= self.guesses)

  def _fastest(self, size: int, num_rows: int, has_tables: bool) -> int:
    places = list(self.places(size, has_tables=has_tables))
    unknown = [place for place in places if not self.is_measured(size, place)]
    if unknown and (self.credit or not self.is_closed):
      return unknown[0]
    if self.is_closed:
      places = [place for place in places if (size, place, has_tables) in self._ran and self.is_measured(size, place)]
    if len(places) < 2:
      return places[0] if places else len(self.trees) - 1
    speeds = {}
    for place in places:
      tokens = self.tokens(self.trees[place])
      reading = tokens * num_rows * self._draft_reading if self.trees[place].num_nodes else 0.0
      speeds[place] = tokens / (self.seconds[size, place] + reading)
    return self._settle(size, speeds)

  @property
  def _draft_reading(self) -> float:
    """The seconds of a new token that the draft's reading of prompts takes."""
    if len(self.reading) < 2 or not self._num_new:
      return 0.0
    return max(0.0, self.reading[True] - self.reading[False]) * self._num_read / self._num_new

  def _settle(self, size: int, speeds: dict[int, float]) -> int:
    """The place of the fastest tree, or now and then of one nearly as fast, for some calls that measure it again."""
    best, home = max(speeds, key=lambda place: speeds[place]), self._homes.get(size)
    if home not in speeds or speeds[best] > _GAIN * speeds[home]:
      home = self._homes[size] = best
    self._num_home[size] += 1
    if self._num_home[size] >= self._gaps[size]:
      self._num_home[size], self._gaps[size] = 0, min(2 * self._gaps[size], _LONGEST_GAP)
      if rivals := [place for place in speeds if place != home and speeds[place] > _RIVAL * speeds[best]]:
        place = min(rivals, key=lambda place: self._num_visits[size, place])
        self._num_visits[size, place] += 1
        self._next_choice = self._num_calls + _VISIT
        return place
    return home

  def tokens(self, tree: TokenTree) -> float:
    """The tokens of a row and round that are to be expected."""
    if not tree.num_nodes:
      return 1.0
    width = int(tree.num_children[0])
    others = [(width / other, kept) for other, kept in self._kept.items() if other != width]
    return 1 + float(np.cumprod(self._kept[width].rates(*others)[: tree.max_depth]).sum())

  def _may_pay(self, size: int, place: int) -> bool:
    """False for trees that would cost more than they can give, if a guess costs half of what the ones before did."""
    known = [
      (self.trees[each].num_nodes, self.seconds[size, each]) for each in range(place) if (size, each) in self.seconds
    ]
    if place < 3 or (size, place) in self.seconds or len(known) < 3:
      return True
    (before, first), (nodes, last) = known[-2:]
    tree = self.trees[place]
    least = last + 0.5 * max(0.0, last - first) / (nodes - before) * (tree.num_nodes - nodes)
    return least < known[0][1] * sum(_BEST**depth for depth in range(tree.max_depth + 1))

  def _learn_kept(self, num_row_rounds: int, kept: np.ndarray) -> None:
    used = int(self.tree.num_children[0])
    for width, each in self._kept.items():
      share = max(0.0, 1 - num_row_rounds / (_REMEMBERED if width == used else _IDLE))
      each.tried *= share
      each.kept *= share
    if self.tree.num_nodes:
      own, depth = self._kept[used], self.tree.max_depth
      own.tried[:depth] += [num_row_rounds, *kept[:-1]]
      own.kept[:depth] += kept

  def _learn_seconds(self, own: tuple[int, int], seconds: float) -> None:
    if self.forced is not None or own not in self.seconds:
      times = self._times.setdefault(own, [])
      times.append(seconds)
      if len(times) >= _MEASURED:
        if own not in self.seconds:
          self.credit = max(0, self.credit - 1)
        self.seconds[own] = float(np.quantile(times, 0.3))  # others on the machine can only make it slower
      return
    # What else the machine does slows all calls alike. Right after a change of trees, what differs is the trees'.
    change = float(np.clip(np.log(seconds / self.seconds[own]), -0.5, 0.5)) - self._drift
    self._num_alike += 1
    if self._num_alike <= _AFTER:
      self.seconds[own] *= float(np.exp(0.2 * change))
    else:
      self._drift += 0.2 * change

  def describe(self) -> dict[str, dict[str, float]]:
    """Milliseconds of a round, by rows and tree, as far as measured."""
    seconds = sorted(self.seconds.items())
    return {
      str(size): {name_of(self.trees[place]): round(1e3 * each, 3) for (_, place), each in group}
      for size, group in itertools.groupby(seconds, key=lambda item: item[0][0])
    }
