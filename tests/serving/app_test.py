"""What the endpoint answers is what the library gives, and what it cannot do it refuses by name."""

import concurrent.futures
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starlette.testclient import TestClient

import spectr_jax
from decode.serving.answer import Served
from decode.serving.app import make_app
from decode.serving.worker import Job
from spectr_jax import SamplingParams, TokenTree, log_likelihood, sample_keys
from tests.serving.served import EOS, LONGEST, NEW, make_worker

_TEXT = 'the quick brown fox'
_PROMPT = {'prompt': _TEXT, 'seed': 3}


def _expected(models, prompt, key, sampling=None, most=NEW):
  """Tokens by `generate`."""
  padded = np.pad([prompt], ((0, 0), (0, LONGEST - len(prompt))))
  found = spectr_jax.generate(
    key[None], *models, padded, [len(prompt)], method='race_traversal', tree=TokenTree.chains(2, 2),
    max_new_tokens=NEW, eos_id=(EOS,), sampling=sampling,
  )  # fmt: skip
  return np.asarray(found.tokens[0, : int(found.lengths[0])]).tolist()[:most]


def _text(tokenizer, tokens):
  return tokenizer.decode([token for token in tokens if token != EOS])


def _key(seed, place=0):
  key = jax.random.key(seed, impl='threefry2x32')
  return jax.random.fold_in(key, place) if place else key


def _ask(client, body, path='completions'):
  response = client.post(f'/v1/{path}', json=body)
  assert response.status_code == 200, response.text
  return response.json()


def test_completions_are_those_of_the_library(client, models, tokenizer):
  prompts = [_TEXT, 'the owl', 'seven wise owls watch']
  body = {'prompt': prompts, 'seed': 5, 'n': 2, 'temperature': 0.7, 'top_p': 0.9, 'max_tokens': NEW}
  found = _ask(client, body)
  assert (found['object'], found['model']) == ('text_completion', 'tiny')
  total = 0
  for place, prompt in enumerate(prompts):
    ids = tokenizer.encode_prompt(prompt)
    for sample, key in enumerate(sample_keys(_key(5, place)[None], 2)):
      choice = found['choices'][2 * place + sample]
      tokens = _expected(models, ids, key, SamplingParams(0.7, top_p=0.9))
      assert choice['text'] == _text(tokenizer, tokens)
      assert choice['index'] == 2 * place + sample
      assert choice['finish_reason'] == ('stop' if tokens[-1] == EOS else 'length')
      total += len(tokens)
  usage = found['usage']
  assert usage['completion_tokens'] == total
  assert usage['prompt_tokens'] == sum(len(tokenizer.encode_prompt(prompt)) for prompt in prompts)
  assert usage['spectr_jax']['target_calls'] + usage['spectr_jax']['accepted_tokens'] >= total


def test_ids_are_prompts_too(client, tokenizer):
  ids = tokenizer.encode_prompt(_TEXT)
  assert _ask(client, {'prompt': ids, 'seed': 3})['choices'][0]['text'] == _ask(client, _PROMPT)['choices'][0]['text']


def test_chats_are_rendered_by_the_template(client, models, tokenizer):
  messages = [{'role': 'system', 'content': 'be kind'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'owl'}]}]
  found = _ask(client, {'messages': messages, 'seed': 1, 'max_completion_tokens': 9}, 'chat/completions')
  flat = [messages[0], {'role': 'user', 'content': 'owl'}]
  tokens = _expected(models, tokenizer.encode_chat(flat), _key(1), most=9)
  message = found['choices'][0]['message']
  assert message == {'role': 'assistant', 'content': _text(tokenizer, tokens)}
  assert found['object'] == 'chat.completion'


def _events(client, body, path='completions'):
  with client.stream('POST', f'/v1/{path}', json=body | {'stream': True}) as response:
    assert response.status_code == 200
    lines = [line for line in response.iter_lines() if line]
  assert lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_streams_say_the_same(client):
  body = _PROMPT | {'n': 2, 'max_tokens': NEW, 'logprobs': 0}
  whole = _ask(client, body)
  *events, last = _events(client, body | {'stream_options': {'include_usage': True}})
  assert (last['choices'], last['usage']) == ([], whole['usage'])
  for index, choice in enumerate(whole['choices']):
    own = [each for event in events for each in event['choices'] if each['index'] == index]
    assert len(own) > 1
    assert ''.join(each['text'] for each in own) == choice['text']
    values = [value for each in own for value in each['logprobs']['token_logprobs']]
    np.testing.assert_allclose(values, choice['logprobs']['token_logprobs'], atol=1e-5)
    assert [each['finish_reason'] for each in own][-1] == choice['finish_reason']


