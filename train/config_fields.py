"""The fields of an experiment for `--help`: names and defaults of its configuration, texts of its comments."""

from __future__ import annotations

import io
import pathlib
import re
import shlex
import tokenize
from collections.abc import Mapping
from typing import Any

from common.help_text import Entry, Section

ROOT = pathlib.Path(__file__).resolve().parents[1]
_BASE = ROOT / 'configs' / 'base.py'
_ASSIGNMENT = re.compile(r'\s*config\.(\w+) = ')


def _comments(source: str) -> tuple[dict[str, str], dict[str, str]]:
  """The texts of fields, and of groups by their first field.

  A comment behind an assignment is about that field. One on lines of its own is about the fields up to the next such
  comment or blank line.
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


def sections_of(config: Mapping[str, Any], path: str) -> list[Section]:
  """The fields of a configuration in the groups in which its file, or `configs/base.py`, has them.

  Args:
    config: The configuration.
    path: Its file, also with an argument for it behind a colon.
  """
  config = dict(config.items())
  (texts, groups), own = (
    _comments(file.read_text(encoding='utf-8')) for file in (_BASE, pathlib.Path(path.partition(':')[0]))
  )
  if texts.keys() <= config.keys():
    texts, groups = texts | {name: text for name, text in own[0].items() if text or name not in texts}, groups | own[1]
  else:
    texts, groups = own
  ordered = [name for name in texts if name in config] + [name for name in config if name not in texts]
  title = f'Fields, and what they are in {path.removeprefix(f"{ROOT}/")}'
  sections = [Section(title, groups.get(ordered[0], ''), [])] if ordered else []
  for name in ordered:
    if name in groups and name != ordered[0]:
      sections.append(Section('', groups[name], []))
    sections[-1].entries.extend(_entries(name, config[name], texts.get(name, '')))
  return sections
