"""Predictions from measurements, the choice, and the file that keeps them."""

import dataclasses
import itertools
import json
import re
import types

import numpy as np
import pytest

from decode.experiment import auto_choice
from decode.experiment.model_options import AUTO_GRID
from decode.experiment.options import DecodeOptions
from decode.experiment.run import run_decode
from decode.experiment.workload import Workload
from spectr_jax import METHODS, Generation, theory
from spectr_jax.auto import calibration, measurement, prediction, programs
from spectr_jax.auto import setting as auto_setting
from spectr_jax.engine.loop import run_rounds


def _options(**changes):
  return DecodeOptions(**{'method': ('auto',)} | changes)


@pytest.fixture(scope='module')
def settings():
  return auto_choice.grid(_options())


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_short_grid_has_the_same_settings(temperature):
  options = _options(temperature=temperature)
  assert auto_choice.grid(dataclasses.replace(options, grid='short')) == auto_choice.grid(options)


def test_the_grid_of_a_head_has_no_method_that_needs_a_constant_draft(settings):
  names, of_head = (
    {each.method.name for each in own} for own in (settings, auto_choice.grid(_options(), reads_features=True))
  )
  assert names - of_head == {'greedy_block'}


def test_the_grid_has_every_lossless_method_and_no_setting_twice(settings):
  assert {setting.method.name for setting in settings} == {name for name, m in METHODS.items() if m.is_lossless}
  assert all(setting.method.is_lossless for setting in settings)
  singles = {setting.method.name for setting in settings if setting.num_drafts == 1}
  assert singles == {'speculative', 'block', 'greedy_block', 'ersd'}  # what others do with one draft
  spectr = [(s.num_drafts, s.draft_length) for s in settings if s.method.name == 'spectr']
  assert sorted(spectr) == [(k, n) for k in AUTO_GRID['num_drafts'][1:] for n in AUTO_GRID['draft_length']]
  assert len(set(map(str, settings))) == len(settings)


def test_trees_that_a_method_or_a_draft_cannot_use_are_left_out():
  settings = auto_choice.grid(_options(tree=('prefix:2,1', 'specinfer'), draft_length=(4,)))
  assert {str(s) for s in settings if s.method.name == 'spectr'} == {'spectr prefix:2,1', 'spectr specinfer'}
  assert not any(setting.method.name == 'block' for setting in settings)
  trees = 'chains', 'likeliest:2,2', 'confident:2,1'
  settings = auto_choice.grid(_options(tree=trees, num_drafts=(2,), draft_length=(2,)))
  assert _trees(settings, 'race_traversal') == set(trees)
  assert _trees(settings, 'traversal') == {'chains', 'confident:2,1'}  # takes no guesses that are not drawn
  assert _trees(settings, 'block') == {'chains'}
  from_one = auto_choice.grid(_options(tree=trees, growth_threshold=0.1, num_drafts=(2,), draft_length=(2,)))
  assert _trees(from_one, 'spectr') == {'chains', 'likeliest:2,2 from 0.1', 'confident:2,1 from 0.1'}
  assert {setting.draft_length for setting in auto_choice.grid(_options(), 4)} == {0, 1, 2, 4}
  with pytest.raises(ValueError, match='^the draft guesses 1 tokens ahead, and all trees are deeper$'):
    auto_choice.grid(_options(draft_length=(2,)), 1)
  assert {setting.draft_length for setting in auto_choice.grid(_options(), 1)} == {0, 1}


@pytest.mark.parametrize(
  ('draft', 'takes', 'singles'),
  [
    ('lookup', 'takes_given', {'speculative', 'ersd'}),
    ('lookup+here', 'takes_mixed', {'race', 'race_block', 'race_traversal'}),
  ],
)
def test_the_grid_with_lookup_has_every_lossless_method_that_takes_its_guesses(draft, takes, singles):
  settings = auto_choice.grid(_options(draft=draft))
  wanted = {name for name, m in METHODS.items() if m.is_lossless and m.max_drafts != 0 and getattr(m, takes)}
  assert {setting.method.name for setting in settings} == wanted | {'autoregressive'}
  assert {setting.method.name for setting in settings if setting.num_drafts == 1} == singles


