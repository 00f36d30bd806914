"""Tools: calls as models write them are read alike at once and in pieces; required ones are always there and valid."""

import json
import re

import jsonschema
import pytest
import tiny_hub

from decode.serving.faults import RefusedError
from decode.serving.protocol import parse
from decode.serving.tools import FORMATS, Reader, Tools, style_of
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from tests.serving import stub as stub_module
from tests.serving.stub import EOS, client_of, running
from tests.serving.tool_models import ALL, TEMPLATES, TOKENS, make_tool_worker, tokenizer_of
from tests.slow import slow


@pytest.fixture(scope='module')
def styles():
  return {name: style_of(tokenizer_of(name)) for name in TEMPLATES}


def _marked(style, text):
  """The text that the style's tokenizer gives for the tokens of a text, in which names of special tokens are these."""
  return style.tokenizer.decode(style.tokenizer.encode(text))


_AUTO, _SURE = Tools([], ('f', 'g'), False, True), Tools([], ('f', 'g'), True, True)
_ARGUMENTS = {'a': 'x} ] "\\\n☃', 'b': [1, -2.5, True, None, {'c': 'é', 'd': []}]}
_IN_JSON = json.dumps(_ARGUMENTS, ensure_ascii=False)
_IN_GEMMA = '{a:<|"|>x} ] "\\\n☃<|"|>,b:[1,-2.5,true,None,{c:<|"|>é<|"|>,d:[]}]}'


def _hermes(name='f', arguments=_IN_JSON, inner='{{"name": "{}", "arguments": {}}}'):
  return f'<tool_call>\n{inner.format(name, arguments)}\n</tool_call>'


def _llama(name='f', arguments=_IN_JSON):
  return f'{{"name": "{name}", "parameters": {arguments}}}'


def _gemma(name='f', arguments=_IN_GEMMA):
  return f'<|tool_call>call:{name}{arguments}<tool_call|>'


_F, _G = ('f', _ARGUMENTS), ('g', {})
_DEEP = f'{{"a": {"[" * 1001}{"]" * 1001}}}'
_TEXTS = [
  # style, text, content, calls
  ('hermes', _hermes(), '', [_F]),
  ('hermes', f'I look. \n{_hermes()}\n{_hermes("g", "{}")}\n', 'I look.', [_F, _G]),
  ('hermes', _hermes(inner='{{"arguments": {1}, "name": "{0}"}}'), '', [_F]),
  ('hermes', f'<tool_call>{_llama()}</tool_call> Done', ' Done', [_F]),
  ('hermes', _hermes()[: -len('\n</tool_call>')], '', [_F]),  # the end of the text ends it
  ('hermes', ' a < b <tool_cal x\n\n', ' a < b <tool_cal x\n\n', []),
  ('hermes', _hermes(arguments='{"a": 1'), _hermes(arguments='{"a": 1'), []),
  ('hermes', _hermes(arguments='[]'), _hermes(arguments='[]'), []),
  ('hermes', _hermes(arguments='{"a": NaN}'), _hermes(arguments='{"a": NaN}'), []),
  ('hermes', _hermes(arguments='{"a": 1e999}'), _hermes(arguments='{"a": 1e999}'), []),
  ('hermes', _hermes(arguments='{"a": "\\ud800"}'), '', [('f', {'a': '\ud800'})]),
  ('hermes', _hermes(arguments=_DEEP), _hermes(arguments=_DEEP), []),
  ('hermes', f'a{" " * 70}{_hermes()}', f'a{" " * 6}', [_F]),
  ('hermes', f'a{" " * 70}<tool', f'a{" " * 70}<tool', []),
  ('llama3_json', f'{" " * 70}{_llama()}', f'{" " * 70}{_llama()}', []),
  ('hermes', _hermes('no name!'), _hermes('no name!'), []),
  ('hermes', 'the <tool_call> tags', 'the <tool_call> tags', []),
  ('gemma4', '<|tool_call>cal', '<|tool_call>cal', []),
  ('hermes', f'<tool_call> f {_hermes()}', '<tool_call> f', [_F]),
  ('hermes', f'{_hermes(arguments="{1}")}{_hermes()}', _hermes(arguments='{1}'), [_F]),
  ('hermes', '<tool_call>\n<function=f>\n</tool_call>', '<tool_call>\n<function=f>\n</tool_call>', []),
  ('llama3_json', _llama(), '', [_F]),
  ('llama3_json', f'\n<|python_tag|>{_llama()}', '', [_F]),
  ('llama3_json', f'<|python_tag|>{_llama()}; {_llama("g", "{}")}', '', [_F, _G]),
  ('llama3_json', '{"type": "function", "name": "g", "parameters": {}}', '', [_G]),
  ('llama3_json', '{"city": "Paris"} {', '{"city": "Paris"} {', []),
  ('llama3_json', f'I say {_llama()}', f'I say {_llama()}', []),
  ('llama3_json', '<|python_tag|>print(1)', '<|python_tag|>print(1)', []),
  ('gemma4', _gemma(), '', [_F]),
  ('gemma4', f'So. {_gemma()}{_gemma("g", "{}")}', 'So.', [_F, _G]),
  ('gemma4', _gemma('g', '{a}'), _gemma('g', '{a}'), []),
  ('gemma4', _gemma()[:20], _gemma()[:20], []),
  ('gemma4', _gemma('f', _IN_JSON), '', [_F]),
]  # fmt: skip


