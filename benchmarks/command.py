"""What the commands of this folder share: flags that are options of decoding, lists of numbers, and results as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from absl import flags

from common import command_line
from decode.experiment.workload import describe_machine


def define_numbers(name: str, default: str, text: str, kind=int, *, least: float = 1) -> Callable[[], tuple]:
  """Defines a flag that is a list of numbers, and returns what reads them, see `command_line.parse_numbers`."""
  holder = flags.DEFINE_list(name, default, text)
  return lambda: command_line.parse_numbers(name, holder.value, kind, least=least)


def define_output() -> flags.FlagHolder:
  return flags.DEFINE_string('output', None, 'JSON file for the results.')


def to_json(results: list[dict[str, Any]], *, indent: int | None = 2, **flags: Any) -> str:
  """Results, with the flags and the machine that they depend on."""
  return json.dumps({'run': {'flags': flags, **describe_machine()}, 'results': results}, indent=indent) + '\n'
