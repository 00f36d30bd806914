"""Mutated and nasty chat templates: each ends in a text or in one line, within its bounds."""

import functools

import hostile
import jinja2.filters
import pytest
import tiny_hub

from spectr_jax.io.hub import chat_template
from spectr_jax.io.hub.chat_template import ChatTemplate

_SECONDS = 0.3
_TOKENS = {'bos_token': '<s>', 'eos_token': '</s>'}
_MESSAGES = [{'role': 'system', 'content': 'be <brief>'}, {'role': 'user', 'content': 'an owl\nand a fox 🙂'}]
_REAL = (
  tiny_hub.CHAT,
  """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=true, system='') -%}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system | trim }}
{%- for message in messages %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 1) %}{{ raise_exception('roles alternate') }}{% endif %}
  {%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
  {%- else %}{% generation %}{{ message.content.split('</think>')[-1] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}""",
  """{%- macro show(x, depth=0) -%}{{ x | tojson(indent=2) | indent(depth) }}{%- endmacro -%}
{{- '<|start|>' ~ strftime_now('%d %b %Y') ~ show({'n': messages | length, 'roles': messages | map(attribute='role')
| list}) -}}{% for m in messages[::-1] if m.content is string %}{% if loop.last %}{% break %}{% endif %}
{{ '%s: %5d' | format(m.role, loop.index) }}{{ m.content | replace('a', 'b') | wordcount }}{% endfor %}""",
)
_VALUES = (
  "'a'", '10**9', '9', '-1', 'messages', 'messages[0].content', '[1, 2]', "{'a': 1}", 'none', 'range(99999)', '0.5',
  "''", "'a' * 10**7", 'loop', 'namespace(a=1)', 'cycler', 'lipsum', 'dict', 'self', "'%99999999d'", "'{:99999999}'",
  '1e308', 'x', "'字\\ud800'", 'strftime_now', 'raise_exception', 'joiner',
)  # fmt: skip
_FILTERS = (*jinja2.filters.FILTERS, 'none_such')
_ARGUMENTS = '', '', '(10**8)', '("a")', '(messages)', '(1, 10**7)', '("", "ab")'
_BLOCKS = (
  '{{% for x in {value} %}}{body}{{% endfor %}}', '{{% for x in range(9999) %}}{body}{{% endfor %}}',
  '{{% if {value} %}}{body}{{% elif {value} %}}b{{% endif %}}', '{{% set x = {value} %}}{body}',
  '{{% set x %}}{body}{{% endset %}}{{{{ x * 9 }}}}',
  '{{% macro f(x) %}}{body}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}',
  '{{% filter upper %}}{body}{{% endfilter %}}', '{{% generation %}}{body}{{% endgeneration %}}',
  '{{% for x in [[1]] recursive %}}{{{{ loop(x) }}}}{{% endfor %}}',
  '{{% block a %}}{body}{{{{ self.a() }}}}{{% endblock %}}', '{{% include {value} %}}', '{{% extends {value} %}}',
  '{{% import {value} as x %}}', '{{% call f() %}}{body}{{% endcall %}}', '{{% raw %}}{body}{{% endraw %}}',
  '{{% with x = {value} %}}{body}{{% endwith %}}', '{{# {body} #}}', '{{% break %}}',
  '{{% set ns = namespace(a="a") %}}{{% for i in range(60) %}}{{% set ns.a = ns.a ~ ns.a %}}{{% endfor %}}{body}',
)  # fmt: skip
_OPERATORS = '+', '-', '*', '**', '//', '%', '~', 'in', 'and', '==', '<', 'if', 'is'
_ATTRIBUTES = (
  '__class__', 'append(1)', 'format(9)', 'update({})', '_x', '__globals__', 'join("ab")', 'zfill(10**9)', 'a',
)  # fmt: skip


def _value(rng, depth=0):
  value = rng.choice(_VALUES)
  while depth < 5 and rng.random() < 0.6:
    depth += 1
    match rng.randrange(5):
      case 0:
        value = f'({value} {rng.choice(_OPERATORS)} {_value(rng, depth + 2)})'
      case 1:
        value = f'({value}).{rng.choice(_ATTRIBUTES)}'
      case 2:
        value = f'({value})[{_value(rng, depth + 3)}:]'
      case _:
        value = f'({value} | {rng.choice(_FILTERS)}{rng.choice(_ARGUMENTS)})'
  return value


def _block(rng, depth=0):
  if depth > 3 or rng.random() < 0.4:
    return rng.choice(('', 'text', f'{{{{ {_value(rng)} }}}}'))
  return rng.choice(_BLOCKS).format(value=_value(rng), body=_block(rng, depth + 1) + _block(rng, depth + 2))


def _source(rng):
  if rng.random() < 0.5:
    return hostile.mutated_bytes(rng.choice(_REAL).encode(), rng).decode(errors='replace')
  return _block(rng) * rng.choice((1, 1, 1, 25))


class _Renderer:
  """Renders one template after the other in one process, for as long as that lives."""

  def __init__(self):
    self._worker = None

  def render(self, source):
    template = ChatTemplate(source, _TOKENS)
    template._worker = self._worker
    try:
      text = template.render(_MESSAGES)
    finally:
      self._worker = template._worker
    assert len(text.encode()) <= 2**22


@pytest.mark.slow
def test_mutated_and_nasty_templates(monkeypatch):
  monkeypatch.setattr(chat_template, '_SECONDS', _SECONDS)
  renderer, tally = _Renderer(), hostile.Tally('the chat template')
  for rng in hostile.rngs():
    source = _source(rng)
    tally.read(functools.partial(renderer.render, source), source)
  tally.check(least_read=300)
  limits = 'longer than', 'too much memory', 'writes more than', 'nested too deeply', 'its process ended'
  reached = {limit: sum(num for text, num in tally.refusals.items() if limit in text) for limit in limits}
  print(reached)
  assert reached['longer than'] > 0
  assert reached['too much memory'] > 0