def _read(style, tools, pieces):
  """What the pieces give at once, and what their deltas give together as clients join them."""
  reader, content, calls = Reader(style, tools), '', {}
  for place, piece in enumerate(pieces):
    delta = reader.add(piece, place == len(pieces) - 1)
    content += delta.get('content', '')
    for each in delta.get('tool_calls', ()):
      call = calls.setdefault(
        each['index'], {'id': each.get('id'), 'name': each['function'].get('name'), 'arguments': ''}
      )
      assert ('id' in each) == ('name' in each['function']) == (not call['arguments'] and call['id'] == each.get('id'))
      call['arguments'] += each['function']['arguments']
  found = [{'id': call['id'], **call['function']} for call in reader.calls]
  assert (content, list(calls.values())) == (reader.content, found)
  assert list(calls) == list(range(len(calls)))
  return content, [(call['name'], call['arguments']) for call in found]


@pytest.mark.parametrize(('name', 'text', 'content', 'calls'), _TEXTS)
def test_calls_are_read_alike_however_the_text_is_cut(styles, name, text, content, calls):
  text = _marked(styles[name], text)
  found = _read(styles[name], _AUTO, [text])
  assert (found[0], [(each, json.loads(arguments)) for each, arguments in found[1]]) == (content, calls)
  for cut in range(0, len(text), 1 + len(text) // 500):
    assert _read(styles[name], _AUTO, [text[:cut], text[cut:]]) == found, cut
  assert _read(styles[name], _AUTO, [*text, '']) == found


@pytest.mark.parametrize('name', TEMPLATES)
def test_required_calls_come_as_far_as_they_are(styles, name):
  text = {
    'hermes': f'{_hermes()}\n{_hermes("g", "{}")}\n',
    'llama3_json': _llama(),
    'gemma4': _gemma() + _gemma('g', '{}'),
  }[name]
  text = _marked(styles[name], text)
  content, calls = _read(styles[name], _SURE, [text])
  assert not content
  assert [(each, json.loads(arguments)) for each, arguments in calls] == [_F, _G][: len(calls)]
  assert len(calls) == 1 + (name != 'llama3_json')
  assert _read(styles[name], _SURE, [*text, ''])[1] == calls
  lengths = set()
  for cut in range(1, len(text)):  # the end of the answer by its limit, which is the end of a token
    if text[:cut].rfind('\U0010fffe') > text[:cut].rfind('\U0010ffff'):
      continue
    content, begun = _read(styles[name], _SURE, [*text[:cut]])
    assert all(mine == whole or whole.startswith(mine) for (_, mine), (_, whole) in zip(begun, calls))
    assert not (content and begun)
    lengths.add(sum(len(mine) for _, mine in begun))
  assert len(lengths) > len(calls[0][1]) / 2  # in pieces


def test_what_cannot_become_a_call_is_not_held_back(styles):
  for name, text in (
    ('hermes', '<tool_call> tags'),
    ('gemma4', '<|tool_call>call me'),
    ('llama3_json', '<|python_tag|>x'),
  ):
    assert Reader(styles[name], _AUTO).add(_marked(styles[name], f'the {text} a')) == {'content': f'the {text} a'}


def test_one_call_where_they_may_not_be_parallel(styles):
  text = _marked(styles['hermes'], f'{_hermes()}\n{_hermes("g", "{}")}')
  assert [name for name, _ in _read(styles['hermes'], _AUTO._replace(is_parallel=False), [text])[1]] == ['f']


def test_tokens_of_the_format_are_not_their_spelling(styles):
  """What a model spells by other tokens is text, also the quotes of Gemma 4."""
  assert _read(styles['gemma4'], _AUTO, [_gemma()])[1] == []
  inner = (
    _marked(styles['gemma4'], '<|tool_call>call:f{a:<|"|>') + '<|"|>' + _marked(styles['gemma4'], '<|"|>}<tool_call|>')
  )
  assert _read(styles['gemma4'], _AUTO, [inner])[1] == [('f', '{"a": "<|\\"|>"}')]


@pytest.mark.parametrize('name', TEMPLATES)
def test_nothing_but_the_tokens_of_a_format_spells_them(styles, name):
  contents = styles[name].tokenizer.token_contents
  assert {index for index, each in enumerate(contents) if b'\xf4' in each} == set(TOKENS[name].values())
  assert sum(b'\xf4' in each for each in tokenizer_of(name).token_contents) == 1  # a byte alone


def test_formats_are_those_of_templates():
  for name in TEMPLATES:
    assert style_of(tokenizer_of(name)).form is FORMATS[name]
  with pytest.raises(ValueError, match='mentions no tools'):
    style_of(
      HubTokenizer.from_parts(
        tiny_hub.backend(), bos_id=None, eos_ids=(EOS,), add_bos=False, chat_template=tiny_hub.CHAT
      )
    )
  coder = HubTokenizer.from_parts(
    tiny_hub.backend(), bos_id=None, eos_ids=(EOS,), add_bos=False,
    chat_template='{{ tools }}<tool_call>\n<function=f>\n{{ arguments }}',
  )  # fmt: skip
  with pytest.raises(ValueError, match='unknown form: --tool_format may be hermes, llama3_json, gemma4'):
    style_of(coder)
  assert style_of(coder, 'hermes').form.name == 'hermes'
  with pytest.raises(ValueError, match='tool_format must be one of hermes, llama3_json, gemma4, got'):
    style_of(coder, 'xml')
  with pytest.raises(ValueError, match='the vocabulary has no token <|tool_call>'):
    style_of(tokenizer_of('gemma4', {}))


_TOOL = {
  'type': 'function',
  'function': {
    'name': 'f', 'description': 'Looks.', 'strict': True,
    'parameters': {
      'type': 'object', 'properties': {'b': {'type': 'boolean'}, 'a': {'enum': ['x', 'yy"']}}, 'required': ['b', 'a'],
      'additionalProperties': False,
    },
  },
}  # fmt: skip
_OTHER = {'type': 'function', 'function': {'name': 'g'}}
_ASKED = {'messages': [{'role': 'user', 'content': 'owl'}], 'tools': [_TOOL, _OTHER]}


def _call(index='1', **function):
  return {'id': index, 'type': 'function', 'function': {'name': 'f', 'arguments': '{"a": 1}'} | function}


def _parse(**more):
  return parse(_ASKED | more, is_chat=True, model='tiny')


def test_what_requests_say_of_tools():
  assert _parse().tools == Tools([_TOOL, _OTHER], ('f', 'g'), False, True)
  assert _parse(tool_choice='none').tools is None
  assert _parse(tool_choice='required', parallel_tool_calls=False).tools == Tools(
    [_TOOL, _OTHER], ('f', 'g'), True, False
  )
  named = _parse(tool_choice={'type': 'function', 'function': {'name': 'g'}}).tools
  assert (named.names, named.is_required, named.is_parallel) == (('g',), True, False)
  talk = [
    {
      'role': 'assistant',
      'content': None,
      'tool_calls': [_call(), _call('2', arguments='{'), _call('3', arguments='')],
    },
    {'role': 'tool', 'tool_call_id': '2', 'content': [{'type': 'text', 'text': 'no'}]},
  ]
  (messages,) = _parse(messages=talk).prompts
  assert [call['function']['arguments'] for call in messages[0]['tool_calls']] == [{'a': 1}, '{', {}]
  assert messages[1] == {'role': 'tool', 'content': 'no', 'tool_call_id': '2'}


@pytest.mark.parametrize(
  ('more', 'words'),
  [
    ({'tools': [3]}, r'tools\[0\] must be of type function'),
    ({'tools': [{'type': 'web_search'}]}, r'tools\[0\] must be of type function'),
    ({'tools': [_OTHER] * 129}, 'tools must be a list of at most 128'),
    ({'tools': [_OTHER] * 2}, 'tools have the name g twice'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a b'}}]}, r'tools\[0\].function.name must be a text that'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a' * 65}}]}, r'tools\[0\].function.name must be'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'parameters': []}}]}, 'must be a JSON schema'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'parameters': {'type': 'array'}}}]}, 'a JSON schema'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'more': 1}}]}, 'unknown field more'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'parameters': {'x': '\ud800'}}}]}, 'valid texts'),
    ({'tool_choice': 'any'}, 'tool_choice must be auto, none, required'),
    ({'tool_choice': {'type': 'allowed_tools'}}, 'tool_choice must be'),
    ({'tool_choice': {'type': 'function', 'function': {'name': 'h'}}}, 'names no function of tools, which are f, g'),
    ({'tool_choice': 'required', 'tools': []}, 'tool_choice needs tools'),
    ({'tool_choice': 'required', 'logprobs': True, 'top_logprobs': 2}, 'with tool_choice only log probabilities'),
    ({'parallel_tool_calls': 1}, 'parallel_tool_calls must be'),
    ({'functions': [{'name': 'f'}]}, 'functions must be left out, since tools'),
    ({'function_call': {'name': 'f'}}, 'function_call must be left out, since tools'),
    ({'response_format': {'type': 'json_object'}}, 'response_format beside tools'),
    ({'messages': [{'role': 'tool', 'content': 'a'}]}, 'tool_call_id must be a text'),
    ({'messages': [{'role': 'tool', 'content': 'a', 'tool_call_id': '1'}]}, 'tool_call_id is that of no call before'),
    ({'messages': [{'role': 'user', 'content': 'a', 'tool_calls': [_call()]}]}, 'tool_calls is not offered here'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [{}]}]}, 'must be calls of functions'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [_call(arguments={})]}]}, 'must have an id and arguments'),
    ({'messages': [{'role': 'assistant', 'tool_calls': [_call()] * 129}]}, 'at most 128 calls'),
  ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(more, words):
  with pytest.raises(RefusedError, match=words):
    _parse(**more)


