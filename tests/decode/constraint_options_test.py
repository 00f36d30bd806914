"""The flags of constraints: which may be given together, what they read, and what a run does with them."""

import json
import re

import commands
import pytest

from decode.experiment.exports import hash_constraint
from decode.experiment.options import DecodeOptions
from decode.experiment.prompt_options import SamplingOptions
from spectr_jax import Tokenizer

pytest.importorskip('outlines_core', reason='needs the extra grammar')


def test_one_of_them_may_be_given(tmp_path, capsys):
  with pytest.raises(ValueError, match='regex and choice are both given'):
    SamplingOptions(regex='a', choice=('b',))
  assert SamplingOptions().read_constraint() == {}
  assert SamplingOptions(choice=(' a', 'b ')).read_constraint() == {'choices': (' a', 'b ')}
  assert SamplingOptions(regex='').read_constraint() == {'regex': ''}
  with pytest.raises(ValueError, match='is not a regular file'):
    SamplingOptions(json_schema='').read_constraint()
  path = tmp_path / 'schema.json'
  path.write_text('{"type": "null"}')
  options = DecodeOptions.of(json_schema=str(path))
  assert options.sampling.read_constraint() == {'json_schema': {'type': 'null'}}
  assert [str(each) for each in options.inputs()['json_schema']] == [str(path)]
  tokenizer = Tokenizer.load('pretrained/target/tokenizer.json')
  made = options.sampling.make_constraint(tokenizer, tokenizer.vocab_size + 3)
  assert made.accepts(tokenizer.encode('null'))
  assert made.vocab_size == tokenizer.vocab_size + 3
  assert capsys.readouterr().err == ''
  path.write_text('{"properties": {"a": {"type": "null"}}}')
  options.sampling.make_constraint(tokenizer, tokenizer.vocab_size)
  said = '--json_schema is followed more narrowly: objects have no properties but those that are named\n'
  assert capsys.readouterr().err == said


def test_penalties_bad_words_and_what_comes_before():
  options = SamplingOptions(
    presence_penalty=0.5, logit_bias=('3:-1.5', '7:2'), min_tokens=4, bad_words=(' a',), regex='b', constraint_after='c'
  )
  assert (options.params.presence_penalty, options.params.min_tokens) == (0.5, 4)
  assert options.params.logit_bias == {3: -1.5, 7: 2.0}
  assert options.penalties == {'presence_penalty': 0.5, 'logit_bias': ['3:-1.5', '7:2'], 'min_tokens': 4}
  assert SamplingOptions().penalties == {}
  assert options.read_constraint() == {'bad_words': [' a'], 'after': 'c', 'regex': 'b'}
  hashes = {hash_constraint(SamplingOptions(regex='b', **more)) for more in ({}, {'constraint_after': 'c'})}
  assert len(hashes | {hash_constraint(options), hash_constraint(SamplingOptions(bad_words=(' a',)))}) == 4
  for wrong, said in (
    ({'logit_bias': ('3',)}, "logit_bias must be ID:NUMBER, such as 17:-2.5, got '3'"),
    ({'logit_bias': ('3:1e400',)}, 'logit_bias must be ID:NUMBER'),
    ({'repetition_penalty': 0.0}, 'repetition_penalty must be from 1e-6 to 1e6'),
    ({'ignore_eos': True, 'bad_words': ('a',)}, 'ignore_eos and bad_words are both given'),
    ({'ignore_eos': True, 'regex': 'a'}, 'ignore_eos and regex are both given'),
  ):
    with pytest.raises(ValueError, match=re.escape(said)):
      SamplingOptions(**wrong)


def test_other_constraints_make_other_runs(tmp_path):
  path, found = tmp_path / 'schema.json', {hash_constraint(SamplingOptions(regex=each)) for each in (None, '', 'a')}
  for names in ('ab', 'ba'):  # which are written in this order
    path.write_text(json.dumps({'properties': {name: {'type': 'null'} for name in names}}))
    found.add(hash_constraint(SamplingOptions(json_schema=str(path))))
  assert len(found) == 5


@pytest.mark.parametrize(
  ('content', 'words'),
  [(None, 'schema.json'), ('{', 'schema.json'), ('[1]', 'must be an object'), ('null', 'must be an object')],
)
def test_a_wrong_file_gets_one_line(tmp_path, content, words):
  path = tmp_path / 'schema.json'
  if content is not None:
    path.write_text(content)
  with pytest.raises((ValueError, OSError), match=words):
    SamplingOptions(json_schema=str(path)).make_constraint(Tokenizer.load('pretrained/target/tokenizer.json'), 4096)


@pytest.mark.slow
def test_a_bulk_run_follows_it(pair, prompt_file, tmp_path):
  path = tmp_path / 'out.jsonl'
  own = [f'--{role}={model}' for role, model in pair.items()]
  own += [f'--prompts={prompt_file}', '--method=spectr', '--num_drafts=2', '--draft_length=2', '--max_new_tokens=9']
  ran = commands.run('decode.bulk', *own, f'--generations={path}', '--regex=[a-c]{2}')
  assert ran.returncode == 0, ran.stderr
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines
  assert all(re.fullmatch('[a-c]{2}', line['text']) for line in lines)
  ran = commands.run('decode.bulk', *own, f'--generations={path}', '--regex=[a-c]{3}', '--resume')
  assert ran.returncode != 0
  assert 'Traceback' not in ran.stderr
