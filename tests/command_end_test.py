"""How commands end: in one line whatever goes wrong, quietly if nobody reads on, and with a traceback on demand."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
_COMMAND = """
import os, sys, zlib
from absl import flags
from common import command_line, processes
WHAT = flags.DEFINE_string('what', '', 'Python to run.')
class PanicException(BaseException):
  pass
def deep():
  deep()
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


@pytest.mark.parametrize(
  ('what', 'message'),
  [
    ('{}["a"]', "KeyError: 'a'"),
    ('[][1]', 'IndexError: list index out of range'),
    ('len(1)', "TypeError: object of type 'int' has no len()"),
    ('None.x', "AttributeError: 'NoneType' object has no attribute 'x'"),
    ('float(10**400)', 'OverflowError: int too large to convert to float'),
    ('deep()', 'RecursionError: maximum recursion depth exceeded'),
    ('zlib.decompress(b"x")', 'error: Error -5'),
    ('raise EOFError', 'EOFError: ;'),
    ('raise PanicException("a\\nb")', 'PanicException: a b'),
    ('raise RuntimeError("x" * 10**6)', f'RuntimeError: {"x" * 297}...;'),
  ],
)
def test_a_fault_of_the_program_is_one_line(what, message):
  ran = _run(what)
  assert (ran.returncode, ran.stdout) == (1, 'table\n')
  (line,) = ran.stderr.splitlines()
  assert line.startswith(f'error: unexpected fault of the program, {message}')
  assert 'given --compilation_cache_dir= --what=' in line
  assert line.endswith('SPECTR_JAX_TRACEBACK=1 shows where it is')
  assert len(line) < 1000


@pytest.mark.parametrize(
  ('what', 'line'),
  [
    ('raise ValueError', 'error: ValueError'),
    ('raise MemoryError', 'error: there is not enough memory; given '),
    ('raise RuntimeError("RESOURCE_EXHAUSTED: a\\nb")', 'error: there is not enough memory; given '),
    ('open("/nowhere/x")', 'error: /nowhere/x: No such file or directory'),
  ],
)
def test_what_is_no_fault_is_not_called_so(what, line):
  ran = _run(what)
  assert ran.returncode == 1
  assert ran.stderr.startswith(line)
  assert ran.stderr.count('\n') == 1


def test_tracebacks_are_shown_of_assertions_and_on_demand():
  for what, env in (
    ('assert 0', {}),
    ('{}["a"]', {'SPECTR_JAX_TRACEBACK': '1'}),
    ('int("x")', {'SPECTR_JAX_TRACEBACK': '1'}),
  ):
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
