"""Constraints of requests: each field is read, answers follow it, and what cannot be done is refused by name."""

import json
import re

import jsonschema
import numpy as np
import pytest

from decode.serving.faults import RefusedError
from decode.serving.protocol import parse
from spectr_jax import log_likelihood
from tests.serving.stub import EOS

pytest.importorskip('outlines_core', reason='needs the extra grammar')
_SCHEMA = {'type': 'object', 'properties': {'a': {'enum': [1, 2]}, 'b': {'type': 'null'}}, 'required': ['a']}
_MESSAGES = [{'role': 'user', 'content': 'owl'}]


def _format(schema):
  return {'response_format': {'type': 'json_schema', 'json_schema': {'name': 'it', 'schema': schema, 'strict': True}}}


@pytest.mark.parametrize(
  ('more', 'expected'),
  [
    (_format(_SCHEMA), ('json_schema', _SCHEMA, 'response_format')),
    ({'response_format': {'type': 'json_object'}}, ('json_schema', True, 'response_format')),
    ({'response_format': {'type': 'text'}}, None),
    ({'structured_outputs': {'json': _SCHEMA}}, ('json_schema', _SCHEMA, 'structured_outputs')),
    ({'structured_outputs': {'regex': 'a+', 'grammar': None}}, ('regex', 'a+', 'structured_outputs')),
    ({'structured_outputs': {'choice': ['a', 'b']}}, ('choices', ['a', 'b'], 'structured_outputs')),
    ({'structured_outputs': {'json_object': True}}, ('json_schema', True, 'structured_outputs')),
  ],
)
def test_fields_say_what_is_asked_for(more, expected):
  assert parse({'prompt': 'a'} | more, is_chat=False, model='tiny').constraint == expected


@pytest.mark.parametrize(
  ('more', 'words'),
  [
    ({'response_format': {'type': 'xml'}}, 'response_format.type must be'),
    ({'response_format': {'type': 'json_schema'}}, 'must be an object with a schema'),
    ({'response_format': {'type': 'json_object', 'more': 1}}, 'unknown field response_format.more'),
    ({'structured_outputs': {'grammar': 'root ::= "a"'}}, 'structured_outputs.grammar is not offered'),
    ({'structured_outputs': {'regex': 'a', 'choice': ['b']}}, 'several forms'),
    ({'structured_outputs': {'regex': 'a'}} | _format(_SCHEMA), 'both ask for a form'),
    ({'structured_outputs': {'regex': 'a'}, 'logprobs': 2}, 'only log probabilities of the new tokens'),
    ({'structured_outputs': {'regex': 'a'}, 'choice_probs': True}, 'choice_probs needs structured_outputs.choice'),
    ({'choice_probs': True}, 'choice_probs needs structured_outputs.choice'),
    (
      {'structured_outputs': {'choice': ['a']}, 'choice_probs': True, 'stream': True},
      'is not offered for streams',
    ),
    ({'structured_outputs': {'choice': ['a']}, 'choice_probs': 1}, 'choice_probs must be'),
    ({'structured_outputs': {'choice': ['a']}, 'max_tokens': 0}, 'max_tokens 0 is for echo and choice_probs'),
  ],
)
def test_what_is_not_offered_is_refused_by_name(more, words):
  with pytest.raises(RefusedError, match=words):
    parse({'prompt': 'a'} | more, is_chat=False, model='tiny')


def test_answers_follow_their_constraints(client):
  """Beside one another in one batch, with and without."""
  body = {'prompt': ['owl', 'the owl'], 'n': 2, 'seed': 3, 'logprobs': 0}
  plain = client.post('/v1/completions', json=body).json()
  found = client.post('/v1/completions', json=body | {'structured_outputs': {'regex': '[a-c]{2}|[x-z]'}}).json()
  assert all(re.fullmatch('[a-c]{2}|[x-z]', choice['text']) for choice in found['choices'])
  assert all(choice['finish_reason'] == 'stop' for choice in found['choices'])
  assert all(max(choice['logprobs']['token_logprobs']) <= 0 for choice in found['choices'])
  response = client.post(
    '/v1/chat/completions', json={'messages': _MESSAGES, 'seed': 1, 'max_tokens': 12} | _format(_SCHEMA)
  )
  (choice,) = response.json()['choices']
  if choice['finish_reason'] == 'stop':
    jsonschema.validate(json.loads(choice['message']['content']), _SCHEMA)
  again = client.post('/v1/completions', json=body).json()
  assert [choice['text'] for choice in again['choices']] == [choice['text'] for choice in plain['choices']]


