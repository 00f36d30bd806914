"""Chat templates: the environment that templates of the hub are written for, and their errors in one line."""

import concurrent.futures
import copy
import datetime
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import time

import hostile
import pytest

from spectr_jax.io.hub import chat_template
from spectr_jax.io.hub.chat_template import ChatTemplate, render_marked

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
  ],
)
def test_errors_are_one_line(source, message):
  hostile.refusal(lambda: _render(source), '', message)


# Bounds.


@pytest.mark.parametrize(
  ('source', 'message'),
  [
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
def test_what_a_template_takes_is_bounded(source, message):
  hostile.refusal(lambda: _render(source), '', message)


@pytest.mark.parametrize(
  'source',
  [
    '{{ 9 ** (9 ** 9) }}',  # Jinja computes it when it compiles
    '{{ (messages | length + 7) ** (9 ** 9) }}',
    '{% for i in range(99999) %}{% for i in range(99999) %}{% for i in range(99999) %}'
    '{% endfor %}{% endfor %}{% endfor %}',
    '{{ lipsum(n=10**7) }}',
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
