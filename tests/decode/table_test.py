"""The papers' tables: measured values stand beside those that the papers print, and files hold all of it."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from exhibit_checks import request_of, rows_of
from matplotlib.figure import Figure

from decode import plots
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import Setting, expand
from decode.papers import exhibit, gbv_tables, published, spectr_tables
from decode.papers.exhibit import Request
from decode.papers.exhibits import TABLES
from decode.study import Value
from spectr_jax import METHODS, TokenTree

_SMALL = {
  'num_prompts': 2, 'num_seeds': 1, 'max_new_tokens': 6, 'batch_size': 1, 'num_runs': 3, 'context': 16,
}  # fmt: skip


def _request(name, pair, prompts, **grid):
  used = TABLES[name].sizes
  return request_of(name, pair, prompts, **{size: value for size, value in (_SMALL | grid).items() if size in used})


def _measure(name, pair, prompts, **grid):
  request = _request(name, pair, prompts, **grid)
  return request, TABLES[name].run(request, lambda *_: None)


def _check(name, request, results):
  """Checks the three files of a table; returns the JSON."""
  table = TABLES[name]
  rows, about = results.rows, table.describe(request, results)
  assert {tuple(row) for row in rows} == {tuple(rows[0])}
  files = table.files(name, request, results, about)
  assert list(files) == [f'{name}.{kind}' for kind in ('json', 'md', 'png', 'svg')]
  text = files[f'{name}.md']
  assert text.startswith(f'# {table.title}\n')
  assert len([line for line in text.splitlines() if line.startswith('| ')]) == len(rows) + 2
  assert any(line.startswith('reduced: ') for line in about)
  assert any(request.target in line and '(0.0M, float32)' in line for line in about)
  for path in request.prompts.values():
    assert any(line.startswith('prompts: ') and path in line for line in about)
  assert files[f'{name}.png'].startswith(b'\x89PNG')
  assert table.to_image(rows, ['$a_b$']).startswith(b'\x89PNG')
  assert b'$a_b$' in table.to_image(rows, ['$a_b$'], kind='svg')
  content = json.loads(files[f'{name}.json'])
  assert content['about'] == about
  assert len(content['rows']) == len(rows)
  assert rows_of(files[f'{name}.json']) == rows
  return content


@pytest.mark.parametrize('name', ['spectr_table1', 'spectr_table3'])
def test_latency_is_relative_to_the_target(name, pair, prompt_file):
  request, results = _measure(name, pair, prompt_file, num_drafts=(1, 2), draft_length=(4, 3))
  _check(name, request, results)
  by_shape = {(row['length'], row['batch'], row['drafts as']): row for row in results.rows}
  assert list(by_shape) == [
    (4, 1, 'rows'), (4, 2, 'rows'), (4, 2, 'tree'), (3, 1, 'rows'), (3, 2, 'rows'), (3, 2, 'tree'),
  ]  # fmt: skip
  assert [row['tokens in the call'] for row in results.rows] == [5, 10, 9, 4, 8, 7]
  printed = published.TARGET_LATENCY if name == 'spectr_table1' else published.DRAFT_LATENCY
  for (length, batch, form), row in by_shape.items():
    figure = printed.get((length, batch)) if form == 'rows' else None
    assert row['paper'] == (Value(*figure) if figure else None)
  ratios = {row['milliseconds'].number / row['relative latency'].number for row in results.rows}
  np.testing.assert_allclose(list(ratios), next(iter(ratios)))
  if name == 'spectr_table1':
    assert by_shape[4, 1, 'rows']['relative latency'].number == pytest.approx(1)


@pytest.mark.slow
def test_comparison_stands_beside_the_set_of_the_same_name(pair, prompt_file, tmp_path, monkeypatch):
  monkeypatch.setattr(gbv_tables, 'METHODS', ('autoregressive', 'speculative'))
  other = tmp_path / 'other.txt'
  other.write_text('seven wise owls\n')
  sets = {'humaneval': str(prompt_file), 'other': str(other)}
  request, results = _measure('gbv_table1', pair, sets, num_prompts=3, num_drafts=(3,), draft_length=(8, 2))
  content = _check('gbv_table1', request, results)
  rows = {(row['prompts'], row['L'], row['method']): row for row in results.rows}
  assert len(rows) == len(results.rows) == 3 * 2 * 2
  row = rows['humaneval', 8, 'speculative']
  assert (row['K'], row['paper: on']) == (1, 'DeepSeek-6.7B, HumanEval')
  assert (str(row['paper: block efficiency']), str(row['paper: speed-up'])) == ('7.06 ± 0.91', '1.19 ± 0.15')
  assert 1 <= row['block efficiency'].number <= 9
  low, high = row['speed-up'].interval
  assert 0 < low < row['speed-up'].number < high
  assert rows['humaneval', 8, 'autoregressive']['speed-up'] == Value(1.0)
  assert rows['humaneval', 2, 'speculative']['paper: block efficiency'] is None
  # One prompt says nothing of others.
  alone = rows['other', 8, 'speculative']
  assert alone['block efficiency'].spread is alone['speed-up'].interval is None
  assert alone['paper: on'] == 'DeepSeek-6.7B, Average'
  mean = rows['Average', 8, 'speculative']
  assert mean['block efficiency'].number == pytest.approx(
    (row['block efficiency'].number + alone['block efficiency'].number) / 2
  )
  assert mean['paper: speed-up'] == Value(1.05)
  assert [run['num_prompts'] for run in content['runs']] == [3, 1]
  assert any('num_prompts 1 instead of 1000' in line for line in content['about'])


@pytest.mark.slow
def test_the_breakdown_adds_up_and_is_compared(pair, prompt_file, monkeypatch):
  monkeypatch.setattr(gbv_tables, 'DRAFTING_METHODS', ('speculative', 'block'))
  grid = {'num_drafts': (1,), 'draft_length': (8,), 'num_prompts': 3, 'batch_size': 2, 'num_seeds': 2}
  runs = []
  real = exhibit.run_decode
  monkeypatch.setattr(exhibit, 'run_decode', lambda *args: runs.append(real(*args)) or runs[-1])
  request, results = _measure('gbv_table5', pair, prompt_file, **grid)
  _check('gbv_table5', request, results)
  here = {row['method']: row for row in results.rows if row['of'] == 'here'}
  assert list(here) == ['speculative', 'block', 'block to speculative']
  for method in ('speculative', 'block'):
    row = here[method]
    parts = sum(row[part].number for part in ('draft', 'target', 'verification', 'rest'))
    assert parts == pytest.approx(row['total'].number)
    assert min(row[part].number for part in ('draft', 'target', 'verification', 'total')) > 0
    # Per prompt, also where a batch holds several and the last is not full.
    own = [each for each in runs[0].measurements if each.setting.method.name == method]
    assert [len(each.batch_seconds) for each in own] == [2, 2]
    assert row['total'].number == pytest.approx(sum(each.batch_seconds.sum() for each in own) / 6)
    assert row['rounds'].number == pytest.approx(sum(each.num_target_calls.sum() for each in own) / 6)
  change = here['block']['rounds'].number / here['speculative']['rounds'].number - 1
  assert here['block to speculative']['rounds'] == f'{100 * change:+.1f}%'
  assert not any(row['of'].startswith('paper') for row in results.rows)  # that has three drafts


def test_published_numbers_stand_beside_three_drafts(monkeypatch):
  options = DecodeOptions.of(method=('autoregressive', 'speculative', 'spectr'), num_drafts=(3, 5), draft_length=(8,))
  settings = {(setting.method.name, setting.num_drafts): setting for setting in expand(options)}
  printed = {key: gbv_tables._is_printed(setting) for key, setting in settings.items()}
  assert printed == {('autoregressive', 0): True, ('speculative', 1): True, ('spectr', 3): True, ('spectr', 5): False}
  measured = {'block efficiency': Value(2.0), 'speed-up': Value(1.0)}
  _, *figures = gbv_tables.compare_sets('GSM8K', 8)
  beside = {k: gbv_tables._beside(settings['spectr', k], measured, figures) for k in (3, 5)}
  assert beside[3]['paper: block efficiency'] == Value(6.55, 0.58)
  assert beside[5]['paper: block efficiency'] is None
  columns = dict.fromkeys(published.BREAKDOWN_COLUMNS, Value(0.0))
  setting = Setting(METHODS['spectr'], num_drafts=3, draft_length=8, tree=TokenTree.chains(3, 8))
  run = SimpleNamespace(prompts=[1], settings=[setting], summarize=lambda setting: None)
  monkeypatch.setattr(gbv_tables, 'decode_sets', lambda *args, **options: [('gsm8k', run)])
  monkeypatch.setattr(gbv_tables, '_breakdown', lambda *args: columns)
  request = Request(target='t', drafts={'d': 'd'}, prompts={}, sizes={'num_seeds': 1})
  rows = {(row['of'], row['method']): row for row in TABLES['gbv_table5'].measure(request, None).rows}
  assert list(rows)[0] == ('here', 'spectr')
  assert rows['paper: DeepSeek-6.7B, GSM8K', 'spectr']['rounds'] == Value(79.27)
  assert rows['paper: DeepSeek-6.7B, GSM8K', 'spectr_gbv to spectr']['rounds'] == '-1.5%'  # as the paper has it
  assert set(_GRIDS) | {'spec_bench'} == set(TABLES)


def test_values_changes_and_error_bars():
  assert gbv_tables._change(Value(1.0), Value(0.0)) is None
  assert gbv_tables._change(Value(1.0), Value(-2.0)) is None
  assert gbv_tables._change(Value(1.0), Value(2.0)) == '-50.0%'
  below, above = plots._errors([Value(2.0, 0.5), Value(2.0, interval=(1.8, 2.4)), Value(2.0), None])
  np.testing.assert_allclose(below, [0.5, 0.2, np.nan, np.nan])
  np.testing.assert_allclose(above, [0.5, 0.4, np.nan, np.nan])
  values = (2.345, 0.06), (0.0123, 0.001), (0.5,), (0.0,), (-0.0312,), (1.0, None, (0.9, 1.125))
  assert [str(Value(*x)) for x in values] == [
    '2.35 ± 0.06', '0.012 ± 0.001', '0.50', '0.00', '-0.031', '1.00 (0.90 to 1.12)'
  ]  # fmt: skip


def test_drafts_are_compared_by_name(pair, prompt_file, monkeypatch):
  monkeypatch.setattr(spectr_tables, 'METHODS', ('speculative',))
  request = _request('spectr_table4', pair, prompt_file, num_drafts=(1,), draft_length=(4,))
  request = dataclasses.replace(request, drafts={'20m': pair['draft'], 'tiny': pair['draft']})
  results = TABLES['spectr_table4'].run(request, lambda *_: None)
  _check('spectr_table4', request, results)
  named, other = results.rows
  assert str(named['paper']) == str(named['paper: 20M']) == '2.71 ± 0.01'
  assert other['paper'] is None
  assert str(other['paper: 2M']) == '1.86 ± 0.02'


def test_what_is_wrong_is_found_before_anything_is_measured(pair, prompt_file, tmp_path, monkeypatch, save_tiny_model):
  monkeypatch.setattr(exhibit, 'run_decode', None)
  long = tmp_path / 'long.txt'
  long.write_text('owl ' * 200 + '\n')
  stranger = save_tiny_model(
    tmp_path / 'stranger',
    0,
    'quite another text, whose forty words few judges know: dozens of quick foxes jump by a lazy moving zebra ' * 9,
  )
  for drafts, prompts, message in (
    ({'a': pair['draft'], 'b': str(tmp_path)}, {}, 'no model at'),
    ({'a': pair['draft'], 'b': stranger}, {}, 'must share a tokenizer'),
    ({'a': pair['draft']}, {'x': str(prompt_file), 'y': '/nowhere.txt'}, 'cannot read prompts from /nowhere.txt'),
    ({'a': pair['draft']}, {'x': str(prompt_file), 'y': str(long)}, 'long.txt, line 1: .* too long'),
  ):
    request = dataclasses.replace(_request('spectr_table4', pair, prompts), drafts=drafts)
    with pytest.raises(ValueError, match=message):
      TABLES['spectr_table4'].run(request, lambda *_: None)
  several = {'a': pair['draft'], 'b': pair['draft']}
  request = dataclasses.replace(_request('gbv_table1', pair, prompt_file), drafts=several)
  with pytest.raises(ValueError, match='this table has one draft, got a, b'):
    TABLES['gbv_table1'].run(request, None)


def test_lines_stand_for_what_differs():
  panel = TABLES['gbv_table2'].panels[0]
  cells = {'block efficiency': Value(2.0, 0.1), 'paper: block efficiency': None}
  rows = [
    {'prompts': prompts, 'method': method, 'K': 3, 'L': length, **cells}
    for prompts in ('a', 'b') for method in ('spectr', 'race_block') for length in (8, 4)
  ]  # fmt: skip
  groups = plots._groups(rows, panel)
  assert [group.name for group in groups] == ['a, spectr', 'a, race_block', 'b, spectr', 'b, race_block']
  assert groups[0].color == groups[2].color != groups[1].color
  assert groups[0].look != groups[2].look
  figure = Figure()
  axes = figure.subplots()
  plots._draw_errors(axes, panel, rows)
  drawn = [line for line in axes.get_lines() if len(line.get_xdata()) == 2 and line.get_marker() in 'os']
  assert len(drawn) == 4
  assert all(list(line.get_xdata()) == [4, 8] for line in drawn)
  panel = TABLES['gbv_figure2'].panels[0]
  labels = {1: 'spectr_gbv', 3: 'spectr_gbv (not lossless)', 5: 'spectr_gbv (not lossless)'}
  rows = [
    {'prompts': 'a', 'temperature': 0.4, 'method': method, 'K': k, 'L': 12, 'accepted': Value(0.5)}
    for k in labels for method in (labels[k], 'spectr')
  ]  # fmt: skip
  groups = plots._groups(rows, panel)
  assert [(group.name, len(group.rows)) for group in groups] == [('spectr_gbv (not lossless)', 3), ('spectr', 3)]


# K and L to run, and how many published figures there are for them. Tables share what is compiled.
_GRIDS = {
  'spectr_table1': ((1, 2, 4, 8), (4, 8), 8), 'spectr_table2': ((2,), (4, 8), 5),
  'spectr_table3': ((1, 2, 4, 8), (4, 8), 8), 'spectr_table4': ((2,), (4, 8), 5), 'gbv_table1': ((3,), (12, 8), 10),
  'gbv_table2': ((3,), (12,), 5), 'gbv_table4': ((3,), (8,), 5), 'gbv_figure2': ((1, 3), (12,), 2),
  'gbv_table5': ((3,), (12, 8), None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('name', _GRIDS)
def test_every_table_is_measured_with_all_methods(name, pair, prompt_file):
  num_drafts, draft_length, num_printed = _GRIDS[name]
  request, results = _measure(name, pair, prompt_file, num_drafts=num_drafts, draft_length=draft_length)
  content = _check(name, request, results)
  if TABLES[name].has_prompts:
    methods = {row['method'] for row in content['rows']}
    assert {'race_block', 'race_traversal'} <= methods
    assert ('spectr_gbv (not lossless)' in methods) == name.startswith('gbv')
    assert any('does not keep the distribution' in line for line in content['about']) == name.startswith('gbv')
  # Whatever the paper prints of the grid stands there.
  if num_printed is not None:
    columns = [column for column in content['rows'][0] if column.startswith('paper')]
    column = columns[1 if name in ('spectr_table2', 'spectr_table4') else 0]  # the first is of drafts of that name
    assert sum(row[column] is not None for row in content['rows']) == num_printed
