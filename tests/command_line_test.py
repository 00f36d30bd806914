"""Command lines: options with structure, ends of commands in one line, and text that cannot steer a terminal."""

import os
import subprocess
import sys
import unicodedata
import zlib

import pytest
from commands import ROOT

from common.command_line import message_of, parse_name_and_ints, parse_numbers, parse_paths, parse_sizes
from common.printable import printable


@pytest.mark.parametrize(('text', 'name', 'integers'), [
  ('specinfer', 'specinfer', ()),
  ('prefix:4', 'prefix', (4,)),
  ('prefix:4,2,2,1', 'prefix', (4, 2, 2, 1)),
  (' prefix : 4 ,2, 1 ', 'prefix', (4, 2, 1)),
  ('a-b_2:007', 'a-b_2', (7,)),
  ('chains:-1,+2', 'chains', (-1, 2)),  # the range is the business of who asked
  ('Chains:0', 'Chains', (0,)),
])  # fmt: skip
def test_name_and_ints(text, name, integers):
  assert parse_name_and_ints(text) == (name, integers)


_NO_NAME_AND_INTS = (
  '', ' ', ':', ':4', 'prefix:', 'prefix: ', 'prefix:,', 'prefix:4,', 'prefix:,4', 'prefix:4,,2', 'prefix:4 2',
  'prefix:4:2', 'prefix:4.0', 'prefix:1e3', 'prefix:1_000', 'prefix:- 1', 'prefix:\u0663', 'a:b', 'a b', 'a,b', '4',
  '4:4', '4,2', 'prefix\n:4\nx',
)  # fmt: skip


@pytest.mark.parametrize('text', _NO_NAME_AND_INTS)
def test_anything_else_is_refused_in_one_line(text):
  with pytest.raises(ValueError, match='expected name or name:integers, such as chains:8,4, got ') as caught:
    parse_name_and_ints(text)
  assert str(caught.value).endswith(repr(text))
  assert '\n' not in str(caught.value)


def test_numbers():
  assert parse_numbers('num_drafts', ['2', ' 8']) == (2, 8)
  assert parse_numbers('temperature', ['0', '0.5'], float, least=0) == (0.0, 0.5)
  for texts in ([], [''], ['x'], ['2', '0'], ['1.5'], ['-1']):
    with pytest.raises(ValueError, match='^num_drafts must be whole numbers of at least 1, separated by commas; got '):
      parse_numbers('num_drafts', texts)
  for text in ('nan', 'inf', '-0.1'):
    with pytest.raises(ValueError, match='temperature must be numbers of at least 0'):
      parse_numbers('temperature', [text], float, least=0)


def test_sizes():
  assert parse_sizes('data:8,model:2') == {'data': 8, 'model': 2}
  assert parse_sizes('data:-1') == {'data': -1}
  for text in ('', 'data', 'data:', 'data:8,8', 'data:8,data:2', 'data:8;model:2'):
    with pytest.raises(ValueError, match='expected name'):
      parse_sizes(text)


def test_paths_are_named():
  texts = ['a=x/y', 'runs/6m/model', 'sets/gsm8k.jsonl', ' HumanEval.jsonl.gz', 'draft-1.3b', 'runs/lr=0.1/model/']
  names = ['a', '6m', 'gsm8k', 'HumanEval', 'draft-1.3b', 'lr=0.1']
  paths = ['x/y', *(text.strip() for text in texts[1:])]
  assert parse_paths('draft', texts) == dict(zip(names, paths))
  for bad in ([], ['a='], ['x', 'x'], ['']):
    with pytest.raises(ValueError, match='draft'):
      parse_paths('draft', bad)


# Ends.

_COMMAND = """
import os, sys
from absl import flags
from common import command_line, processes
WHAT = flags.DEFINE_string('what', '', 'Python to run.')
class PanicException(BaseException):
  pass
def main():
  print('table')
  processes.run_together(lambda: exec(WHAT.value, globals()))
command_line.run(main)
"""