def test_chunks_may_count_what_came_so_far(client):
  body = _PROMPT | {
    'n': 2,
    'max_tokens': NEW,
    'stream_options': {'include_usage': True, 'continuous_usage_stats': True},
  }
  *events, last = _events(client, body)
  counts = [event['usage']['completion_tokens'] for event in events]
  assert counts == sorted(counts)
  assert counts[-1] == last['usage']['completion_tokens'] > counts[0]
  assert events[0]['usage']['prompt_tokens'] == last['usage']['prompt_tokens']


def test_streams_of_chats_begin_with_the_role(client):
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'seed': 2}
  whole = _ask(client, body, 'chat/completions')['choices'][0]
  deltas = [event['choices'][0]['delta'] for event in _events(client, body, 'chat/completions')]
  assert deltas[0]['role'] == 'assistant'
  assert all('role' not in delta for delta in deltas[1:])
  assert ''.join(delta['content'] for delta in deltas) == whole['message']['content']


def test_stop_texts_and_limits(client):
  whole = _ask(client, _PROMPT | {'max_tokens': NEW})['choices'][0]['text']
  pairs = (whole[place : place + 2] for place in range(3, len(whole) - 1))
  stop = next(pair for pair in pairs if '\ufffd' not in pair)
  found = _ask(client, _PROMPT | {'max_tokens': NEW, 'stop': stop})
  assert found['choices'][0]['text'] == whole[: whole.index(stop)]
  assert found['choices'][0]['finish_reason'] == 'stop'
  short = _ask(client, _PROMPT | {'max_tokens': 2})
  assert short['usage']['completion_tokens'] == 2
  assert whole.startswith(short['choices'][0]['text'])


def test_log_probabilities_are_those_of_the_target(client, models, tokenizer):
  body = _PROMPT | {'max_tokens': 5, 'temperature': 0, 'logprobs': 3}
  own = _ask(client, body)['choices'][0]
  echoed = _ask(client, body | {'echo': True})['choices'][0]
  ids = tokenizer.encode_prompt(_TEXT)
  new = _expected(models, ids, _key(3), SamplingParams(0), most=5)
  found = log_likelihood(models[0], [[*ids, *new]], num_top=3)
  np.testing.assert_allclose(own['logprobs']['token_logprobs'], found.logprobs[0, len(ids) :], atol=1e-4)
  assert own['logprobs']['tokens'] == [tokenizer.decode([token]) for token in new]
  assert echoed['text'] == tokenizer.decode(ids) + own['text']
  values = echoed['logprobs']['token_logprobs']
  assert values[0] is None
  assert echoed['logprobs']['top_logprobs'][0] is None
  np.testing.assert_allclose(values[1:], found.logprobs[0, 1:], atol=1e-4)
  # Greedy tokens are the likeliest of their place: how evaluations tell them.
  for value, top in zip(values[len(ids) :], echoed['logprobs']['top_logprobs'][len(ids) :], strict=True):
    assert value == max(top.values())
  alone = _ask(client, {'prompt': _TEXT, 'max_tokens': 0, 'echo': True, 'logprobs': 1})['choices'][0]
  np.testing.assert_allclose(alone['logprobs']['token_logprobs'][1:], found.logprobs[0, 1 : len(ids)], atol=1e-4)
  assert alone['text'] == tokenizer.decode(ids)


def test_log_probabilities_of_chats(client, tokenizer):
  body = {'messages': [{'role': 'user', 'content': 'owl'}], 'seed': 2, 'logprobs': True, 'top_logprobs': 2}
  content = _ask(client, body | {'max_tokens': 4}, 'chat/completions')['choices'][0]['logprobs']['content']
  assert len(content) == 4
  for entry in content:
    assert len(entry['top_logprobs']) == 2
    assert bytes(entry['bytes']).decode() == entry['token']
    assert entry['logprob'] <= entry['top_logprobs'][0]['logprob']


def test_requests_beside_each_other_are_as_alone(client):
  bodies = [
    {'prompt': 'the owl ' * (i % 5 + 1), 'seed': i, 'temperature': i % 3 / 2, 'top_k': i % 4, 'max_tokens': 1 + i % NEW}
    for i in range(14)
  ]
  alone = [_ask(client, body)['choices'][0]['text'] for body in bodies]
  with concurrent.futures.ThreadPoolExecutor(14) as pool:
    together = list(pool.map(lambda body: _ask(client, body)['choices'][0]['text'], bodies))
  assert together == alone


