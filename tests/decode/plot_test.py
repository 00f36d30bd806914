"""Pictures of results."""

import io
import json
import pathlib
import re

import commands
import pytest
from matplotlib import image

from decode import plot
from decode.study import to_csv

_FIGURES = pathlib.Path(__file__).parents[2] / 'docs' / 'figures'


def _result(method, drafts, length, tokens, calls, speed, speedup, seed=0):
  return {
    'method': method, 'num_drafts': drafts, 'draft_length': length, 'tree': 'chains', 'seed': seed, 'tokens': tokens,
    'target_calls': calls, 'tokens_per_second': speed, 'speedup': speedup,
  }  # fmt: skip


_RESULTS = [
  _result('autoregressive', 0, 0, 100, 100, 50.0, 1.0),
  _result('block', 1, 8, 100, 25, 100.0, 2.0),
  _result('block', 1, 8, 300, 50, 50.0, 1.0, seed=1),
  _result('race_traversal', 4, 8, 100, 20, 75.0, 1.5),
]


@pytest.fixture
def results(tmp_path):
  path = tmp_path / 'results.json'
  path.write_text(json.dumps({'run': {}, 'results': _RESULTS}))
  return path


def test_points_are_settings_over_all_seeds(results):
  _, (alone, block, race) = plot.read_results(str(results))
  assert (alone['shape'], block['shape'], race['shape']) == ('', '1x8', '4x8')
  assert block['tokens_per_call'] == pytest.approx(400 / 75)
  assert block['tokens_per_second'] == pytest.approx(400 / 7)
  assert block['speedup'] == 1.5


def test_pictures_are_written(results, tmp_path):
  commands.succeed('decode.plot', results, f'--output={tmp_path / "a.svg"}')
  drawn = (tmp_path / 'a.svg').read_text()
  assert drawn.startswith('<?xml')
  assert '>race_traversal</text>' in drawn
  commands.succeed('decode.plot', results, results, f'--output={tmp_path / "b.png"}')
  assert image.imread(io.BytesIO((tmp_path / 'b.png').read_bytes())).shape[1] > 900


def test_wrong_arguments_and_mixed_files_are_one_line(results, tmp_path):
  assert 'from 1 to 12 files, 0 were given' in commands.refuse('decode.plot', '--output=a.svg')
  assert 'output must end in .png or .svg' in commands.refuse('decode.plot', results, '--output=a.pdf')
  before = results.read_text()
  line = commands.refuse('decode.main', 'results.json')
  assert 'unexpected argument' in line
  assert results.read_text() == before
  with pytest.raises(ValueError, match='not drawn together'):
    plot.picture_of([str(results), str(tmp_path / 'metrics.jsonl')], 'svg')


def _bars(picture):
  return picture.count('id="LineCollection_')


def test_intervals_are_bars_and_models_are_named(tmp_path):
  """Of two seeds the mean ends. A file without intervals has no bars."""
  given = [
    _RESULTS[1] | {'block_efficiency_ci95': [3.0, 5.0], 'speedup_ci95': [1.5, 2.6]},
    _RESULTS[2] | {'block_efficiency_ci95': [4.0, 8.0], 'speedup_ci95': [0.5, 1.4]},
    _RESULTS[3] | {'block_efficiency_ci95': [4.0, 6.0], 'speedup_ci95': None},
  ]
  models = {'target': {'path': 'some/target', 'num_params': 7_900_000}, 'draft': {'path': '$a_b$\x1b'}}
  path = tmp_path / 'a.json'
  path.write_text(json.dumps({'run': {'models': models}, 'results': given}))
  _, (block, race) = plot.read_results(str(path))
  assert (block['tokens_per_call_ci95'], block['speedup_ci95']) == ((3.5, 6.5), (1.0, 2.0))
  assert (race['tokens_per_call_ci95'], race['speedup_ci95']) == ((4.0, 6.0), None)
  drawn = plot.picture_of([str(path)], 'svg').decode()
  assert 'target some/target (7.9M), draft $a_b$\ufffd' in ' '.join(re.findall(r'<text[^>]*>(.*?)</text>', drawn))
  assert 'bars: 95%' in drawn
  assert _bars(drawn) == 3
  other = tmp_path / 'b.json'
  other.write_text(
    json.dumps({'results': [each | {'speedup_ci95': None, 'block_efficiency_ci95': None} for each in given]})
  )
  plain = plot.picture_of([str(other)], 'svg').decode()
  assert 'bars: 95%' not in plain
  assert _bars(plain) == 0
  both = plot.picture_of([str(path), str(other)], 'svg').decode()
  assert 'target some/target (7.9M)' in both.replace('\n', ' ')


