"""Entry of every command, and parsers of options. Bad input ends in one line and a non-zero exit code, no traceback."""

from __future__ import annotations

import errno
import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from absl import app, flags, logging
from etils import epath

from common import extras, help_text
from common.printable import printable
from spectr_jax import cache_programs

_NAME_AND_INTS = re.compile(r'\s*([a-z][\w-]*)\s*(?::(\s*[+-]?\d+\s*(?:,\s*[+-]?\d+\s*)*))?', re.ASCII | re.IGNORECASE)


# The variable of the environment with which errors end in tracebacks.
TRACEBACK = 'SPECTR_JAX_TRACEBACK'
_LONGEST = 300  # characters of an unexpected message, and of the arguments


def _cut(text: str) -> str:
  return text if len(text) <= _LONGEST else f'{text[: _LONGEST - 3]}...'


def message_of(error: BaseException) -> str | None:
  """The line about an error for users; None for one that is not for users: its traceback is shown, or it is no error.

  Bad input raises `ValueError`, `OSError` or `ImportError`. Anything else is a fault of the program, but for a lack of
  memory. Assertions, and with the variable `TRACEBACK` all errors, have tracebacks.

  Args:
    error: What ended the command.
  """
  if os.environ.get(TRACEBACK) or isinstance(error, AssertionError):
    return None
  kind = type(error).__name__
  if isinstance(error, OSError) and error.filename and error.strerror:
    return f'{error.filename}: {error.strerror}'
  if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):  # files have names
    return f'cannot write to the standard output: {error.strerror}'
  if isinstance(error, ValueError | OSError | ImportError):  # a remote path may need a package that is not installed
    return str(error) or kind
  # A panic of the tokenizers is no Exception. Its type can only be told by its name.
  if not isinstance(error, Exception) and kind != 'PanicException':
    return None
  given = f'given {_cut(" ".join(sys.argv[1:]))}; ' if sys.argv[1:] else ''
  if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error):
    return f'there is not enough memory; {given}{_cut(str(error)) or kind}'
  return f'unexpected fault of the program, {kind}: {_cut(str(error))}; {given}{TRACEBACK}=1 shows where it is'


def print_error(error: str) -> None:
  """Prints a message as one line on stderr."""
  print('error: ' + printable(' '.join(error.split())), file=sys.stderr, flush=True)


def _fail(message: str, code: int = 1) -> NoReturn:
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
    if missing := re.match(r'flag --(\w+)=None: Flag --\1 must have a value', str(error)):
      _fail(f'--{missing[1]} is missing; --help lists the options')
    _fail(f'{str(error).removesuffix(" ?")}; --help lists the options')
  except Exception as error:  # files of configurations are programs
    _end(error)
  # Users see log messages of libraries below ERROR only if they set --verbosity.
  if flags.FLAGS['verbosity'].using_default_value:
    flags.FLAGS.verbosity = logging.ERROR
  return rest


def _end_stdout() -> None:
  """Writes what was printed, or lets the interpreter not try it again."""
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere


def _end(error: BaseException) -> NoReturn:
  """Ends the command with one line about an error, or lets it go on if there is none."""
  _end_stdout()
  if isinstance(error, BrokenPipeError):  # whoever read the output wants no more
    sys.exit(1)
  message = message_of(error)
  if message is None:
    raise error
  _fail(message)


def _end_interrupted() -> NoReturn:
  """Ends an interrupted command at once: threads that still compile would outlive what Python takes down at its end."""
  _end_stdout()
  print_error('interrupted')
  os._exit(130)


def _collect_rarely() -> None:
  """Makes garbage collection rare: tracing programs makes many objects, few of them in cycles."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 50)


def run(
  main: Callable[..., None],
  examples: Sequence[str] = (),
  *,
  files: str = '',
  sections: Callable[[], Sequence[help_text.Section]] = tuple,
) -> None:
  """Runs a command under absl: parses flags, sets up the compilation cache and calls `main`.

  Errors end the process with one line and exit code 1, see `message_of`.

  Args:
    main: Called with the arguments that are not flags: files, if there may be some.
    examples: Arguments that `--help` shows, a line each.
    files: What stands for each of the files that may be named beside flags; empty if none may.
    sections: Makes what `--help` says of options that are no flags.
  """
  cache_dir = flags.DEFINE_string(
    'compilation_cache_dir',
    None,
    "Where compiled programs are kept between runs; '' for nowhere. Default: $JAX_COMPILATION_CACHE_DIR, else"
    " spectr_jax in the user's cache directory.",
  )
  help_text.in_group('Machine', cache_dir)
  if extras.is_help_asked_for(sys.argv[1:]):
    print(help_text.text_of(sys.modules['__main__'], examples, files, sections()))
    sys.exit(0)

  def guarded(argv):
    if len(argv) > 1 and not files:
      _fail(f'unexpected argument {argv[1]!r}; options are given as --name=value')
    has_stdout = sys.stdout is not None
    if not has_stdout:
      sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 - no file of the command may take its place
    try:
      _collect_rarely()
      cache_programs(cache_dir.value)
      main(*argv[1:])
      sys.stdout.flush()
    except KeyboardInterrupt:
      _end_interrupted()
    except SystemExit:
      raise
    except BaseException as error:  # a panic of the tokenizers is no Exception
      _end(error)
    if not has_stdout:
      _fail('cannot write to the standard output: it is closed')

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
