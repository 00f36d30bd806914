"""Which fields of a request ask for nothing, and which ask for something that is not offered."""

import pytest

from decode.serving.faults import RefusedError
from decode.serving.protocol import parse

_COMPLETION = {'prompt': 'a'}
_CHAT = {'messages': [{'role': 'user', 'content': 'a'}]}


def _parse(body, more):
  return parse(body | more, is_chat=body is _CHAT, model='tiny')


# Defaults in the types of the client openai 3.57, in vLLM's protocol of commit 002032e, and in tasks of lm-eval 0.4.13.
@pytest.mark.parametrize('body', [_COMPLETION, _CHAT])
@pytest.mark.parametrize(
  'more',
  [
    {'metadata': {}, 'service_tier': 'auto', 'store': False},
    {'service_tier': 'default', 'safety_identifier': 'me', 'prompt_cache_key': 'mine', 'user': 'me'},
    {'function_call': 'none', 'functions': [], 'tools': [], 'tool_choice': 'auto', 'parallel_tool_calls': True},
    {'modalities': ['text'], 'response_format': {'type': 'text'}, 'verbosity': 'medium', 'reasoning_effort': 'none'},
    {'stop_token_ids': [], 'bad_words': [], 'logits_processors': [], 'min_tokens': 0, 'ignore_eos': False},
    {'skip_special_tokens': True, 'spaces_between_special_tokens': True, 'include_stop_str_in_output': False},
    {'repetition_penalty': 1.0, 'length_penalty': 1.0, 'use_beam_search': False, 'priority': 0, 'best_of': 1},
    {'chat_template_kwargs': {}, 'mm_processor_kwargs': {}, 'documents': [], 'vllm_xargs': {}},
    {'include_reasoning': True, 'presence_penalty': 0, 'frequency_penalty': 0.0},
    {'num_beams': 1, 'do_sample': True, 'early_stopping': False, 'use_cache': True, 'num_return_sequences': 1},
    {'stop': [], 'logit_bias': {}, 'stream_options': {}, 'top_k': -1, 'suffix': ''},
    {'stream_options': {'include_usage': False, 'continuous_usage_stats': None, 'include_obfuscation': False}},
    {'audio': None, 'prediction': None, 'web_search_options': None, 'prompt_logprobs': None, 'whatever': None},
  ],
)
def test_what_asks_for_nothing_changes_nothing(body, more):
  assert _parse(body, more) == _parse(body, {})


def test_fields_of_one_kind_and_limits_and_sampling_agree():
  nothing = {'echo': False, 'add_generation_prompt': True, 'continue_final_message': False}
  assert _parse(_CHAT, nothing) == _parse(_CHAT, {})
  for body, add in ((_CHAT, False), (_COMPLETION, True)):
    assert _parse(body, {'add_special_tokens': add}) == _parse(body, {})
    with pytest.raises(RefusedError, match='add_special_tokens is not offered'):
      _parse(body, {'add_special_tokens': not add})
  assert _parse(_COMPLETION, {'n': 3, 'best_of': 3}) == _parse(_COMPLETION, {'n': 3})
  assert _parse(_COMPLETION, {'max_tokens': 256, 'max_new_tokens': 150}).max_tokens == 150
  assert _parse(_COMPLETION, {'max_tokens': 256, 'max_new_tokens': 1024}).max_tokens == 256
  assert _parse(_COMPLETION, {'max_new_tokens': 7}).max_tokens == 7
  assert _parse(_CHAT, {'max_completion_tokens': 9, 'max_new_tokens': 7}).max_tokens == 7
  with pytest.raises(RefusedError, match='different'):
    _parse(_CHAT, {'max_completion_tokens': 9, 'max_tokens': 7})
  assert _parse(_COMPLETION, {'temperature': 0, 'do_sample': False}) == _parse(_COMPLETION, {'temperature': 0})
  for temperature, is_drawn in ((0, True), (0.5, False)):
    with pytest.raises(RefusedError, match='do_sample'):
      _parse(_COMPLETION, {'temperature': temperature, 'do_sample': is_drawn})


