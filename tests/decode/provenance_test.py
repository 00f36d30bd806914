"""A resumed file is of the same run: what must not change is refused by name, what may change is not."""

import json
import pathlib
import shutil

import pytest

from decode.bulk import decode_bulk
from decode.experiment.exports import OPTIONS
from decode.experiment.options import FIELDS, DecodeOptions


def test_every_option_has_its_part():
  assert sorted(name for names in OPTIONS.values() for name in names) == sorted(FIELDS)


@pytest.fixture(scope='module')
def begun(pair, prompt_file, tmp_path_factory):
  """The options of a run, and its file with a line for each of three prompts."""
  folder = tmp_path_factory.mktemp('begun')
  corpus = folder / 'corpus.txt'
  corpus.write_text('the quick brown fox\n\nseven wise owls\n')
  fields = {'method': ('race',), 'num_drafts': (2,), 'draft_length': (2,), 'max_new_tokens': 4, 'stop': ('q',)}
  fields |= pair | {'draft': f'lookup+{pair["draft"]}', 'lookup_corpus': (str(corpus),), 'prompts': str(prompt_file)}
  decode_bulk(DecodeOptions.of(**fields), folder / 'out.jsonl')
  return fields, folder / 'out.jsonl'


def _resume(begun, path, **changes):
  fields, file = begun
  shutil.copy(file, path)
  before = path.read_bytes()
  try:
    return decode_bulk(DecodeOptions.of(**fields | changes), path, resume=True)
  finally:
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize(
  ('changes', 'name'),
  [
    ({'dtype': 'bfloat16'}, 'target_dtype'), ({'weights': 'int8'}, 'weights'), ({'lookup_max': 3}, 'lookup_max'),
    ({'lookup_min': 3}, 'lookup_min'), ({'lookup_corpus': ()}, 'lookup_corpus'),
    ({'draft': 'lookup', 'lookup_corpus': ()}, 'draft'), ({'logprobs': True}, 'logprobs'),
    ({'method': ('race_block',)}, 'method'), ({'num_drafts': (3,)}, 'num_drafts'),
    ({'draft_length': (3,)}, 'draft_length'), ({'temperature': 0.5}, 'temperature'), ({'top_k': 5}, 'top_k'),
    ({'top_p': 0.5}, 'top_p'), ({'min_p': 0.1}, 'min_p'), ({'stop': ()}, 'stop'),
    ({'max_new_tokens': 5}, 'max_new_tokens'),
  ],
)  # fmt: skip
def test_what_determines_continuations_is_refused(begun, tmp_path, changes, name):
  with pytest.raises(
    ValueError, match=rf'out\.jsonl, line 1, has .*\b{name} .*, and this run .*; only these may change'
  ):
    _resume(begun, tmp_path / 'out.jsonl', **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('fields', 'change'),
  [
    ({'method': ('race',), 'tree': ('confident:2,2',)}, {'growth_threshold': 1e-7}),
    ({'method': ('autoregressive',)}, {'gumbel': True}),
  ],
)
def test_growth_and_gumbel_count(pair, prompt_file, tmp_path, fields, change):
  fields = pair | {'prompts': str(prompt_file), 'max_new_tokens': 2} | fields
  decode_bulk(DecodeOptions.of(**fields), tmp_path / 'out.jsonl')
  with pytest.raises(ValueError, match=f'has .*{next(iter(change))} '):
    decode_bulk(DecodeOptions.of(**fields | change), tmp_path / 'out.jsonl', resume=True)


def test_models_and_corpus_count_by_content_and_not_by_place(begun, save_tiny_model, tmp_path):
  fields, _ = begun
  moved = tmp_path / 'moved'
  shutil.copytree(fields['target'], moved)
  assert _resume(begun, tmp_path / 'out.jsonl', target=str(moved))[0] == 0
  other = save_tiny_model(tmp_path / 'other', 5)
  for role, value in (('target', other), ('draft', f'lookup+{other}')):
    with pytest.raises(ValueError, match=f"line 1, has {role} '[0-9a-f]{{16}}', and this run '[0-9a-f]{{16}}'"):
      _resume(begun, tmp_path / 'out.jsonl', **{role: value})
  corpus = tmp_path / 'other.txt'
  corpus.write_text(pathlib.Path(begun[0]['lookup_corpus'][0]).read_text())
  assert _resume(begun, tmp_path / 'out.jsonl', lookup_corpus=(str(corpus),))[0] == 0
  corpus.write_text('the quick brown dog\n\nseven wise owls\n')
  with pytest.raises(ValueError, match='has lookup_corpus '):
    _resume(begun, tmp_path / 'out.jsonl', lookup_corpus=(str(corpus),))


def test_what_may_change_may_change(begun, tmp_path):
  path = tmp_path / 'out.jsonl'
  assert _resume(begun, path, batch_size=3, num_prompts=2)[0] == 0
  assert _resume(begun, path, num_samples=2, num_seeds=2, skip_long=True)[0] > 0
  places = {(x['seed'], x['index'], x['sample']) for x in map(json.loads, path.read_text().splitlines())}
  assert places == {(seed, index, sample) for seed in range(2) for index in range(3) for sample in range(2)}
  assert {'batch_size', 'num_seeds', 'num_samples', 'seed', 'mesh'} <= {*OPTIONS['free']}


def test_prompts_count(begun, tmp_path):
  prompts = tmp_path / 'prompts.jsonl'
  text = pathlib.Path(begun[0]['prompts']).read_text()
  for changed, what in ((text.replace('"a"', '"b"'), 'id'), (text.replace('wise', 'old'), 'prompt')):
    prompts.write_text(changed)
    with pytest.raises(ValueError, match=f'continues another prompt than number . of this run: {what} '):
      _resume(begun, tmp_path / 'out.jsonl', prompts=str(prompts))
