"""The fields of `DecodeOptions` as flags, for the commands that take them."""

import dataclasses
import typing
from typing import Any

from absl import flags

from common import command_line, help_text
from decode.experiment.options import DecodeOptions

_TYPES = typing.get_type_hints(DecodeOptions)
_DEFINE = {
  str: flags.DEFINE_string,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  bool: flags.DEFINE_bool,
  tuple[str, ...]: flags.DEFINE_list,
  tuple[int, ...]: flags.DEFINE_list,
}


def _type(name: str):
  """The type of a field; for `T | None` it is T."""
  arguments = typing.get_args(_TYPES[name])
  return arguments[0] if type(None) in arguments else _TYPES[name]


def _define(field: dataclasses.Field) -> flags.FlagHolder:
  define = flags.DEFINE_multi_string if field.metadata['is_repeated'] else _DEFINE[_type(field.name)]
  default = list(map(str, field.default)) if isinstance(field.default, tuple) else field.default
  flag = define(field.name, default, field.metadata['help'])
  help_text.in_group(field.metadata['group'], flag)
  return flag


_FLAGS = tuple(map(_define, dataclasses.fields(DecodeOptions)))


def _value(flag):
  value = flags.FLAGS[flag.name].value  # None where a command took the default away
  if not isinstance(value, list):
    return value
  if flag.name == 'stop':  # blanks count
    return tuple(value)
  values = tuple(entry.strip() for entry in value)
  if _type(flag.name) == tuple[str, ...]:
    return values
  return command_line.parse_numbers(flag.name, values)


def read_values() -> dict[str, Any]:
  """The fields that the flags give, by name, without those that have no default in this command and are not given."""
  values = {flag.name: _value(flag) for flag in _FLAGS}
  return {name: value for name, value in values.items() if value is not None}


def read_options(**fixed) -> DecodeOptions:
  """The options that the flags give. Keyword arguments override flags.

  Raises:
    ValueError: A value is out of range.
  """
  return DecodeOptions(**read_values() | fixed)
