"""The report of a run for people."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from decode.experiment import exports, report
from decode.experiment.console import make_console
from decode.experiment.measurements import DecodeRun, Measurement
from decode.experiment.options import DecodeOptions
from decode.experiment.prompts import Prompt
from decode.experiment.settings import expand


@pytest.fixture
def run(tokenizer):
  """Autoregressive decoding at 8 tokens/s and two methods of which the second is slower."""
  methods = 'autoregressive', 'speculative', 'spectr'
  options = DecodeOptions.of(method=methods, draft_length=(2,), num_drafts=(2,), max_new_tokens=8)
  ids = np.resize(tokenizer.encode('an old oak'), (1, 8)).astype(np.int32)
  measurements = []
  for setting, calls, seconds in zip(expand(options), (8, 4, 4), (1.0, 0.5, 2.0)):
    accepted = np.full((1, setting.draft_length), 2)
    origins = np.resize([0, 1, 0, 2], (1, 8))
    measurements.append(
      Measurement(
        ids, np.array([8]), np.array([calls]), accepted, origins, np.array([0]), setting=setting, seed=0,
        batch_seconds=np.array([seconds]), baseline_seconds=np.array([1.0]), rounds=calls,
      )
    )  # fmt: skip
  info = {
    'models': {'target': {'path': 't', 'num_params': 10, 'dtype': 'float32'}},
    'device': {'platform': 'cpu', 'kind': 'cpu'},
  }
  info['device']['num_cpus'] = 1
  info |= {'num_long_prompts': 0, 'timed_together': [[str(setting) for setting in expand(options)]]}
  return DecodeRun(options, info, [Prompt('an owl')], tokenizer, expand(options), measurements, node_costs={5: 3.5})


def _printed(run, **kwargs):
  console = Console(file=io.StringIO(), highlight=False, markup=False, **kwargs)
  report.print_report(run, console)
  return console.file.getvalue()


def test_plain_report_has_no_escape_codes_and_no_folded_rows(run):
  text = _printed(run)
  assert '\x1b' not in text
  rows = [line.split() for line in text.splitlines()]
  assert text.startswith('target t (0.0M, float32)\n')
  assert ['autoregressive', 'yes', '-', '-', '1.00', '-', '8', '1.00x', '-'] in rows
  assert ['speculative', 'yes', '1', '2', '2.00', '0.50', '0.50', '16', '2.00x', '-'] in rows
  assert ['spectr', 'yes', '2', '2', '2.00', '0.50', '0.50', '4', '0.50x', '-'] in rows


@pytest.mark.parametrize(
  ('length', 'shown'), [(8, ['0.50'] * 8), (9, ['0.50'] * 8 + ['...']), (40, ['0.50'] * 8 + ['...'])]
)
def test_deep_trees_fit_into_the_table(run, length, shown):
  (setting,) = expand(run.options.replace(method=('speculative',), draft_length=(length,)))
  deep = dataclasses.replace(run.measurements[1], setting=setting, accepted_by_depth=np.full((1, length), 2))
  run = dataclasses.replace(run, settings=[setting], measurements=[deep])
  (row,) = [line.split() for line in _printed(run).splitlines() if line.startswith('speculative ')]
  assert row == ['speculative', 'yes', '1', str(length), '2.00', *shown, '16', '-']
  (result,) = json.loads(exports.to_json(run))['results']
  assert result['acceptance_by_position'] == [0.5] * length


def _with_batches(run, methods, seconds, lengths, **options):
  """The run with other methods, of one prompt in each batch, with their times relative to autoregressive ones."""
  options = run.options.replace(method=('autoregressive', *methods), draft_length=(16,), **options)
  settings, number = expand(options), len(seconds)
  measurements = [
    dataclasses.replace(
      run.measurements[bool(setting.tree.num_nodes)],
      setting=setting, tokens=np.zeros((number, 8), int), lengths=np.array(lengths),
      num_target_calls=np.full(number, 4), accepted_by_depth=np.full((number, setting.tree.max_depth), 2),
      origins=np.zeros((number, 8), int), failures=np.zeros(number, int),
      batch_seconds=np.array(seconds if setting.tree.num_nodes else np.ones(number)), baseline_seconds=np.ones(number),
    )
    for setting in settings
  ]  # fmt: skip
  prompts, costs = [Prompt('an owl')] * number, {each.tree.num_nodes + 1: 2.0 for each in settings}
  run = dataclasses.replace(run, node_costs=costs)
  return dataclasses.replace(run, options=options, prompts=prompts, settings=settings, measurements=measurements)


def _table(run, width):
  console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
  console.print(report.fitting_table(run, console))
  return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize('width', [60, 80, 120])
def test_tables_fit_the_terminal_and_keep_what_counts(run, width):
  wide = _with_batches(run, ('race_traversal', 'spectr_gbv'), [0.5, 0.7, 0.6, 0.5], [8, 6, 7, 8])
  lines = _table(wide, width)
  assert max(map(len, lines)) <= width
  own = {line.split()[0]: line for line in lines if line.startswith(('race_traversal', 'spectr_gbv'))}
  assert own.keys() == {'race_traversal', 'spectr_gbv'}
  for line in own.values():
    assert re.search(r' 2 +16 +1\.81 ± \d\.\d\d .*\d+ +1\.74x( +\d\.\d\d to \d\.\d\d)?$', line), line
    assert (' to ' in line) == (width > 60)
  assert ('(!)' in own['spectr_gbv']) != (' no ' in own['spectr_gbv'])
  assert ('0.50' in own['race_traversal']) == (width > 80)


@pytest.mark.parametrize('tree', ['prefix:2,2,1,1,1,1,1,1,1,1', 'chains'])
@pytest.mark.parametrize('seconds', [[0.5, 0.7, 0.6, 0.5], [5e-4, 7e-4, 3e-3, 5e-2]])
def test_a_narrow_table_folds_nothing_but_trees(run, tree, seconds):
  wide = _with_batches(run, ('race_traversal',), seconds, [8, 6, 7, 8], tree=(tree,))
  lines = _table(wide, 60)
  assert max(map(len, lines)) <= 60
  (line,) = [line for line in lines if line.startswith('race_traversal')]
  summary = wide.summarize(wide.settings[1])
  assert re.search(rf' {summary["tokens_per_second"]:,.0f} +{summary["speedup"]:.2f}x$', line), line
  low, high = summary['speedup_ci95']
  assert next(report.explain_hidden_ranges(wide)).endswith(f'x, 95% range {low:.2f} to {high:.2f}.')


@pytest.mark.parametrize(('num_batches', 'is_shown'), [(1, False), (2, False), (3, True), (9, True)])
def test_ranges_can_be_true(run, num_batches, is_shown):
  """Speed-ups are positive, and a tree of depth 16 gives 1 to 17 tokens per call, however few and noisy batches are."""
  seconds, lengths = np.resize([0.1, 4.0, 20.0], num_batches), np.resize([4, 80], num_batches)
  noisy = _with_batches(run, ('speculative',), seconds, lengths)
  summary = noisy.summarize(noisy.settings[1])
  for value, interval, least, most in (
    (summary['speedup'], summary['speedup_ci95'], 0, np.inf),
    (summary['block_efficiency'], summary['block_efficiency_ci95'], 1, 17),
  ):
    assert (interval is not None) == is_shown
    if is_shown:
      assert max(least, 1e-9) <= interval[0] <= value <= interval[1] <= most
  printed = _printed(noisy, width=200)
  row = next(line for line in printed.splitlines() if line.startswith('speculative  '))
  assert row.rstrip().endswith('-') != is_shown
  result = json.loads(exports.to_json(noisy))['results'][1]
  assert (result['speedup_ci95'] is None) == (result['block_efficiency_ci95'] is None) != is_shown


def test_the_report_says_what_took_long_beside_the_new_tokens(run):
  assert 'Loading' not in _printed(run)
  seconds = {'loading': 3.14, 'compiling': 12.0, 'prompts': 0.25, 'prompt_tokens': 1234}
  assert (
    'Loading took 3.1 s and compiling 12.0 s, which tokens/s leave out. Reading the prompts of the first batch, 1,234'
    ' tokens, took 0.250 s, which they count.\n'
  ) in _printed(dataclasses.replace(run, info=run.info | {'seconds': seconds}))


def test_the_first_line_says_what_is_gained(run):
  def first(methods, seconds):
    return _printed(_with_batches(run, methods, seconds, np.full(len(seconds), 8))).splitlines()[0]

  gain = first(('speculative', 'decoding_uno'), [0.5, 0.5, 0.5])
  assert gain.startswith(
    'speculative K=1 L=16 decodes 2.00 times as fast as the target alone (2.00 to 2.00): 16 tokens/s'
  )
  assert gain.endswith("for 8, 2.00 tokens per call of the target, with exactly the target's distribution.")
  assert first(('speculative',), [2.0] * 3).startswith(
    'Nothing gains here: the fastest, speculative K=1 L=16, decodes 0.50'
  )
  for methods, seconds in ((('speculative',), [0.5, 0.5]), (('decoding_uno',), [0.5] * 3)):
    assert first(methods, seconds).startswith('target t')


def test_slow_settings_and_a_missing_baseline_are_explained(run):
  assert 'speed-up is relative to' not in _printed(run)
  alone = dataclasses.replace(run, settings=run.settings[1:], measurements=run.measurements[1:])
  assert 'speed-up is relative to autoregressive, which is not among the methods' in _printed(alone)
  (line,) = report.explain_slow(run)
  # 2 s for 4 rounds against 1 s for 8 steps, and 8 tokens in 4 rounds.
  for part in ('spectr K=2 L=2', '4.0 times', '2.0 tokens per row', '3.5 times', '5 nodes'):
    assert part in line


def test_results_as_a_table_of_values(run):
  rows = list(csv.DictReader(io.StringIO(exports.to_csv(run))))
  results = json.loads(exports.to_json(run))['results']
  assert [row['method'] for row in rows] == ['autoregressive', 'speculative', 'spectr']
  for row, result in zip(rows, results, strict=True):
    assert float(row['block_efficiency']) == result['block_efficiency']
    assert row['acceptance_by_position'] == ' '.join(map(str, result['acceptance_by_position']))
    assert row['speedup_ci95_low'] == row['epsilon'] == ''


def test_sample_is_marked_by_origin(run):
  plain = report.make_sample(run, is_colored=False)
  pieces = report.split_by_origin(run.measurements[0].tokens[0], np.resize([0, 1, 0, 2], 8), run.tokenizer)
  marks = {0: '{}', 1: '[{}]', 2: '{{{}}}'}
  assert plain.plain.splitlines()[-1] == ''.join(marks[origin].format(text) for text, origin in pieces)
  assert '\x1b[32m' in _printed(run, force_terminal=True, color_system='standard', width=80)


def test_bytes_of_a_character_stay_together_and_none_is_lost(tokenizer):
  ids = tokenizer.encode('a€b')
  pieces = report.split_by_origin(np.array(ids), np.arange(len(ids)) % 3, tokenizer)
  assert ''.join(text for text, _ in pieces) == 'a€b'
  assert '€' in [text for text, _ in pieces]
  ids = [*tokenizer.encode('字')[:2], *tokenizer.encode('a€b'), *tokenizer.encode('字')[:1]]
  pieces = report.split_by_origin(np.array(ids), np.arange(len(ids)) % 3, tokenizer)
  assert ''.join(text for text, _ in pieces) == tokenizer.decode(ids) == '\ufffda€b\ufffd'
  assert report.split_by_origin(np.array([], int), np.array([], int), tokenizer) == []


def test_text_cannot_steer_the_terminal_and_no_color_is_heeded(run, monkeypatch):
  prompts = [dataclasses.replace(run.prompts[0], text='a\x1b[31m\x9b\u202e\nb'), *run.prompts[1:]]
  shown = report.make_sample(dataclasses.replace(run, prompts=prompts), is_colored=False)
  assert 'a\ufffd[31m\ufffd\ufffd\nb' in shown.plain
  monkeypatch.setenv('NO_COLOR', '1')
  monkeypatch.setenv('FORCE_COLOR', '1')
  assert make_console().color_system is None


def test_bias_and_the_parts_of_a_round_are_explained(run):
  assert not [*report.explain_bias(run)]
  options = run.options.replace(method=('spectr_gbv', 'decoding_opt'))
  settings = expand(options)
  measurements = [dataclasses.replace(run.measurements[1], setting=setting) for setting in settings]
  biased = dataclasses.replace(run, options=options, settings=settings, measurements=measurements)
  lines = [*report.explain_bias(biased)]
  assert [line.split()[0] for line in lines] == ['spectr_gbv', 'decoding_opt']
  assert 'as if drafts did not compete' in lines[0]
  printed = _printed(biased)
  assert all(line in printed for line in lines)
  rows = [line for line in printed.splitlines() if line.startswith(('spectr_gbv ', 'decoding_opt '))]
  assert [row.split()[1] for row in rows[:2]] == ['no', 'no']
  # Without over-acceptance it is speculative decoding.
  exact = options.replace(method=('decoding_opt',), epsilon=0.0)
  assert [setting.method.is_lossless for setting in expand(exact)] == [True]
  setting = run.settings[1]
  parts = {'draft': 0.05, 'target': 0.06, 'verification': 0.0375}
  run = dataclasses.replace(run, part_seconds={setting: parts})
  assert run.summarize(run.settings[0])['seconds_per_round'] is None
  seconds = run.summarize(setting)['seconds_per_round']
  assert list(seconds) == ['round', 'draft', 'target', 'verification', 'rest']
  assert seconds['round'] == pytest.approx(0.125)
  assert seconds['rest'] == pytest.approx(-0.0225)
  [line] = report.explain_parts(run)
  expected = (
    'speculative K=1 L=2: a round takes 125.00 ms, of which draft 50.00, target 60.00, verification 37.50, rest -22.50'
  )
  assert line.startswith(expected)
