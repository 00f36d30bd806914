"""Chat templates: the environment that templates of the hub are written for, and their errors in one line."""

import datetime

import pytest

from spectr_jax.io.hub.chat_template import ChatTemplate

_MESSAGES = [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'is <3 & "ü" text?'}]


def _render(source, messages=_MESSAGES, **special_tokens):
  return ChatTemplate(source, special_tokens).render(messages)


@pytest.mark.parametrize(
  ('source', 'text'),
  [
    (
      '{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}',
      'system\n',
    ),  # trimmed
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
    (
      "{{ raise_exception('roles must\nalternate') }}",
      'the chat template refuses the conversation: roles must alternate',
    ),
    ('{{ none_such.role }}', "refuses the conversation: 'none_such' is undefined"),
    ('{{ messages[0].content + 1 }}', 'refuses the conversation: can only concatenate str'),
    ("{{ ''.__class__.__mro__ }}", 'refuses the conversation: access to attribute'),
    ('{{ messages.append(1) }}', 'refuses the conversation: .*append'),
    ('{% for i in range(10**9) %}{% endfor %}', 'refuses the conversation: Range too big'),
  ],
)
def test_errors_are_one_line(source, message):
  with pytest.raises(ValueError, match=message) as caught:
    _render(source)
  assert '\n' not in str(caught.value)


def test_messages_are_not_changed():
  messages = [dict(message) for message in _MESSAGES]
  _render("{% set m = messages[0] %}{{ m.get('role') }}", messages)
  assert messages == _MESSAGES