_CHOICES = [' owl', ' owls', 'x', 'the owl sleeps']


@pytest.mark.parametrize('more', [{}, {'max_tokens': 0}, {'n': 2, 'logprobs': 0}])
def test_all_choices_have_probabilities(client, models, tokenizer, more):
  """Those of each choice alone, behind each of several prompts; ` owl` begins ` owls`, so its end belongs to it."""
  prompts, encoded = ['the', 'seven wise owls watch the'], [tokenizer.encode(each) for each in _CHOICES]
  assert encoded[1][: len(encoded[0])] == encoded[0]
  body = {'prompt': prompts, 'structured_outputs': {'choice': _CHOICES}, 'choice_probs': True, 'seed': 1}
  found = client.post('/v1/completions', json=body | more).json()['choices']
  size = more.get('n', 1)
  assert len(found) == 2 * size
  for place, choice in enumerate(found):
    _check_choices(models[0], tokenizer.encode_prompt(prompts[place // size]), encoded, choice['choice_probs'])
    assert choice['text'] in ([''] if more.get('max_tokens') == 0 else _CHOICES)


def _check_choices(target, prompt, encoded, found):
  texts = [[*prompt, *ids, *([EOS] if place == 0 else [])] for place, ids in enumerate(encoded)]
  likelihood = log_likelihood(target, texts)
  alone = [likelihood.of(row, len(prompt), len(text))[0] for row, text in enumerate(texts)]
  assert [each['choice'] for each in found] == _CHOICES
  assert [each['logprob'] for each in found] == pytest.approx(alone, abs=1e-3)
  assert [each['prob'] for each in found] == pytest.approx(np.exp(alone) / np.exp(alone).sum(), rel=1e-3)


def test_choices_of_chats_have_probabilities(client, models, tokenizer):
  body = {'messages': _MESSAGES, 'structured_outputs': {'choice': _CHOICES}, 'choice_probs': True}
  response = client.post('/v1/chat/completions', json=body)
  (choice,) = response.json()['choices']
  encoded = [tokenizer.encode(each) for each in _CHOICES]
  _check_choices(models[0], tokenizer.encode_chat(_MESSAGES), encoded, choice['choice_probs'])


@pytest.mark.parametrize(
  ('choices', 'words'),
  [
    ([], 'must be a list of texts that are not empty'),
    ({'a': 1}, 'must be a list of texts that are not empty'),
    (7, 'must be a list of texts that are not empty'),
    (['x' * 65], 'a choice has 65 tokens, allowed are 64 for choice_probs'),
    ([f'{number:04}' for number in range(16)], 'the choices have 64 tokens, allowed are 60 for choice_probs'),
    (['x' * 60], 'a prompt and a choice have 80 tokens, allowed are 72 for choice_probs'),
    (['a', '\ud800'], 'not valid Unicode'),
  ],
)
def test_choices_that_cannot_be_scored_are_refused(client, choices, words):
  body = {'prompt': [1] * 20, 'structured_outputs': {'choice': choices}, 'choice_probs': True, 'max_tokens': 0}
  response = client.post('/v1/completions', content=json.dumps(body))
  error = response.json()['error']
  assert (response.status_code, error['param']) == (400, 'structured_outputs')
  assert words in error['message']


def test_what_cannot_be_compiled_is_refused_with_its_field(client):
  for schema, words in (
    ({'not': {}}, "'not' is not supported"),
    ({'type': 'array', 'uniqueItems': True}, 'uniqueItems'),
  ):
    response = client.post('/v1/chat/completions', json={'messages': _MESSAGES} | _format(schema))
    error = response.json()['error']
    assert (response.status_code, error['param']) == (400, 'response_format')
    assert words in error['message']
