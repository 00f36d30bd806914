"""`--draft=lookup`: what commands take and refuse."""

import gzip
import json

import numpy as np
import pytest

from decode.bulk import decode_bulk
from decode.experiment.model_options import ModelOptions
from decode.experiment.options import DecodeOptions
from decode.experiment.workload import Workload, model_title
from spectr_jax import Drafter


def test_drafts_of_lookup():
  assert ModelOptions(draft='lookup').draft_model == ''
  beside = ModelOptions(draft='lookup+pretrained/draft')
  assert beside.has_lookup
  assert beside.draft_model == 'pretrained/draft'
  directory = ModelOptions(draft='lookup_of_mine')
  assert (directory.has_lookup, directory.draft_model) == (False, 'lookup_of_mine')


_SOUGHT = {'num_drafts': (2,), 'draft_length': (2,), 'max_new_tokens': 8, 'lookup_min': 1}


@pytest.fixture(scope='module')
def corpus_files(tmp_path_factory):
  directory = tmp_path_factory.mktemp('corpus')
  (directory / 'one.txt').write_text('the quick brown fox\njumps\n\nseven wise owls watch\n')
  with gzip.open(directory / 'two.txt.gz', 'wt') as stream:
    stream.write('old oak tree')
  return str(directory / 'one.txt'), str(directory / 'two.txt.gz')


def test_a_corpus_is_searched_and_described(pair, prompt_file, corpus_files):
  target, prompts = pair['target'], str(prompt_file)
  options = DecodeOptions.of(
    target=target, draft='lookup', method=('spectr',), prompts=prompts, lookup_corpus=corpus_files, **_SOUGHT
  )
  work = Workload.load(options)
  documents = work.tokenizer.encode_batch(['the quick brown fox\njumps', 'seven wise owls watch', 'old oak tree'])
  described = work.info['models']['corpus']
  assert (described['path'], described['num_documents']) == (','.join(corpus_files), 3)
  assert described['num_tokens'] == sum(map(len, documents))
  assert len(described['sha256']) == 2
  assert model_title(described) == f'{",".join(corpus_files)} ({described["num_tokens"]} tokens)'
  assert isinstance(work.draft, Drafter)
  ids = [token for document in documents for token in (*document, -1)]
  np.testing.assert_array_equal(work.draft.corpus.tokens, ids)


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (None, "^lookup_corpus: no file matches '.*texts.gz'$"),
    ('\n', 'there is no text in '),
    ('text', 'lookup_corpus: cannot read .*texts.gz as text'),
  ],
)
def test_corpora_that_cannot_be_read(pair, tmp_path, content, message):
  path = tmp_path / 'texts.gz'
  if content == 'text':
    path.write_text(content)
  elif content is not None:
    path.write_bytes(gzip.compress(content.encode()))
  with pytest.raises(ValueError, match=message):
    Workload.load(
      DecodeOptions.of(target=pair['target'], draft='lookup', method=('spectr',), lookup_corpus=(str(path),))
    )


@pytest.mark.slow
@pytest.mark.parametrize('is_beside', [False, True])
def test_bulk_decoding_resumes_and_takes_a_mesh(pair, prompt_file, corpus_files, tmp_path, is_beside):
  draft = f'lookup+{pair["draft"]}' if is_beside else 'lookup'
  fields = {'target': pair['target'], 'draft': draft, 'method': ('race_traversal',), 'prompts': str(prompt_file)}
  fields |= {'batch_size': 2, 'lookup_corpus': corpus_files if is_beside else ()} | _SOUGHT
  tokens = []
  for mesh in ('', 'data:1,model:1'):
    path = tmp_path / f'{len(mesh)}.jsonl'
    decode_bulk(DecodeOptions.of(**fields, mesh=mesh), path)
    entries = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda entry: entry['index'])
    tokens.append([entry['tokens'] for entry in entries])
    assert all(entry.get('lookup_corpus') == (list(corpus_files) if is_beside else None) for entry in entries)
    assert decode_bulk(DecodeOptions.of(**fields, mesh=mesh), path, resume=True)[1] == 0
  assert tokens[0] == tokens[1]
  assert len(tokens[0]) == 3
