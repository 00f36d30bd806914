"""What `--help` reads of flags, in the place of `absl.flags` where absl is not installed; nothing is parsed.

Names and arguments are those of absl, as far as commands use them before they run.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any


class Flag:
  """The definition of a flag, and what `DEFINE_...` returns.

  Attributes:
    name, default, help: As they were given.
    using_default_value: Whether the default is the value: True.
    parser: The object whose `enum_values` are the allowed values; None for a flag without a list of them.
  """

  using_default_value = True

  def __init__(self, kind: str, name: str, default: Any, help: str | None, enum_values: Any = None):
    self.name, self.default, self.help, self._kind = name, default, help, kind
    self.parser = types.SimpleNamespace(enum_values=enum_values)

  def flag_type(self) -> str:
    """The kind in absl's words."""
    return self._kind

  @property
  def value(self) -> Any:
    """The default."""
    return self.default


class _Flags(dict):
  """The flags by name."""

  def __init__(self):
    super().__init__()
    self._modules: dict[str, list[Flag]] = {}

  def add(self, flag: Flag) -> Flag:
    """Adds a flag to the module that defines it, the nearest caller that is no part of this project's `common`."""
    frame = sys._getframe(1)
    while frame.f_globals['__name__'] in (__name__, 'common.stand_ins'):
      frame = frame.f_back
    module = frame.f_globals['__name__']
    self[flag.name] = flag
    self._modules.setdefault(sys.argv[0] if module == '__main__' else module, []).append(flag)
    return flag

  def flags_by_module_dict(self) -> dict[str, list[Flag]]:
    """The flags of each module; those of the command's own under the name of the program."""
    return self._modules

  def set_default(self, name: str, default: Any) -> None:
    """Changes a default."""
    self[name].default = default


FLAGS = _Flags()
FlagHolder = Flag
Error = ValueError


def _define(kind: str, name: str, default: Any, help: str | None, **more: Any) -> Flag:
  del more  # bounds, and whether it is required
  return FLAGS.add(Flag(kind, name, float(default) if kind == 'float' and default is not None else default, help))


def _define_enum(kind: str, name: str, default: Any, enum_values: Any, help: str | None, **more: Any) -> Flag:
  del more
  return FLAGS.add(Flag(kind, name, default, help, list(enum_values)))


DEFINE_string = functools.partial(_define, 'string')
DEFINE_integer = functools.partial(_define, 'int')

DEFINE_float = functools.partial(_define, 'float')
DEFINE_bool = DEFINE_boolean = functools.partial(_define, 'bool')
DEFINE_list = functools.partial(_define, 'comma separated list of strings')
DEFINE_multi_string = functools.partial(_define, 'multi string')
DEFINE_config_file = functools.partial(_define, 'config object')
DEFINE_enum = functools.partial(_define_enum, 'string enum')
DEFINE_multi_enum = functools.partial(_define_enum, 'multi string enum')


def mark_flag_as_required(name: str) -> None:
  """Does nothing: `--help` requires no flag."""


mark_flags_as_required = adopt_module_key_flags = mark_flag_as_required
