"""Chat templates: Jinja programs that write a conversation in the form that a model was trained on."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Begins and ends a mark, which stands for a special token. Unicode assigns no characters to these code points.
_BEGIN, _END = '\ufdd0', '\ufdd1'


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` around what the assistant says: a notice for training, which renders its content."""

  tags = {'generation'}

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
  # Jinja's own filter writes for HTML.
  return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
  """The environment that templates of the hub are written for. Templates are programs of others, hence the sandbox."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals |= {'raise_exception': _refuse, 'strftime_now': _format_now}
  return environment


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split()) or type(error).__name__


class ChatTemplate:
  """A chat template.

  A template may read the clock (`strftime_now`), as that of Llama 3.1 does. Its prompts then change from day to day.

  Attributes:
    source: The Jinja text.
    special_tokens: Special tokens by the names that templates have for them.
  """

  def __init__(self, source: str, special_tokens: Mapping[str, str]):
    """Stores the template, which is compiled when it is first used.

    Args:
      source: The Jinja text.
      special_tokens: Special tokens by the names that templates have for them, such as `bos_token`.
    """
    self.source, self.special_tokens = source, dict(special_tokens)

  @functools.cached_property
  def _template(self) -> jinja2.Template:
    try:
      return _environment().from_string(self.source)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f'the chat template is damaged, line {error.lineno}: {_one_line(error)}') from error

  def render(self, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as text, up to where the model answers.

    Args:
      messages: The messages, each with the texts `role` and `content`.

    Raises:
      ValueError: The template is damaged or refuses the conversation; the message says why.
    """
    template = self._template
    try:
      return template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        tools=None,
        documents=None,
        **self.special_tokens,
      )
    except Exception as error:  # a template is a program, which may fail in any way
      raise ValueError(f'the chat template refuses the conversation: {_one_line(error)}') from error


def mark_special(special_tokens: Iterable[str]) -> dict[str, str]:
  """Marks that stand for special tokens in a text.

  Args:
    special_tokens: The tokens.

  Returns:
    Each token's mark.
  """
  return {token: f'{_BEGIN}{index}{_END}' for index, token in enumerate(sorted(special_tokens))}


def _substitute(text: str, replaced: Mapping[str, str]) -> str:
  """Replaces every key by its value, the longest of those that begin at a place, as tokenizers look for tokens."""
  pattern = '|'.join(map(re.escape, sorted(replaced, key=len, reverse=True)))
  return re.sub(pattern, lambda match: replaced[match[0]], text)


def render_marked(
  template: ChatTemplate, messages: Sequence[Mapping[str, str]], marks: Mapping[str, str]
) -> str | None:
  """The rendered conversation with marks in place of the template's own special tokens.

  What messages spell stays as they spell it, so that a tokenizer that knows only the marks reads it as text. To tell
  the two apart, the conversation is rendered a second time with marks in the messages. Put back, these must give the
  first text. This is exact for every template that trims, joins or encodes whole contents, and says so for a template
  that looks at the special token itself.

  Args:
    template: The template.
    messages: The messages.
    marks: The result of `mark_special`.

  Returns:
    The text, or None if no message spells a special token, so that all of them are the template's.

  Raises:
    ValueError: The template refuses the conversation, or does something with a special token in a message.
  """
  spelled = {token: mark for token, mark in marks.items() if any(token in v for m in messages for v in m.values())}
  if not spelled:
    return None
  text = template.render(messages)
  if _BEGIN in text:
    raise ValueError(f'a message has the special token {min(spelled)!r} and U+FDD0, which no text should have')
  marked = template.render([{k: _substitute(v, spelled) for k, v in message.items()} for message in messages])
  back = {mark: token for token, mark in marks.items()}
  if _substitute(marked, back) != text:
    raise ValueError(
      f'a message has the special token {min(spelled)!r}, and the chat template gives it a meaning: write it otherwise'
    )
  return _substitute(marked, {**marks, **back})
