"""Chat templates: the environment that templates of the hub are written for, and their errors in one line."""

import concurrent.futures
import copy
import datetime
import functools
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import time

import hostile
import jinja2.filters
import pytest
import tiny_hub

from spectr_jax.io.hub import chat_template
from spectr_jax.io.hub.chat_template import ChatTemplate, render_marked
from tests.slow import slow

_MESSAGES = [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'is <3 & "ü" text?'}]


def _render(source, messages=_MESSAGES, **special_tokens):
  return ChatTemplate(source, special_tokens).render(messages)


@pytest.mark.parametrize(
  ('source', 'text'),
  [
    ('{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}', 'system\n'),
    ('{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}', 'system'),
    ('{{ messages[1] | tojson }}', '{"role": "user", "content": "is <3 & \\"ü\\" text?"}'),
    ('{{ {"a": [1]} | tojson(indent=2) }}', '{\n  "a": [\n    1\n  ]\n}'),
    ('{{ bos_token }}{{ none_such }}{{ tools }}{{ add_generation_prompt }}', '<s>NoneTrue'),
    ('{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}', '2'),
    ('{% generation %}{{ messages[0].role }}{% set x = 1 %}{% endgeneration %}{{ x }}', 'system'),
    ("{{ strftime_now('%Y') }}", str(datetime.date.today().year)),
  ],
)
def test_what_templates_use_is_there(source, text):
  assert _render(source, bos_token='<s>') == text


# Bounds.


@pytest.mark.parametrize(
  ('source', 'message'),
  [
    ('{% for m in messages %}', 'the chat template is damaged, line 1: Unexpected end'),
    ("{{ raise_exception('roles must\nalternate') }}", 'refuses the conversation: roles must alternate'),
    ('{{ none_such.role }}', "refuses the conversation: 'none_such' is undefined"),
    ('{{ messages[0].content + 1 }}', 'refuses the conversation: can only concatenate str'),
    ("{{ ''.__class__.__mro__ }}", 'refuses the conversation: access to attribute'),
    ('{{ messages.append(1) }}', 'refuses the conversation: .*append'),
    ('{% for i in range(10**9) %}{% endfor %}', 'refuses the conversation: Range too big'),
    ("{{ 'a' * 10**10 }}", 'it needs too much memory'),
    ("{{ '{:10000000000}'.format(1) }}", 'it needs too much memory'),
    ('{{ [1] | tojson(indent=10**9) }}', 'it needs too much memory'),
    ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", 'it needs too much memory'),
    ("{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}", 'it writes more than 4,194,304 bytes'),
    ('{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}', 'it is nested too deeply'),
    ('{% for a in [1] %}' * 21 + '{% endfor %}' * 21, 'damaged: too many statically nested blocks'),
    ('{% if a %}' * 120 + '{% endif %}' * 120, 'damaged: too many levels of indentation'),
    ('{{ ' + '(' * 10**5 + '1' + ')' * 10**5 + ' }}', 'damaged: it is nested too deeply'),
    ('{{ 10**5000 }}', 'damaged: Exceeds the limit'),
    ('a' * 10**7, 'has 10,000,000 characters'),
    ("{{ '\\ud800' }}", 'it writes characters that are none'),
    ("{{ raise_exception('\x1b[2J') }}", 'refuses the conversation: \ufffd\\[2J'),
    ('', 'the chat template is empty'),
    (' \n\t', 'the chat template is empty'),
  ],
)
def test_errors_are_one_line_and_what_a_template_takes_is_bounded(source, message):
  hostile.refusal(lambda: _render(source), '', message)


@pytest.mark.parametrize(
  'source',
  [
    slow('{{ 9 ** (9 ** 9) }}'),  # Jinja computes it when it compiles
    slow('{{ (messages | length + 7) ** (9 ** 9) }}'),
    '{% for i in range(99999) %}{% for i in range(99999) %}{% for i in range(99999) %}'
    '{% endfor %}{% endfor %}{% endfor %}',
    slow('{{ lipsum(n=10**7) }}'),
    "{{ ('a ' * 4 * 10**6) | wordwrap(1) }}",
  ],
)
def test_what_takes_for_ever_is_ended(source, monkeypatch):
  monkeypatch.setattr(chat_template, '_SECONDS', 1.0)
  template = ChatTemplate(source, {})
  for _ in range(2):  # a new process each time
    begin = time.monotonic()
    with pytest.raises(ValueError, match='the chat template fails: it takes longer than 1 second'):
      template.render(_MESSAGES)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
  ('message', 'shown'),
  [
    ({'role': 'user', 'content': ['a']}, r"message 1 must hold texts, got 'content': \['a'\]"),
    ({'role': 'user', 'content': None}, "message 1 must hold texts, got 'content': None"),
    ({'role': 'user', 'content': '\ud800'}, r"message 1 must hold texts, got 'content': '\\ud800'"),
    ({3: 'user'}, "message 1 must hold texts, got 3: 'user'"),
  ],
)
def test_messages_hold_texts(message, shown):
  with pytest.raises(ValueError, match=shown):
    _render('a', [message])
  with pytest.raises(ValueError, match=shown):
    render_marked(ChatTemplate('a', {}), [message], {'<s>': 'x'})