@pytest.mark.parametrize('body', [_COMPLETION, _CHAT])
@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('metadata', {'run': '1'}), ('service_tier', 'flex'), ('stop_token_ids', [3]), ('min_tokens', -1),
    ('function_call', {'name': 'f'}), ('tool_choice', 'required'), ('tools', [{'type': 'function'}]),
    ('bad_words', [1]), ('num_beams', 2), ('min_tokens', False), ('store', 0), ('skip_special_tokens', False),
    ('include_stop_str_in_output', True), ('best_of', 2), ('verbosity', 'low'), ('chat_template_kwargs', {'a': 1}),
    ('logit_bias', {'a': 1}), ('logit_bias', {'3': 101}), ('presence_penalty', 2.1), ('repetition_penalty', 0),
    ('constraint_after', '</think>'), ('ignore_eos', 1), ('do_sample', False), ('allowed_token_ids', []),
    # An empty object asks for a search with the usual options.
    ('web_search_options', {}), ('prediction', {'type': 'content', 'content': 'a'}), ('audio', {}),
    ('stream_options', {'include_obfuscation': True}), ('whatever', 0), ('whatever', []),
  ],
)  # fmt: skip
def test_what_asks_for_something_is_refused_by_name(body, name, value):
  with pytest.raises(RefusedError, match=name) as caught:
    _parse(body, {name: value})
  assert (caught.value.field, caught.value.status) == (name, 400)


def test_penalties_and_bad_words_are_those_of_the_request():
  more = {
    'presence_penalty': 0.5, 'frequency_penalty': -1, 'repetition_penalty': 1.1, 'logit_bias': {'3': -100},
    'min_tokens': 4, 'bad_words': ['a b'], 'max_tokens': 9,
  }  # fmt: skip
  found = _parse(_COMPLETION, more)
  wanted = {name: value for name, value in more.items() if name not in ('logit_bias', 'bad_words', 'max_tokens')}
  assert {name: getattr(found.sampling, name) for name in wanted} == wanted
  assert (found.sampling.logit_bias, found.bad_words) == ({3: -100}, ('a b',))
  assert _parse(_COMPLETION, {'ignore_eos': True}).sampling.ignore_eos
  form = {'structured_outputs': {'regex': 'a'}}
  assert _parse(_COMPLETION, form | {'constraint_after': ''}).constraint_after == ''
  for wrong, field in (
    ({'min_tokens': 4, 'max_tokens': 3}, 'min_tokens'),
    (form | {'ignore_eos': True}, 'ignore_eos'),
    ({'bad_words': ['a'], 'ignore_eos': True}, 'ignore_eos'),
  ):
    with pytest.raises(RefusedError) as caught:
      _parse(_COMPLETION, wrong)
    assert caught.value.field == field


def _messages(message):
  return _parse(_CHAT, {'messages': [{'role': 'user', 'content': 'a'} | message]}).prompts[0]


def test_fields_of_messages():
  """Those that the client of openai 3.57 sends back with an answer, and a name, which is the template's."""
  nothing = {'annotations': [], 'tool_calls': [], 'refusal': None, 'audio': None, 'function_call': None}
  assert _messages(nothing) == _messages({'refusal': '', 'name': None}) == [{'role': 'user', 'content': 'a'}]
  assert _messages({'name': 'ann'}) == [{'role': 'user', 'content': 'a', 'name': 'ann'}]
  parts = [{'type': 'text', 'text': 'x', 'annotations': []}, {'type': 'text', 'text': 'y'}]
  assert _messages({'content': parts}) == [{'role': 'user', 'content': 'xy'}]


_PART = {'type': 'text', 'text': 'x', 'cache_control': {'type': 'ephemeral'}}


@pytest.mark.parametrize(
  ('message', 'field'),
  [
    ({'role': 'function'}, '.role'), ({'role': 'tool'}, '.tool_call_id'),
    ({'content': 3}, '.content'), ({'content': [{'type': 'image_url'}]}, '.content'),
    ({'name': 3}, '.name'), ({'name': '\ud800'}, '.name'), ({'annotations': [{}]}, '.annotations'),
    ({'tool_calls': [1]}, '.tool_calls'), ({'tool_calls': [{}]}, '.tool_calls'), ({'audio': {'id': 'a'}}, '.audio'),
    ({'tool_call_id': 'a'}, '.tool_call_id'), ({'content': [_PART]}, '.content.cache_control'),
  ],
)  # fmt: skip
def test_wrong_fields_of_messages(message, field):
  with pytest.raises(RefusedError) as caught:
    _messages(message)
  assert caught.value.field == f'messages[0]{field}'


@pytest.mark.parametrize(('given', 'field'), [(None, 'messages'), ([], 'messages'), ([{'role': 'a'}], 'messages[0]')])
def test_conversations_that_are_none(given, field):
  with pytest.raises(RefusedError) as caught:
    _parse(_CHAT, {'messages': given})
  assert (caught.value.field, caught.value.status) == (field, 400)
