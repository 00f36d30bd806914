"""JSON schemas as regular expressions, for constraints.

The expression describes texts that a schema accepts, though not all of them: objects have their properties in the order
of the schema and no others, there is at most one space between two parts, and what a schema leaves open is nested a few
levels deep. What cannot be described so, such as `not` or `uniqueItems`, is refused by name and place.
"""

from __future__ import annotations

import itertools
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spectr_jax.io.json_regex import (
  ANY_DEPTH,
  FORMATS,
  FRACTION,
  JSON,
  NATURAL,
  Syntax,
  either,
  integers,
)  # fmt: skip
from spectr_jax.io.pattern_syntax import found_in_json
from spectr_jax.io.untrusted import shown

_MOST_VISITS, _MOST_CHARACTERS = 20_000, 2**20  # of schemas that refer to themselves
_MOST_NESTED = 3  # times that a reference may stand within itself
_MOST_REPEATS = 1_000
_MOST_NUMBERED = 64  # characters of a text of limited length that may be written by their numbers

_ANNOTATIONS = frozenset((
  'title', 'description', 'default', 'examples', 'example', '$schema', '$id', '$comment', '$anchor', '$defs',
  'definitions', 'deprecated', 'readOnly', 'writeOnly', 'contentMediaType', 'contentEncoding', 'discriminator',
))  # fmt: skip
# Keywords by the type that they are about; others are refused.
_KEYWORDS = {
  'object': frozenset(('properties', 'required', 'additionalProperties', 'unevaluatedProperties')),
  'array': frozenset(('items', 'prefixItems', 'minItems', 'maxItems', 'uniqueItems', 'additionalItems')),
  'string': frozenset(('minLength', 'maxLength', 'pattern', 'format')),
  'integer': frozenset(('minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum')),
  'number': frozenset(('minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum')),
  'boolean': frozenset(),
  'null': frozenset(),
}
_OF_TYPES = frozenset(('type', *(name for names in _KEYWORDS.values() for name in names)))


class SchemaRegex(NamedTuple):
  """The texts of a schema.

  Attributes:
    regex: The regular expression, of whole texts.
    narrower: What it leaves out of the values that the schema accepts, a sentence for each kind.
  """

  regex: str
  narrower: tuple[str, ...]


def schema_regex(schema: Any, syntax: Syntax = JSON) -> SchemaRegex:
  """The regular expression of texts that a schema accepts.

  Args:
    schema: The schema, a parsed JSON value.
    syntax: How values are written.

  Raises:
    ValueError: It has a keyword or a value that cannot be described, which is named, or it accepts nothing.
  """
  writer = _Writer(schema, syntax)
  try:
    regex = writer.value(schema, '#')
  except RecursionError:
    raise ValueError('the JSON schema is nested too deeply') from None
  if regex is None:
    raise ValueError('the JSON schema accepts nothing')
  return SchemaRegex(regex, tuple(writer.narrower))


