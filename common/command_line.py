"""How a command ends, bad input becomes one line and a non-zero exit code, never a traceback; and what options say."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable

from absl import app, flags, logging
from etils import epath

from common.compilation_cache import keep_compiled

_NAME_AND_INTS = re.compile(r'\s*([a-z][\w-]*)\s*(?::(\s*[+-]?\d+\s*(?:,\s*[+-]?\d+\s*)*))?', re.ASCII | re.IGNORECASE)


def message_of(error: Exception) -> str:
  """What to tell the user about an error."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    return f'{error.filename}: {error.strerror}'
  return str(error)


def _fail(message: str, code: int = 1) -> None:
  print('error: ' + ' '.join(message.split()), file=sys.stderr)
  sys.exit(code)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    _fail(f'{error}; --help lists the flags')
  # Unless asked for, what libraries log while they start is no business of the user's.
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.ERROR
  return rest


def run(main: Callable[[list[str]], None]) -> None:
  """Runs `main` under absl; bad input, which raises `ValueError` or `OSError`, ends it with one line and code 1."""
  cache_dir = flags.DEFINE_string(
    'compilation_cache_dir',
    None,
    "Where compiled programs are kept between runs; '' for nowhere. Default: $JAX_COMPILATION_CACHE_DIR, else"
    " spectr_jax in the user's cache directory.",
  )

  def guarded(argv):
    if len(argv) > 1:
      _fail(f'unexpected argument {argv[1]!r}; options are given as --name=value')
    try:
      keep_compiled(cache_dir.value)
      main(argv)
    except (ValueError, OSError, ImportError) as error:  # a remote path may need a package that is not there
      _fail(message_of(error))
    except KeyboardInterrupt:
      _fail('interrupted', 130)

  app.run(guarded, flags_parser=_parse_flags)


def parse_numbers(name: str, texts: Iterable[str], kind: Callable[[str], float] = int, *, least: float = 1) -> tuple:
  """The values of an option that is a list of numbers.

  Args:
    name: The option.
    texts: What stands between its commas.
    kind: int or float.
    least: What none may be below.

  Raises:
    ValueError: Something else stands there.
  """
  texts = list(texts)
  try:
    numbers = tuple(map(kind, texts))
    is_right = all(least <= number < math.inf for number in numbers) and numbers
  except ValueError:
    is_right = False
  if not is_right:
    what = 'whole numbers' if kind is int else 'numbers'
    raise ValueError(f'{name} must be {what} of at least {least}, separated by commas; got {",".join(texts)!r}')
  return numbers


def parse_name_and_ints(text: str) -> tuple[str, tuple[int, ...]]:
  """Parses the value of an option that is a name, or a name and integers: `chains:8,4`.

  Args:
    text: A name of letters, digits, `-` and `_` that begins with a letter; then maybe `:` and integers with commas
      between them. Spaces around the parts do not matter.

  Returns:
    The name and the integers, none if there is no `:`.

  Raises:
    ValueError: `text` has another form.
  """
  match = _NAME_AND_INTS.fullmatch(text)
  if match is None:
    raise ValueError(f'expected name or name:integers, such as chains:8,4, got {text!r}')
  name, integers = match.groups()
  return name, tuple(int(integer) for integer in integers.split(',')) if integers else ()


def parse_sizes(text: str) -> dict[str, int]:
  """Parses the value of an option that gives names a number each: `data:8,model:2`.

  Raises:
    ValueError: `text` has another form, or a name twice.
  """
  sizes = {}
  for part in text.split(','):
    name, numbers = parse_name_and_ints(part)
    if len(numbers) != 1 or name in sizes:
      raise ValueError(f'expected names with one number each, such as data:8,model:2, got {text!r}')
    sizes[name] = numbers[0]
  return sizes


def parse_paths(name: str, texts: Iterable[str]) -> dict[str, str]:
  """Paths by name, of a list of `PATH` or `NAME=PATH`.

  A path without a name is named after its last part, without what says how a file is written; of `WORKDIR/model`, where
  trained models stand, after the part before.

  Args:
    name: The option.
    texts: What stands between its commas.

  Raises:
    ValueError: There is none, one is empty, or two have one name.
  """
  texts = [text.strip() for text in texts]
  paths = {}
  for text in texts:
    label, is_named, path = text.partition('=')
    if not is_named or '/' in label:
      parts = epath.Path(text).parts
      last = parts[-2] if parts[-1:] == ('model',) and len(parts) > 1 else ''.join(parts[-1:])
      label, path = re.sub(r'(\.(jsonl?|tsv|txt))?(\.gz)?$', '', last), text
    if not label or not path:
      raise ValueError(f'{name} must be paths, or NAME=PATH, separated by commas; got {",".join(texts)!r}')
    if label in paths:
      raise ValueError(f'{name}: {label} is there twice; give names, NAME=PATH')
    paths[label] = path
  if not paths:
    raise ValueError(f'{name} must be at least one path')
  return paths
