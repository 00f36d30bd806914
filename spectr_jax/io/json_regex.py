"""Regular expressions of parts of JSON: texts, numbers in bounds, dates and the like, and values of any kind."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from spectr_jax.io.untrusted import shown

ANY_DEPTH = 2  # levels of objects and lists where a schema leaves all open
SPACE = ' ?'
PLAIN = r'[^"\\\x00-\x1f]'  # a character that JSON spells as itself
SHORT = rf'(?:{PLAIN}|\\["\\/bfnrt])'  # or escapes by a letter
_HEX = '[0-9a-fA-F]'
# The last is any character of the basic plane by its number, halves of others left out.
CHARACTER = rf'(?:{PLAIN}|\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF]{_HEX}|[dD][0-7]){_HEX}{{2}}))'
NATURAL = '(?:0|[1-9][0-9]*)'
FRACTION = r'(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?'

# RFC 3339; 400 years have 97 leap years, so that all of them have a finite expression. There is no year 0.
_YEAR = '(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])'
_FOURTH = '(?:0[48]|[2468][048]|[13579][26])'
_DATE = (
  f'(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)'
  f'|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)'
)
_HOUR = '(?:[01][0-9]|2[0-3]):[0-5][0-9]'
_TIME = rf'{_HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[-+]{_HOUR})'
# RFC 1123: labels of at most 63 characters, 253 together. To count both takes too large a table, so more than 3 labels
# have at most 31, and more than 7 at most 15.
_LABEL = '[A-Za-z0-9](?:[A-Za-z0-9-]{{0,{}}}[A-Za-z0-9])?'
_LABELS = [(_LABEL.format(longest - 2), most) for longest, most in ((63, 3), (31, 7), (15, 15))]
_HOST = f'(?:{"|".join(rf"{label}(?:[.]{label}){{0,{most - 1}}}" for label, most in _LABELS)})'
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = '(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])'
_IPV4 = rf'{_BYTE}(?:\.{_BYTE}){{3}}'
# RFC 4291: eight groups, of which two colons leave out at least one; the last two may be an address of version 4.
_GROUP = f'{_HEX}{{1,4}}'
_IPV6 = '(?:' + '|'.join([
  f'(?:{_GROUP}:){{6}}(?:{_GROUP}:{_GROUP}|{_IPV4})',
  *(f'{f"{_GROUP}(?::{_GROUP}){{{n - 1}}}" if n else ""}::'
    + (f'(?:{_GROUP}(?::{_GROUP}){{0,{6 - n}}})?' if n < 7 else '') for n in range(8)),
  *(f'{f"{_GROUP}(?::{_GROUP}){{{n - 1}}}" if n else ""}::(?:{_GROUP}:){{0,{5 - n}}}{_IPV4}' for n in range(6)),
]) + ')'  # fmt: skip
# RFC 3986.
_NAMED = "A-Za-z0-9._~!$&'()*+,;=-"
_PATH, _QUERY, _USER, _REGISTERED = (rf'(?:[{more}{_NAMED}]|%{_HEX}{{2}})' for more in (':@', ':@/?', ':', ''))
_AUTHORITY = rf'(?:{_USER}*@)?(?:{_REGISTERED}*|\[(?:{_IPV6}|[vV]{_HEX}+\.[:{_NAMED}]+)\])(?::[0-9]*)?'
FORMATS = {
  'date': _DATE,
  'time': _TIME,
  'date-time': f'{_DATE}[Tt]{_TIME}',
  'email': rf'{_ATOM}(?:\.{_ATOM})*@{_HOST}',
  'hostname': _HOST,
  'ipv4': _IPV4,
  'ipv6': _IPV6,
  'uri': (
    rf'[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PATH}*)*|/?(?:{_PATH}+(?:/{_PATH}*)*)?)'
    rf'(?:\?{_QUERY}*)?(?:#{_QUERY}*)?'
  ),
  'uuid': f'{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}',
}


def escaped(text: str) -> str:
  """The regular expression of one text."""
  return re.escape(text)


def either(parts: Sequence[str]) -> str:
  """One of several expressions."""
  return f'(?:{"|".join(parts)})'


@dataclasses.dataclass(frozen=True)
class Syntax:
  """How values are written, as expressions: in JSON, unless fields say otherwise.

  Attributes:
    space: What may stand between two parts.
    quote: What stands around a text.
    character: A character of a text; `short` is the same without numbers of characters.
    null: The value that is none.
    spell: Gives what stands between the quotes of a text.
    bare: A name of a property, where names have no quotes.
  """

  space: str = SPACE
  quote: str = '"'
  character: str = CHARACTER
  short: str = SHORT
  null: str = 'null'
  spell: Callable[[str], str] = lambda text: json.dumps(text, ensure_ascii=False)[1:-1]
  bare: str | None = None

  @property
  def string(self) -> str:
    return f'{self.quote}{self.character}*{self.quote}'

  @property
  def simple(self) -> dict[str, str]:
    return {'boolean': '(?:true|false)', 'null': self.null}

  def text(self, text: str) -> str:
    return f'{self.quote}{escaped(self.spell(text))}{self.quote}'

  def name(self, name: str) -> str:
    """The name of a property; `ValueError` if it cannot be written."""
    if self.bare is None:
      return self.text(name)
    if not re.fullmatch(self.bare, name):
      raise ValueError(f'the name {shown(name)} is not supported where names have no quotes')
    return escaped(name)

  def literal(self, value: Any) -> str:
    """One value, with the space between parts that objects have; a whole number with a point without it, too."""
    if isinstance(value, dict):
      inner = f',{self.space}'.join(
        f'{self.name(name)}:{self.space}{self.literal(each)}' for name, each in value.items()
      )
      return rf'\{{{self.space}{inner}{self.space if inner else ""}\}}'
    if isinstance(value, list):
      inner = f',{self.space}'.join(map(self.literal, value))
      return rf'\[{self.space}{inner}{self.space if inner else ""}\]'
    if value is None or isinstance(value, str):
      return self.null if value is None else self.text(value)
    text = json.dumps(value, allow_nan=False)
    return f'{text[:-2]}(?:\\.0)?' if isinstance(value, float) and text.endswith('.0') else escaped(text)

  def listed(self, item: str, least: int, most: int | None) -> str:
    """Items from `least` to `most` times, with commas."""
    more = f'(?:,{self.space}{item})'
    if most == 0:
      return ''
    repeats = f'{{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    both = f'{item}{more}{repeats}{self.space}'
    return f'(?:{both})?' if least == 0 else both

  def any_object(self, depth: int = ANY_DEPTH, value: str | None = None) -> str:
    """Objects with any content, or of any names with one `value`; nested at most `depth` levels deep."""
    value = self.any_value(depth - 1) if value is None else value
    return rf'\{{{self.space}{self.listed(f"{self.bare or self.string}:{self.space}{value}", 0, None)}\}}'

  def any_value(self, depth: int) -> str:
    """Any value; lists and objects in it are nested at most `depth` levels deep."""
    parts = [self.string, f'-?{NATURAL}{FRACTION}', *self.simple.values()]
    if depth > 0:
      parts += [self.any_object(depth), rf'\[{self.space}{self.listed(self.any_value(depth - 1), 0, None)}\]']
    return either(parts)


JSON = Syntax()


def _same_length(low: str, high: str) -> str:
  """Numbers of equally many digits from `low` to `high`."""
  if low == high:
    return low
  if set(low) == {'0'} and set(high) == {'9'}:
    return f'[0-9]{{{len(low)}}}'
  rest = len(low) - 1
  if low[0] == high[0]:
    return low[0] + _same_length(low[1:], high[1:])
  parts, first, last = [], int(low[0]), int(high[0])
  if rest and set(low[1:]) != {'0'}:
    parts.append(low[0] + _same_length(low[1:], '9' * rest))
    first += 1
  if rest and set(high[1:]) != {'9'}:
    parts.append(high[0] + _same_length('0' * rest, high[1:]))
    last -= 1
  if first <= last:
    parts.append(f'[{first}-{last}]' + (f'[0-9]{{{rest}}}' if rest else ''))
  return either(parts)


def _naturals(low: int, high: int | None) -> str:
  """Whole numbers from `low`, at least 0, to `high`, or without an end."""
  digits, parts = len(str(low)), []
  for size in range(digits, len(str(high)) + 1 if high is not None else digits + 1):
    first = str(low) if size == digits else '1' + '0' * (size - 1)
    last = str(high) if high is not None and size == len(str(high)) else '9' * size
    parts.append(_same_length(first, last))
  if high is None:
    parts.append(f'[1-9][0-9]{{{digits},}}')
  return either(parts)


def integers(low: int | None, high: int | None) -> str | None:
  """Whole numbers from `low` to `high`, None for no bound; None if there are none."""
  if low is not None and high is not None and low > high:
    return None
  parts = []
  if high is None or high >= 0:
    parts.append(_naturals(max(low or 0, 0), high))
  if low is None or low < 0:
    parts.append('-' + _naturals(max(1, -high if high is not None else 1), None if low is None else -low))
  return either(parts)