def _trees(settings, name):
  return {setting.tree_name for setting in settings if setting.method.name == name}


def test_greedy_decoding_alone_is_compared_with_trees_of_likeliest_guesses():
  settings = auto_choice.grid(_options(temperature=0.0))
  # One method stands for all, since they keep the same.
  first = next(
    name for name, each in METHODS.items() if each.takes_given and each.takes_grown and each.max_drafts is None
  )
  assert METHODS[first].is_lossless
  grown = set(auto_choice.GREEDY_TREES)
  for name in METHODS:
    assert _trees(settings, name) & grown == (grown if name == first else set())
  assert {setting.num_drafts for setting in settings if setting.spec and setting.spec.name == 'chains'} == {1}
  assert _trees(settings, 'speculative') == {'chains'}
  several = auto_choice.grid(_options(temperature=0.0, num_drafts=(1, 3)))
  assert {setting.num_drafts for setting in several if setting.spec and setting.spec.name == 'chains'} == {1, 3}
  for changes in (
    {'temperature': 0.5},
    {'temperature': 0.0, 'draft': 'lookup'},
    {'temperature': 0.0, 'tree': ('prefix:2',)},
  ):
    assert not any(setting.growth for setting in auto_choice.grid(_options(**changes)))


def test_the_fastest_growing_tree_is_tuned():
  settings = auto_choice.grid(_options(tree=('chains', 'confident:4,4'), num_drafts=(2,), draft_length=(2,)))
  ordered = sorted(settings, key=lambda setting: str(setting) != 'spectr confident:4,4')
  tuned = auto_setting.tuned(ordered)
  assert [str(setting) for setting in tuned] == [f'spectr confident:4,4 from {t:g}' for t in auto_setting._THRESHOLDS]
  assert [setting.growth.threshold for setting in tuned] == list(auto_setting._THRESHOLDS)
  assert not auto_setting.tuned([setting for setting in ordered if setting.growth is None])
  assert not auto_setting.tuned(tuned[:1])  # a threshold that the user chose
  with pytest.raises(ValueError, match='autoregressive grows no trees'):
    settings[0].with_threshold(0.1)


def _calibration(settings, *, draft=0.5e-3, node=0.1e-3, rest=1e-3, rate=0.8, prefill=2e-3):
  """Ten prompts one by one, 100 rounds each: every guess is accepted at `rate`; seconds are linear in L and nodes."""
  drafts, targets, observations = {}, {}, {}
  for setting in settings:
    size, length = setting.tree.num_nodes, setting.draft_length
    name = f'chains {setting.num_drafts}x{length}' if size else 'none'
    drafts[name], targets[size] = draft * length, 3e-3 + node * size
    if auto_setting.source_of(setting, settings) != setting:
      continue
    kept = [round(1000 * rate ** (depth + 1)) for depth in range(length)]
    observations[str(setting)] = calibration.Observation(
      num_batches=10, num_tokens=1000 + sum(kept), row_calls=[100] * 10, kept=kept,
      prefill_seconds=prefill, round_seconds=drafts[name] + targets[size] + rest * (1 + 0.01 * size),
    )  # fmt: skip
  return calibration.Calibration({'device': 'test', 'batch_size': 1}, drafts, targets, observations)


def test_seconds_of_a_group_are_those_of_the_first_groups_time():
  def batch(seconds, calls):
    calls = np.array(calls)
    return seconds, seconds / 100, Generation(calls, 2 * calls, calls, calls[:, None], calls, 0 * calls)

  runs = [batch(3.0, [5, 6]), batch(5.0, [7, 7])]  # the last row is a copy
  observation = measurement.observation_of(runs, 3, num_passes=1, pace=2)
  assert (observation.prefill_seconds, observation.round_seconds) == (2.0, 0.02)
  assert (observation.row_calls, observation.num_tokens, observation.kept) == ([5, 6, 7], 36, [18])
  # The same prompts twice, and a machine that was slow once.
  observation = measurement.observation_of([*runs, batch(100.0, [1, 2]), batch(5.0, [3, 3])], 3, num_passes=2, pace=1)
  assert (observation.num_batches, observation.prefill_seconds, observation.round_seconds) == (4, 5.0, 0.05)
  assert (observation.row_calls, observation.num_tokens, observation.kept) == ([5, 6, 7, 1, 2, 3], 48, [24])


