"""The table of Spec-Bench: its sample, its means, and its published leaderboard."""

import dataclasses
import json

import numpy as np
import pytest
from exhibit_checks import request_of, rows_of

from decode.experiment.measurements import DecodeRun, Measurement
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import expand
from decode.experiment.workload import describe
from decode.papers import exhibit as exhibits
from decode.papers import published, spec_bench
from decode.papers.exhibits import TABLES
from decode.study import Value

# Each prompt's category, and of both methods the tokens, target calls and seconds that a run is made up of.
_AUTOREGRESSIVE, _SPECULATIVE = 'autoregressive', 'speculative'
_PROMPTS = {
  'writing': {_AUTOREGRESSIVE: (4, 4, 2.0), _SPECULATIVE: (4, 2, 1.0)},
  'math': {_AUTOREGRESSIVE: (4, 4, 4.0), _SPECULATIVE: (4, 4, 4.0)},
  'qa': {_AUTOREGRESSIVE: (2, 2, 1.0), _SPECULATIVE: (2, 1, 0.5)},
}


@pytest.fixture
def question_file(tmp_path):
  path = tmp_path / 'question.jsonl'
  categories = [category for category in _PROMPTS for _ in range(2)]
  entries = ({'question_id': 7 + i, 'category': name, 'turns': [f'owl {i}']} for i, name in enumerate(categories))
  path.write_text(''.join(json.dumps(entry) + '\n' for entry in entries))
  return f'spec_bench:{path}'


def _made_up_run(options, notify, pick):
  del notify
  prompts, settings = pick(options.prompts.read(), options.prompts.num_prompts), expand(options)

  def measurement(setting):
    tokens, calls, seconds = map(np.array, zip(*(_PROMPTS[prompt.task][setting.method.name] for prompt in prompts)))
    baseline = np.array([_PROMPTS[prompt.task][_AUTOREGRESSIVE][2] for prompt in prompts])
    kept = np.minimum((tokens - calls)[:, None], np.arange(setting.draft_length, 0, -1))
    every = np.zeros((len(prompts), options.prompts.max_new_tokens), np.int32)
    return Measurement(
      every, tokens, calls, kept, every, np.zeros_like(calls), setting=setting, seed=0, batch_seconds=seconds,
      baseline_seconds=baseline, rounds=int(calls.sum()),
    )  # fmt: skip

  models = {'target': {'path': options.models.target, 'num_params': 1, 'dtype': 'float32'}}
  info = describe(options, models) | {'num_long_prompts': 0}
  return DecodeRun(options, info, prompts, None, settings, [measurement(setting) for setting in settings])


def _request(question_file, **sizes):
  request = request_of('spec_bench', prompts={'Spec-Bench': question_file}, draft_length=(2,), **sizes)
  return dataclasses.replace(request, options=TABLES['spec_bench'].choose_options({'method': (_SPECULATIVE,)}))