def _run(what, shell='', text=True, **env):
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **env}
  command = [sys.executable, '-c', _COMMAND, '--compilation_cache_dir=', f'--what={what}']
  if shell:
    command = ['bash', '-c', f'"$@" {shell}', 'bash', *command]
  return subprocess.run(command, capture_output=True, text=text, env=env, timeout=300, cwd=ROOT)


def _deep():
  _deep()


@pytest.mark.parametrize(('fault', 'message'), [
  (lambda: {}['a'], "KeyError: 'a';"),
  (lambda: [][1], 'IndexError: list index out of range;'),
  (lambda: len(1), "TypeError: object of type 'int' has no len();"),
  (lambda: None.x, "AttributeError: 'NoneType' object has no attribute 'x';"),
  (lambda: float(10**400), 'OverflowError: int too large to convert to float;'),
  (_deep, 'RecursionError: maximum recursion depth exceeded'),
  (lambda: zlib.decompress(b'x'), 'error: Error -5'),
  (lambda: next(iter(())), 'StopIteration: ;'),
])  # fmt: skip
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


@pytest.mark.parametrize(('what', 'message'), [
  ('raise PanicException("a\\nb")', 'PanicException: a b;'),
  ('raise RuntimeError("x" * 10**6)', f'RuntimeError: {"x" * 297}...;'),
])  # fmt: skip
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
@pytest.mark.parametrize(('shell', 'err'), [
  ('> /dev/full', 'error: cannot write to the standard output: No space left on device\n'),
  ('>&-', 'error: cannot write to the standard output: it is closed\n'),
  ('| true; exit ${PIPESTATUS[0]}', ''),
])  # fmt: skip
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


def test_garbage_is_collected_rarely():
  ran = _run('import gc; print(gc.get_threshold()[0])')
  assert (ran.stdout, ran.returncode) == ('table\n50000\n', 0), ran.stderr


# Text of models and files.


@pytest.mark.parametrize(('text', 'expected'), [
  ('a\x1b[31mb\x1b]0;title\x07', 'a\ufffd[31mb\ufffd]0;title\ufffd'),
  ('\x9b2J\x90q\x9c', '\ufffd2J\ufffdq\ufffd'),  # C1 controls
  ('right\rwrong\x08\x7f\x00', 'right\ufffdwrong\ufffd\ufffd\ufffd'),
  ('\u202eevil\u2066\u2069\u200e\ufeff\u00ad', '\ufffdevil' + 5 * '\ufffd'),
  ('\u2028\u2029\x85\x0b\x0c', 5 * '\ufffd'),
  ('\ud800\udcff\U000e0041', 3 * '\ufffd'),
  ('a\nb\tc', 'a\nb\tc'),
  ('字\u3000é\u00a0👩\u200d👧 مِی\u200cخواهم\U0001fae9', '字\u3000é\u00a0👩\u200d👧 مِی\u200cخواهم\U0001fae9'),
  ('', ''),
])  # fmt: skip
def test_what_steers_a_terminal_is_replaced(text, expected):
  assert printable(text) == expected
  assert ''.join(map(printable, text)) == expected


def test_no_control_of_all_characters_is_left():
  shown = printable(''.join(map(chr, range(0x110000))))
  left = {c for c in shown if unicodedata.category(c) in ('Cc', 'Cf', 'Cs')}
  assert left == {'\n', '\t', '\u200c', '\u200d'}
  assert len(shown) == 0x110000


def test_an_error_cannot_steer_the_terminal():
  for encoding in ('utf-8', 'ascii'):
    what = "raise ValueError('in \\x1b[2J\\r\\x9b \\u202e \\ud800\\n \\u5b57')"
    ran = _run(what, PYTHONIOENCODING=encoding, text=False)
    assert ran.returncode == 1
    assert ran.stderr == 'error: in \ufffd[2J \ufffd \ufffd \ufffd 字\n'.encode(encoding, 'replace')
