"""Constraints of requests: each field is read, answers follow it, and what cannot be done is refused by name."""

import json
import re

import jsonschema
import pytest

from decode.serving.faults import RefusedError
from decode.serving.protocol import parse

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


def test_what_cannot_be_compiled_is_refused_with_its_field(client):
  for schema, words in (
    ({'not': {}}, "'not' is not supported"),
    ({'type': 'array', 'uniqueItems': True}, 'uniqueItems'),
  ):
    response = client.post('/v1/chat/completions', json={'messages': _MESSAGES} | _format(schema))
    error = response.json()['error']
    assert (response.status_code, error['param']) == (400, 'response_format')
    assert words in error['message']