def test_speeds_are_means_over_prompts_beside_the_leaderboard(question_file, monkeypatch):
  monkeypatch.setattr(exhibits, 'run_decode', _made_up_run)
  exhibit, request = TABLES['spec_bench'], _request(question_file, num_prompts=3)
  results = exhibit.measure(request, None)
  assert {tuple(row) for row in results.rows} == {tuple(results.rows[0])}
  here = {(row['task'], row['method']): row for row in results.rows if row['of'] == 'here'}
  talk, overall = 'multi-turn conversation', 'overall'
  assert list(here) == [
    (task, method) for task in (talk, 'question answering', overall) for method in (_AUTOREGRESSIVE, _SPECULATIVE)
  ]
  # Two of the conversations' four prompts, from both of their categories.
  speeds = {key: (row['prompts'], row['tokens/s'].number, row['speed-up'].number) for key, row in here.items()}
  assert speeds[talk, _AUTOREGRESSIVE] == pytest.approx((2, (2 + 1) / 2, 1))
  assert speeds[talk, _SPECULATIVE] == pytest.approx((2, (4 + 1) / 2, 2.5 / 1.5))
  assert speeds['question answering', _SPECULATIVE] == pytest.approx((1, 4, 2))
  assert speeds[overall, _SPECULATIVE] == pytest.approx((3, (4 + 1 + 4) / 3, 9 / 5))
  assert here[talk, _SPECULATIVE]['mean accepted tokens'].number == pytest.approx(8 / 6)
  assert here[overall, _SPECULATIVE]['mean accepted tokens'].number == pytest.approx(10 / 7)
  assert here[talk, _SPECULATIVE]['acceptance by position'] == '0.33 0.17'
  assert here[talk, _AUTOREGRESSIVE]['acceptance by position'] is None
  low, high = here[overall, _SPECULATIVE]['speed-up'].interval
  assert 0 < low < 9 / 5 < high
  assert here[talk, _SPECULATIVE]['speed-up'].interval is None  # of two prompts
  assert here['question answering', _SPECULATIVE]['speed-up'].interval is None  # one prompt says nothing of others
  about = exhibit.describe(request, results)
  assert any('evenly over the tasks' in line and f'{talk} 2, question answering 1' in line for line in about)
  assert any(line.startswith('without a prompt: translation, summarization, mathematical') for line in about)
  assert any('other hardware, models and drafters' in line for line in about)
  assert any('num_prompts 3 instead of 480' in line for line in about)
  files = exhibit.files('spec_bench', request, results, about)
  assert rows_of(files['spec_bench.json']) == results.rows
  assert files['spec_bench.png'].startswith(b'\x89PNG')
  monkeypatch.setattr(exhibits, 'run_decode', _made_up_run)
  rows = TABLES['spec_bench'].measure(_request(question_file, num_prompts=6), None).rows
  printed = {(row['task'], row['method']): row for row in rows if row['of'] == 'leaderboard: A100, Vicuna-13B'}
  assert len(printed) == 3 * len(published.SPEC_BENCH)
  assert printed['question answering', 'EAGLE-2']['speed-up'] == Value(2.20)
  assert printed['question answering', 'EAGLE-2']['mean accepted tokens'] is None
  assert printed['overall', 'EAGLE-3']['mean accepted tokens'] == Value(5.71)
  assert printed['overall', 'EAGLE-3']['speed-up'] == Value(3.02)


def test_a_prompt_needs_a_time_of_its_own_and_a_baseline(question_file):
  options = DecodeOptions.of(prompts=question_file, method=(_AUTOREGRESSIVE,), num_prompts=6, batch_size=2)
  run = _made_up_run(options, None, lambda prompts, number: prompts[:number])
  with pytest.raises(ValueError, match='batch_size must be 1, got 2'):
    run.take(np.array([0]))
  assert spec_bench._methods(('block', 'autoregressive')) == ('block', 'autoregressive')
  assert spec_bench._methods(('auto',)) == ('autoregressive', 'auto')
  with pytest.raises(ValueError, match='no method given'):
    spec_bench._methods(())


@pytest.mark.slow
def test_the_pretrained_pair_is_measured_by_task(question_file):
  models = DecodeOptions.of().models
  request = request_of(
    'spec_bench', {'target': models.target, 'draft': models.draft}, {'Spec-Bench': question_file},
    num_prompts=3, max_new_tokens=16, draft_length=(4,),
  )  # fmt: skip
  options = {'method': ('race_traversal',), 'tree': ('prefix:2,1',), 'temperature': (0.5,)}
  request = dataclasses.replace(request, options=TABLES['spec_bench'].choose_options(options))
  results = TABLES['spec_bench'].run(request, lambda *_: None)
  here = [row for row in results.rows if row['of'] == 'here']
  assert [row['method'] for row in here] == ['autoregressive', 'race_traversal'] * 3
  for row in here[1::2]:
    assert row['tree'] == 'prefix:2,1'
    assert 1 <= row['mean accepted tokens'].number <= 3
    assert min(row['tokens/s'].number, row['speed-up'].number) > 0
  # By tasks and overall it is the same run.
  counts = [row['prompts'] for row in here[1::2]]
  assert counts == [2, 1, 3]
  speeds = [row['tokens/s'].number for row in here[1::2]]
  assert speeds[2] == pytest.approx((2 * speeds[0] + speeds[1]) / 3)