def test_tables_of_values_are_read_as_results(tmp_path):
  intervals = dict.fromkeys(('speedup_ci95_low', 'speedup_ci95_high'), '')
  intervals |= {'block_efficiency_ci95_low': 2.5, 'block_efficiency_ci95_high': 4.5}
  rows = [{**result, **intervals, 'target': 'some/target', 'draft': ''} for result in _RESULTS]
  (tmp_path / 'r.csv').write_text(to_csv(rows))
  results = [result | {'block_efficiency_ci95': [2.5, 4.5]} for result in _RESULTS]
  (tmp_path / 'r.json').write_text(json.dumps({'results': results}))
  names, points = plot.read_results(str(tmp_path / 'r.csv'))
  assert names == 'target some/target'
  assert points == plot.read_results(str(tmp_path / 'r.json'))[1]
  commands.succeed('decode.plot', tmp_path / 'r.csv', tmp_path / 'r.json', f'--output={tmp_path / "a.png"}')


@pytest.mark.parametrize('name', ['ladder', 'methods', 'batch_fig3'])
def test_the_data_of_a_figure_gives_the_figure(name, tmp_path):
  path = _FIGURES / f'{name}.csv'
  assert plot.picture_of([str(path)], 'svg').decode() == (_FIGURES / f'{name}.svg').read_text()
  with pytest.raises(ValueError, match='drawn alone'):
    plot.picture_of([str(path)] * 2, 'svg')
  renamed = tmp_path / f'{name} of others.csv'
  renamed.write_text(path.read_text())
  assert plot.picture_of([str(renamed)], 'png') == plot.picture_of([str(path)], 'png')


_LOG = """{"step": 10, "train_loss": 3.5}
{"step": 20, "train_loss": 2.5, "held_out_loss": 2.75, "held_out_acceptance_1": 0.5, "held_out_acceptance_2": 0.25}
{"step": 20, "final_loss": 2.75}
"""


def test_curves_of_training(tmp_path):
  runs = [tmp_path / 'big' / 'metrics.jsonl', tmp_path / 'draft_log.jsonl']
  runs[0].parent.mkdir()
  runs[0].write_text(_LOG + '{"step": 30, "train_l')
  runs[1].write_text('{"step": 10, "train_loss": 3.5, "held_out_loss": NaN}\n')
  assert [metrics['step'] for metrics in plot.read_steps(str(runs[0]))] == [10, 20, 20]
  assert plot.read_steps(str(runs[1])) == [{'step': 10, 'train_loss': 3.5}]
  commands.succeed('decode.plot', *runs, f'--output={tmp_path / "a.svg"}')
  drawn = (tmp_path / 'a.svg').read_text()
  for label in ('big, training', 'big, held out', 'big, acceptance 2', 'draft_log, training'):
    assert f'>{label}</text>' in drawn
  assert 'draft_log, held out' not in drawn


_ALMOST = [_RESULTS[0], _RESULTS[1] | {'target_calls': 0}]
_COLUMNS = 'method,tokens,target_calls,tokens_per_second'


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('a.json', '{', 'is not JSON'),
    ('a.json', '[]', 'holds no results'),
    ('a.json', '{"results": []}', 'holds no results'),
    ('a.json', '{"results": [3]}', 'holds no results'),
    ('a.json', '{"results": [{"method": "block"}]}', "holds no results .KeyError: 'tokens'"),
    ('a.json', json.dumps({'results': _ALMOST}), 'holds no results .*division by zero'),
    ('a.json', json.dumps({'results': [_RESULTS[0] | {'method': None}]}), 'holds no results .AttributeError'),
    *(('a.csv', text, 'no table of results') for text in ('', 'x\n', 'a,b\n1,2,3\n', 'a,b\n1\n', '\x00', 'a' * 2**18)),
    ('a.csv', 'a,b\n1,2\n', 'neither results nor the data of a figure, .*ladder'),
    ('a.csv', f'{_COLUMNS}\nspectr,1,0,2\n', 'holds no results .*division by zero'),
    ('a.csv', f'{_COLUMNS}\n3,1,1,2\n', 'holds no results .AttributeError'),
    ('ladder.csv', 'a,b\n1,2\n', 'is not the data of the figure ladder'),
    ('ladder.csv', 'method,nodes,shape,is best,low,high\nspectr,16,y,1,,\n', 'not the data of the figure'),
    ('a.jsonl', '', 'holds no loss'),
    ('a.jsonl', '{"step": 1}\n', 'holds no loss'),
    ('a.jsonl', '{"step": 1, "train_loss": 2}\n3\n', 'is not of a training'),
    ('a.jsonl', '{"step": "1", "train_loss": 2}\n', 'lines without a step'),
    ('a.jsonl', '\xff\n', 'is damaged: byte 0 is not UTF-8'),
    ('a.jsonl', ' ' * 2**20 + '\n', 'is not of a training .line 1 of'),
  ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_text(content, encoding='latin-1')
  with pytest.raises(ValueError, match=message):
    plot.picture_of([str(path)], 'svg')
