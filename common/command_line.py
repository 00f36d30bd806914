"""Entry of every command, and parsers of options. Bad input ends in one line and a non-zero exit code, no traceback."""

from __future__ import annotations

import gc
import math
import re
import sys
from collections.abc import Callable, Iterable

from absl import app, flags, logging
from etils import epath

from common.compilation_cache import keep_compiled
from common.printable import printable

_NAME_AND_INTS = re.compile(r'\s*([a-z][\w-]*)\s*(?::(\s*[+-]?\d+\s*(?:,\s*[+-]?\d+\s*)*))?', re.ASCII | re.IGNORECASE)


def message_of(error: Exception) -> str:
  """The message about an error for users."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    return f'{error.filename}: {error.strerror}'
  return str(error)


def print_error(error: str) -> None:
  """Prints a message as one line on stderr."""
  print('error: ' + printable(' '.join(error.split())), file=sys.stderr, flush=True)


def _fail(message: str, code: int = 1) -> None:
  print_error(message)
  sys.exit(code)


def _print_any_text() -> None:
  """Lets a character that the terminal does not have print as another, and not end the run."""
  for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, 'reconfigure'):
      stream.reconfigure(errors='replace')


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    _fail(f'{error}; --helpfull lists all flags')
  # Users see log messages of libraries below ERROR only if they set --verbosity.
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.ERROR
  return rest


def _collect_rarely() -> None:
  """Makes garbage collection rare: tracing programs makes many objects, few of them in cycles."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 50)


def run(main: Callable[[list[str]], None]) -> None:
  """Runs a command under absl: parses flags, sets up the compilation cache and calls `main`.

  `ValueError`, `OSError` and `ImportError` end the process with one line and exit code 1.

  Args:
    main: Called with the arguments that are not flags: the program's name.
  """
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
      _collect_rarely()
      keep_compiled(cache_dir.value)
      main(argv)
    except (ValueError, OSError, ImportError) as error:  # a remote path may need a package that is not installed
      _fail(message_of(error))
    except KeyboardInterrupt:
      _fail('interrupted', 130)

  _print_any_text()
  app.run(guarded, flags_parser=_parse_flags)


def parse_numbers(name: str, texts: Iterable[str], kind: Callable[[str], float] = int, *, least: float = 1) -> tuple:
  """Parses the values of an option that is a list of numbers.

  Args:
    name: The option, for messages.
    texts: The texts between its commas.
    kind: int or float.
    least: The smallest valid number.

  Returns:
    The numbers, at least one.

  Raises:
    ValueError: There is none, or a text is not a finite number of at least `least`.
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
  """Parses the value of an option that is a name, or a name and integers, such as `chains:8,4`.

  Args:
    text: A name of letters, digits, `-` and `_` that begins with a letter, optionally followed by `:` and integers
      separated by commas. Spaces around the parts are ignored.

  Returns:
    The name, and the integers; no integers if there is no `:`.

  Raises:
    ValueError: `text` has another form.
  """
  match = _NAME_AND_INTS.fullmatch(text)
  if match is None:
    raise ValueError(f'expected name or name:integers, such as chains:8,4, got {text!r}')
  name, integers = match.groups()
  return name, tuple(int(integer) for integer in integers.split(',')) if integers else ()


def parse_sizes(text: str) -> dict[str, int]:
  """Parses the value of an option that gives every name one integer, such as `data:8,model:2`.

  Args:
    text: Pairs NAME:INTEGER, separated by commas.

  Returns:
    The integers by name.

  Raises:
    ValueError: `text` has another form or repeats a name.
  """
  sizes = {}
  for part in text.split(','):
    name, numbers = parse_name_and_ints(part)
    if len(numbers) != 1 or name in sizes:
      raise ValueError(f'expected names with one number each, such as data:8,model:2, got {text!r}')
    sizes[name] = numbers[0]
  return sizes


def parse_paths(name: str, texts: Iterable[str]) -> dict[str, str]:
  """Parses the values of an option that is a list of `PATH` or `NAME=PATH`.

  A path without a name is named after its last part without the file extension. `WORKDIR/model`, the directory of a
  trained model, is named after the part before the last.

  Args:
    name: The option, for messages.
    texts: The texts between its commas.

  Returns:
    The paths by name, at least one.

  Raises:
    ValueError: There is no path, a name or path is empty, or two paths have the same name.
  """
  texts = [text.strip() for text in texts]
  paths = {}
  for text in texts:
    label, is_named, path = text.partition('=')
    if not is_named or '/' in label:
      parts = epath.Path(text).parts
      last = parts[-2] if parts[-1:] == ('model',) and len(parts) > 1 else ''.join(parts[-1:])
      label, path = re.sub(r'(\.(jsonl?|tsv|txt))?(\.(gz|bz2))?$', '', last), text
    if not label or not path:
      raise ValueError(f'{name} must be paths, or NAME=PATH, separated by commas; got {",".join(texts)!r}')
    if label in paths:
      raise ValueError(f'{name}: {label} is there twice; give names, NAME=PATH')
    paths[label] = path
  if not paths:
    raise ValueError(f'{name} must be at least one path')
  return paths
