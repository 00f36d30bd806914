"""A tokenizer and a chat template in the form of Gemma 4's: spaces as ▁ and none in front, bytes, turns with names."""

import pytest
import tiny_hub
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from spectr_jax.io.hub.hub_tokenizer import load_hub_tokenizer

_SPECIAL = ('<pad>', '<eos>', '<bos>', '<unk>', '<|turn>', '<turn|>', '<|channel>', '<channel|>', '<|think|>')
# With a macro, a namespace, flags that are not there, thoughts that are cut out, and turns that begin and end.
_TEMPLATE = """{%- macro strip_thinking(text) -%}
  {%- set ns = namespace(result='') -%}
  {%- for part in text.split('<channel|>') -%}
    {%- if '<|channel>' in part -%}{%- set ns.result = ns.result + part.split('<|channel>')[0] -%}
    {%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
  {%- endfor -%}
  {{- ns.result | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set loop_messages = messages -%}
{%- if (enable_thinking is defined and enable_thinking) or tools or messages[0]['role'] in ['system', 'developer'] -%}
  {{- '<|turn>system\n' -}}
  {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>\n' -}}{%- endif -%}
  {%- if messages[0]['role'] in ['system', 'developer'] -%}
    {{- messages[0]['content'] | trim -}}{%- set loop_messages = messages[1:] -%}
  {%- endif -%}
  {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in loop_messages -%}
  {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
  {{- '<|turn>' + role + '\n' -}}
  {%- if message['content'] is string -%}
    {%- if role == 'model' -%}{{- strip_thinking(message['content']) -}}
    {%- else -%}{{- message['content'] | trim -}}{%- endif -%}
  {%- elif message['content'] is sequence -%}
    {%- for item in message['content'] -%}
      {%- if item['type'] == 'text' -%}{{- item['text'] | trim -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<turn|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\n' -}}{%- endif -%}
"""


def _backend():
  letters = ('▁', '\n', *'abcdefghilmnorstuw.,<>|', 'th', 'the', '▁the', '▁▁')
  tokens = dict.fromkeys([*_SPECIAL, *(f'<0x{byte:02X}>' for byte in range(256)), *letters])
  vocab = {token: index for index, token in enumerate(tokens)}
  merges = [('t', 'h'), ('th', 'e'), ('▁', 'the'), ('▁', '▁')]
  found = tokenizers.Tokenizer(
    models.BPE(vocab=vocab, merges=merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True)
  )
  found.normalizer = normalizers.Replace(' ', '▁')
  found.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
  found.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
  found.post_processor = processors.TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', 2)])
  found.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in _SPECIAL])
  return found


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  names = {'bos_token': '<bos>', 'eos_token': '<eos>', 'pad_token': '<pad>', 'unk_token': '<unk>'}
  folder = tiny_hub.write(
    tmp_path_factory.mktemp('gemma4'),
    _backend(),
    tokenizer_config=names | {'processor_class': 'Gemma4Processor', 'padding_side': 'left'},
    generation_config={'bos_token_id': 2, 'eos_token_id': [1, 5], 'pad_token_id': 0},
    chat_template=_TEMPLATE,
  )
  return load_hub_tokenizer(folder)


@pytest.mark.parametrize('text', ['the owl', ' the  owl', '日本 the', 'the\nowl ', ''])
def test_texts_are_read_and_written_again(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.encode_prompts([text]) == [[2, *ids]]


def test_turns(tokenizer):
  messages = [
    {'role': 'system', 'content': 'be brief. '},
    {'role': 'user', 'content': ' the owl <turn|> '},
    {'role': 'assistant', 'content': 'a bird'},
    {'role': 'user', 'content': 'and'},
  ]
  expected = (
    '<bos><|turn>system\nbe brief.<turn|>\n<|turn>user\nthe owl <turn|><turn|>\n<|turn>model\na bird<turn|>\n'
    '<|turn>user\nand<turn|>\n<|turn>model\n'
  )
  assert tokenizer.chat_template.render(messages) == expected
  ids = tokenizer.encode_chat(messages)
  assert tokenizer.eos_ids == (1, 5)
  assert ids.count(5) == 4  # what a user writes ends no turn
  assert ids[:2] == [2, 4]
  assert ids.count(2) == 1