@pytest.mark.slow
def test_a_machine_that_slows_down_between_groups(small_options, monkeypatch):
  options = small_options('auto', num_prompts=2, batch_size=1, draft_length=(1,), max_new_tokens=4)
  alone, spectr = (each for each in auto_choice.grid(options) if each.method.name in ('autoregressive', 'spectr'))
  now, tick = 0.0, 1.0  # every look at the clock takes a tick

  def look():
    nonlocal now
    now += tick
    return now

  def groups(settings, prepare, *, baseline, is_joint):
    nonlocal tick
    assert (settings, baseline, is_joint) == ([alone, spectr], alone, False)
    prepare(alone)
    yield [alone]
    tick = 2.0
    prepare(spectr)
    yield [alone, spectr]

  monkeypatch.setattr(measurement, 'time', types.SimpleNamespace(perf_counter=look))
  monkeypatch.setattr(measurement, 'in_groups', groups)
  trial = auto_choice.trial_of(Workload.load(options))
  observations = measurement.Measurer(*trial, alone, lambda *_: None).observe([spectr])
  assert set(observations) == {str(alone), str(spectr)}
  assert [each.prefill_seconds for each in observations.values()] == [1.0, 1.0]
  assert all(0.25 <= each.round_seconds <= 1 for each in observations.values())


def test_predictions_are_those_of_the_closed_form(settings):
  predicted = {str(p.setting): p for p in prediction.predict(_calibration(settings), settings)}
  alone = predicted['autoregressive']
  assert alone.tokens_per_call == 1
  assert alone.tokens_per_second == pytest.approx(100 / (2e-3 + 100 * 4e-3))
  for name, length, nodes, is_observed in (
    ('speculative K=1 L=8', 8, 8, True), ('speculative K=1 L=2', 2, 2, True), ('spectr K=8 L=4', 4, 32, True),
    ('specinfer K=8 L=4', 4, 32, False), ('block K=1 L=4', 4, 4, True), ('race_block K=4 L=2', 2, 8, True),
  ):  # fmt: skip
    tokens = sum(0.8**depth for depth in range(length + 1))
    seconds = 0.5e-3 * length + 3e-3 + 0.1e-3 * nodes + 1e-3 * (1 + 0.01 * nodes)
    assert predicted[name].tokens_per_call == pytest.approx(tokens, rel=1e-3)
    assert predicted[name].round_seconds == pytest.approx(seconds, rel=1e-6)
    # Shorter drafts take more rounds for the same tokens.
    source_tokens = tokens if is_observed else sum(0.8**depth for depth in range(9))
    per_batch = 100 * source_tokens
    rounds = per_batch / tokens
    assert predicted[name].tokens_per_second == pytest.approx(per_batch / (2e-3 + rounds * seconds), rel=1e-3)
    assert predicted[name].is_observed == is_observed
  settings = auto_choice.grid(_options(num_drafts=(4,), draft_length=(2, 8)))
  by_name = {str(setting): setting for setting in settings}
  longest, short = by_name['specinfer K=4 L=8'], by_name['specinfer K=4 L=2']
  assert str(auto_setting.reference_of(short, settings)) == 'spectr K=4 L=2'
  assert auto_setting.source_of(short, settings) == longest
  measured = _calibration(settings)
  for name, seconds in (('spectr K=4 L=2', 0.030), ('spectr K=4 L=8', 0.050), ('specinfer K=4 L=8', 0.058)):
    observation = measured.observations[name]
    measured.observations[name] = dataclasses.replace(observation, round_seconds=seconds)
  predicted = {str(p.setting): p.round_seconds for p in prediction.predict(measured, settings)}
  assert predicted['specinfer K=4 L=8'] == pytest.approx(0.058)
  assert predicted['specinfer K=4 L=2'] == pytest.approx(0.030 + 0.008 / 4)


