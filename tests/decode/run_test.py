"""The grid and what is run for it."""

import dataclasses
import io
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from decode.experiment import report
from decode.experiment.prompts import Prompt
from decode.experiment.run import run_decode
from decode.experiment.workload import load_models, model_title, row_keys
from spectr_jax import load_model, save_model
from spectr_jax.engine import program_memory


def test_a_key_comes_from_seed_and_place_in_the_file():
  both = row_keys(3, [Prompt('x', 0), Prompt('y', 9)])
  alone = row_keys(3, [Prompt('z', 9)])
  assert jax.random.key_data(both[1]).tolist() == jax.random.key_data(alone[0]).tolist()
  assert jax.random.key_data(both[0]).tolist() != jax.random.key_data(both[1]).tolist()
  assert jax.random.key_data(row_keys(4, [Prompt('z', 9)])[0]).tolist() != jax.random.key_data(alone[0]).tolist()


def test_progress_reaches_its_total(small_options):
  seen = []
  begin = time.perf_counter()
  run = run_decode(small_options('autoregressive', num_seeds=2), lambda *args: seen.append(args))
  took = time.perf_counter() - begin
  assert seen[0] == ('compiling 1 of 1: autoregressive', 0, 1)
  assert seen[-1] == ('done', 4, 4)
  # Dummy rows that fill the last batch are dropped, and seeds differ.
  assert [each.tokens.shape for each in run.measurements] == [(3, 6), (3, 6)]
  assert not np.array_equal(run.measurements[0].tokens, run.measurements[1].tokens)
  assert 'draft' not in run.info['models']
  seconds = run.info['seconds']
  assert seconds['prompt_tokens'] == sum(len(run.tokenizer.encode_prompt(each.text)) for each in run.prompts[:2])
  assert seconds.pop('compiling') >= 0  # 0 where another test has compiled the same
  assert min(seconds.values()) > 0
  decoding = sum(each.batch_seconds.sum() for each in run.measurements)
  assert seconds['loading'] + seconds['prompts'] + decoding < took


@pytest.mark.slow
def test_long_grids_are_decoded_in_groups(small_options, monkeypatch):
  options = small_options('autoregressive', 'speculative', 'spectr', max_new_tokens=4)
  whole = run_decode(options)
  answers = iter([False, True])
  monkeypatch.setattr(program_memory, '_is_half_full', lambda: next(answers))
  seen = []
  parts = run_decode(options, lambda *args: seen.append(args))
  names = [str(setting) for setting in whole.settings]
  assert whole.info['timed_together'] == [names]
  assert parts.info['timed_together'] == [names[:2], [names[0], names[2]]]
  for one, other in zip(whole.measurements, parts.measurements):
    assert one.setting == other.setting
    np.testing.assert_array_equal(one.tokens, other.tokens)
  assert [done for what, done, _ in seen if what.startswith('decoding')] == [0, 1, 2, 3, 4, 4, 5, 5]
  assert seen[-1][1:] == (6, 6)
  alone, together, later = parts.measurements
  np.testing.assert_array_equal(together.baseline_seconds, alone.batch_seconds)
  assert not np.array_equal(later.baseline_seconds, alone.batch_seconds)
  said = [''.join(program_memory.describe_groups(run.info['timed_together'])) for run in (whole, parts)]
  assert said[0] == ''
  assert 'in 2 groups' in said[1]
  assert said[1].endswith(f'New groups begin with {names[2]}.')


def test_programs_are_forgotten_where_there_is_little_room(monkeypatch, tmp_path):
  limit = tmp_path / 'limit'
  monkeypatch.setattr(program_memory, '_LIMIT', limit)
  assert not program_memory.is_half_full()  # another system
  limit.write_text('2')
  assert program_memory.is_half_full()
  limit.write_text('100000000')
  assert not program_memory.is_half_full()
  program = jax.jit(lambda x: x + 1)
  program(np.zeros(9))

  def sizes(**more):
    """How many programs there are whenever a group is given."""

    def compiled(i):
      program(np.zeros(i + 1))

    return [(group, program._cache_size()) for group in program_memory.in_groups(range(3), compiled, **more)]

  assert sizes() == [([0, 1, 2], 4)]
  assert sizes(baseline=1) == [([1, 0, 2], 4)]
  limit.write_text('2')
  assert sizes() == [([0], 1), ([1], 1), ([2], 1)]
  assert sizes(baseline=0) == [([0, 1], 2), ([0, 2], 2)]
  assert list(program_memory.in_groups([], print)) == []
  assert list(program_memory.in_groups([0], print, baseline=0)) == [[0]]


def test_rounds_are_profiled(small_options, tmp_path):
  options = small_options('autoregressive', num_prompts=1, batch_size=1)
  profiled = run_decode(options.replace(profile_dir=str(tmp_path / 'profile')))
  assert list((tmp_path / 'profile' / 'autoregressive').rglob('*.xplane.pb'))
  np.testing.assert_array_equal(profiled.measurements[0].tokens, run_decode(options).measurements[0].tokens)
  (tmp_path / 'file').write_text('text')
  with pytest.raises(ValueError, match='profile_dir: cannot write .*file/autoregressive: Not a directory'):
    run_decode(options.replace(profile_dir=str(tmp_path / 'file')))


@pytest.mark.parametrize('role', ['target', 'draft'])
def test_logits_that_are_not_finite_are_named(small_options, pair, tmp_path, role):
  model, tokenizer = load_model(pair[role])
  model = dataclasses.replace(model, params=jax.tree.map(lambda x: x * np.nan, model.params))
  save_model(tmp_path / 'bad', model, tokenizer)
  options = small_options('block', **{role: str(tmp_path / 'bad')})
  with pytest.raises(ValueError, match=f'block.*, prompt a: row 0, round 1: logits of the {role} are not finite'):
    run_decode(options)


