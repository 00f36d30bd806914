"""`--help` of a command: what it does, examples, and its options in groups, as wide as the terminal."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Sequence

from absl import flags

from common import extras

_WIDEST, _NARROWEST = 100, 40
_INDENT = 24  # columns of an option and its value; what it does stands behind them, or below a longer one
_OWN = 'common.', 'decode.', 'train.', 'benchmarks.'
# Groups in the order in which they stand; flags of none are the command's own.
_ORDER = 'Options', 'Models', 'Method and tree', 'Prompts', 'Sampling', 'Measurements and output', 'Machine'
_VALUES = {
  'int': 'N', 'float': 'X', 'comma separated list of strings': 'A,B', 'config object': 'FILE', 'bool': '',
}  # fmt: skip
_groups: dict[str, str] = {}
_left_out: set[str] = set()
_singles: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Entry:
  """An option."""

  name: str  # with its value, as `--config.seed=0`
  what: str  # what it does
  default: str  # empty where help says nothing of it


@dataclasses.dataclass(frozen=True)
class Section:
  """Options that stand together."""

  title: str  # a line above them; may be empty
  text: str  # a sentence about all of them; may be empty
  entries: list[Entry]


def in_group(title: str, *holders: flags.FlagHolder) -> None:
  """Puts flags into a group of `--help`, one of `_ORDER`; others stand in the first one."""
  _groups.update((holder.name, title) for holder in holders)


def take_one(**values: str) -> None:
  """Shows flags of lists as if they took one value, which the text by the flag's name stands for."""
  _singles.update(values)


def leave_out(*names: str) -> None:
  """Keeps flags out of `--help`: those that other commands share and this one refuses, and rare ones, which
  `--helpfull` has.
  """
  _left_out.update(names)


def text_of(
  module: types.ModuleType,
  examples: Sequence[str],
  files: str = '',
  sections: Sequence[Section] = (),
  *,
  width: int | None = None,
) -> str:
  """The help of a command: the first sentence of its module's docstring, examples and options, those of `sections`
  beside flags. `files` stands for each of the files that may be named. Without a width that of the terminal counts,
  between 40 and 100 columns.
  """
  width = min(max(width or shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)
  command = f'python -m {module.__spec__.name}'
  what = re.split(r': `|\n\n', module.__doc__, maxsplit=1)[0]
  lines = [
    *textwrap.wrap(what.rstrip('.') + '.', width),
    '',
    f'  {command} {f"{files} ... " if files else ""}[--OPTION=VALUE ...]',
  ]
  if examples:
    lines += ['', 'Examples']
    for example in examples:
      lines += _wrapped(f'  {command} {example}'.rstrip(), width)
  for section in (*_sections_of_flags(), *sections):
    if section.entries:
      text = textwrap.wrap(section.text, width - 2, break_on_hyphens=False)
      lines += ['', *([section.title] if section.title else []), *(f'  {line}' for line in text)]
      lines += [line for entry in section.entries for line in _described(entry, width)]
  end = extras.lacks() or ['--helpfull says more of each option.']
  return '\n'.join([*lines, '', *(part for line in end for part in textwrap.wrap(line, width, break_on_hyphens=False))])


def _wrapped(command: str, width: int) -> list[str]:
  """A command in lines that a shell joins; it is broken before options."""
  lines = ['']
  for part in re.split(r' (?=--)', command):
    is_new = lines[-1] and len(lines[-1]) + len(part) + 3 > width
    lines[-1] += ' \\' if is_new else ''
    lines = [*lines, f'    {part}'] if is_new else [*lines[:-1], f'{lines[-1]} {part}' if lines[-1] else part]
  return lines


def _own_flags() -> list[flags.Flag]:
  """The flags of this project's modules in the order of their definition, those of the command's own module last."""
  by_module = flags.FLAGS.flags_by_module_dict()
  own = [members for name, members in by_module.items() if name.startswith(_OWN)]
  by_name = {flag.name: flag for members in (*own, by_module.get(sys.argv[0], [])) for flag in members}
  return [flag for name, flag in by_name.items() if name not in _left_out]


def _sections_of_flags() -> list[Section]:
  own = _own_flags()
  groups = {title: [flag for flag in own if _groups.get(flag.name, _ORDER[0]) == title] for title in _ORDER}
  return [Section(title, '', [_entry_of(flag) for flag in members]) for title, members in groups.items()]


def _entry_of(flag: flags.Flag) -> Entry:
  values = getattr(flag.parser, 'enum_values', None)
  value = '|'.join(values) if values else _singles.get(flag.name) or _VALUES.get(flag.flag_type(), 'TEXT')
  name = f'--{flag.name}={value}' if value else f'--[no]{flag.name}' if flag.default else f'--{flag.name}'
  what = _first_part(re.sub(r'^<[^>]*>: ', '', ' '.join((flag.help or '').split())))
  return Entry(name, what, '' if 'efault' in what else _default_of(flag))


def _described(entry: Entry, width: int) -> list[str]:
  name, what = f'  {entry.name}', f'{entry.what} [{entry.default}]'.strip() if entry.default else entry.what
  if not what:
    return [name]
  is_beside = len(name) < _INDENT and width > 2 * _INDENT
  indent = _INDENT if is_beside else 6
  lines = textwrap.wrap(what, width - indent, break_long_words=False, break_on_hyphens=False)
  lines = [' ' * indent + line for line in lines]
  return [f'{name:<{_INDENT}}{lines[0].strip()}', *lines[1:]] if is_beside else [name, *lines]


def _first_part(text: str) -> str:
  """A text up to its first full stop or semicolon."""
  return re.split(r'\.\s|;\s', text, maxsplit=1)[0].rstrip('.')


def _default_of(flag: flags.Flag) -> str:
  """The default as the command line has it; empty where it says nothing."""
  if flag.default is None or flag.default is False or flag.default in ('', []):
    return ''
  values = flag.default if isinstance(flag.default, list) else [flag.default]
  here = os.getcwd() + os.sep
  return 'on' if flag.default is True else ','.join(str(value).removeprefix(here) for value in values)
