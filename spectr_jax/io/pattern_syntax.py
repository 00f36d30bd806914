"""Regular expressions of schemas and users, rewritten for an engine without assertions and with other classes.

An expression is read into *terms*: for each of the four conditions (nothing stands before it, nothing stands behind it)
the expression of what it matches under that condition, which has no assertion itself, and whether that may be empty.
Terms can be joined, listed and repeated, so `^` and `$` may stand anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from spectr_jax.io.json_regex import CHARACTER, PLAIN, either

_MOST_DEPTH = 100
_MOST_CHARACTERS = 2**16  # of an expression, which is read in Python
_MOST_REPEATS = 10_000
_FREE, _LEFT, _RIGHT, _BOTH = (False, False), (True, False), (False, True), (True, True)
Terms = dict[tuple[bool, bool], tuple[str, bool]]
Ranges = list[tuple[int, int]]

_GROUP = re.compile(r'\((\?(?:P?<\w+>|:|[a-zA-Z]*(?:-[a-zA-Z]+)?[:)]|<?[=!])?)?')
_REPEAT = re.compile(r'(?:[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\})\??')
_NUMBER = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4}))')
_PAIR = re.compile(r'\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})')
_PROPERTY = re.compile(r'\\[pP]\{[\w=]+\}')


def _complement(ranges: Ranges) -> Ranges:
  found, after = [], 0
  for low, high in sorted(ranges):
    if low > after:
      found.append((after, low - 1))
    after = max(after, high + 1)
  return [*found, (after, 0x10FFFF)] if after <= 0x10FFFF else found


_DIGITS: Ranges = [(48, 57)]
_WORD: Ranges = [*_DIGITS, (65, 90), (95, 95), (97, 122)]
_SPACES: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
                   (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]  # fmt: skip
_LINES: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SETS = {'d': _DIGITS, 'w': _WORD, 's': _SPACES} | {
  name: _complement(ranges) for name, ranges in (('D', _DIGITS), ('W', _WORD), ('S', _SPACES))
}
_NOT_PLAIN: Ranges = [(0, 31), (34, 34), (92, 92), (0xD800, 0xDFFF)]  # in a text of JSON; halves are no characters
_SHORT = {8: 'b', 9: 't', 10: 'n', 12: 'f', 13: 'r', 34: '"', 92: r'\\'}
_LETTERS = {'t': 9, 'n': 10, 'v': 11, 'f': 12, 'r': 13, '0': 0}


def _one(character: str) -> Ranges:
  return [(ord(character), ord(character))]


def _plain(ranges: Ranges) -> Ranges:
  return _complement([*_complement(ranges), *_NOT_PLAIN])


def _spelled(ranges: Ranges) -> str:
  """Ranges within a class of Rust's `regex`."""
  return ''.join(rf'\x{{{low:x}}}-\x{{{high:x}}}' for low, high in ranges)


def _merged(pairs: Iterable[tuple[tuple[bool, bool], str, bool]]) -> Terms:
  """Terms of alternatives."""
  found: dict[tuple[bool, bool], tuple[list[str], bool]] = {}
  for key, regex, is_empty in pairs:
    before, was_empty = found.get(key, ([], False))
    found[key] = [*before, regex] if regex not in before else before, was_empty or is_empty
  return {key: (each[0] if len(each) == 1 else either(each), is_empty) for key, (each, is_empty) in found.items()}


def _joined(one: Terms, other: Terms) -> Terms:
  """Terms of one expression behind another; what an assertion keeps out must be empty."""
  return _merged(
    ((left or left2, right or right2), ('' if left2 else regex) + ('' if right else regex2), is_empty and is_empty2)
    for (left, right), (regex, is_empty) in one.items()
    for (left2, right2), (regex2, is_empty2) in other.items()
    if (is_empty or not left2) and (is_empty2 or not right)
  )


def _counted(regex: str, least: int, most: int | None) -> str:
  if not regex or (least, most) == (1, 1):
    return regex
  return f'(?:{regex}){{{least},{"" if most is None else most}}}'


def _repeated(terms: Terms, least: int, most: int | None) -> Terms:
  """Terms of repeats: of those with an assertion at most the first and the last are more than empty."""

  def may_be_empty(*keys: tuple[bool, bool]) -> bool:
    return any(key in terms and terms[key][1] for key in keys)

  found = []
  for ends in ((), (_LEFT,), (_RIGHT,), (_LEFT, _RIGHT)):
    rest = None if most is None else most - len(ends)
    need = 0 if may_be_empty(*ends) else max(least - len(ends), 0)
    if any(end not in terms for end in ends) or (rest is not None and rest < 0) or (_FREE not in terms and need):
      continue
    inner = _counted(terms[_FREE][0], need, rest) if _FREE in terms and rest != 0 else ''
    first, last = (terms[key][0] if key in ends else '' for key in (_LEFT, _RIGHT))
    is_empty = (not need or may_be_empty(_FREE)) and all(terms[end][1] for end in ends)
    found.append(((_LEFT in ends, _RIGHT in ends), first + inner + last, is_empty))
  if _BOTH in terms and most != 0 and (least <= 1 or may_be_empty(_FREE, _LEFT, _RIGHT, _BOTH)):
    is_whole = least <= 1 or may_be_empty(_FREE, _LEFT, _RIGHT)
    found.append((_BOTH, terms[_BOTH][0] if is_whole else '', terms[_BOTH][1]))
  return _merged(found)