@pytest.mark.parametrize(
  ('body', 'field', 'status'),
  [
    ({}, 'prompt', 400),
    ({'prompt': ''}, 'prompt', 400),
    ({'prompt': []}, 'prompt', 400),
    ({'prompt': [1, 'a']}, 'prompt', 400),
    ({'prompt': [-1]}, 'prompt', 400),
    ({'prompt': [10**6]}, 'prompt', 400),
    ({'prompt': 'x y z ' * 100}, 'prompt', 400),
    ({'prompt': 'a\ud800'}, 'prompt', 400),
    ({'prompt': 'a', 'temperature': -1}, 'temperature', 400),
    ({'prompt': 'a', 'temperature': True}, 'temperature', 400),
    ({'prompt': 'a', 'top_p': 0}, 'top_p', 400),
    ({'prompt': 'a', 'n': 17}, 'n', 400),
    ({'prompt': 'a', 'seed': 0.5}, 'seed', 400),
    ({'prompt': 'a', 'stop': ['']}, 'stop', 400),
    ({'prompt': 'a', 'stop': ['x'] * 17}, 'stop', 400),
    ({'prompt': 'a', 'max_tokens': NEW + 1}, 'max_tokens', 400),
    ({'prompt': 'a', 'max_tokens': 0}, 'max_tokens', 400),
    ({'prompt': 'a', 'logprobs': 21}, 'logprobs', 400),
    ({'prompt': 'a', 'logprobs': True}, 'logprobs', 400),
    ({'prompt': 'a', 'presence_penalty': 0.5}, 'presence_penalty', 400),
    ({'prompt': 'a', 'stream_options': {'include_usage': True}}, 'stream_options', 400),
    ({'prompt': 'a', 'stream': True, 'stream_options': {'include_all': True}}, 'stream_options', 400),
    ({'prompt': 'a', 'ignore_eos': True}, 'ignore_eos', 400),
    ({'prompt': 'a', 'stream': True, 'echo': True}, 'echo', 400),
    ({'prompt': 'a', 'stream': True, 'logprobs': 2}, 'logprobs', 400),
    ({'prompt': 'a', 'beams': 3}, 'beams', 400),
    ({'prompt': 'a', 'messages': []}, 'messages', 400),
    ({'prompt': 'a', 'model': 'another'}, 'model', 404),
  ],
)
def test_what_is_wrong_is_named(client, body, field, status):
  response = client.post('/v1/completions', content=json.dumps(body))
  assert response.status_code == status, response.text
  error = response.json()['error']
  assert error['param'] == field
  assert error['message']


@pytest.mark.parametrize(
  ('messages', 'field'),
  [
    (None, 'messages'),
    ([], 'messages'),
    ([{'role': 'user'}], 'messages[0]'),
    ([{'role': 'tool', 'content': 'a'}], 'messages[0].role'),
    ([{'role': 'user', 'content': 3}], 'messages[0].content'),
    ([{'role': 'user', 'content': [{'type': 'image_url'}]}], 'messages[0].content'),
    ([{'role': 'user', 'content': 'a', 'tool_calls': [1]}], 'messages[0].tool_calls'),
  ],
)
def test_wrong_conversations_are_named(client, messages, field):
  response = client.post('/v1/chat/completions', json={'messages': messages})
  assert (response.status_code, response.json()['error']['param']) == (400, field)


def test_values_that_ask_for_nothing_are_taken(client):
  body = _PROMPT | {'presence_penalty': 0, 'frequency_penalty': 0.0, 'best_of': 1, 'suffix': None, 'user': 'me'}
  assert _ask(client, body)['choices'] == _ask(client, _PROMPT)['choices']


def test_bodies_that_are_not_json(client):
  for content, message in (
    (b'{', 'body'), (b'\xff\xfe', 'not UTF-8'), (b'[]', 'JSON object'), (b'[' * 100_000, 'body'),
  ):  # fmt: skip
    response = client.post('/v1/completions', content=content)
    assert response.status_code == 400
    assert message in response.json()['error']['message']
  response = client.post('/v1/completions', content=b' ' * (2**22 + 1))
  assert response.status_code == 413