def test_the_fastest_is_chosen_and_speculation_left_where_it_does_not_pay(settings):
  predictions = prediction.predict(_calibration(settings), settings)
  assert predictions == sorted(predictions, key=lambda each: -each.tokens_per_second)
  assert prediction.choose(predictions) == predictions[0].setting
  assert predictions[0].setting.tree.num_nodes
  # Where every node costs as much as a call, as at large batches, nothing is better than no guess.
  predictions = prediction.predict(_calibration(settings, node=4e-3), settings)
  assert prediction.choose(predictions).method.name == 'autoregressive'


def test_processes_whose_clocks_differ_choose_alike(monkeypatch, settings):
  first = prediction.predict(_calibration(settings), settings)
  own = prediction.predict(_calibration(settings, node=4e-3), settings)
  assert prediction.choose(own) != prediction.choose(first)
  sent = []

  def broadcast(order):
    sent.append(np.asarray(order))
    return sent[0]

  monkeypatch.setattr(programs.jax, 'process_count', lambda: 2)
  monkeypatch.setattr(programs.multihost_utils, 'broadcast_one_to_all', broadcast)
  in_first, in_other = (prediction.ranked(own_order) for own_order in (first, own))
  assert in_first == in_other == [own_order.setting for own_order in first]
  assert not np.array_equal(sent[0], sent[1])
  assert prediction.choose(own) == prediction.choose(first)


def test_no_seed_is_decoded_twice():
  options = _options(seed=2**32 - 3, num_seeds=2, calibration_prompts=3)
  taken = types.SimpleNamespace(keys=lambda seed: seed)
  workload = types.SimpleNamespace(options=options, batch_size=2, take={4: taken}.get)  # two batches
  some, keys_fn = auto_choice.trial_of(workload)
  assert some is taken
  passes = [keys_fn(number) for number in range(2 * measurement.FEWEST_BATCHES)]
  used = [*options.seeds, options.seeds[-1] + 1, *passes]  # one is for acceptance rates
  assert len(set(used)) == 2 + 1 + 2 * measurement.FEWEST_BATCHES


def test_observations_are_joined_and_batches_wait_for_their_slowest_row(settings):
  one = calibration.Observation(2, 30, [8, 12], [8, 2], 1.0, 0.1)
  other = calibration.Observation(6, 50, [5] * 6, [15, 5], 2.0, 0.2)
  joined = one.joined(other)
  assert joined == calibration.Observation(8, 80, [8, 12, 5, 5, 5, 5, 5, 5], [23, 7], 1.75, joined.round_seconds)
  assert joined.round_seconds == pytest.approx(0.175)
  # Rounds are those of the slowest row of all batches that the rows could form.
  calls = [4, 9, 6, 6, 3]
  joined = dataclasses.replace(one, row_calls=calls)
  for size in (1, 2, 3, 5):
    assert joined.rounds(size) == pytest.approx(np.mean([max(rows) for rows in itertools.combinations(calls, size)]))
  assert joined.rounds(8) == 9  # there are five prompts
  measured = _calibration(settings)
  together = dataclasses.replace(measured, conditions={'device': 'test', 'batch_size': 4})
  alone = {str(joined.setting): joined.tokens_per_second for joined in prediction.predict(measured, settings)}
  for joined in prediction.predict(together, settings):  # all rows take as many rounds
    assert joined.tokens_per_second == pytest.approx(4 * alone[str(joined.setting)])
  for seen in together.observations.values():
    seen.row_calls[0] += 100  # in two of five batches
    seen.row_calls[1] -= 100
  slower = {str(joined.setting): joined.tokens_per_second for joined in prediction.predict(together, settings)}
  assert all(slower[name] < 4 * alone[name] for name in alone)