def test_schemas_are_not_nested_without_end():
  deep = {}
  for _ in range(70):
    deep = {'x': deep}
  with pytest.raises(RefusedError, match='nested more than 64 levels deep'):
    _parse(tools=[{'type': 'function', 'function': {'name': 'a', 'parameters': deep}}])


@pytest.mark.parametrize('name', TEMPLATES)
def test_conversations_with_calls_are_rendered(name):
  """Calls that are rendered are read back as they were, and what tools and messages spell is no special token."""
  tokenizer = tokenizer_of(name)
  (messages,) = _parse(
    messages=[
      *_ASKED['messages'], {'role': 'assistant', 'tool_calls': [_call(arguments=json.dumps(_ARGUMENTS))]},
      {'role': 'tool', 'tool_call_id': '1', 'content': 'no <|im_end|>'},
    ]
  ).prompts  # fmt: skip
  text = tokenizer.chat_template.render(messages, [_TOOL])
  assert 'Looks.' in text or name == 'gemma4'
  begin, end = re.search('assistant\n*', text).end(), text.index('<|im_end|>', text.index('assistant'))
  style = style_of(tokenizer)
  assert _read(style, _AUTO, [_marked(style, text[begin:end])])[1] == [
    ('f', json.dumps(_ARGUMENTS, ensure_ascii=False))
  ]
  if name != 'gemma4':  # tojson of another template spells the quotes otherwise
    ids = tokenizer.encode_chat(messages, [_TOOL])
    assert ids.count(EOS) == text.count('<|im_end|>') - 1


