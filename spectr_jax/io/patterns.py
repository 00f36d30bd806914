"""Regular expressions of somebody else: those whose matches may take for ever are refused.

Tokenizers split texts by expressions of their files, and nothing can interrupt a match. A backtracking engine takes
time by how many ways there are to match a part of the text that is then found not to fit: exponential in the text's
length for `(a+)+$`, and a power of it for `a*a*a*b`. What comes last in an expression is never tried in a second way,
since nothing behind it can fail. So an expression may have, in each alternative and before its last part, one
repetition of unbounded length. At worst, matching then takes time quadratic in the length of what can be repeated.
"""

from __future__ import annotations

import dataclasses
import math
import re

from spectr_jax.io.untrusted import shown

_MOST_CHARACTERS = 2**13
_MOST_REPEATS = 1000  # what is repeated a given number of times is copied as often
_MOST_DEPTH = 32  # of groups
_MOST_DEGREE = 1
_MOST_WAYS = 256
_EXPONENTIAL = 100  # more than any degree that is allowed
_SHORT = 16  # repeats up to which a bounded repetition is counted as so many ways

_REPETITION = re.compile(r'(?:[*+?]|\{(\d*)(,?)(\d*)\})([?+]?)')
_ESCAPE = re.compile(r'\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|.)', re.DOTALL)
_GROUP = re.compile(r'\((?:\?(?:(?P<look>=|!|<=|<!|>)|<\w+>|[ims-]*:))?')
_OPTIONS = re.compile(r'\(\?[ims-]+\)')
_ESCAPED_LETTERS = frozenset('dDsSwWhHpPbBAzZnrtfvaexu0')


@dataclasses.dataclass(frozen=True)
class _Part:
  """How much of a text a part of an expression may be matched in several ways with."""

  degree: int = 0  # unbounded repetitions, one behind the other
  ways: int = 1  # besides these
  last_degree: int = 0  # `degree` if nothing follows
  last_ways: int = 1  # `ways` if nothing follows
  may_be_empty: bool = False  # whether it matches without a character and without a condition
  is_fixed: bool = True  # whether there is one way to match


class _Refused(Exception):  # noqa: N818
  pass


class _Scanner:
  """Reads an expression of Oniguruma, as far as that says how often what is repeated."""

  def __init__(self, pattern: str):
    self._pattern, self._at = pattern, 0

  def whole(self) -> _Part:
    # Elsewhere than at the beginning they would make a group of what follows.
    if options := _OPTIONS.match(self._pattern):
      self._at = options.end()
    part = self._alternatives(0)
    if self._at < len(self._pattern):
      raise _Refused('a parenthesis closes nothing')
    return part

  def _alternatives(self, depth: int) -> _Part:
    if depth > _MOST_DEPTH:
      raise _Refused('groups are nested too deeply')
    begin = self._at
    branches = [self._sequence(depth)]
    while self._pattern.startswith('|', self._at):
      self._at += 1
      branches.append(self._sequence(depth))
    if len(branches) == 1:
      return branches[0]
    texts = self._pattern[begin : self._at].casefold().split('|')
    if all(len(text) == 1 and text.isalnum() for text in texts) and len(set(texts)) == len(texts):
      return _Part()  # as a class of characters
    return _Part(
      degree=max(branch.degree for branch in branches),
      ways=sum(branch.ways for branch in branches),
      last_degree=max(branch.last_degree for branch in branches),
      last_ways=sum(branch.last_ways for branch in branches),
      may_be_empty=any(branch.may_be_empty for branch in branches),
      is_fixed=False,
    )

  def _sequence(self, depth: int) -> _Part:
    parts: list[_Part] = []
    while self._at < len(self._pattern) and self._pattern[self._at] not in '|)':
      parts.append(self._repeated(self._atom(depth)))
    degree, ways = sum(part.degree for part in parts), math.prod(part.ways for part in parts)
    # Of the last parts, one that need not match ends the expression at once, so that none before it is tried again.
    num_last = 0
    for part in reversed(parts):
      num_last += 1
      if not part.may_be_empty:
        break
    before, last = parts[: len(parts) - num_last], parts[len(parts) - num_last :]
    return _Part(
      degree,
      ways,
      last_degree=sum(part.degree for part in before) + sum(part.last_degree for part in last),
      last_ways=math.prod(part.ways for part in before) * math.prod(part.last_ways for part in last),
      may_be_empty=all(part.may_be_empty for part in parts),
      is_fixed=all(part.is_fixed for part in parts),
    )

  def _atom(self, depth: int) -> _Part:
    pattern, at = self._pattern, self._at
    if pattern[at] == '\\':
      escape = _ESCAPE.match(pattern, at)
      if escape is None:
        raise _Refused('it ends with a backslash')
      if escape[0][1].isalnum() and escape[0][1] not in _ESCAPED_LETTERS:
        raise _Refused(f'{escape[0]} is not known here')
      self._at = escape.end()
      return _Part()
    if pattern[at] == '[':
      self._class()
      return _Part()
    if pattern[at] == '(':
      return self._group(depth)
    if pattern[at] in '*+?':
      raise _Refused(f'{pattern[at]} repeats nothing')
    self._at += 1
    return _Part()

  def _class(self) -> None:
    """Skips a class of characters, in which classes may be nested."""
    depth, at, pattern = 0, self._at, self._pattern
    while at < len(pattern):
      if pattern[at] == '\\':
        at += 2
        continue
      if pattern[at] == '[':
        depth += 1
        at += 2 if pattern.startswith('^', at + 1) else 1
        at += pattern.startswith(']', at)  # at the beginning it is a character
        continue
      if pattern[at] == ']':
        depth -= 1
        if not depth:
          self._at = at + 1
          return
      at += 1
    raise _Refused('a class of characters does not end')

  def _group(self, depth: int) -> _Part:
    opening = _GROUP.match(self._pattern, self._at)
    assert opening is not None  # a parenthesis is there
    if opening[0] == '(' and self._pattern.startswith(('?', '*'), opening.end()):
      raise _Refused(f'{self._pattern[self._at : self._at + 4]} is not known here')
    self._at = opening.end()
    part = self._alternatives(depth + 1)
    if not self._pattern.startswith(')', self._at):
      raise _Refused('a parenthesis is not closed')
    self._at += 1
    if opening['look'] is None:
      return part
    # It is a condition, which also fails where its inside matches, if that is what must not be there.
    is_last = opening['look'] in ('=', '<=', '>')
    return dataclasses.replace(
      part,
      last_degree=part.last_degree if is_last else part.degree,
      last_ways=part.last_ways if is_last else part.ways,
      may_be_empty=False,
    )

  def _repeated(self, part: _Part) -> _Part:
    """The part with the repetitions that follow it."""
    is_repeated = False
    while repetition := _REPETITION.match(self._pattern, self._at):
      least, most = _range(repetition)
      if most is None and repetition[0][0] == '{' and not repetition[1]:
        return part  # braces that are characters
      if is_repeated:
        raise _Refused('what is repeated is repeated')
      is_repeated, self._at = True, repetition.end()
      part = _times(part, least, most)
    return part