def test_other_places(client):
  assert client.get('/health').text == 'ok\n'
  (model,) = client.get('/v1/models').json()['data']
  assert model['id'] == 'tiny'
  for method, path, status, allowed in (
    ('GET', '/v1/completions', 405, {'POST'}),
    ('DELETE', '/v1/chat/completions', 405, {'POST'}),
    ('OPTIONS', '/v1/completions', 405, {'POST'}),
    ('POST', '/v1/models', 405, {'GET', 'HEAD'}),
    ('PUT', '/metrics', 405, {'GET', 'HEAD'}),
    ('GET', '/v1/../../etc/passwd', 404, None),
    ('POST', '/v1/embeddings', 404, None),
    ('GET', '/v1/models/', 404, None),  # no redirect: its address would be that of the Host
    ('POST', '/v1/completions/', 404, None),
  ):
    response = client.request(method, path, headers={'Host': 'elsewhere'}, follow_redirects=False)
    assert response.status_code == status
    assert 'there is no' in response.json()['error']['message']
    found = response.headers.get('allow')
    assert (set(found.split(', ')) if found else None) == allowed


def test_metrics_count(client):
  def numbers():
    lines = [line.rsplit(' ', 1) for line in client.get('/metrics').text.splitlines() if not line.startswith('#')]
    return {name: float(value) for name, value in lines}

  before = numbers()
  usage = _ask(client, _PROMPT | {'max_tokens': 5})['usage']  # rounds give more, which nobody sees
  after = numbers()

  def grown(name):
    return after[f'spectr_jax_{name}'] - before.get(f'spectr_jax_{name}', 0)

  assert grown('requests_total{kind="completions",outcome="answered"}') == 1
  assert grown('prompt_tokens_total') == usage['prompt_tokens']
  assert grown('time_to_first_token_seconds_count') == 1
  assert grown('tokens_total') == usage['completion_tokens']
  assert grown('target_calls_total') == usage['spectr_jax']['target_calls']
  assert after['spectr_jax_tokens_per_call'] >= 1
  assert after['spectr_jax_time_to_first_token_seconds_bucket{le="+Inf"}'] >= 1


def test_a_key_is_asked_for(worker, tokenizer):
  client = TestClient(make_app(Served(worker, tokenizer, 'tiny', NEW, api_key='secret')))
  for headers in ({}, {'Authorization': 'Bearer no'}, {'Authorization': 'secret'}):
    for request in (lambda h: client.get('/v1/models', headers=h), _post(client)):
      assert request(headers).status_code == 401
  assert _post(client)({'Authorization': 'Bearer secret'}).status_code == 200
  assert client.get('/health').status_code == 200


def _post(client):
  return lambda headers: client.post('/v1/completions', json=_PROMPT, headers=headers)


def test_too_many_are_asked_to_come_again(models, tokenizer):
  worker = make_worker(models, tokenizer, most_waiting=1)  # nobody decodes
  client = TestClient(make_app(Served(worker, tokenizer, 'tiny', NEW)))
  worker.submit([Job([1], _key(0), SamplingParams(), 1, None, print)])
  response = client.post('/v1/completions', json=_PROMPT)
  assert response.status_code == 429
  assert int(response.headers['Retry-After']) > 0
  assert worker.num_waiting == 1
  response = client.post('/v1/completions', json=_PROMPT | {'n': 2})
  assert (response.status_code, response.json()['error']['param']) == (400, 'n')
  assert client.get('/health').status_code == 503
  worker.stop()
  response = client.post('/v1/completions', json=_PROMPT)
  assert (response.status_code, response.json()['error']['message']) == (503, 'the server is ending')


def test_a_failed_round_fails_its_request_alone(models, tokenizer):
  target = models[0]
  bad = tokenizer.encode_prompt('fox')[-1]

  def apply_fn(params, tokens, positions, mask, cache):
    output = target.apply_fn(params, tokens, positions, mask, cache)
    is_bad = (tokens == bad)[..., None] & (positions[..., None] == 0)
    return dataclasses.replace(output, logits=jnp.where(is_bad, jnp.nan, output.logits))

  worker = make_worker([dataclasses.replace(target, apply_fn=apply_fn), models[1]], tokenizer)
  worker.start()
  try:
    client = TestClient(make_app(Served(worker, tokenizer, 'tiny', NEW)))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      bodies = [{'prompt': [bad], 'seed': 0}, _PROMPT, {'prompt': 'the owl', 'seed': 1}]
      failed, *others = pool.map(lambda body: client.post('/v1/completions', json=body), bodies)
    assert failed.status_code == 500
    assert 'not finite' in failed.json()['error']['message']
    assert [each.status_code for each in others] == [200, 200]
    assert client.post('/v1/completions', json=_PROMPT).json()['choices'] == others[0].json()['choices']
  finally:
    worker.stop()
