"""A draft with another tokenizer in commands: what they decode, say and refuse."""

import io
import json

import commands
import httpx
import numpy as np
import pytest
from rich.console import Console

from decode.bulk import decode_bulk
from decode.experiment import exports, report
from decode.experiment.run import run_decode
from decode.experiment.workload import load_models

_OTHER = 'pack my box with five dozen liquor jugs and then sphinx of black quartz judge my vow for the wizards ' * 4


@pytest.fixture(scope='module')
def stranger(tmp_path_factory, save_tiny_model):
  """The path of a draft with another tokenizer."""
  return save_tiny_model(tmp_path_factory.mktemp('other') / 'draft', 1, _OTHER)


def test_a_run_says_what_is_shared_and_keeps_the_targets_text(small_options, stranger):
  options = small_options('autoregressive', 'speculative', draft=stranger, num_drafts=(1,), temperature=0.0)
  run = run_decode(options)
  shared = json.loads(exports.to_json(run))['run']['models']['draft']['vocabulary']
  assert 256 < shared['num_shared'] < 320
  assert shared['num_draft'] == shared['num_target'] == 320
  assert 0.5 < shared['share_of_mass'] < 1
  console = Console(record=True, width=400, file=io.StringIO())
  report.print_report(run, console)
  assert f'of its 320 tokens {shared["num_shared"]} are among the target' in console.export_text()
  alone, drafted = run.measurements
  np.testing.assert_array_equal(alone.tokens, drafted.tokens)


def test_a_draft_of_nothing_in_common_is_refused(small_options, stranger, monkeypatch):
  options = small_options('speculative', draft=stranger)
  monkeypatch.setattr('spectr_jax.io.tokenizer.TokenizerBase.token_bytes', lambda self, ids: [b''] * len(ids))
  monkeypatch.setattr('spectr_jax.io.fit_draft._roles', lambda tokenizer: [])
  monkeypatch.setattr('spectr_jax.io.fit_draft._same_names', lambda *names: [])
  with pytest.raises(ValueError, match='^[^ ]+ and [^ ]+: draft and target share no token: no guess'):
    load_models(options)


@pytest.mark.slow
def test_bulk_decoding_resumes(small_options, stranger, tmp_path):
  """Beside lookup, too; greedy texts are those without a draft."""
  texts = []
  for draft, method in (
    (stranger, 'speculative'),
    (f'lookup+{stranger}', 'race_traversal'),
    (stranger, 'autoregressive'),
  ):
    options, path = (
      small_options(method, draft=draft, num_drafts=(1,), temperature=0.0),
      tmp_path / f'{len(texts)}.jsonl',
    )
    decode_bulk(options, path)
    found = sorted(map(json.loads, path.read_text().splitlines()), key=lambda entry: entry['index'])
    texts.append([entry['tokens'] for entry in found])
    assert decode_bulk(options, path, resume=True)[1] == 0
  assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_auto_takes_it(small_options, stranger):
  options = small_options('auto', draft=stranger, num_drafts=(1,), draft_length=(2,), calibration_prompts=2)
  run = run_decode(options)
  assert any(each.setting.tree.num_nodes for each in run.speeds)


@pytest.mark.slow
def test_trees_that_grow_and_samples(small_options, stranger):
  trees = {'tree': ('confident:2,2', 'prefix:2,1'), 'num_samples': 2}
  assert len(run_decode(small_options('race_traversal', draft=stranger, **trees)).measurements) == 2


@pytest.mark.slow
def test_it_is_served(pair, stranger):
  """The text is that of the target alone."""
  answers = []
  for draft in (f'--draft={stranger}', '--draft=lookup'):
    sizes = '--num_drafts=1', '--draft_length=2', '--batch_size=2', '--longest_prompt=16', '--port=0'
    process = commands.start('decode.serve', f'--target={pair["target"]}', draft, '--method=speculative', *sizes)
    line = process.stdout.readline()
    assert line.startswith('serving target at http://'), line + process.stderr.read()
    body = {'prompt': 'the owl', 'max_tokens': 8, 'temperature': 0}
    answer = httpx.post(f'{line.split(" at ")[1].split(",")[0]}/completions', json=body, timeout=120)
    process.kill()
    process.communicate()
    answers.append(answer.json()['choices'][0]['text'])
  assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [['--mesh=data:2'], ['--mesh=model:2'], ['--mesh=model:2', '--draft_mesh=divided']])
def test_two_devices_decode_like_one(pair, stranger, prompt_file, tmp_path, mesh):
  models = f'--target={pair["target"]}', f'--draft={stranger}', f'--prompts={prompt_file}'
  sizes = '--method=race_traversal,spectr', '--num_drafts=2', '--draft_length=2', '--batch_size=2', '--max_new_tokens=6'
  found = []
  for number, own in enumerate(([], mesh)):
    path = tmp_path / f'{number}.jsonl'
    options = {'num_devices': 1 + number, 'JAX_DEFAULT_MATMUL_PRECISION': 'highest'}
    commands.succeed('decode.main', *models, *sizes, *own, f'--generations={path}', **options)
    found.append([json.loads(line) for line in path.read_text().splitlines()])
  assert found[0] == found[1]
