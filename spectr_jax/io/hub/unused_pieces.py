"""Pieces of SentencePiece that lead to others and are no tokens of a text themselves.

A vocabulary may have pieces marked as unused. Neighbors are merged into them as into others, by score; what is still
one of them at the end is cut again where it was joined.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


class UnusedPieces:
  """Cuts unused pieces in the ids of a text, as the package `sentencepiece` does; high scores are merged first.

  Where a piece is cut follows from the last two neighbors in the whole text that could have become it. So the merges of
  a text with such a piece are made again here.
  """

  def __init__(self, tokens: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], unused: frozenset[int]):
    self._tokens, self._ids, self._scores, self._unused = tokens, ids, scores, unused

  def __call__(self, ids: list[int]) -> list[int]:
    if self._unused.isdisjoint(ids):
      return ids
    symbols: list[str] = []
    kept: dict[int, int] = {}  # by place: the ids of what is not merged, such as bytes
    for index in ids:
      if self._ids.get(self._tokens[index]) == index:
        symbols += self._tokens[index]
      else:
        kept[len(symbols)] = index
        symbols.append('')
    places, halves = self._merge(symbols, kept)
    result: list[int] = []
    for place in places:
      if place in kept:
        result.append(kept[place])
        continue
      waiting = [symbols[place]]
      while waiting:
        piece = waiting.pop()
        index = self._ids[piece]
        if index in self._unused and piece in halves:
          waiting += reversed(halves[piece])
        else:
          result.append(index)
    return result

  def _merge(self, symbols: list[str], kept: Mapping[int, int]) -> tuple[list[int], dict[str, tuple[str, str]]]:
    """Merges symbols: the places that are left, and the last two neighbors that could become each unused piece."""
    num = len(symbols)
    before, after = list(range(-1, num - 1)), list(range(1, num + 1))
    halves: dict[str, tuple[str, str]] = {}
    queue: list[tuple[float, int, int, str]] = []

    def propose(left, right):
      if left < 0 or right >= num or left in kept or right in kept:
        return
      piece = symbols[left] + symbols[right]
      index = self._ids.get(piece)
      if index is None:
        return
      heapq.heappush(queue, (-self._scores[index], left, right, piece))
      if index in self._unused:
        halves[piece] = symbols[left], symbols[right]

    for place in range(num - 1):
      propose(place, place + 1)
    while queue:
      _, left, right, piece = heapq.heappop(queue)
      if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != piece:
        continue  # one of them is part of another piece by now
      symbols[left], symbols[right] = piece, ''
      after[left] = after[right]
      if after[right] < num:
        before[after[right]] = left
      propose(before[left], left)
      propose(left, after[left])
    places, place = [], 0
    while place < num:
      places.append(place)
      place = after[place]
    return places, halves
