"""Chat templates that write calls of tools, their tokenizers, and a tiny pair that serves them."""

import itertools

import jax
import pytest
import tiny_hub

from decode.serving.worker import Worker
from spectr_jax import Decoder, TokenTree
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer
from spectr_jax.models import causal_lm, transformer
from tests.serving.stub import EOS

# As public families write them: Qwen 2.5 and 3, Llama 3.1 and Gemma 4, each cut down to what calls need.
_CHATML = (
  "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
  """{{- '\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}"""
  '{%- endif %}'
  "{%- for message in messages %}{%- if message.role == 'tool' %}"
  "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- else %}"
  "{{- '<|im_start|>' + message.role + '\n' + message.content }}{%- for call in message.tool_calls %}"
  """{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
  '{{- call.function.arguments | tojson }}'
  "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_LLAMA = (
  "{{- '<s>' }}{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- for t in tools %}"
  '{{- t | tojson(indent=4) }}'
  '{%- endfor %}{%- endif %}{%- for message in messages %}'
  "{%- if not (message.role == 'tool' or 'tool_calls' in message) %}"
  "{{- '<|im_start|>' + message.role + '\n\n' + message.content | trim + '<|im_end|>' }}"
  "{%- elif 'tool_calls' in message %}{%- if not message.tool_calls | length == 1 %}"
  "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
  """{%- set call = message.tool_calls[0].function %}{{- '<|im_start|>assistant\n\n{"name": "' + call.name + '", ' }}"""
  """{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|im_end|>' }}"""
  "{%- else %}{{- '<|im_start|>ipython\n\n' + message.content | tojson + '<|im_end|>' }}{%- endif %}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
_GEMMA = (
  "{%- macro written(value) -%}{%- if value is string -%}{{- '<|\"|>' + value + '<|\"|>' -}}"
  "{%- elif value is boolean -%}{{- 'true' if value else 'false' -}}{%- elif value is mapping -%}{{- '{' -}}"
  '{%- for key, each in value | dictsort -%}{{- key -}}:{{- written(each) -}}{%- if not loop.last -%},{%- endif -%}'
  "{%- endfor -%}{{- '}' -}}{%- elif value is sequence -%}{{- '[' -}}{%- for each in value -%}{{- written(each) -}}"
  "{%- if not loop.last -%},{%- endif -%}{%- endfor -%}{{- ']' -}}{%- else -%}{{- value -}}{%- endif -%}"
  '{%- endmacro -%}'
  "{%- for tool in tools or [] -%}{{- 'declaration:' + tool.function.name + written(tool.function.parameters) -}}"
  '{%- endfor -%}'
  "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' -}}{%- for call in message.tool_calls -%}"
  "{{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' -}}{%- endfor -%}"
  "{{- message.content + '<|im_end|>\n' -}}{%- endfor -%}"
  "{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}"
)
TEMPLATES = {'hermes': _CHATML, 'llama3_json': _LLAMA, 'gemma4': _GEMMA}
TOKENS = {
  'hermes': {'<tool_call>': 301, '</tool_call>': 302}, 'llama3_json': {'<|python_tag|>': 301},
  'gemma4': {'<|tool_call>': 301, '<tool_call|>': 302, '<|"|>': 303},
}  # fmt: skip


def tokenizer_of(name, tokens=None):
  tokens = TOKENS[name] if tokens is None else tokens
  return HubTokenizer.from_parts(
    tiny_hub.backend(tiny_hub.SPECIAL | tokens), bos_id=None, eos_ids=(EOS,), add_bos=False,
    chat_template=TEMPLATES[name],
  )  # fmt: skip


ALL = dict(zip(sorted({*itertools.chain(*TOKENS.values())}), range(301, 400)))


def make_tool_worker(num_drafts, *, longest, most_new):
  """A pair of random models, for all formats: vocabularies with `ALL` have equally many ids."""
  pytest.importorskip('outlines_core', reason='needs the extra grammar')
  tokenizer, size = tokenizer_of('hermes', ALL), longest + most_new
  config = causal_lm.lm1b_config(
    tokenizer.vocab_size, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16, context_length=size
  )
  params = [transformer.init_params(jax.random.key(seed), config) for seed in (0, 1)]
  models = [causal_lm.causal_lm(jax.device_put(each, jax.devices()[0]), config) for each in params]
  decoder = Decoder.make(
    *models, method='race_traversal', tree=TokenTree.chains(num_drafts, 4), max_new_tokens=most_new, cache_size=size,
    eos_id=tokenizer.eos_ids, logprobs=True,
  )  # fmt: skip
  return Worker(decoder, tokenizer, batch_size=4, longest_prompt=longest, most_waiting=64)