# The process.


def _process(template):
  return template._worker._process


def test_one_process_serves_threads_in_turn_and_ends_with_the_template():
  template = ChatTemplate('{{ messages[0].content }}', {})
  assert template.render([{'role': 'user', 'content': 'a'}]) == 'a'
  process = _process(template)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    texts = list(pool.map(template.render, ([{'role': 'user', 'content': str(i)}] for i in range(100))))
  assert texts == list(map(str, range(100)))
  assert _process(template) is process
  assert process.poll() is None
  del template
  gc.collect()
  assert process.returncode is not None


def test_a_process_that_is_gone_is_started_anew():
  template = ChatTemplate('{{ messages | length }}', {})
  assert template.render(_MESSAGES) == '2'
  first = _process(template)
  first.kill()
  first.wait()
  assert template.render(_MESSAGES) == '2'
  assert _process(template) is not first


def test_a_conversation_that_is_interrupted_leaves_no_answer_behind(monkeypatch):
  template = ChatTemplate('{{ messages[0].content }}', {})
  template.render([{'role': 'user', 'content': 'a'}])
  exchange = template._worker._exchange

  def interrupted(request):
    exchange(request)
    raise KeyboardInterrupt

  monkeypatch.setattr(template._worker, '_exchange', interrupted)
  with pytest.raises(KeyboardInterrupt):
    template.render([{'role': 'user', 'content': 'secret'}])
  assert template.render([{'role': 'user', 'content': 'b'}]) == 'b'


def test_templates_are_copied_without_their_process():
  template = ChatTemplate('{{ bos_token }}{{ messages | length }}', {'bos_token': '<s>'})
  assert template.render(_MESSAGES) == '<s>2'
  for other in (copy.deepcopy(template), pickle.loads(pickle.dumps(template))):
    assert other._worker is None
    assert other.render(_MESSAGES) == '<s>2'


_PARENT = """
import os, sys
from spectr_jax.io.hub.chat_template import ChatTemplate
template = ChatTemplate('{{ messages[0].content }}', {})
print(template.render([{'role': 'user', 'content': 'parent'}]), template._worker._process.pid, flush=True)
if sys.argv[1] == 'fork':
  child = os.fork()
  print(template.render([{'role': 'user', 'content': 'child' if child == 0 else 'parent'}]), flush=True)
  if child:
    os.waitpid(child, 0)
    print(template.render([{'role': 'user', 'content': 'parent'}]), flush=True)
elif sys.argv[1] == 'kill':
  os.kill(os.getpid(), 9)
"""


def _is_running(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='looks at processes in /proc')
@pytest.mark.parametrize('end', ['exit', 'kill', 'fork'])
def test_no_process_is_left(end):
  root = pathlib.Path(__file__).parents[3]
  command = [sys.executable, '-W', 'error', '-c', _PARENT, end]
  ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
  assert ran.stderr == ''
  (text, pid), *rest = map(str.split, ran.stdout.splitlines())
  assert text == 'parent'
  assert sorted(rest) == ([['child'], ['parent'], ['parent']] if end == 'fork' else [])
  deadline = time.monotonic() + 20
  while _is_running(pid):
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_the_process_knows_little(monkeypatch):
  """It gets no setting of this process except those that Python needs, and sees the same time zone."""
  monkeypatch.setenv('SECRET', 'x')
  monkeypatch.setenv('TZ', 'UTC+7')
  template = ChatTemplate("{{ strftime_now('%H') }}", {})
  hours = [datetime.datetime.now(datetime.UTC).hour]
  found = template.render(_MESSAGES)
  hours.append(datetime.datetime.now(datetime.UTC).hour)
  assert int(found) in [(hour - 7) % 24 for hour in hours]
  environment = pathlib.Path(f'/proc/{_process(template).pid}/environ')
  if environment.exists():
    assert b'SECRET' not in environment.read_bytes()


# Mutated and nasty templates: each ends in a text or in one line, within its bounds.

_TOKENS = {'bos_token': '<s>', 'eos_token': '</s>'}
_CONVERSATION = [{'role': 'system', 'content': 'be <brief>'}, {'role': 'user', 'content': 'an owl\nand a fox 🙂'}]
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
      text = template.render(_CONVERSATION)
    finally:
      self._worker = template._worker
    assert len(text.encode()) <= 2**22


@pytest.mark.slow
def test_mutated_and_nasty_templates(monkeypatch):
  monkeypatch.setattr(chat_template, '_SECONDS', 0.3)
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
