"""The grid of `--method=auto`, what is timed of it, and the file that keeps it."""

import dataclasses
import json
import types

import pytest

from decode.experiment import auto_choice
from decode.experiment.model_options import AUTO_GRID
from decode.experiment.options import DecodeOptions
from decode.experiment.report import explain_choice
from decode.experiment.run import run_decode
from spectr_jax import METHODS
from spectr_jax.auto import measurement
from spectr_jax.auto.observation import Observation
from spectr_jax.engine.loop import run_rounds
from spectr_jax.methods import Guesses


def _options(**changes):
  return DecodeOptions.of(**{'method': ('auto',)} | changes)


def _grid(guesses=None, **changes):
  return auto_choice.grid(_options(**changes), guesses)[0]


@pytest.fixture(scope='module')
def settings():
  return auto_choice.grid(_options())[0]


def test_the_grid_of_a_head_has_no_method_that_needs_a_constant_draft(settings):
  of_head, left_out = auto_choice.grid(_options(), Guesses(feature_layers=(1,)))
  assert {each.method.name for each in settings} - {each.method.name for each in of_head} == {'greedy_block'}
  assert 'to be the same in every round' in left_out['greedy_block']
  assert left_out['decoding_opt'] == 'decoding_opt is not lossless'


def test_the_grid_has_every_lossless_method_and_no_setting_twice(settings):
  assert {setting.method.name for setting in settings} == {name for name, m in METHODS.items() if m.is_lossless}
  assert all(setting.method.is_lossless for setting in settings)
  singles = {setting.method.name for setting in settings if setting.num_drafts == 1}
  assert singles == {'speculative', 'block', 'greedy_block', 'ersd'}  # what others do with one draft
  spectr = [(s.num_drafts, s.draft_length) for s in settings if s.method.name == 'spectr']
  assert sorted(spectr) == [(k, n) for k in AUTO_GRID['num_drafts'][1:] for n in AUTO_GRID['draft_length']]
  assert len(set(map(str, settings))) == len(settings)


def test_trees_that_a_method_or_a_draft_cannot_use_are_left_out():
  settings = _grid(None, tree=('prefix:2,1', 'specinfer'), draft_length=(4,))
  assert {str(s) for s in settings if s.method.name == 'spectr'} == {'spectr prefix:2,1', 'spectr specinfer'}
  assert not any(setting.method.name == 'block' for setting in settings)
  trees = 'chains', 'likeliest:2,2', 'confident:2,1'
  settings = _grid(None, tree=trees, num_drafts=(2,), draft_length=(2,))
  assert _trees(settings, 'race_traversal') == set(trees)
  assert _trees(settings, 'traversal') == {'chains', 'confident:2,1'}  # takes no guesses that are not drawn
  assert _trees(settings, 'block') == {'chains'}
  from_one = _grid(None, tree=trees, growth_threshold=0.1, num_drafts=(2,), draft_length=(2,))
  assert _trees(from_one, 'spectr') == {'chains', 'likeliest:2,2 from 0.1', 'confident:2,1 from 0.1'}
  assert {setting.draft_length for setting in _grid(Guesses(max_depth=4))} == {0, 1, 2, 4}
  with pytest.raises(ValueError, match='^this drafter guesses 1 tokens ahead, and the tree is 2 deep$'):
    _grid(Guesses(max_depth=1), draft_length=(2,))
  with pytest.raises(ValueError, match='^this drafter guesses 1 tokens ahead'):
    _grid(Guesses(max_depth=1), tree=('prefix:2,1',))
  assert {setting.draft_length for setting in _grid(Guesses(max_depth=1))} == {0, 1}


@pytest.mark.parametrize(
  ('draft', 'takes', 'singles'),
  [
    ('lookup', 'takes_given', {'speculative', 'ersd'}),
    ('lookup+here', 'takes_mixed', {'race', 'race_block', 'race_traversal'}),
  ],
)
def test_the_grid_with_lookup_has_every_lossless_method_that_takes_its_guesses(draft, takes, singles):
  settings = _grid(None, draft=draft)
  wanted = {name for name, m in METHODS.items() if m.is_lossless and m.max_drafts != 0 and getattr(m, takes)}
  assert {setting.method.name for setting in settings} == wanted | {'autoregressive'}
  assert {setting.method.name for setting in settings if setting.num_drafts == 1} == singles


