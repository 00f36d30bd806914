"""One-line errors for commands that take `--config=FILE.py[:ARGUMENT]` and its fields, `--config.field=value`."""

from __future__ import annotations

import train.needs  # noqa: F401  # isort: skip

import importlib.util
import sys
from collections.abc import Sequence

import ml_collections

from common import command_line
from train.config_fields import ROOT, sections_of


def load(path: str) -> ml_collections.ConfigDict:
  """The configuration that `get_config` of a file returns.

  Raises:
    ValueError: The file cannot be loaded; the message is one line.
  """
  name, *argument = path.split(':', 1)
  try:
    spec = importlib.util.spec_from_file_location('checked_config', name)
    if spec is None:
      raise ValueError('not a Python file')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*argument)
  except Exception as error:  # the file's code may raise anything
    raise ValueError(f'cannot load config {path}: {error}') from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise ValueError(f'cannot load config {path}: get_config returns {type(config).__name__}, not a ConfigDict')
  return config


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
  """Checks the configuration that the arguments name, and the fields that they set.

  absl checks them as well, but prints tracebacks, or does not say which fields exist.

  Raises:
    ValueError: The file cannot be loaded or a field does not exist; the message is one line.
  """
  path, fields = _given(argv)
  config = None if path is None else load(path)
  for field in fields if config is not None else ():
    place, *parents = config, *field.split('.')
    for i, part in enumerate(parents):
      if not isinstance(place, ml_collections.ConfigDict) or part not in place:
        where = '.'.join(['config', *parents[:i]])
        allowed = ', '.join(sorted(place)) if isinstance(place, ml_collections.ConfigDict) else 'none'
        raise ValueError(f'{where} has no field {part!r}; its fields: {allowed}')
      place = place[part]


def run(main, examples: Sequence[str] = (), *, example: str = 'configs/base.py') -> None:
  """Runs a command by `command_line.run`, after `check` of its arguments.

  Args:
    main, examples: As for `command_line.run`.
    example: The file of this project whose fields `--help` shows, unless `--config` is given.
  """
  argv = sys.argv[1:]

  def sections():
    path = _given(argv)[0] or str(ROOT / example)
    return sections_of(load(path), path)

  try:
    check(argv)
  except ValueError as error:
    sys.exit('error: ' + ' '.join(str(error).split()))
  command_line.run(main, examples, sections=sections)
