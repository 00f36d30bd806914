"""The flag `--config=FILE.py[:ARGUMENT]` and its fields, `--config.field=value`: errors in one line, and `--help`."""

from __future__ import annotations

import io
import pathlib
import re
import shlex
import sys
import tokenize
from collections.abc import Sequence
from typing import Any

import ml_collections

from common import command_line
from common.config_file import load
from common.help_text import Entry, Section

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_BASE = _ROOT / 'configs' / 'base.py'
_ASSIGNMENT = re.compile(r'\s*config\.(\w+) = ')


def _given(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """The file that the arguments name as configuration, and the fields that they set."""
  path, fields = None, []
  for argument, following in zip(argv, [*argv[1:], '']):
    name, has_value, value = argument.partition('=')
    name = '-' + name.lstrip('-') if name.startswith('-') else ''
    if name == '-config':
      path = value if has_value else following
    elif name.startswith('-config.'):
      fields.append(name.removeprefix('-config.'))
  return path, fields


def check(argv: Sequence[str]) -> None:
  """Checks the configuration that arguments name, and the fields that they set, with a `ValueError`: absl prints
  tracebacks, or does not say which fields exist.
  """
  path, fields = _given(argv)
  if path is None:
    return
  config = load(path)
  for field in fields:
    place, *parents = config, *field.split('.')
    for i, part in enumerate(parents):
      if not isinstance(place, ml_collections.ConfigDict) or part not in place:
        where = '.'.join(['config', *parents[:i]])
        allowed = ', '.join(sorted(place)) if isinstance(place, ml_collections.ConfigDict) else 'none'
        raise ValueError(f'{where} has no field {part!r}; its fields: {allowed}')
      place = place[part]


def _comments(source: str) -> tuple[dict[str, str], dict[str, str]]:
  """The texts of fields, from the comments behind their assignments, and of groups by their first field: a comment on
  lines of its own is about the fields up to the next such comment or blank line.
  """
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  comments = {token.start[0]: token.string.lstrip('# ') for token in tokens if token.type == tokenize.COMMENT}
  texts, groups, block = {}, {}, []
  for number, line in enumerate(source.splitlines(), 1):
    if match := _ASSIGNMENT.match(line):
      texts[match[1]] = comments.get(number, '')
      if block:
        groups[match[1]], block = ' '.join(block), []
    elif line.lstrip().startswith('#'):
      block.append(comments.get(number, ''))
    elif not line.strip():
      block = []
  return texts, groups


def _entries(name: str, value: Any, text: str) -> list[Entry]:
  """The entry of a field, or those of the fields within it."""
  if hasattr(value, 'items'):
    return [entry for part, inner in sorted(value.items()) for entry in _entries(f'{name}.{part}', inner, '')]
  return [Entry(f'--config.{name}={shlex.quote(str(value))}', text, '')]


def sections_of(path: str) -> list[Section]:
  """The fields of `FILE[:ARGUMENT]` for `--help`, in the groups in which that file, or `configs/base.py`, has them.
  Names and values are those of the configuration, texts are the comments of the file.
  """
  config = dict(load(path).items())
  (texts, groups), own = (
    _comments(file.read_text(encoding='utf-8')) for file in (_BASE, pathlib.Path(path.partition(':')[0]))
  )
  if texts.keys() <= config.keys():
    texts, groups = texts | {name: text for name, text in own[0].items() if text or name not in texts}, groups | own[1]
  else:
    texts, groups = own
  ordered = [name for name in texts if name in config] + [name for name in config if name not in texts]
  title = f'Fields, and what they are in {path.removeprefix(f"{_ROOT}/")}'
  sections = [Section(title, groups.get(ordered[0], ''), [])] if ordered else []
  for name in ordered:
    if name in groups and name != ordered[0]:
      sections.append(Section('', groups[name], []))
    sections[-1].entries.extend(_entries(name, config[name], texts.get(name, '')))
  return sections


def run(main, examples: Sequence[str] = (), *, example: str = 'configs/base.py') -> None:
  """Runs a command by `command_line.run`, after `check` of its arguments; `--help` shows the fields of `example`, a
  file of this project, unless `--config` is given.
  """
  argv = sys.argv[1:]
  try:
    check(argv)
  except ValueError as error:
    command_line.print_error(str(error))
    sys.exit(1)
  command_line.run(main, examples, sections=lambda: sections_of(_given(argv)[0] or str(_ROOT / example)))
