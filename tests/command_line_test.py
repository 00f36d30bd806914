"""Options with structure: what their parsers read and what they refuse."""

import pathlib
import subprocess
import sys

import pytest

from common.command_line import parse_name_and_ints, parse_numbers, parse_paths, parse_sizes


@pytest.mark.parametrize(
  ('text', 'name', 'integers'),
  [
    ('specinfer', 'specinfer', ()),
    ('prefix:4', 'prefix', (4,)),
    ('prefix:4,2,2,1', 'prefix', (4, 2, 2, 1)),
    (' prefix : 4 ,2, 1 ', 'prefix', (4, 2, 1)),
    ('a-b_2:007', 'a-b_2', (7,)),
    ('chains:-1,+2', 'chains', (-1, 2)),  # the range is the business of who asked
    ('Chains:0', 'Chains', (0,)),
  ],
)
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


def test_commands_collect_garbage_rarely():
  code = 'import gc; from common import command_line; command_line.run(lambda argv: print(gc.get_threshold()[0]))'
  command = [sys.executable, '-c', code, '--compilation_cache_dir=']
  ran = subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
  assert (ran.stdout, ran.returncode) == ('50000\n', 0), ran.stderr