def _trees(settings, name):
  return {setting.tree_name for setting in settings if setting.method.name == name}


def test_greedy_decoding_alone_is_compared_with_trees_of_likeliest_guesses():
  settings = _grid(None, temperature=0.0)
  # One method stands for all, since they keep the same.
  first = next(
    name for name, each in METHODS.items() if each.takes_given and each.takes_grown and each.max_drafts is None
  )
  assert METHODS[first].is_lossless
  grown = set(auto_choice.GREEDY_TREES)
  for name in METHODS:
    assert _trees(settings, name) & grown == (grown if name == first else set())
  assert {setting.num_drafts for setting in settings if setting.num_drafts} == {1}
  assert _trees(settings, 'speculative') == {'chains'}
  several = _grid(None, temperature=0.0, num_drafts=(1, 3))
  assert {setting.num_drafts for setting in several if setting.num_drafts} == {1, 3}
  for changes in (
    {'temperature': 0.5},
    {'temperature': 0.0, 'draft': 'lookup'},
    {'temperature': 0.0, 'tree': ('prefix:2',)},
  ):
    assert not any(setting.growth for setting in _grid(None, **changes))


def test_no_seed_is_decoded_twice():
  options = _options(seed=2**32 - 3, num_seeds=2, calibration_prompts=3)
  taken = types.SimpleNamespace(keys=lambda seed: seed)
  seeds, take = options.sampling.seeds, {4: taken}.get  # two batches
  workload = types.SimpleNamespace(options=options, seeds=seeds, batch_size=2, take=take)
  some, keys_fn = auto_choice.trial_of(workload)
  assert some is taken
  passes = [keys_fn(number) for number in range(2 * measurement.MOST_BATCHES)]
  used = [*seeds, seeds[-1] + 1, *passes]  # one is for acceptance rates
  assert len(set(used)) == 2 + 1 + 2 * measurement.MOST_BATCHES


_SEEN = Observation([8, 7], [8, 7], [], [0.1, 0.2], [0.01, 0.02])


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'x.json is not JSON .*--calibration writes one'),
    *(
      (text, 'x.json is no calibration')
      for text in ('[]', '{"format": 0}', '{"format": 2}', '{"format": 3, "conditions": {}}')
    ),
  ],
)
def test_a_calibration_is_the_same_after_a_file_and_others_are_refused(tmp_path, text, message):
  path, measured = tmp_path / 'x.json', auto_choice.Calibration({'device': 'test'}, {'autoregressive': _SEEN})
  path.write_text(measured.to_json())
  assert auto_choice.read_calibration(path) == measured
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    auto_choice.read_calibration(path)


def test_few_are_timed_on_cpus_unless_the_grid_is_given(monkeypatch):
  assert _options().methods.has_short_grid
  assert not _options(grid='full').methods.has_short_grid
  assert not _options(num_drafts=(1, 2)).methods.has_short_grid
  assert not _options(tree=('prefix:2,1',)).methods.has_short_grid
  assert _options(tree=('prefix:2,1',), grid='short').methods.has_short_grid
  assert _options().replace(num_prompts=3).methods.has_short_grid
  monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
  assert not _options().methods.has_short_grid
  assert _options(grid='short').methods.has_short_grid


class _Interrupted(BaseException):
  """In the place of Ctrl-C."""