def test_a_setting_that_was_lucky_at_first_is_not_chosen(monkeypatch, settings):
  first, seconds = _calibration(settings), _calibration(settings).observations
  lucky = next(each for each in prediction.predict(first, settings)[3:] if each.is_observed).setting

  def with_time(factor):
    return dataclasses.replace(seconds[str(lucky)], round_seconds=factor * seconds[str(lucky)].round_seconds)

  first.observations[str(lucky)] = with_time(0.6)
  predictions = prediction.predict(first, settings)
  assert prediction.choose(predictions) == lucky
  finalists = prediction.finalists_of(predictions)
  assert finalists == [each.setting for each in predictions[: prediction._NUM_FINALISTS]]
  assert not prediction.finalists_of(predictions[:7])  # a quarter is a single one
  unseen = next(setting for setting in settings if str(setting) not in seconds)
  alone = settings[0]

  def observe(self, some, *, turn, pace):
    assert turn == 1
    assert some == [*finalists, unseen]
    assert pace == seconds[str(alone)].round_seconds
    own = {str(lucky): with_time(1.8), str(unseen): dataclasses.replace(seconds[str(alone)], num_tokens=1234)}
    return {
      str(each): own.get(str(each)) or seconds[str(auto_setting.source_of(each, settings))] for each in [alone, *some]
    }

  monkeypatch.setattr(measurement.Measurer, 'observe', observe)
  again = measurement.Measurer(None, None, alone, None).observe_finalists([*finalists, unseen], first)
  assert again.observations[str(lucky)].round_seconds == pytest.approx(1.2 * seconds[str(lucky)].round_seconds)
  assert again.observations[str(lucky)].num_tokens == 2 * seconds[str(lucky)].num_tokens
  predictions = {each.setting: each for each in prediction.predict(again, settings)}
  assert prediction.choose(list(predictions.values())) != lucky
  assert predictions[unseen].is_observed
  assert predictions[unseen].tokens_per_call == 1.234


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'x.json is not JSON .*--calibration writes one'),
    *(
      (text, 'x.json is no calibration')
      for text in ('[]', '{"format": 0}', '{"format": 1}', '{"format": 1, "conditions": {}}')
    ),
  ],
)
def test_a_calibration_is_the_same_after_a_file_and_others_are_refused(tmp_path, settings, text, message):
  path, measured = tmp_path / 'x.json', _calibration(settings)
  path.write_text(measured.to_json())
  assert auto_choice.read_calibration(path) == measured
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    auto_choice.read_calibration(path)


def test_a_calibration_of_another_grid_is_refused_unless_it_has_more(settings):
  measured = _calibration(settings)
  measured.check_conditions({'device': 'test'}, 'f')
  assert programs.complete_settings(measured, settings, 'f', is_short=False) == settings
  with pytest.raises(ValueError, match='f was measured with device test, not other; name a new file'):
    measured.check_conditions({'device': 'other'}, 'f')
  with pytest.raises(ValueError, match='f was measured for another grid, without speculative K=1'):
    programs.complete_settings(measured, auto_choice.grid(_options(draft_length=(2, 16))), 'f', is_short=False)
  whole = _calibration(settings)
  assert programs.complete_settings(whole, settings, 'f', is_short=True) == settings
  few, _ = _measured(_NOTHING, settings, node=0.1e-3)
  assert len(programs.complete_settings(few, settings, 'f', is_short=True)) == 4
  with pytest.raises(ValueError, match='f was measured for another grid, without '):
    programs.complete_settings(few, settings, 'f', is_short=False)
  del few.observations['autoregressive']
  with pytest.raises(ValueError, match='f was measured for another grid, without autoregressive'):
    programs.complete_settings(few, settings, 'f', is_short=True)