def _of_ranges(ranges: Ranges, properties: Sequence[str] = (), *, is_negated: bool = False) -> Terms:
  """One character of a set, as JSON spells it; of a set with properties only those spelled as themselves."""
  if properties:
    inside = f'[{"^" if is_negated else ""}{_spelled(_plain(ranges))}{"".join(properties)}]'
    return {_FREE: (f'[{inside}&&{PLAIN}]', False)}
  ranges = _complement(ranges) if is_negated else ranges
  parts = [f'[{inner}]'] if (inner := _spelled(_plain(ranges))) else []
  for code in (*range(32), 34, 92):
    if any(low <= code <= high for low, high in ranges):
      digits = ''.join(f'[{digit}{digit.upper()}]' if digit.isalpha() else digit for digit in f'{code:04x}')
      number = rf'\\u{digits}'
      parts.append(number if code not in _SHORT else rf'(?:\\{_SHORT[code]}|{number})')
  return {_FREE: (parts[0] if len(parts) == 1 else either(parts), False)} if parts else {}


class _Parser:
  """Reads an expression of JavaScript, `is_ecma`, or as far as assertions are concerned of Rust's `regex`."""

  def __init__(self, pattern: str, *, is_ecma: bool):
    if len(pattern) > _MOST_CHARACTERS:
      raise ValueError(f'it has {len(pattern):,} characters, allowed are {_MOST_CHARACTERS:,}')
    self._pattern, self._at, self._is_ecma = pattern, 0, is_ecma

  def whole(self) -> Terms:
    terms = self._alternatives(0)
    if self._at < len(self._pattern):
      raise ValueError('a parenthesis or a bracket has no other half')
    return terms

  def _alternatives(self, depth: int) -> Terms:
    if depth > _MOST_DEPTH:
      raise ValueError(f'groups are nested more than {_MOST_DEPTH} deep')
    branches = [self._sequence(depth)]
    while self._pattern.startswith('|', self._at):
      self._at += 1
      branches.append(self._sequence(depth))
    return _merged((key, *value) for branch in branches for key, value in branch.items())

  def _sequence(self, depth: int) -> Terms:
    terms: Terms = {_FREE: ('', True)}
    while self._at < len(self._pattern) and self._pattern[self._at] not in '|)':
      terms = _joined(terms, self._repeat(self._atom(depth)))
    return terms

  def _repeat(self, terms: Terms) -> Terms:
    while repeat := _REPEAT.match(self._pattern, self._at):
      self._at = repeat.end()
      least, most = {'*': (0, None), '+': (1, None), '?': (0, 1)}.get(repeat[0][0], (0, 0))
      if repeat[1]:
        if max(len(repeat[1]), len(repeat[3] or '')) > 9 or max(int(repeat[1]), int(repeat[3] or 0)) > _MOST_REPEATS:
          raise ValueError(f'something is repeated more than {_MOST_REPEATS:,} times')
        least = int(repeat[1])
        most = int(repeat[3]) if repeat[3] else None if repeat[2] else least
        if most is not None and most < least:
          raise ValueError(f'{repeat[0]} has its limits in the wrong order')
      terms = _repeated(terms, least, most)
    return terms

  def _atom(self, depth: int) -> Terms:
    pattern, at = self._pattern, self._at
    if pattern[at] == '(':
      return self._group(depth)
    if pattern[at] in '*+?':
      raise ValueError(f'{pattern[at]} repeats nothing')
    if pattern[at] in '^$':
      self._at += 1
      return {(pattern[at] == '^', pattern[at] == '$'): ('', True)}
    if not self._is_ecma:
      return self._of_rust()
    if pattern[at] == '[':
      return self._class()
    if pattern[at] == '\\':
      found = self._escape()
      return _of_ranges([], [found]) if isinstance(found, str) else _of_ranges(found)
    self._at += 1
    return _of_ranges(_complement(_LINES) if pattern[at] == '.' else _one(pattern[at]))

  def _group(self, depth: int) -> Terms:
    group = _GROUP.match(self._pattern, self._at)
    kind = (group[1] or '') if group else ''
    if kind[-1:] in ('=', '!') or kind == '?':
      name = 'looking around' if kind[1:] else 'a group'
      raise ValueError(f'{name}, {self._pattern[self._at : self._at + 4]}, is not supported')
    flags = '' if '<' in kind else kind[1:-1]
    if flags and (self._is_ecma or set(flags) & set('mx')):
      raise ValueError(f'the flags {flags} are not supported')
    assert group is not None  # a parenthesis is there
    self._at = group.end()
    if kind.endswith(')'):
      return {_FREE: (group[0], True)}
    terms = self._alternatives(depth + 1)
    if not self._pattern.startswith(')', self._at):
      raise ValueError('a parenthesis or a bracket has no other half')
    self._at += 1
    opening = f'(?{flags}:'
    return {key: (f'{opening}{regex})' if regex else '', is_empty) for key, (regex, is_empty) in terms.items()}

  def _of_rust(self) -> Terms:
    """A character, an escape or a class, as it stands."""
    pattern, at, depth = self._pattern, self._at, 0
    while True:
      part = re.compile(r'\\(?:[pPxuU]\{[^}]*\}|.)|\[\^?\]?|.', re.DOTALL).match(pattern, at)
      if part is None or part[0] == '\\':
        raise ValueError('a parenthesis or a bracket has no other half, or a backslash escapes nothing')
      depth += (part[0][0] == '[') - (part[0] == ']' and depth > 0)
      at = part.end()
      if not depth:
        break
    found, self._at = pattern[self._at : at], at
    if found in (r'\A', r'\z'):
      return {(found == r'\A', found == r'\z'): ('', True)}
    return {_FREE: (found, False)}

  def _class(self) -> Terms:
    pattern = self._pattern
    self._at += 1
    is_negated = pattern.startswith('^', self._at)
    self._at += is_negated
    ranges, properties = [], []
    while not pattern.startswith(']', self._at):
      low = self._member()
      high = None
      if pattern.startswith('-', self._at) and not pattern.startswith('-]', self._at):
        self._at += 1
        high = self._member()
      parts = [low] if high is None else [low, [(45, 45)], high]  # beside a set of characters it stands for itself
      ends = [each[0] for each in parts if isinstance(each, list) and len(each) == 1 and each[0][0] == each[0][1]]
      if len(ends) == 3:
        parts = [[(ends[0][0], ends[2][0])]]
        if ends[0] > ends[2]:
          raise ValueError('a class has a range in the wrong order')
      for each in parts:
        properties.append(each) if isinstance(each, str) else ranges.extend(each)
    self._at += 1
    return _of_ranges(ranges, properties, is_negated=is_negated)

  def _member(self) -> Ranges | str:
    if self._at >= len(self._pattern):
      raise ValueError('a parenthesis or a bracket has no other half')
    if self._pattern[self._at] == '\\':
      return self._escape(in_class=True)
    self._at += 1
    return _one(self._pattern[self._at - 1])

  def _escape(self, *, in_class: bool = False) -> Ranges | str:
    """The characters of an escape, or a property of Unicode."""
    pattern, at = self._pattern, self._at
    name = pattern[at + 1 : at + 2]
    if not name:
      raise ValueError('a backslash escapes nothing')
    if found := _PROPERTY.match(pattern, at):
      self._at = found.end()
      return found[0]
    if found := _PAIR.match(pattern, at):
      code = 0x10000 + ((int(found[1], 16) & 0x3FF) << 10) + (int(found[2], 16) & 0x3FF)
    elif found := _NUMBER.match(pattern, at):
      code = int(found[1] or found[2] or found[3], 16)
    elif name in _SETS:
      self._at += 2
      return _SETS[name]
    elif name == 'b' and in_class:
      code = 8
    elif name == 'c' and pattern[at + 2 : at + 3].isascii() and pattern[at + 2 : at + 3].isalpha():
      code, at = ord(pattern[at + 2]) % 32, at + 1
    elif name in _LETTERS and not (name == '0' and pattern[at + 2 : at + 3].isdigit()):
      code = _LETTERS[name]
    elif name.isalnum():
      raise ValueError(f'\\{name} is not supported')
    else:
      code = ord(name)
    self._at = found.end() if found else at + 2
    if code > 0x10FFFF:
      raise ValueError('an escape names no character')
    return [(code, code)]


def _written(terms: Terms, write: Callable[[str, bool, bool], str]) -> str:
  if not terms:
    raise ValueError('it matches nothing')
  return either([write(regex, *key) for key, (regex, _) in terms.items()])


def found_in_json(pattern: str) -> str:
  """The JSON texts in which an expression of JavaScript, and so of JSON Schema, matches somewhere.

  Raises:
    ValueError: It is damaged, has something that is not supported, or matches nothing.
  """
  free = f'{CHARACTER}*'
  terms = _Parser(pattern, is_ecma=True).whole()
  return f'"{_written(terms, lambda regex, left, right: ("" if left else free) + regex + ("" if right else free))}"'


def whole(regex: str) -> str:
  """An expression of Rust's `regex` without the assertions of begin and end, of whole texts; ValueError as above."""
  terms = _Parser(regex, is_ecma=False).whole()
  return regex if set(terms) == {_FREE} else _written(terms, lambda each, left, right: each)
