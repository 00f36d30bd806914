"""Ends of commands: in one line whatever goes wrong, quietly if nobody reads on, and with a traceback on demand."""

import os
import pathlib
import subprocess
import sys
import zlib

import pytest

from common.command_line import message_of

ROOT = pathlib.Path(__file__).parents[1]
_COMMAND = """
import os, sys
from absl import flags
from common import command_line, processes
WHAT = flags.DEFINE_string('what', '', 'Python to run.')
class PanicException(BaseException):
  pass
def main(argv):
  print('table')
  processes.run_together(lambda: exec(WHAT.value, globals()))
command_line.run(main)
"""


def _run(what, stdout=subprocess.PIPE, shell='', **env):
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **env}
  command = [sys.executable, '-c', _COMMAND, '--compilation_cache_dir=', f'--what={what}']
  if shell:
    command = ['bash', '-c', f'"$@" {shell}', 'bash', *command]
  return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=300, cwd=ROOT)


def _deep():
  _deep()


@pytest.mark.parametrize(
  ('fault', 'message'),
  [
    (lambda: {}['a'], "KeyError: 'a';"),
    (lambda: [][1], 'IndexError: list index out of range;'),
    (lambda: len(1), "TypeError: object of type 'int' has no len();"),
    (lambda: None.x, "AttributeError: 'NoneType' object has no attribute 'x';"),
    (lambda: float(10**400), 'OverflowError: int too large to convert to float;'),
    (_deep, 'RecursionError: maximum recursion depth exceeded'),
    (lambda: zlib.decompress(b'x'), 'error: Error -5'),
    (lambda: next(iter(())), 'StopIteration: ;'),
  ],
)
def test_a_fault_is_named_with_what_was_given(monkeypatch, fault, message):
  monkeypatch.setattr(sys, 'argv', ['x', '--a=1', '--b=2'])
  with pytest.raises(Exception) as caught:  # noqa: PT011 - any may come
    fault()
  line = message_of(caught.value)
  assert line.startswith(f'unexpected fault of the program, {message}')
  assert line.endswith('; given --a=1 --b=2; SPECTR_JAX_TRACEBACK=1 shows where it is')


def test_what_is_no_fault_is_not_called_so():
  assert message_of(ValueError()) == 'ValueError'
  assert message_of(ValueError('a')) == 'a'
  assert message_of(FileNotFoundError(2, 'No such file', 'x')) == 'x: No such file'
  for error in (MemoryError(), RuntimeError('RESOURCE_EXHAUSTED: Out of memory')):
    assert message_of(error).startswith('there is not enough memory; ')
  for error in (AssertionError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()):
    assert message_of(error) is None


@pytest.mark.parametrize(
  ('what', 'message'),
  [
    ('raise PanicException("a\\nb")', 'PanicException: a b;'),
    ('raise RuntimeError("x" * 10**6)', f'RuntimeError: {"x" * 297}...;'),
  ],
)
def test_a_fault_of_the_program_is_one_line(what, message):
  ran = _run(what)
  assert (ran.returncode, ran.stdout) == (1, 'table\n')
  (line,) = ran.stderr.splitlines()
  assert line.startswith(f'error: unexpected fault of the program, {message} given --compilation_cache_dir= --what=')
  assert len(line) < 1000


def test_tracebacks_are_shown_of_assertions_and_on_demand():
  on_demand = {'SPECTR_JAX_TRACEBACK': '1'}
  for what, env in (('assert 0', {}), ('{}["a"]', on_demand), ('int("x")', on_demand)):
    ran = _run(what, **env)
    assert ran.returncode == 1
    assert ran.stderr.startswith('Traceback')


def test_ends_that_are_no_errors():
  assert _run('sys.exit(3)').returncode == 3
  ran = _run('raise KeyboardInterrupt')
  assert (ran.returncode, ran.stderr) == (130, 'error: interrupted\n')


@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize(
  ('shell', 'err'),
  [
    ('> /dev/full', 'error: cannot write to the standard output: No space left on device\n'),
    ('>&-', 'error: cannot write to the standard output: it is closed\n'),
    ('| true; exit ${PIPESTATUS[0]}', ''),
  ],
)
def test_a_place_for_output_that_takes_nothing(tmp_path, unbuffered, shell, err):
  what = 'print("x" * 10**6)' if 'true' in shell else f'open("{tmp_path}/file", "w").write("whole")'
  ran = _run(what, shell=shell, PYTHONUNBUFFERED=unbuffered)
  assert (ran.returncode, ran.stderr) == (1, err)
  if 'true' not in shell:
    # With nothing buffered the first line fails, before anything is done.
    assert (tmp_path / 'file').exists() == (shell == '>&-' or not unbuffered)


def test_nowhere_to_complain_is_an_error_all_the_same():
  for shell in ('2> /dev/full', '2>&-', '> /dev/full 2> /dev/full'):
    assert _run('{}["a"]', shell=shell).returncode != 0
