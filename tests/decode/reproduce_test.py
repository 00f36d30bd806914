"""The papers' tables: what is measured stands beside what they print, and files hold all of it."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from decode import figures, published, table_report, tables
from decode.tables import TABLES, Request, Sizes, Value

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_SMALL = {
  'num_prompts': 2, 'num_seeds': 1, 'max_new_tokens': 6, 'batch_size': 1, 'num_runs': 3, 'context': 16,
}  # fmt: skip


def _sizes(name, **grid):
  used = TABLES[name].sizes.used
  return Sizes(**{size: value for size, value in (_SMALL | grid).items() if size in used})


def _measure(name, pair, prompts, **grid):
  drafts, prompts = {'tiny': pair['draft']}, {'HumanEval': str(prompts)}
  request = Request(target=pair['target'], drafts=drafts, prompts=prompts, sizes=_sizes(name, **grid))
  found = TABLES[name].measure(request, lambda *_: None)
  return request, found


def _check(name, request, found):
  """What must hold of every table; returns its JSON."""
  table = TABLES[name]
  lines = table_report.describe(table, request, found)
  assert {tuple(row) for row in found.rows} == {tuple(found.rows[0])}
  text = table_report.to_markdown(table, found.rows, lines)
  assert text.startswith(f'# {table.title}\n')
  assert len([line for line in text.splitlines() if line.startswith('| ')]) == len(found.rows) + 2
  assert any(line.startswith('reduced: ') for line in lines)
  assert any(request.target in line and '(0.0M, float32)' in line for line in lines)
  assert figures.draw(table, found.rows, '').startswith(b'\x89PNG')
  content = json.loads(table_report.to_json(name, table, request, found, lines))
  assert len(content['rows']) == len(found.rows)
  return content


@pytest.mark.usefixtures('quickly')
@pytest.mark.parametrize('name', ['spectr_table1', 'spectr_table3'])
def test_latency_is_relative_to_the_target(name, pair, prompt_file):
  request, found = _measure(name, pair, prompt_file, num_drafts=(1, 2), draft_length=(4, 3))
  _check(name, request, found)
  by_shape = {(row['length'], row['batch'], row['drafts as']): row for row in found.rows}
  assert list(by_shape) == [
    (4, 1, 'rows'),
    (4, 2, 'rows'),
    (4, 2, 'tree'),
    (3, 1, 'rows'),
    (3, 2, 'rows'),
    (3, 2, 'tree'),
  ]
  assert [row['tokens in the call'] for row in found.rows] == [5, 10, 9, 4, 8, 7]
  printed = published.TARGET_LATENCY if name == 'spectr_table1' else published.DRAFT_LATENCY
  for (length, batch, form), row in by_shape.items():
    figure = printed.get((length, batch)) if form == 'rows' else None
    assert row['paper'] == (Value(*figure) if figure else None)
  ratios = {row['milliseconds'].number / row['relative latency'].number for row in found.rows}
  np.testing.assert_allclose(list(ratios), next(iter(ratios)))
  if name == 'spectr_table1':
    assert by_shape[4, 1, 'rows']['relative latency'].number == pytest.approx(1)


@pytest.mark.usefixtures('quickly')
def test_comparison_stands_beside_the_set_of_the_same_name(pair, prompt_file, monkeypatch):
  monkeypatch.setattr(tables, 'GBV_METHODS', ('autoregressive', 'speculative'))
  request, found = _measure('gbv_table1', pair, prompt_file, num_drafts=(3,), draft_length=(8, 2))
  content = _check('gbv_table1', request, found)
  rows = {(row['L'], row['method']): row for row in found.rows}
  assert list(rows) == [(8, 'autoregressive'), (8, 'speculative'), (2, 'autoregressive'), (2, 'speculative')]
  row = rows[8, 'speculative']
  assert row['paper: on'] == 'DeepSeek-6.7B, HumanEval'
  assert (str(row['paper: tokens per call']), str(row['paper: speed-up'])) == ('7.06 ± 0.91', '1.19 ± 0.15')
  assert 1 <= row['tokens per call'].number <= 9
  assert row['speed-up'].spread > 0
  assert rows[8, 'autoregressive']['speed-up'].number == 1
  assert rows[2, 'speculative']['paper: tokens per call'] is None
  assert content['runs'][0]['num_prompts'] == 2
  assert 'num_prompts 2 instead of 1000' in content['about'][4]


@pytest.mark.usefixtures('quickly')
def test_the_breakdown_adds_up_and_is_compared(pair, prompt_file, monkeypatch):
  monkeypatch.setattr(tables, 'DRAFTING_METHODS', ('speculative', 'block'))
  request, found = _measure('gbv_table5', pair, prompt_file, num_drafts=(1,), draft_length=(8,))
  _check('gbv_table5', request, found)
  here = {row['method']: row for row in found.rows if row['of'] == 'here'}
  assert list(here) == ['speculative', 'block', 'block to speculative']
  for method in ('speculative', 'block'):
    row = here[method]
    parts = sum(row[part].number for part in ('draft', 'target', 'verification', 'rest'))
    assert parts == pytest.approx(row['total'].number)
    assert min(row[part].number for part in ('draft', 'target', 'verification', 'total')) > 0
    assert 1 <= row['rounds'].number <= 6
  change = here['block']['rounds'].number / here['speculative']['rounds'].number - 1
  assert here['block to speculative']['rounds'] == f'{100 * change:+.1f}%'
  printed = {row['method']: row for row in found.rows if row['of'] == 'paper: DeepSeek-6.7B, HumanEval'}
  assert printed['spectr_gbv (not lossless) to spectr']['rounds'] == '-3.0%'  # as the paper has it


@pytest.mark.slow
@pytest.mark.parametrize('name', TABLES)
def test_every_table_is_measured_whole(name, pair, prompt_file):
  grid = {'spectr_table4': {}, 'gbv_figure2': {'num_drafts': (1, 3)}}.get(name, {})
  defaults = TABLES[name].sizes
  grid = {'num_drafts': defaults.num_drafts, 'draft_length': defaults.draft_length} | grid
  request, found = _measure(name, pair, prompt_file, **grid)
  content = _check(name, request, found)
  if not name.endswith(('table1', 'table3')) or name.startswith('gbv'):
    methods = {row['method'] for row in content['rows']}
    assert 'race_block' in methods
    assert ('spectr_gbv (not lossless)' in methods) == name.startswith('gbv')
    assert any('does not keep the law' in line for line in content['about']) == name.startswith('gbv')
  # Whatever the paper prints of the grid stands there.
  printed = {
    'spectr_table1': 8, 'spectr_table2': 9, 'spectr_table3': 8, 'spectr_table4': 9, 'gbv_table1': 10, 'gbv_table2': 20,
    'gbv_table4': 20, 'gbv_figure2': 4,
  }  # fmt: skip
  if name in printed:
    column = next(column for column in content['rows'][0] if column.startswith('paper'))
    assert sum(row[column] is not None for row in content['rows']) == printed[name]


def test_values_have_the_digits_they_need():
  assert [str(Value(*x)) for x in [(2.345, 0.06), (0.0123, 0.001), (0.5,), (0.0,), (-0.0312,)]] == [
    '2.35 ± 0.06', '0.012 ± 0.001', '0.50', '0.00', '-0.031'
  ]  # fmt: skip


def test_one_draft_where_one_is_meant(pair):
  request = Request(target='t', drafts={'a': 'x', 'b': 'y'}, prompts={}, sizes=Sizes())
  with pytest.raises(ValueError, match='this table has one draft, got a, b'):
    _ = request.draft


def _run(*arguments):
  env = {**os.environ, 'PYTHONPATH': str(_REPOSITORY), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-m', 'decode.reproduce', *map(str, arguments)]
  return subprocess.run(command, cwd=_REPOSITORY, env=env, capture_output=True, text=True, timeout=600)


def test_the_command_writes_all_three_files(pair, prompt_file, tmp_path):
  sizes = '--num_drafts=1', '--draft_length=2', '--num_runs=2', '--context=8'
  models = [f'--{role}={path}' for role, path in pair.items()]
  ran = _run('--table=spectr_table1', *models, *sizes, f'--output={tmp_path / "out"}')
  assert ran.returncode == 0, ran.stderr
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
    f'spectr_table1.{kind}' for kind in ('json', 'md', 'png')
  ]
  assert 'reduced: num_runs 2 instead of 1000' in ran.stdout


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--table=gbv_table3'], 'error: table must be one of spectr_table1,'),
    (['--table=spectr_table1', '--num_seeds=3'], 'error: num_seeds is not for this table, whose sizes are num_runs'),
    (['--table=gbv_table1', '--prompts=HumanEval=/nowhere.jsonl'], 'error: cannot read prompts from /nowhere.jsonl'),
  ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path):
  kept = tmp_path / 'gbv_table1.json'
  kept.write_text('kept')
  ran = _run(*arguments, f'--output={tmp_path}')
  assert ran.returncode == 1
  errors = [line for line in ran.stderr.splitlines() if not line.startswith('[')]
  assert len(errors) == 1
  assert errors[0].startswith(message)
  assert kept.read_text() == 'kept'
  assert [path.name for path in tmp_path.iterdir()] == ['gbv_table1.json']
