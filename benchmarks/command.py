"""What the commands of this folder share: flags that are options of decoding, lists of numbers, and results as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from absl import flags

from common import command_line
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import describe_machine

_FIELDS = {field.name: field for field in dataclasses.fields(DecodeOptions)}
_DEFINE = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer}


def define_options(*names: str, **defaults: Any) -> Callable[..., DecodeOptions]:
  """Defines fields of `DecodeOptions` as flags, of which `names` keep their defaults; returns what reads them, with
  further fields as keyword arguments.
  """
  own = {name: _FIELDS[name].default for name in names} | defaults
  holders = [
    _DEFINE.get(type(default), flags.DEFINE_string)(name, default, _FIELDS[name].metadata['help'])
    for name, default in own.items()
  ]
  return lambda **more: DecodeOptions(**{holder.name: holder.value for holder in holders} | more)


def define_numbers(name: str, default: str, text: str, kind=int, *, least: float = 1) -> Callable[[], tuple]:
  """Defines a flag that is a list of numbers, and returns what reads them, see `command_line.parse_numbers`."""
  holder = flags.DEFINE_list(name, default, text)
  return lambda: command_line.parse_numbers(name, holder.value, kind, least=least)


def define_output() -> flags.FlagHolder:
  return flags.DEFINE_string('output', None, 'JSON file for the results.')


def to_json(results: list[dict[str, Any]], *, indent: int | None = 2, **flags: Any) -> str:
  """Results, with the flags and the machine that they depend on."""
  return json.dumps({'run': {'flags': flags, **describe_machine()}, 'results': results}, indent=indent) + '\n'
