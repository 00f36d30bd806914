"""What requests say of the text so far: penalties, bad words, ends, and constraints behind a text."""

import jax
import pytest

import spectr_jax
from spectr_jax import SamplingParams
from spectr_jax.engine.loop import run_rounds
from tests.serving.stub import EOS, NEW, client_of, make_worker, running

PROMPT = [3, 4]
PENALTIES = {
  'presence_penalty': 0.5,
  'frequency_penalty': 1.5,
  'repetition_penalty': 1.3,
  'logit_bias': {'5': 2.0},
  'min_tokens': 3,
}  # fmt: skip


@pytest.fixture(scope='module')
def penalized(models, tokenizer):
  worker = make_worker(models, tokenizer, has_penalties=True)
  with running(worker), client_of(worker, tokenizer, constraint_after='e') as client:
    yield client


def ask(client, **body):
  response = client.post('/v1/completions', json={'prompt': PROMPT, 'temperature': 0, 'max_tokens': NEW} | body)
  assert response.status_code == 200, response.text
  return response.json()['choices'][0]


def plain(models, tokenizer, **options):
  sampling = SamplingParams(temperature=0.0, **options)
  result = spectr_jax.generate(
    jax.random.key(0), models[0], None, [PROMPT], max_new_tokens=NEW, sampling=sampling, eos_id=EOS
  )
  return tokenizer.decode(result.tokens[0, : result.lengths[0]].tolist())


def test_texts_are_those_of_the_library_and_share_a_program(penalized, models, tokenizer):
  texts = {}
  for name, value in [('nothing', {}), *PENALTIES.items(), ('all', PENALTIES)]:
    options = value if name in ('nothing', 'all') else {name: value}
    own = {key: {5: 2.0} if key == 'logit_bias' else each for key, each in options.items()}
    texts[name] = ask(penalized, **options)['text']
    assert texts[name] == plain(models, tokenizer, **own)
    if name == 'nothing':
      size = run_rounds._cache_size()
    size += 1  # that of the plain loop
    assert run_rounds._cache_size() <= size
  assert len(set(texts.values())) > 3


def test_ids_that_end_texts_may_be_ignored(penalized):
  bias = {'logit_bias': {str(EOS): 100}}
  assert ask(penalized, **bias)['finish_reason'] == 'stop'
  assert ask(penalized, **bias, min_tokens=NEW)['finish_reason'] == 'length'
  found = ask(penalized, **bias, ignore_eos=True, logprobs=0)
  assert (found['finish_reason'], len(found['logprobs']['tokens'])) == ('length', NEW)


def test_a_server_that_is_not_prepared_says_so(client):
  for name, value in PENALTIES.items():
    response = client.post('/v1/completions', json={'prompt': PROMPT, name: value})
    error = response.json()['error']
    assert (response.status_code, error['param']) == (400, name)
    assert error['message'] == f'{name} needs a server that was started with --penalties'


def test_an_id_beyond_the_vocabulary_is_refused(penalized):
  response = penalized.post('/v1/completions', json={'prompt': PROMPT, 'logit_bias': {'99999': 1}})
  assert (response.status_code, response.json()['error']['param']) == (400, 'logit_bias')


def test_bad_words_never_come(client):
  text = ask(client)['text']
  words = [text[2:4], text[:1]]
  found = ask(client, bad_words=words)['text']
  assert found
  assert not any(word in found for word in words)


def test_constraints_begin_behind_the_servers_text_or_the_requests(penalized):
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  form = {'structured_outputs': {'choice': ['no', 'yes']}, 'temperature': 1, 'n': 8, 'max_tokens': NEW}
  for more, marker in (({}, 'e'), ({'constraint_after': 'a'}, 'a'), ({'constraint_after': ''}, '')):
    response = penalized.post('/v1/completions', json={'prompt': PROMPT} | form | more)
    assert response.status_code == 200, response.text
    texts = [(each['text'], each['finish_reason']) for each in response.json()['choices']]
    for text, reason in texts:
      rest = text.split(marker, 1)[1:] if marker else [text]
      assert reason == 'length' or rest[0] in ('no', 'yes')
      assert not rest or any(each.startswith(rest[0]) for each in ('no', 'yes'))
    assert any(reason == 'stop' for _, reason in texts)