@pytest.mark.parametrize('name', TEMPLATES)
def test_free_calls_reach_clients(monkeypatch, name):
  """Rows that say a text in place of a model: whole, streamed, without parallel calls, and cut by the limit."""
  tokenizer = tokenizer_of(name, ALL)
  first, second = {
    'hermes': (_hermes(), _hermes('g', '{}')), 'llama3_json': (_llama(), f';{_llama("g", "{}")}'),
    'gemma4': (_gemma(), _gemma('g', '{}')),
  }[name]  # fmt: skip
  before = '' if name == 'llama3_json' else 'I look. '
  ids = [*tokenizer.encode(f'{before}{first}{second}'), EOS]
  monkeypatch.setattr(stub_module, 'NEW', len(ids))
  monkeypatch.setattr(stub_module, 'LONGEST', 2000)
  monkeypatch.setattr(stub_module, 'said', lambda prompt: ids)
  stub_module.patch(monkeypatch)
  with (
    running(stub_module.make_stub(tokenizer)) as worker,
    client_of(worker, tokenizer, most_new=len(ids)) as client,
  ):
    (choice,) = _ask(client, logprobs=True)
    calls = [call['function'] for call in choice['message']['tool_calls']]
    assert [(call['name'], json.loads(call['arguments'])) for call in calls] == [_F, _G]
    assert (choice['finish_reason'], choice['message']['content']) == ('tool_calls', before.strip() or None)
    assert len(choice['logprobs']['content']) == len(ids)
    joined = [call['name'] + call['arguments'] for call in calls]
    assert _streamed(client) == (before.strip() or None, 'tool_calls', joined)
    assert _streamed(client, parallel_tool_calls=False) == (before.strip() or None, 'tool_calls', joined[:1])
    (cut,) = _ask(client, max_tokens=len(tokenizer.encode(before + first)) - 3)
    assert (cut['finish_reason'], 'tool_calls' in cut['message']) == ('length', False)
    assert cut['message']['content'].startswith(f'{before}{first}'[:20])
    (none,) = _ask(client, tool_choice='none')
    assert (none['finish_reason'], none['message'].get('tool_calls')) == ('stop', None)