class _Writer:
  """Writes the expressions of the parts of one schema.

  Attributes:
    narrower: What is left out so far, as keys.
  """

  def __init__(self, root: Any, syntax: Syntax):
    self.narrower: dict[str, None] = {}
    self._syntax = syntax
    self._root, self._num_visits, self._num_characters = root, 0, 0
    self._within: list[str] = []  # references

  def value(self, schema: Any, where: str) -> str | None:
    """The expression of the texts of a schema, or None where it accepts none."""
    regex = self._value(schema, where)
    self._num_visits, self._num_characters = self._num_visits + 1, self._num_characters + len(regex or '')
    if self._num_visits > _MOST_VISITS or self._num_characters > 16 * _MOST_CHARACTERS:
      raise ValueError('the JSON schema is too large')
    if len(regex or '') > _MOST_CHARACTERS:
      raise ValueError(f'the JSON schema is too large: its expression has more than {_MOST_CHARACTERS:,} characters')
    return regex

  def _value(self, schema: Any, where: str) -> str | None:
    if isinstance(schema, bool):
      return self._any() if schema else None
    if not isinstance(schema, Mapping):
      raise _refused(where, f'must be an object or a boolean, got {shown(schema)}')
    own = {name: value for name, value in schema.items() if name not in _ANNOTATIONS and not name.startswith('x-')}
    for name, write in (('$ref', self._reference), ('enum', self._enum), ('const', self._enum)):
      if name in own:
        _only(own, where, name, *(('type',) if name != '$ref' else ()))
        return write(own, where)
    for name in ('anyOf', 'oneOf', 'allOf'):
      if name in own:
        _only(own, where, name)
        return self._alternatives(own[name], where, name)
    for name in own:
      if name not in _OF_TYPES:
        raise _refused(where, f'{shown(name)} is not supported')
    return self._of_types(own, where)

  def _any(self, depth: int = ANY_DEPTH) -> str:
    self.narrower[f'what is left open is nested at most {ANY_DEPTH} levels deep'] = None
    return self._syntax.any_value(depth)

  def _reference(self, schema: Mapping[str, Any], where: str) -> str | None:
    target = schema['$ref']
    if not isinstance(target, str) or not re.match('#(/|$)', target):
      raise _refused(where, f'$ref must name a part of this schema, such as #/$defs/NAME, got {shown(target)}')
    if self._within.count(target) > _MOST_NESTED:
      self.narrower[f'what contains itself is nested at most {_MOST_NESTED} levels deep'] = None
      return None
    self._within.append(target)
    regex = self.value(self._part(target, where), target)
    self._within.pop()
    return regex

  def _part(self, target: str, where: str) -> Any:
    """What a reference names."""
    found = self._root
    for step in urllib.parse.unquote(target[1:]).split('/')[1:]:
      step = step.replace('~1', '/').replace('~0', '~')
      if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
        found = found[int(step)]
      elif isinstance(found, Mapping) and step in found:
        found = found[step]
      else:
        raise _refused(where, f'there is no {shown(target)}')
    return found

  def _enum(self, schema: Mapping[str, Any], where: str) -> str | None:
    values = schema['enum'] if 'enum' in schema else [schema['const']]
    if not isinstance(values, list) or not values:
      raise _refused(where, 'enum must be a list of values')
    types = _types_of(schema, where) if 'type' in schema else None
    kept = [each for each in values if types is None or _type_names(each) & set(types)]
    return either(list(dict.fromkeys(map(self._syntax.literal, kept)))) if kept else None

  def _alternatives(self, parts: Any, where: str, name: str) -> str | None:
    if not isinstance(parts, list) or not parts:
      raise _refused(where, f'{name} must be a list of schemas')
    if name == 'allOf' and len(parts) > 1:
      raise _refused(where, 'allOf of several schemas is not supported')
    if name == 'oneOf':
      # As far as types and listed values tell. A tag is always written, also one that has a default.
      resolved = [self._resolved(part, where) for part in parts]
      for part in resolved:
        properties = part.get('properties') if isinstance(part, dict) else None
        if isinstance(properties, dict) and isinstance(required := part.get('required', []), list):
          self.narrower['within oneOf, properties of listed values are always there'] = None
          part['required'] = required + [
            name for name, own in properties.items() if _values(own) and name not in required
          ]
      pairs = itertools.combinations(resolved, 2)
      if not all(itertools.starmap(_are_apart, pairs)):
        raise _refused(where, 'oneOf is supported where types or constants tell the schemas apart; anyOf is')
    found = [self.value(part, f'{where}/{name}/{place}') for place, part in enumerate(parts)]
    kept = [regex for regex in found if regex is not None]
    return either(kept) if kept else None

  def _resolved(self, schema: Any, where: str) -> Any:
    """A schema, or what it refers to in a few steps."""
    for _ in range(_MOST_NESTED):
      target = schema.get('$ref') if isinstance(schema, Mapping) else None
      if not isinstance(target, str):
        break
      schema = self._part(target, where)
    return schema

  def _of_types(self, schema: Mapping[str, Any], where: str) -> str | None:
    if not schema:
      return self._any()
    write = {
      'object': self._object, 'array': self._array, 'string': self._string, 'integer': _integer, 'number': _number,
    }  # fmt: skip
    simple, found = self._syntax.simple, []
    for kind in _types_of(schema, where):
      own = {name: value for name, value in schema.items() if name in _KEYWORDS[kind]}
      found.append(simple[kind] if kind in simple else write[kind](own, where))
    kept = [regex for regex in found if regex is not None]
    return either(kept) if kept else None

  def _object(self, schema: Mapping[str, Any], where: str) -> str | None:
    required, more, space = schema.get('required', []), schema.get('additionalProperties', True), self._syntax.space
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
      raise _refused(where, 'required must be a list of names')
    if schema.get('unevaluatedProperties', True) not in (True, False):
      raise _refused(where, 'unevaluatedProperties of a schema is not supported')
    if 'properties' not in schema:
      if required:
        raise _refused(where, f'required names {shown(required[0])}, which properties does not describe')
      value = self.value(more, f'{where}/additionalProperties') if more is not True else self._any(ANY_DEPTH - 1)
      return rf'\{{{space}\}}' if value is None else self._syntax.any_object(value=value)
    properties = schema['properties']
    if not isinstance(properties, Mapping):
      raise _refused(where, 'properties must be an object')
    if missing := [name for name in required if name not in properties]:
      raise _refused(where, f'required names {shown(missing[0])}, which properties does not describe')
    if more is not False:
      self.narrower['objects have no properties but those that are named'] = None
    parts: list[tuple[str, bool]] = []
    for name, own in properties.items():
      regex = self.value(own, f'{where}/properties/{name}')
      if regex is not None:
        parts.append((f'{self._syntax.name(name)}:{space}{regex}', name in required))
      elif name in required:
        return None
    return rf'\{{{space}{_members(parts, space)}\}}'

  def _array(self, schema: Mapping[str, Any], where: str) -> str | None:
    (least, most), space = (_count(schema, name, where) for name in ('minItems', 'maxItems')), self._syntax.space
    if schema.get('uniqueItems') and (most is None or most > 1):
      raise _refused(where, 'uniqueItems is not supported')
    least = least or 0
    if most is not None and least > most:
      return None
    if 'prefixItems' in schema:
      parts = schema['prefixItems']
      if not isinstance(parts, list) or not least <= len(parts) <= (len(parts) if most is None else most):
        raise _refused(where, 'prefixItems must be a list of as many schemas as there may be items')
      each = [self.value(part, f'{where}/prefixItems/{place}') for place, part in enumerate(parts)]
      if any(regex is None for regex in each):
        return None
      return rf'\[{space}{f",{space}".join(map(str, each))}{space}\]'
    items = schema.get('items', True)
    if isinstance(items, list):
      raise _refused(where, 'items must be one schema; prefixItems has one for each place')
    item = self._any(ANY_DEPTH - 1) if items is True else self.value(items, f'{where}/items')
    if item is None and least:
      return None
    return rf'\[{space}{"" if item is None else self._syntax.listed(item, least, most)}\]'

  def _string(self, schema: Mapping[str, Any], where: str) -> str | None:
    if len(names := sorted({'pattern', 'format'} & set(schema))) + bool({'minLength', 'maxLength'} & set(schema)) > 1:
      raise _refused(where, f'{names[0]} beside another rule for strings is not supported')
    quote = self._syntax.quote
    if 'pattern' in schema:
      return self._pattern(schema['pattern'], where)
    if 'format' in schema:
      known = schema['format']
      if not isinstance(known, str) or known not in FORMATS:
        raise _refused(where, f'format {shown(known)} is not supported, of formats {", ".join(FORMATS)} are')
      if known in ('hostname', 'email'):
        self.narrower['hosts of more than 3 labels have labels of at most 31 characters, of more than 7 at most 15'] = (
          None
        )
      return f'{quote}{FORMATS[known]}{quote}'
    least, most = (_count(schema, name, where) for name in ('minLength', 'maxLength'))
    if least is None and most is None:
      return self._syntax.string
    if least is not None and most is not None and least > most:
      return None
    # The number of a character needs states of its own for every place.
    character = self._syntax.character if max(least or 0, most or 0) <= _MOST_NUMBERED else self._syntax.short
    return f'{quote}{character}{{{least or 0},{"" if most is None else most}}}{quote}'

  def _pattern(self, pattern: Any, where: str) -> str:
    if self._syntax is not JSON:
      raise _refused(where, 'pattern is supported in JSON alone')
    if not isinstance(pattern, str):
      raise _refused(where, f'pattern must be a text, got {shown(pattern)}')
    try:
      return found_in_json(pattern)
    except ValueError as error:
      raise _refused(where, f'in pattern {shown(pattern)} {error}') from None


