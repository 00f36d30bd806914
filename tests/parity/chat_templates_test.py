"""Rendered conversations and their ids, beside those of `transformers`: `pytest -m parity`, with the extra `parity`."""

import pytest
import tiny_hub

from spectr_jax.io.hub.chat_template import ChatTemplate
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.io.model_files import GgufFile
from tests.serving import tool_models

pytestmark = pytest.mark.parity

# Templates as public families write them: how they begin, what they trim, where they refuse, how they loop.
_TEMPLATES = {
  'chatml': (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
  ),
  'llama2': (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    '{% set system_message = false %}{% endif %}{% for message in loop_messages %}'
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate between user and assistant') }}{% endif %}"
    '{% if loop.index0 == 0 and system_message != false %}'
    "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
  ),
  'llama3': """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- system_message + eos_token }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("No tools here") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
  'gemma': (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    '{% for message in messages %}'
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
  ),
  'mistral': """{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "system" %}
        {%- set system = message["content"] %}
        {%- continue %}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if system is defined and loop.last %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- else %}
        {%- generation %}
        {{- " " + message["content"] | trim + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{{- {"turns": ns.index, "text": "ü <x>"} | tojson }}
""",
}
_USER = {'role': 'user', 'content': '  Why is <b>"ü"</b> 日本?\n\n'}
_ANSWER = {'role': 'assistant', 'content': ' Because.\n'}
_SYSTEM = {'role': 'system', 'content': 'Be brief. '}
_CONVERSATIONS = {
  'one': [_USER],
  'three': [_USER, _ANSWER, _USER],
  'system': [_SYSTEM, _USER],
  'long': [_SYSTEM, _USER, _ANSWER, {'role': 'user', 'content': '{{ 1 + 1 }} {% if %}'}],
  'begun': [_USER, _USER],
}
_TOKENS = {'bos_token': '<s>', 'eos_token': '<|im_end|>'}


def _reference(template, backend):
  transformers = pytest.importorskip('transformers', reason='needs the extra parity')
  found = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **_TOKENS)
  found.chat_template = template
  return found


def _render(function):
  """The text, or the reason of a template that refuses."""
  try:
    return function()
  except Exception as error:
    return str(error).removeprefix('the chat template refuses the conversation: ')


@pytest.mark.parametrize('conversation', _CONVERSATIONS)
@pytest.mark.parametrize('name', _TEMPLATES)
def test_the_text_is_that_of_transformers(name, conversation):
  messages, template = _CONVERSATIONS[conversation], _TEMPLATES[name]
  reference = _reference(template, tiny_hub.backend())
  wanted = _render(lambda: reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
  assert _render(lambda: ChatTemplate(template, _TOKENS).render(messages)) == wanted
  assert wanted


@pytest.mark.parametrize('name', _TEMPLATES)
def test_the_ids_are_those_of_transformers(name):
  messages, template = _CONVERSATIONS['three'], _TEMPLATES[name]
  reference = _reference(template, tiny_hub.backend(add_bos=True))
  tokenizer = HubTokenizer.from_parts(
    tiny_hub.backend(add_bos=True), bos_id=7, eos_ids=[41], add_bos=True, chat_template=template
  )
  wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
  assert tokenizer.encode_chat(messages) == wanted
  for text in ('the owl', 'the <|im_start|>owl', ' ', 'naïve 日本\n'):
    assert tokenizer.encode_prompt(text) == reference(text)['input_ids']
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
      tokenizer.encode(text), skip_special_tokens=True
    )


def test_a_real_model(smollm2):
  """SmolLM2's own template, tokenizer and special tokens, with the ids of transformers for the same file."""
  transformers = pytest.importorskip('transformers', reason='needs the extra parity')
  reference = transformers.AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
  tokenizer = GgufFile(smollm2).tokenizer()
  for messages in _CONVERSATIONS.values():
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == wanted
    spelled = [messages[0] | {'content': '<|im_end|>'}, *messages[1:]]
    ids = tokenizer.encode_chat(spelled)
    assert ids.count(2) == wanted.count(2)
    assert tokenizer.decode(ids) == tokenizer.decode(wanted).replace(messages[0]['content'], '<|im_end|>', 1)


@pytest.mark.parametrize('name', tool_models.TEMPLATES)
def test_tools_and_calls_are_rendered_as_by_transformers(name):
  template, call = tool_models.TEMPLATES[name], {'name': 'f', 'arguments': {'b': ['"ü"', None, True], 'a': {'x': 1.5}}}
  tool = {'type': 'function', 'function': {'name': 'f', 'description': '<ü>', 'parameters': {'type': 'object'}}}
  talk = [
    _USER, {'role': 'assistant', 'content': '', 'tool_calls': [{'id': '1', 'type': 'function', 'function': call}]},
    {'role': 'tool', 'tool_call_id': '1', 'content': '日本'}, _USER,
  ]  # fmt: skip
  for num, tools in ((1, [tool]), (4, [tool, tool]), (3, None)):
    _check_tools(template, talk[:num], tools)


def _check_tools(template, messages, tools):
  reference = _reference(template, tiny_hub.backend())
  more = {'tools': tools, 'tokenize': False, 'add_generation_prompt': True}
  wanted = _render(lambda: reference.apply_chat_template(messages, **more))
  assert _render(lambda: ChatTemplate(template, _TOKENS).render(messages, tools)) == wanted
  assert len(wanted) > 100