def _measured(calibration, settings, *, node, rate=0.8):
  """The calibration with all that is missing, as a short grid measures it, and the programs in their order."""
  full, done = _calibration(settings, node=node, rate=rate), []
  while True:
    planned = programs.plan(calibration, settings, is_short=True)[1]
    first = next((each for each in planned if not each.is_in(calibration)), None)
    if first is None:
      return calibration, done
    done.append(str(first))
    name, size = auto_setting.tree_name_of(first.setting), first.setting.tree.num_nodes
    of = {
      programs.TARGET: ('target_seconds', size, full.target_seconds.get(size)),
      programs.DRAFT: ('draft_seconds', name, full.draft_seconds.get(name)),
      programs.ROUNDS: ('observations', str(first.setting), full.observations.get(str(first.setting))),
    }
    field, key, value = of[first.kind]
    calibration = dataclasses.replace(calibration, **{field: getattr(calibration, field) | {key: value}})


_NOTHING = calibration.Calibration({'device': 'test', 'batch_size': 1}, {}, {}, {}, is_complete=False)


@pytest.mark.parametrize(
  ('node', 'rate', 'first', 'others'),
  [
    # Scoring costs nothing: longer drafts where many guesses are kept, more and shorter ones where few are.
    (0.0, 0.9, 'block K=1 L=4', ['block K=1 L=8', 'race_traversal K=2 L=4']),
    (0.0, 0.3, 'block K=1 L=4', ['block K=1 L=1', 'race_traversal K=4 L=2']),
    # A third of a call: short ones.
    (1e-3, 0.8, 'block K=1 L=1', ['block K=1 L=2', 'race_traversal K=2 L=2']),
    # A whole call: nothing else is tried.
    (3e-3, 0.8, 'block K=1 L=1', []),
  ],
)
def test_a_short_grid_is_what_the_slope_of_the_target_allows(node, rate, first, others, settings):
  measured, done = _measured(_NOTHING, settings, node=node, rate=rate)
  compared = [str(each) for each in programs.plan(measured, settings, is_short=True)[0]]
  assert compared == ['autoregressive', first, *others]
  sizes = [f'timing the target on {size + 1} tokens' for size in (0, 1, 2, 4, 8)]
  assert done[:5] == sizes
  assert done[5].startswith('timing the draft on chains 1x')
  assert done[6:] == [f'decoding with {name}' for name in compared]
  assert len(done) <= programs.plan(_NOTHING, settings, is_short=True)[2] == 10
  predictions = prediction.predict(measured, programs.plan(measured, settings, is_short=True)[0])
  assert all(each.is_observed and each.tokens_per_second > 0 for each in predictions)


def test_a_short_grid_promises_no_more_than_the_closed_form():
  """One draft: (1 - a^(L+1)) / (1 - a) tokens, over 1 + L c calls where scoring costs nothing."""
  setting = auto_setting.Setting.of_chains(METHODS['block'], 1, 5)
  tokens, kept = theory.expected_chain_tokens(0.6, 5), 0.6 ** np.arange(1, 9)
  wanted = theory.speed_up(tokens, 5, draft_cost=0.2)
  assert programs.speed_up_at(setting, kept, (1.0, 1.0), 0.2) == pytest.approx(float(wanted))
  several = auto_setting.Setting.of_chains(METHODS['race_traversal'], 4, 5)
  assert programs.speed_up_at(setting, kept, (1, 1), 0) < programs.speed_up_at(several, kept, (1, 1), 0) < 6


def test_lengths_are_judged_by_what_was_kept_at_each_depth():
  """Of 100 calls 50 kept a token and 10 two: deeper ones follow at the rate of all, 60 of 150."""
  seen = calibration.Observation(1, 160, [60, 40], [50, 10], 0.1, 0.01)
  np.testing.assert_allclose(programs.kept_by_depth(seen)[:4], [0.5, 0.1, 0.04, 0.016])


@pytest.mark.parametrize('changes', [{'draft': 'lookup'}, {'draft': 'lookup+here'}, {'temperature': 0.0}])
def test_every_kind_of_draft_has_a_short_grid(changes):
  settings = auto_choice.grid(_options(**changes))
  candidates = programs.candidates_of(settings)
  names = {'draft': {'lookup': {'speculative', 'race_traversal'}, 'lookup+here': {'race_traversal'}}}
  wanted = names.get(next(iter(changes)), {}).get(changes.get('draft'))
  methods = {each.method.name for each in candidates[1:]}
  assert methods == wanted if wanted else {'block'} < methods
  assert len({auto_setting.tree_name_of(each) for each in candidates}) == len(candidates)
  assert max(each.tree.num_nodes for each in candidates) == 8