def _integer(schema: Mapping[str, Any], where: str) -> str | None:
  bounds: dict[str, int] = {}
  for name in ('minimum', 'exclusiveMinimum', 'maximum', 'exclusiveMaximum'):
    if name in schema:
      value = schema[name]
      if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or abs(value) > 10**18:
        raise _refused(where, f'{name} of integers must be a whole number of at most 18 digits, got {shown(value)}')
      bounds[name] = int(value)
  lows = [bounds[name] + step for name, step in (('minimum', 0), ('exclusiveMinimum', 1)) if name in bounds]
  highs = [bounds[name] - step for name, step in (('maximum', 0), ('exclusiveMaximum', 1)) if name in bounds]
  return integers(max(lows, default=None), min(highs, default=None))


def _number(schema: Mapping[str, Any], where: str) -> str:
  if not set(schema) <= {'minimum'} or schema.get('minimum', 0) != 0:
    raise _refused(where, 'of bounds of numbers only minimum 0 is supported')
  return f'{"" if "minimum" in schema else "-?"}{NATURAL}{FRACTION}'


def _members(parts: Sequence[tuple[str, bool]], space: str) -> str:
  """The members of an object in their order; those that are not required may be left out."""
  places = [place for place, (_, is_required) in enumerate(parts) if is_required]
  behind = [f',{space}{regex}' if is_required else f'(?:,{space}{regex})?' for regex, is_required in parts]
  if places:
    first = places[0]
    before = [f'(?:{regex},{space})?' for regex, _ in parts[:first]]
    return ''.join([*before, parts[first][0], *behind[first + 1 :], space])
  each = [regex + ''.join(behind[place + 1 :]) for place, (regex, _) in enumerate(parts)]
  return f'(?:{either(each)}{space})?' if each else ''