def test_turns_may_be_rendered_by_the_chat_template(question_file, pair, monkeypatch):
  asked = []
  monkeypatch.setattr(exhibits, 'run_decode', lambda options, *rest, **more: asked.append(options) or _made_up_run(
    options, *rest, **more
  ))  # fmt: skip
  request = _request(question_file, max_new_tokens=8)
  chat = dataclasses.replace(request, options={**request.options, 'chat': True})
  for each in (request, chat):
    spec_bench.TABLES['spec_bench'].measure(each, lambda *_: None)
  assert [options.prompts.chat for options in asked] == [False, True]
  for each, words in ((request, 'without a chat template'), (chat, "in the target's chat template")):
    notes = spec_bench.TABLES['spec_bench'].measure(each, lambda *_: None).runs[0]['notes']
    assert [note.rpartition(', ')[2] for note in notes if 'chat template' in note] == [
      words if each is request else f'as turns of the user {words}'
    ]
  assert not any('chat template' in note for note in spec_bench.TABLES['spec_bench'].notes)
  own = dataclasses.replace(chat, target=pair['target'], drafts={'draft': pair['draft']})
  with pytest.raises(ValueError, match='the model has no chat template'):
    spec_bench.TABLES['spec_bench'].run(own, lambda *_: None)


def test_drafts_of_several_kinds_and_temperatures(question_file, monkeypatch):
  asked = []

  def run(options, *rest):
    asked.append((options.models.draft, options.sampling.temperature, options.methods.method, options.methods.tree))
    return _made_up_run(options, *rest)

  monkeypatch.setattr(exhibits, 'run_decode', run)
  monkeypatch.setitem(_PROMPTS, 'writing', _PROMPTS['writing'] | {'race': (4, 2, 1.0)})
  monkeypatch.setitem(_PROMPTS, 'math', _PROMPTS['math'] | {'race': (4, 2, 1.0)})
  monkeypatch.setitem(_PROMPTS, 'qa', _PROMPTS['qa'] | {'race': (2, 1, 1.0)})
  options = {'method': ('speculative', 'race'), 'temperature': (0.0, 0.6), 'tree': ('chains',)}
  request = dataclasses.replace(
    _request(question_file, num_prompts=3, num_drafts=(1,)),
    drafts={'lookup': 'lookup', 'head': 'h', 'both': 'lookup+h'},
    options=TABLES['spec_bench'].choose_options(options),
  )
  results = TABLES['spec_bench'].measure(request, None)
  every, mixed = ('autoregressive', 'speculative', 'race'), ('autoregressive', 'race')
  assert asked == [
    (draft, temperature, methods, ('chains',))
    for draft, methods in (('lookup', every), ('h', every), ('lookup+h', mixed))
    for temperature in (0.0, 0.6)
  ]
  here = [row for row in results.rows if row['of'] == 'here' and row['task'] == 'overall']
  assert [(row['draft'], row['temperature'], row['method']) for row in here] == [
    (name, temperature, method)
    for name, methods in (('lookup', every), ('head', every), ('both', mixed))
    for temperature in (0.0, 0.6)
    for method in methods
  ]
  assert 'both: without speculative, which its guesses are not for' in results.runs[0]['notes']
  assert TABLES['spec_bench'].to_image(results.rows).startswith(b'\x89PNG')
  only = dataclasses.replace(request, options={**request.options, 'method': (_SPECULATIVE,)})
  with pytest.raises(
    ValueError, match=r'^lookup\+h takes none of these methods on none of these trees: autoregressive, spec'
  ):
    TABLES['spec_bench'].measure(only, None)