_NEW = 192  # tokens, which are mostly characters here


@pytest.fixture(scope='module', params=[slow(1), 2], ids=['1x4', '2x4'])
def worker(request):
  with running(make_tool_worker(request.param, longest=1024, most_new=_NEW)) as worker:
    yield worker


def _ask(client, **more):
  return _answered(client, **more)['choices']


def _answered(client, **more):
  response = client.post('/v1/chat/completions', json=_ASKED | {'seed': 5} | more)
  assert response.status_code == 200, response.text
  return response.json()


def _streamed(client, **more):
  text = client.post('/v1/chat/completions', json=_ASKED | {'seed': 5, 'stream': True} | more).text
  calls, content, reason = {}, '', None
  for line in text.split('\n\n')[:-2]:
    (choice,) = json.loads(line.removeprefix('data: '))['choices']
    content, reason = content + choice['delta'].get('content', ''), choice['finish_reason']
    for each in choice['delta'].get('tool_calls', ()):
      calls[each['index']] = (
        calls.get(each['index'], '') + each['function'].get('name', '') + each['function']['arguments']
      )
  return content or None, reason, list(calls.values())


@pytest.mark.parametrize('name', TEMPLATES)
def test_required_calls_are_always_there_and_valid(worker, name):
  with client_of(worker, tokenizer_of(name, ALL), most_new=_NEW) as client:
    required = {'tool_choice': 'required', 'parallel_tool_calls': False, 'temperature': 1.5}
    found = [choice for seed in (5, 6) for choice in _ask(client, **required, n=8, seed=seed)]
    for choice in found:
      (call,) = choice['message']['tool_calls']
      assert (choice['finish_reason'], choice['message']['content']) == ('tool_calls', None)
      schema = _TOOL['function']['parameters'] if call['function']['name'] == 'f' else {'maxProperties': 0}
      jsonschema.validate(json.loads(call['function']['arguments']), schema)
    assert {choice['message']['tool_calls'][0]['function']['name'] for choice in found} == {'f', 'g'}
    own = found[0]['message']['tool_calls'][0]['function']
    assert _streamed(client, **required) == (None, 'tool_calls', [own['name'] + own['arguments']])
    named = {'tool_choice': {'type': 'function', 'function': {'name': 'f'}}}
    answer = _answered(client, **named)
    (choice,) = answer['choices']
    assert [call['function']['name'] for call in choice['message']['tool_calls']] == ['f']
    arguments = choice['message']['tool_calls'][0]['function']['arguments']
    parts = []
    for size in range(answer['usage']['completion_tokens'] - 1, 0, -8):
      (cut,) = _ask(client, **named, max_tokens=size)
      assert cut['finish_reason'] == 'length'
      parts += [call['function']['arguments'] for call in cut['message'].get('tool_calls', ())]
    assert all(map(arguments.startswith, parts))
    assert any(0 < len(part) < len(arguments) for part in parts)
    (several,) = _ask(client, tool_choice='required')
    assert several['finish_reason'] in ('tool_calls', 'length')
    assert len(several['message']['tool_calls']) >= 1


