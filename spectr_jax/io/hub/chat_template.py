"""Chat templates: Jinja programs that write a conversation in the form that a model was trained on."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spectr_jax.io.bounded_process import BoundedProcess
from spectr_jax.io.untrusted import TEXT, named, one_line, shown

# Begins and ends a mark, which stands for a special token. Unicode assigns no characters to these code points.
_BEGIN, _END = '\ufdd0', '\ufdd1'

_MOST_SOURCE = 2**20  # characters
_MOST_OUTPUT = 2**22  # bytes of UTF-8
_MOST_ANSWER = 6 * _MOST_OUTPUT + 2**16  # bytes: JSON writes `\u0000` for a character of one byte
_MEMORY = 2**29  # bytes of address space
_SECONDS = 10.0  # of wall-clock time for a conversation
_MOST_DEPTH = 64  # levels of objects and lists in a message or a tool
_SCRIPT = pathlib.Path(__file__).with_name('chat_worker.py')


class ChatTemplate:
  """A chat template.

  It is a Jinja program, which runs in a process of its own, which stays for further conversations. Its time, memory and
  output are bounded whatever it does, and the process ends with this object.

  A template may read the clock (`strftime_now`), as that of Llama 3.1 does. Its prompts then change from day to day.
  """

  def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None):
    """Stores the Jinja text, compiled when it is first used, special tokens by their names such as `bos_token`, and the
    text that takes its place where there are tools, as Transformers does with templates of the name `tool_use`.
    """
    self.source, self.special_tokens, self.tool_source = source, dict(special_tokens), tool_source
    self._lock, self._worker = threading.Lock(), None

  def __reduce__(self):
    return type(self), (self.source, self.special_tokens, self.tool_source)

  def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The conversation as text up to where the model answers.

    Args:
      messages: JSON objects with the texts `role` and `content`, and with what else the template reads, such as
        `tool_calls`.
      tools: JSON objects that describe the tools, in the form that the template reads; None for none.

    Raises:
      ValueError: The template is damaged, refuses the conversation or exceeds its bounds, or a message or a tool is not
        of JSON; one line says why.
    """
    for _ in texts_of(messages, tools):
      pass
    source = self.source if tools is None or self.tool_source is None else self.tool_source
    if not source.strip():
      raise ValueError('the chat template is empty')
    if len(source) > _MOST_SOURCE:
      raise ValueError(f'the chat template has {len(source):,} characters, the most are {_MOST_SOURCE:,}')
    if self._worker is not None and self._worker.owner != os.getpid():  # after a fork
      self._lock, self._worker = threading.Lock(), None
    given = {'source': source, 'special_tokens': self.special_tokens, 'messages': [dict(m) for m in messages]}
    given['tools'] = None if tools is None else list(tools)
    with self._lock, named('the chat template fails'):
      if self._worker is None or not self._worker.is_alive():
        bounds = {'seconds': _SECONDS, 'memory': _MEMORY, 'most': _MOST_ANSWER}
        self._worker = BoundedProcess(_SCRIPT, ['jinja2', 'markupsafe'], **bounds)
      answer = self._worker.ask({**given, 'most': _MOST_OUTPUT})
    text = answer.get('text')
    if isinstance(text, str):
      return text
    if 'damaged' in answer:
      line = answer.get('line')
      where = f', line {line}' if isinstance(line, int) else ''
      raise ValueError(f'the chat template is damaged{where}: {one_line(answer["damaged"])}')
    raise ValueError(f'the chat template refuses the conversation: {one_line(answer.get("refused"))}')


def texts_of(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> Iterator[str]:
  """All texts of a conversation.

  Raises `ValueError` for a message that holds more than texts and `tool_calls`, and for what is not of JSON or nested
  too deeply.
  """
  for place, message in enumerate(messages, 1):
    for name, value in message.items():
      if name == 'tool_calls':
        yield from _texts(value, f'message {place}')
      elif TEXT.is_valid(name) and TEXT.is_valid(value):
        yield value
      else:
        raise ValueError(f'message {place} must hold texts, got {shown(name)}: {shown(value)}')
  for place, tool in enumerate(tools or (), 1):
    yield from _texts(tool, f'tool {place}')


def _texts(value: Any, where: str, depth: int = 0) -> Iterator[str]:
  if depth > _MOST_DEPTH:
    raise ValueError(f'{where} is nested more than {_MOST_DEPTH} levels deep')
  if isinstance(value, Mapping | list):
    for each in value if isinstance(value, list) else itertools.chain(value, value.values()):
      yield from _texts(each, where, depth + 1)
  elif TEXT.is_valid(value):
    yield value
  elif value is not None and not isinstance(value, bool | int | float):
    raise ValueError(f'{where} must hold valid texts, got {shown(value)}')


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
  """A value of JSON with every text changed, names of fields included."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, Mapping):
    return {change(name): _mapped(each, change) for name, each in value.items()}
  return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def mark_special(special_tokens: Iterable[str]) -> dict[str, str]:
  """The mark of each special token."""
  return {token: f'{_BEGIN}{index}{_END}' for index, token in enumerate(sorted(special_tokens))}


def _substitute(text: str, replaced: Mapping[str, str]) -> str:
  """Replaces every key by its value, the longest of those that begin at a place, as tokenizers do."""
  pattern = '|'.join(map(re.escape, sorted(replaced, key=len, reverse=True)))
  return re.sub(pattern, lambda match: replaced[match[0]], text)


def render_marked(
  template: ChatTemplate,
  messages: Sequence[Mapping[str, Any]],
  marks: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]] | None = None,
) -> str | None:
  """The rendered conversation with marks in place of the template's own special tokens; None if no message spells one.

  What messages spell stays as they spell it, so that a tokenizer that knows only the marks reads it as text. To tell
  the two apart, the conversation is rendered a second time with marks in the messages. Put back, these must give the
  first text. This is exact for every template that trims, joins or encodes whole contents, and says so for a template
  that looks at the special token itself.
  """
  texts = list(texts_of(messages, tools))
  spelled = {token: mark for token, mark in marks.items() if any(token in text for text in texts)}
  if not spelled:
    return None
  text = template.render(messages, tools)
  if _BEGIN in text:
    raise ValueError(f'a message has the special token {min(spelled)!r} and U+FDD0, which no text should have')
  hidden = [_mapped(list(each or ()), lambda part: _substitute(part, spelled)) for each in (messages, tools)]
  marked = template.render(hidden[0], None if tools is None else hidden[1])
  back = {mark: token for token, mark in marks.items()}
  if _substitute(marked, back) != text:
    raise ValueError(
      f'a message has the special token {min(spelled)!r}, and the chat template gives it a meaning: write it otherwise'
    )
  return _substitute(marked, {**marks, **back})