def test_the_grid_is_short_on_cpus_unless_it_is_given(monkeypatch):
  assert _options().has_short_grid
  assert not _options(grid='full').has_short_grid
  assert not _options(num_drafts=(1, 2)).has_short_grid
  assert not _options(tree=('prefix:2,1',)).has_short_grid
  assert dataclasses.replace(_options(), num_prompts=3).has_short_grid
  monkeypatch.setattr('jax.default_backend', lambda: 'gpu')
  assert not _options().has_short_grid
  assert _options(grid='short').has_short_grid


class _Interrupted(BaseException):
  """In the place of Ctrl-C."""


@pytest.mark.slow
def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path, pair, prompt_file, monkeypatch):
  path = tmp_path / 'calibration.json'
  options = _options(**pair, prompts=str(prompt_file), grid='short', max_new_tokens=8, calibration=str(path))
  said, once = [], []

  def notify(what, done, total):
    said.append(what)
    if 'program 8' in what and not once:
      once.append(what)
      raise _Interrupted

  with pytest.raises(_Interrupted):
    run_decode(options, notify)
  kept = auto_choice.read_calibration(path)
  assert not kept.is_complete
  assert (len(kept.target_seconds), len(kept.draft_seconds), list(kept.observations)) == (5, 1, ['autoregressive'])
  assert [each.name for each in tmp_path.iterdir()] == ['calibration.json']  # nothing unfinished
  said.clear()
  run = run_decode(options, notify)
  numbers = [int(whole[1]) for each in said if (whole := re.match(r'auto: program (\d+) of 10, ', each))]
  assert numbers == sorted(numbers)
  assert numbers[0] == 8
  whole = auto_choice.read_calibration(path)
  assert whole.is_complete
  assert whole.target_seconds == kept.target_seconds
  assert whole.observations['autoregressive'] == kept.observations['autoregressive']
  assert {str(each.setting) for each in run.predictions} == set(whole.observations)
  monkeypatch.setattr(measurement, 'Measurer', None)  # not called again
  assert run_decode(options).predictions == run.predictions


@pytest.fixture
def few_methods(monkeypatch):
  few = 'autoregressive', 'spectr', 'race'
  methods = {name: dataclasses.replace(method, is_lossless=name in few) for name, method in METHODS.items()}
  monkeypatch.setattr(auto_choice, 'METHODS', methods)


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
@pytest.mark.parametrize('is_beside', [False, True])
def test_lookup_is_measured(tmp_path, pair, prompt_file, is_beside):
  path = tmp_path / 'calibration.json'
  draft = f'lookup+{pair["draft"]}' if is_beside else 'lookup'
  options = _options(
    target=pair['target'], draft=draft, prompts=str(prompt_file), num_drafts=(1, 2), draft_length=(2,),
    max_new_tokens=8, lookup_min=1, calibration=str(path),
  )  # fmt: skip
  names = {'autoregressive', 'race K=2 L=2', 'race K=1 L=2' if is_beside else 'spectr K=2 L=2'}
  run = run_decode(options)
  assert {str(each.setting) for each in run.predictions} == names
  assert all(each.tokens_per_second > 0 for each in run.predictions)
  assert run_decode(options).predictions == run.predictions
  with pytest.raises(ValueError, match=r'measured with lookup \[8, 1\], not \[8, 2\]'):
    run_decode(dataclasses.replace(options, lookup_min=2))


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
def test_a_pair_is_measured_once(tmp_path, small_options):
  path = tmp_path / 'calibration.json'
  options = small_options('auto', draft_length=(1, 3), max_new_tokens=8, calibration=str(path))
  said = []
  run = run_decode(options, lambda what, done, total: said.append(what))
  assert any(re.fullmatch(r'auto: program \d of 9, decoding calibration prompts', each) for each in said)
  names = {
    'autoregressive', 'spectr K=2 L=1', 'spectr K=2 L=3', 'race K=2 L=1', 'race K=2 L=3',
  }  # fmt: skip
  assert {str(each.setting) for each in run.predictions} == names
  assert run.settings == [run.predictions[0].setting]
  observed = json.loads(path.read_text())['observations']
  assert set(observed) == names - {'race K=2 L=1'}
  for each in observed.values():
    # Three passes of two batches, each with another seed.
    assert (each['num_batches'], len(each['row_calls'])) == (6, 9)
    assert sum(each['row_calls']) <= each['num_tokens'] <= 9 * 8  # a row may end with its last token before that
  drafted = observed['spectr K=2 L=3']['row_calls']
  assert not drafted[:3] == drafted[3:6] == drafted[6:]
  alone = observed['autoregressive']
  assert sum(alone['row_calls']) == alone['num_tokens']

  said.clear()
  again = run_decode(options, lambda what, done, total: said.append(what))
  assert not any('calibration' in what for what in said)
  assert again.predictions == run.predictions
  with pytest.raises(ValueError, match='measured with batch_size 2, not 1'):
    run_decode(dataclasses.replace(options, batch_size=1))


