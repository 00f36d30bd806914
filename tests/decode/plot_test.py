"""Pictures of results."""

import io
import json

import commands
import pytest
from matplotlib import image

from decode import plot, training_curves


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
  alone, block, race = plot.read_points(str(results))
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


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{', 'is not JSON'),
    ('[]', 'holds no results'),
    ('{"results": []}', 'holds no results'),
    ('{"results": [3]}', 'result 1 lacks tokens, target_calls, tokens_per_second'),
    (json.dumps({'results': [_RESULTS[0], _RESULTS[1] | {'target_calls': 0}]}), 'result 2 lacks'),
    (json.dumps({'results': [_RESULTS[0] | {'method': None}]}), 'result 1 names no method'),
  ],
)
def test_other_files_are_refused(tmp_path, content, message):
  path = tmp_path / 'results.json'
  path.write_text(content)
  with pytest.raises(ValueError, match=message):
    plot.read_points(str(path))


def test_wrong_arguments_are_one_line(results, tmp_path):
  assert 'from 1 to 12 files, 0 were given' in commands.refuse('decode.plot', '--output=a.svg')
  assert 'output must end in .png or .svg' in commands.refuse('decode.plot', results, '--output=a.pdf')
  before = results.read_text()
  line = commands.refuse('decode.main', 'results.json')
  assert 'unexpected argument' in line
  assert results.read_text() == before


_LOG = """{"step": 10, "train_loss": 3.5}
{"step": 20, "train_loss": 2.5, "held_out_loss": 2.75, "held_out_acceptance_1": 0.5, "held_out_acceptance_2": 0.25}
{"step": 20, "final_loss": 2.75}
"""


def test_curves_of_training(tmp_path):
  runs = [tmp_path / 'big' / 'metrics.jsonl', tmp_path / 'draft_log.jsonl']
  runs[0].parent.mkdir()
  runs[0].write_text(_LOG + '{"step": 30, "train_l')
  runs[1].write_text('{"step": 10, "train_loss": 3.5, "held_out_loss": NaN}\n')
  assert [found['step'] for found in training_curves.read_steps(str(runs[0]))] == [10, 20, 20]
  assert training_curves.read_steps(str(runs[1])) == [{'step': 10, 'train_loss': 3.5}]
  commands.succeed('decode.plot', *runs, f'--output={tmp_path / "a.svg"}')
  drawn = (tmp_path / 'a.svg').read_text()
  for label in ('big, training', 'big, held out', 'big, acceptance 2', 'draft_log, training'):
    assert f'>{label}</text>' in drawn
  assert 'draft_log, held out' not in drawn


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('', 'holds no loss'),
    ('{"step": 1}\n', 'holds no loss'),
    ('{"step": 1, "train_loss": 2}\n3\n', 'line 2 of .* has no step'),
    ('{"step": "1"}\n', 'line 1 of .* has no step'),
    ('\xff\n', 'line 1 of .* is not of a training log'),
    (' ' * 2**20 + '\n', 'line 1 of .* is not of a training log'),
  ],
)
def test_other_logs_are_refused(tmp_path, content, message):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(content, encoding='latin-1')
  with pytest.raises(ValueError, match=message):
    training_curves.read_steps(str(path))


def test_results_and_logs_are_not_mixed(results, tmp_path):
  with pytest.raises(ValueError, match='not drawn together'):
    plot.picture_of([str(results), str(tmp_path / 'metrics.jsonl')], 'svg')