def test_weights_in_int8_are_named(small_options):
  options = small_options('speculative', weights='int8')
  loaded = load_models(options)
  models, plain = loaded.info, load_models(options.replace(weights='')).info
  assert models == {role: {**model, 'weights': 'int8'} for role, model in plain.items()}  # sizes and dtypes as before
  assert loaded.target.params['embedding'].values.dtype == loaded.draft.params['embedding'].values.dtype == np.int8
  assert model_title(models['target']) == f'{models["target"]["path"]} (0.0M, int8 weights)'
  assert model_title(plain['target'], has_dtype=True).endswith(' (0.0M, float32)')


def test_long_prompts_are_left_out_and_counted(small_options, tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_text('the quick\n' + 'owl ' * 90 + '\nseven wise owls\nold\n')
  options = small_options('autoregressive', prompts=str(path), num_prompts=2, skip_long=True)
  run = run_decode(options)
  assert [prompt.index for prompt in run.prompts] == [0, 2]  # so many of those that fit
  assert run.info['num_long_prompts'] == 1
  console = Console(file=io.StringIO(), width=200)
  report.print_report(run, console)
  assert '2 prompts (1 of the file are too long and left out)' in console.file.getvalue()
  with pytest.raises(ValueError, match='line 2: the prompt is too long'):
    run_decode(options.replace(skip_long=False))


def test_speed_is_compared_batch_by_batch(small_options):
  options = small_options('autoregressive', 'speculative', num_seeds=2)
  run = run_decode(options)
  measurements = []
  for measured in run.measurements:
    name = measured.setting.method.name
    own = np.array({'autoregressive': (4.0, 2.0), 'speculative': (2.0, 1.0)}[name])
    seconds = {'batch_seconds': own, 'baseline_seconds': np.array([4.0, 2.0])}
    measurements.append(dataclasses.replace(measured, **seconds, lengths=np.array([6, 6, 6])))
  run = dataclasses.replace(run, measurements=measurements)
  baseline, summary = map(run.summarize, run.settings)
  # Twice as fast in either batch.
  assert summary['speedup'] == pytest.approx(2)
  assert summary['speedup_ci95'] is baseline['speedup_ci95'] is None  # two batches say nothing of others
  assert (summary['seconds'], baseline['seconds']) == (6.0, 12.0)
  # Three batches, in each of which it is twice as fast: nothing is left to chance.
  alone = dataclasses.replace(run, options=options.replace(batch_size=1))

  def timed(seconds):
    own = [np.array(seconds if measured.setting.method.max_drafts else (4.0, 2.0, 3.0)) for measured in measurements]
    times = [{'batch_seconds': each, 'baseline_seconds': np.array([4.0, 2.0, 3.0])} for each in own]
    return dataclasses.replace(alone, measurements=[dataclasses.replace(f, **t) for f, t in zip(measurements, times)])

  summary = timed((2.0, 1.0, 1.5)).summarize(run.settings[1])
  np.testing.assert_allclose(summary['speedup_ci95'], (2, 2))
  assert timed((2.0, 1.0, 1.5)).summarize(run.settings[0])['speedup_ci95'] is None
  # Twice as fast in two batches and as fast in the other.
  low, high = timed((2.0, 2.0, 1.5)).summarize(run.settings[1])['speedup_ci95']
  assert 0 < low < 9 / 5.5 < high
  # In a group of its own, when the machine was half as fast: it is compared with what was beside it.
  slow = {'batch_seconds': np.array([2.0, 2.0]), 'baseline_seconds': np.array([8.0, 4.0])}
  measurements = [
    dataclasses.replace(measured, **slow) if measured.setting.method.max_drafts else measured
    for measured in measurements
  ]
  slower = dataclasses.replace(run, measurements=measurements).summarize(run.settings[1])
  assert (slower['speedup'], slower['tokens_per_second']) == (pytest.approx(3), pytest.approx(4.5))
  assert slower['round_cost'] == pytest.approx(8 / slower['num_rounds'] / (24 / baseline['num_rounds']))


@pytest.mark.slow
def test_the_share_of_the_optimum_is_reported(small_options):
  options = small_options('spectr', 'gsd', batch_size=3, max_new_tokens=12, share_of_optimum=True)
  run = run_decode(options)
  spectr, gsd = map(run.summarize, run.settings)
  # Of few tokens: what is accepted may by chance exceed what would be on average.
  assert 0.5 < spectr['share_of_optimum'] < 1.5
  assert spectr['share_of_optimum_ci95'][0] < spectr['share_of_optimum'] < spectr['share_of_optimum_ci95'][1]
  assert gsd['share_of_optimum'] is gsd['share_of_optimum_ci95'] is None
  console = Console(file=io.StringIO(), width=200)
  console.print(report.make_table(run))
  printed = console.file.getvalue()
  assert 'share of' in printed
  assert f'{spectr["share_of_optimum"]:.2f} ±' in printed


@pytest.mark.slow
def test_seed_exact_decoding_gives_the_text_of_its_reference(small_options):
  options = small_options('autoregressive', 'ersd', gumbel=True, batch_size=3, max_new_tokens=8)
  reference, keyed = run_decode(options).measurements
  np.testing.assert_array_equal(keyed.tokens, reference.tokens)
  assert keyed.num_target_calls.sum() < reference.num_target_calls.sum()