@pytest.mark.slow
@pytest.mark.usefixtures('few_methods')
@pytest.mark.parametrize('kind', ['model', 'head', 'lookup beside a head'])
def test_drafts_of_every_kind_are_measured_with_growing_trees(
  tmp_path, pair, prompt_file, tiny_head_file, kind, monkeypatch
):
  is_mixed, path = kind == 'lookup beside a head', tmp_path / 'calibration.json'
  draft = {'model': pair['draft'], 'head': tiny_head_file}.get(kind, f'lookup+{tiny_head_file}')
  trees = ('chains',) if is_mixed else ('chains', 'likeliest:2,2', 'confident:2,2')
  options = _options(
    target=pair['target'], draft=draft, prompts=str(prompt_file), num_drafts=(2,), draft_length=(2,), tree=trees,
    max_new_tokens=8, calibration=str(path), calibration_prompts=2,
  )  # fmt: skip
  compiled = []
  observe = measurement.Measurer.observe
  monkeypatch.setattr(
    measurement.Measurer, 'observe', lambda *a, **k: (observe(*a, **k), compiled.append(run_rounds._cache_size()))[0]
  )
  run = run_decode(options)
  predicted = {str(each.setting): each for each in run.predictions}
  grown = [] if is_mixed else ['likeliest:2,2', 'confident:2,2']
  names = {'race K=2 L=2'} | {f'{name} {tree}' for name in ('spectr', 'race') for tree in grown}
  names |= set() if is_mixed else {'spectr K=2 L=2'}
  assert names | {'autoregressive'} <= set(predicted)
  assert all(each.tokens_per_second > 0 and each.tokens_per_call >= 1 for each in run.predictions)
  further = set(predicted) - names - {'autoregressive'}
  assert len(further) == (0 if is_mixed else len(auto_setting._THRESHOLDS))
  assert len({name.partition(' from ')[0] for name in further}) == (not is_mixed)
  assert len(set(compiled[len(names) :])) == 1  # other thresholds compile nothing
  assert is_mixed or len(compiled) > len(names) + 1
  assert run_decode(options).predictions == run.predictions
  content = json.loads(path.read_text())
  prompts = {name: len(each['row_calls']) for name, each in content['observations'].items()}
  twice = {name for name, number in prompts.items() if number == 2 * min(prompts.values())}
  num_finalists = len(predicted) // 4 if len(predicted) >= 8 else 0
  assert num_finalists <= len(twice) <= num_finalists + 1
  assert not twice or 'autoregressive' in twice  # beside the fastest
  content['observations'] = {n: each for n, each in content['observations'].items() if ' from ' not in n}
  path.write_text(json.dumps(content))
  if not is_mixed:
    with pytest.raises(ValueError, match='was measured for another grid, without .* from 0.02'):
      run_decode(options)
