"""Options: fields of a dataclass that the command line has as flags, and the values that they may have."""

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


def option(group: str, text: str, default: Any, *, is_repeated: bool = False, rule: Rule | None = None) -> Any:
  """A field that the command line has as a flag of a group of `--help`.

  Values of a tuple are separated by commas, or given by repeating the flag if `is_repeated`. `rule` says which values
  the field may have besides None.
  """
  metadata = {'group': group, 'help': text, 'is_repeated': is_repeated, 'rule': rule}
  return dataclasses.field(default=default, metadata=metadata)


class Record:
  """Checks of single fields, which come before those of the records."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, rule = getattr(self, field.name), field.metadata['rule']
      if rule is not None and value is not None and not rule[1](value):
        raise ValueError(f'{field.name} must be {rule[0]}, got {value!r}')
