"""What requests say of the text so far: penalties, bad words, ends, and constraints behind a text."""

import jax
import pytest

import spectr_jax
from spectr_jax import SamplingParams
from spectr_jax.engine.loop import run_rounds
from tests.serving.stub import EOS, NEW, client_of, make_worker, running

PROMPTS = [[3, 4], [9, 20, 30], [25], [14, 2, 7]]
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
  response = client.post('/v1/completions', json={'prompt': PROMPTS, 'temperature': 0, 'max_tokens': NEW} | body)
  assert response.status_code == 200, response.text
  return response.json()['choices']


def texts_of(choices):
  return tuple(each['text'] for each in choices)


def plain(models, tokenizer, **options):
  result = spectr_jax.generate(
    jax.random.key(0), models[0], None, PROMPTS, max_new_tokens=NEW, eos_id=EOS,
    sampling=SamplingParams(temperature=0.0, **options),
  )  # fmt: skip
  return tuple(tokenizer.decode(row[:length].tolist()) for row, length in zip(result.tokens, result.lengths))


def test_texts_are_those_of_the_library_and_share_a_program(penalized, models, tokenizer):
  requests = {'nothing': {}, **{name: {name: value} for name, value in PENALTIES.items()}, 'all': PENALTIES}
  texts, sizes = {}, set()
  for name, options in requests.items():
    texts[name] = texts_of(ask(penalized, **options))
    sizes.add(run_rounds._cache_size())
  assert len(sizes) == 1
  for name, options in requests.items():
    own = {key: {5: 2.0} if key == 'logit_bias' else each for key, each in options.items()}
    assert texts[name] == plain(models, tokenizer, **own)
  assert len(set(texts.values())) > 3


def test_ids_that_end_texts_may_be_ignored(penalized):
  bias = {'logit_bias': {str(EOS): 100}, 'prompt': PROMPTS[0]}
  reasons = [ask(penalized, **bias, **more)[0]['finish_reason'] for more in ({}, {'min_tokens': NEW})]
  assert reasons == ['stop', 'length']
  (found,) = ask(penalized, **bias, ignore_eos=True, logprobs=0)
  assert (found['finish_reason'], len(found['logprobs']['tokens'])) == ('length', NEW)


def test_what_is_not_possible_is_refused_by_name(client, penalized):
  for name, value in PENALTIES.items():
    response = client.post('/v1/completions', json={'prompt': 'a', name: value})
    error = response.json()['error']
    assert (response.status_code, error['param']) == (400, name)
    assert error['message'] == f'{name} needs a server that was started without --nopenalties'
  response = penalized.post('/v1/completions', json={'prompt': 'a', 'logit_bias': {'99999': 1}})
  assert (response.status_code, response.json()['error']['param']) == (400, 'logit_bias')


def test_bad_words_never_come(client):
  text = ''.join(texts_of(ask(client, temperature=1, seed=1)))
  words = sorted({each for each in text if each != '\ufffd'})[::2]
  assert len(words) > 1
  found = texts_of(ask(client, bad_words=words, temperature=1, seed=1))
  assert any(found)
  assert not any(word in each for word in words for each in found)


def test_constraints_begin_behind_the_servers_text_or_the_requests(penalized, tokenizer):
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  for more, marker in (({}, 'e'), ({'constraint_after': 'a'}, 'a'), ({'constraint_after': ''}, '')):
    likely = {str(token): 6 for token in tokenizer.encode(marker)}
    form = {'structured_outputs': {'choice': ['no', 'yes']}, 'temperature': 1, 'n': 4, 'logit_bias': likely}
    choices = ask(penalized, **form, **more)
    for text, reason in ((each['text'], each['finish_reason']) for each in choices):
      rest = text.split(marker, 1)[1:] if marker else [text]
      assert reason == 'length' or rest[0] in ('no', 'yes')
      assert not rest or any(each.startswith(rest[0]) for each in ('no', 'yes'))
    assert any(each['finish_reason'] == 'stop' for each in choices)
