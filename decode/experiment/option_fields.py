"""Options: fields of a record that the command line has as flags, and the values that they may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

# The values that a field may have, in words, and the test. NaN fails every test.
Rule = tuple[str, Callable[[Any], bool]]
AT_LEAST_0: Rule = 'finite and at least 0', lambda x: 0 <= x < math.inf
AT_LEAST_1: Rule = 'at least 1', lambda x: x >= 1


def one_of(words: str, *values: str) -> Rule:
  """The rule of a field that has one of some values; `words` names them."""
  return words, lambda x: x in values


def option(
  group: str, text: str, default: Any, *, is_repeated: bool = False, is_derived: bool = False, rule: Rule | None = None
) -> Any:
  """A field that the command line has as a flag of a group of `--help`.

  Values of a tuple are separated by commas, or given by repeating the flag if `is_repeated`. The default of one that
  `is_derived` depends on other options, so its flag has none. `rule` says which values the field may have besides None.
  """
  flag_default = None if is_derived else default
  metadata = {'group': group, 'help': text, 'is_repeated': is_repeated, 'flag_default': flag_default, 'rule': rule}
  return dataclasses.field(default=default, metadata=metadata)


def check_fields(record: Any) -> None:
  """Refuses values that the rules of their fields do not allow."""
  for field in dataclasses.fields(record):
    value, rule = getattr(record, field.name), field.metadata['rule']
    if rule is not None and value is not None and not rule[1](value):
      raise ValueError(f'{field.name} must be {rule[0]}, got {value!r}')
