"""The fields of `DecodeOptions` as flags, for the commands that take them."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from common import command_line, help_text
from decode.experiment.options import FIELDS, DecodeOptions
from spectr_jax.sampling import COUNTED

_DEFINE = {
  'str': flags.DEFINE_string,
  'int': flags.DEFINE_integer,
  'float': flags.DEFINE_float,
  'bool': flags.DEFINE_bool,
  'tuple[str, ...]': flags.DEFINE_list,
  'tuple[int, ...]': flags.DEFINE_list,
}


def _type_of(field: dataclasses.Field) -> str:
  """The annotated type of a field; for `T | None` it is T."""
  return field.type.removesuffix(' | None')


def _define(field: dataclasses.Field) -> None:
  define = flags.DEFINE_multi_string if field.metadata['is_repeated'] else _DEFINE[_type_of(field)]
  default = field.metadata['flag_default']
  default = list(map(str, default)) if isinstance(default, tuple) else default
  help_text.in_group(field.metadata['group'], define(field.name, default, field.metadata['help']))


for _field in FIELDS.values():
  _define(_field)
help_text.leave_out(*COUNTED, 'logit_bias', 'min_tokens', 'ignore_eos', 'bad_words', 'constraint_after')


def _value(field: dataclasses.Field) -> Any:
  value = flags.FLAGS[field.name].value  # None where a command took the default away
  if not isinstance(value, list):
    return value
  if field.name in ('stop', 'choice', 'bad_words'):  # blanks count
    return tuple(value)
  values = tuple(entry.strip() for entry in value)
  return values if _type_of(field) == 'tuple[str, ...]' else command_line.parse_numbers(field.name, values)


def read_values() -> dict[str, Any]:
  """The fields that were typed, or have a default of this command, by name."""
  values = {name: (_value(field), field.metadata['flag_default']) for name, field in FIELDS.items()}
  return {
    name: value
    for name, (value, default) in values.items()
    if flags.FLAGS[name].present or value not in (None, default)
  }


def read_options(**fixed) -> DecodeOptions:
  """The options that the flags give. Keyword arguments override flags."""
  return DecodeOptions.of(**read_values() | fixed)