def test_free_answers_and_what_is_refused(worker):
  with client_of(worker, tokenizer_of('hermes', ALL), most_new=_NEW) as client:
    (choice,) = _ask(client, max_tokens=24)
    assert choice['finish_reason'] in ('stop', 'length')
    assert 'tool_calls' not in choice['message']
    assert _streamed(client, max_tokens=24) == (choice['message']['content'], choice['finish_reason'], [])
    (none,) = _ask(client, tool_choice='none', max_tokens=24)
    (plain,) = _ask(client, tools=[], max_tokens=24)
    assert none['message'] == plain['message']
    pattern = {'type': 'object', 'properties': {'a': {'not': {}}}}
    tool = {'type': 'function', 'function': {'name': 'f', 'parameters': pattern}}
    response = client.post('/v1/chat/completions', json=_ASKED | {'tools': [tool], 'tool_choice': 'required'})
    assert (response.status_code, response.json()['error']['param']) == (400, 'tools')
    assert "the function f: the JSON schema at '#/properties/a': 'not' is not supported" in response.text
    for arguments, words in (
      ('{"a": "\\ud800"}', 'must hold valid texts'),
      ('{"a":' * 70 + '1' + '}' * 70, 'nested more'),
    ):
      talk = [{'role': 'assistant', 'tool_calls': [_call(arguments=arguments)]}, *_ASKED['messages']]
      response = client.post('/v1/chat/completions', json=_ASKED | {'messages': talk})
      assert (response.status_code, words in response.text) == (400, True)
    response = client.post('/v1/responses', json={'input': 'owl'})
    assert response.status_code == 404
    assert 'OpenAIChatModel' in response.json()['error']['message']
  with client_of(worker, HubTokenizer.from_parts(
    tiny_hub.backend(tiny_hub.SPECIAL | ALL), bos_id=None, eos_ids=(EOS,), add_bos=False, chat_template=tiny_hub.CHAT
  )) as client:  # fmt: skip
    response = client.post('/v1/chat/completions', json=_ASKED)
    assert response.status_code == 400
    assert response.json()['error']['message'] == 'the model tiny: the chat template mentions no tools'