def _refused(where: str, why: str) -> ValueError:
  return ValueError(f'the JSON schema at {shown(where)}: {why}')


def _only(schema: Mapping[str, Any], where: str, name: str, *others: str) -> None:
  if more := [other for other in schema if other not in (name, *others)]:
    raise _refused(where, f'{shown(more[0])} beside {name} is not supported')


def _count(schema: Mapping[str, Any], name: str, where: str) -> int | None:
  value = schema.get(name)
  if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_REPEATS):
    raise _refused(where, f'{name} must be a whole number from 0 to {_MOST_REPEATS}, got {shown(value)}')
  return value


def _types_of(schema: Mapping[str, Any], where: str) -> list[str]:
  """The types that a schema allows; without `type` the first that its keywords are about."""
  if 'type' not in schema:
    return [next(kind for kind, names in _KEYWORDS.items() if names & set(schema))]
  types = schema['type'] if isinstance(schema['type'], list) else [schema['type']]
  for kind in types:
    if not isinstance(kind, str) or kind not in _KEYWORDS:
      raise _refused(where, f'type must be one of {", ".join(_KEYWORDS)}, or a list of them, got {shown(kind)}')
  return list(dict.fromkeys(types))


def _type_names(value: Any) -> set[str]:
  if isinstance(value, bool):
    return {'boolean'}
  if isinstance(value, int) or (isinstance(value, float) and value == int(value)):
    return {'integer', 'number'}
  return {
    'number' if isinstance(value, float) else {str: 'string', list: 'array', dict: 'object'}.get(type(value), 'null')
  }


def _are_apart(one: Any, other: Any) -> bool:
  if not isinstance(one, Mapping) or not isinstance(other, Mapping):
    return False
  values = [_values(each) for each in (one, other)]
  if values[0] is not None and values[1] is not None:
    return not any(a == b for a in values[0] for b in values[1])
  types = [_spread(each) for each in (one, other)]
  if types[0] is not None and types[1] is not None and not types[0] & types[1]:
    return True
  first, second = (each['required'] if isinstance(each.get('required'), list) else [] for each in (one, other))
  own, others = (each.get('properties') for each in (one, other))
  if not isinstance(own, Mapping) or not isinstance(others, Mapping):
    return False
  shared = set(map(str, first)) & set(map(str, second))
  listed = [name for name in shared if None not in (_values(own.get(name)), _values(others.get(name)))]
  return any(_are_apart(own[name], others[name]) for name in listed)


def _values(schema: Any) -> list[Any] | None:
  """The values that a schema lists, or None."""
  if not isinstance(schema, Mapping):
    return None
  return schema['enum'] if isinstance(schema.get('enum'), list) else [schema['const']] if 'const' in schema else None


def _spread(schema: Mapping[str, Any]) -> set[str] | None:
  """The types of a schema, numbers as integers, too; None if it does not say."""
  if (values := _values(schema)) is not None:
    return set().union(*map(_type_names, values))
  if 'type' not in schema:
    return None
  types = set(map(str, schema['type'] if isinstance(schema['type'], list) else [schema['type']]))
  return types | ({'integer', 'number'} if types & {'integer', 'number'} else set())
