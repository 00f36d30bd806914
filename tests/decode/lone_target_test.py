"""A target without a draft decodes autoregressively: the shipped draft is for the shipped target alone."""

import json
import os

import commands
import gguf_files
import httpx
import pytest

from decode.experiment.drafting import with_default_drafting
from decode.experiment.model_options import DEFAULT_METHODS, PRETRAINED, ROOT, choose_draft
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting

_DRAFT = str(PRETRAINED / 'draft')


def test_the_shipped_draft_is_for_the_shipped_target(tmp_path):
  (tmp_path / 'link').symlink_to(PRETRAINED / 'target')
  shipped = (
    str(PRETRAINED / 'target'),
    os.path.relpath(PRETRAINED / 'target'),
    f'{PRETRAINED}/target/',
    tmp_path / 'link',
  )
  for target in map(str, shipped):
    assert choose_draft(target, None) == _DRAFT
    assert choose_draft(target, 'other') == 'other'
    assert choose_draft(target, 'lookup') == 'lookup'
    assert DecodeOptions.of(target=target).methods.method == DEFAULT_METHODS
  others = 'model.gguf', 'ORG/NAME', 'pretrained/target', '', str(PRETRAINED / 'draft'), str(ROOT)
  for target in others:
    if os.path.realpath(target) == os.path.realpath(PRETRAINED / 'target'):
      continue  # where the tests run in the repository
    options = DecodeOptions.of(target=target)
    assert (options.models.draft, options.models.draft_model, options.models.has_lookup) == (None, '', False)
    assert (options.methods.method, options.methods.needs_draft) == (('autoregressive',), False)
    assert DecodeOptions.of(target=target, draft='x').methods.method == DEFAULT_METHODS
    assert DecodeOptions.of(target=target, draft='lookup', method=('speculative',)).models.has_lookup
    assert choose_draft('gs://bucket/target', None) is None
    assert 'draft' not in options.inputs()
    values = {'target': target, 'tree': ('chains',)}
    assert only_setting(DecodeOptions.of(**with_default_drafting(values))).method.name == 'autoregressive'
    assert with_default_drafting(values | {'draft': 'lookup'})['method'] != ('autoregressive',)


@pytest.mark.parametrize(
  ('fields', 'words'),
  [
    ({'method': ('block',)}, 'block needs a draft of the target: --draft=DRAFT, or --method=autoregressive'),
    ({'method': ('autoregressive', 'spectr')}, 'spectr needs a draft'), ({'method': ('auto',)}, 'auto needs a draft'),
    ({'num_drafts': (4,)}, 'num_drafts is for a draft of the target, and none is given'),
    ({'draft_length': (4,)}, 'draft_length is for a draft'), ({'tree': ('prefix:2,2',)}, 'tree is for a draft'),
    ({'lookup_max': 5}, 'lookup_max and lookup_min are for --draft=lookup'),
  ],
)  # fmt: skip
def test_what_needs_a_draft_says_so(fields, words):
  with pytest.raises(ValueError, match=words):
    DecodeOptions.of(target='model.gguf', **fields)


def test_main_and_bulk_decode_with_a_lone_target(pair, tmp_path):
  target, sizes = f'--target={pair["target"]}', ('--max_new_tokens=4', '--prompt=the owl')
  out = commands.succeed('decode.main', target, *sizes, '--num_seeds=1', f'--output={tmp_path / "out.json"}')
  run = json.loads((tmp_path / 'out.json').read_text())
  assert [each['method'] for each in run['results']] == ['autoregressive']
  assert 'draft' not in run['run']['models']
  assert '--method=auto' not in out  # which would need one
  commands.succeed('decode.bulk', target, *sizes, f'--generations={tmp_path / "lone.jsonl"}')
  named = '--method=autoregressive', f'--generations={tmp_path / "named.jsonl"}'
  commands.succeed('decode.bulk', target, *sizes, *named)
  lines = [json.loads((tmp_path / name).read_text()) for name in ('lone.jsonl', 'named.jsonl')]
  assert lines[0]['tokens'] == lines[1]['tokens']
  assert lines[0]['method'] == 'autoregressive'
  line = commands.refuse('decode.bulk', target, '--method=block', f'--generations={tmp_path / "none.jsonl"}')
  assert 'block needs a draft of the target: --draft=DRAFT' in line


def test_a_lone_file_is_served(tmp_path):
  path = gguf_files.write_model(tmp_path / 'model.gguf')
  sizes = '--max_new_tokens=4', '--longest_prompt=16', '--batch_size=1', '--port=0'
  process = commands.start('decode.serve', f'--target={path}', *sizes)
  try:
    line = process.stdout.readline()
    assert line.startswith('serving model.gguf at http://'), line + process.stderr.read()
    address = line.split(' at ')[1].split(',')[0]
    answer = httpx.post(f'{address}/completions', json={'prompt': 'ab', 'max_tokens': 4}, timeout=60).json()
  finally:
    process.kill()
    process.communicate()
  assert answer['usage']['spectr_jax'] == {'target_calls': answer['usage']['completion_tokens'], 'accepted_tokens': 0}