def _range(repetition: re.Match[str]) -> tuple[int, int | None]:
  """The least and the most repeats, None for no bound."""
  kind = repetition[0][0]
  if kind != '{':
    return {'*': (0, None), '+': (1, None), '?': (0, 1)}[kind]
  if max(float(repetition[1] or 0), float(repetition[3] or 0)) > _MOST_REPEATS:
    raise _Refused(f'it repeats something more than {_MOST_REPEATS} times')
  least = int(repetition[1] or 0)
  most = int(repetition[3]) if repetition[3] else None if repetition[2] or not repetition[1] else least
  if repetition[4] == '+' or (repetition[4] and not repetition[2]) or (most is not None and most < least):
    raise _Refused(f'{repetition[0]} is not known here')
  return least, most


def _times(part: _Part, least: int, most: int | None) -> _Part:
  is_empty = part.may_be_empty or least == 0
  if (least, most) == (0, 1):
    return dataclasses.replace(part, ways=part.ways + 1, may_be_empty=True, is_fixed=False)
  if least == most and part.is_fixed:
    return part
  if not part.is_fixed and least > 1:
    raise _Refused('what matches in several ways is repeated a number of times')
  if not part.is_fixed:  # many ways, each repeat with its own
    degree, ways = _EXPONENTIAL, 1
  elif most is None or most - least > _SHORT:
    degree, ways = 1, 1
  else:
    degree, ways = 0, most - least + 1
  # If nothing follows, no repeat is tried again: where the next one fails, the expression ends.
  return _Part(degree, ways, part.last_degree, part.last_ways, may_be_empty=is_empty, is_fixed=False)


def check_pattern(pattern: str, where: str) -> None:
  """Checks that matching an expression takes a bounded time."""
  if len(pattern) > _MOST_CHARACTERS:
    raise ValueError(
      f'{where} has a regular expression of {len(pattern):,} characters, the most are {_MOST_CHARACTERS:,}'
    )
  try:
    part = _Scanner(pattern).whole()
  except _Refused as error:
    raise ValueError(f'{where} has the regular expression {shown(pattern)}: {error}') from error
  if part.last_degree > _MOST_DEGREE or part.last_ways > _MOST_WAYS:
    raise ValueError(f'{where} has the regular expression {shown(pattern)}, which may match in too many ways')