@pytest.fixture
def few_methods(monkeypatch):
  few = 'autoregressive', 'spectr', 'race'
  methods = {name: dataclasses.replace(method, is_lossless=name in few) for name, method in METHODS.items()}
  monkeypatch.setattr(auto_choice, 'METHODS', methods)


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path, small_options, monkeypatch):
  path = tmp_path / 'calibration.json'
  options = small_options('auto', draft_length=(1, 3), max_new_tokens=8, calibration=str(path))
  said, once = [], []

  def notify(what, done, total):
    said.append((what, done, total))
    if what == 'auto: compiling race K=2 L=3' and not once:
      once.append(what)
      raise _Interrupted

  with pytest.raises(_Interrupted):
    run_decode(options, notify)
  kept = auto_choice.read_calibration(path)
  assert list(kept.observations) == ['autoregressive']  # the deepest one is next
  assert [each.name for each in tmp_path.iterdir()] == ['calibration.json']  # nothing unfinished
  said.clear()
  run = run_decode(options, notify)
  assert said[0] == ('auto: compiling race K=2 L=3', 1, 12)
  names = {'autoregressive', *(f'{name} K=2 L={length}' for name in ('spectr', 'race') for length in (1, 3))}
  assert {str(each.setting) for each in run.speeds} == names
  assert run.settings == [run.speeds[0].setting]
  speeds = [each.tokens_per_second for each in run.speeds]
  assert speeds == sorted(speeds, reverse=True)
  assert all(each.interval[0] <= each.tokens_per_second <= each.interval[1] for each in run.speeds)
  choice, others = explain_choice(run.speeds, run.left_out)
  assert others.startswith('It leaves out methods: speculative is not lossless; ')
  assert choice == f'auto takes {run.settings[0]}, the fastest of 5 settings that it timed.'
  whole = auto_choice.read_calibration(path).observations
  assert whole['autoregressive'] == kept.observations['autoregressive']
  again = {name for name in whole if name.endswith(', again')}
  assert set(whole) == names | again
  assert len(again) in (3, 4)
  assert 'autoregressive, again' in again
  for name, each in whole.items():
    # Passes of two batches, of two rows and of one, each with another seed.
    assert 3 <= len(each.round_seconds) <= measurement.MOST_BATCHES
    assert len(each.row_calls) == len(each.round_seconds) * 3 // 2 + len(each.round_seconds) % 2
    assert sum(each.row_calls) <= sum(each.row_tokens) <= 8 * len(each.row_calls)
    assert ('autoregressive' not in name) or each.row_calls == each.row_tokens
  assert json.loads(path.read_text())['format'] == auto_choice.FORMAT
  monkeypatch.setattr(measurement, 'Timer', None)  # not called again
  assert run_decode(options).speeds == run.speeds
  with pytest.raises(ValueError, match='measured with batch_size 2, not 1'):
    run_decode(options.replace(batch_size=1))


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
@pytest.mark.parametrize('is_beside', [False, True])
def test_lookup_is_timed(tmp_path, pair, prompt_file, is_beside):
  path = tmp_path / 'calibration.json'
  draft = f'lookup+{pair["draft"]}' if is_beside else 'lookup'
  options = _options(
    target=pair['target'], draft=draft, prompts=str(prompt_file), num_drafts=(1, 2), draft_length=(2,),
    max_new_tokens=8, lookup_min=1, calibration=str(path),
  )  # fmt: skip
  names = {'autoregressive', 'race K=2 L=2', 'race K=1 L=2' if is_beside else 'spectr K=2 L=2'}
  run = run_decode(options)
  assert {str(each.setting) for each in run.speeds} == names
  assert all(each.tokens_per_second > 0 for each in run.speeds)
  with pytest.raises(ValueError, match=r'measured with lookup \[8, 1\], not \[8, 2\]'):
    run_decode(options.replace(lookup_min=2))


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
@pytest.mark.parametrize('kind', ['model', 'head'])
def test_thresholds_of_the_fastest_growing_tree_compile_nothing(pair, prompt_file, tiny_head_file, kind, monkeypatch):
  options = _options(
    target=pair['target'], draft={'model': pair['draft'], 'head': tiny_head_file}[kind], prompts=str(prompt_file),
    tree=('likeliest:2,2', 'confident:2,2'), max_new_tokens=8, calibration_prompts=2,
  )  # fmt: skip
  compiled, observe = [], measurement.Timer.observe
  monkeypatch.setattr(
    measurement.Timer, 'observe', lambda *a: (observe(*a), compiled.append(run_rounds._cache_size()))[0]
  )
  run = run_decode(options)
  names = {f'{name} {tree}:2,2' for name in ('spectr', 'race') for tree in ('likeliest', 'confident')}
  timed = {str(each.setting) for each in run.speeds}
  assert names | {'autoregressive'} <= timed
  further = timed - names - {'autoregressive'}
  assert {name.partition(' from ')[2] for name in further} == {'0.02', '0.05', '0.1'}
  assert len({name.partition(' from ')[0] for name in further}) == 1
  assert len(set(compiled[len(names) :])) == 1
