"""Chat templates: Jinja programs that write a conversation in the form that a model was trained on."""

from __future__ import annotations

import os
import pathlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence

from spectr_jax.io.bounded_process import BoundedProcess
from spectr_jax.io.untrusted import TEXT, named, one_line, shown

# Begins and ends a mark, which stands for a special token. Unicode assigns no characters to these code points.
_BEGIN, _END = '\ufdd0', '\ufdd1'

_MOST_SOURCE = 2**20  # characters
_MOST_OUTPUT = 2**22  # bytes of UTF-8
_MOST_ANSWER = 6 * _MOST_OUTPUT + 2**16  # bytes: JSON writes `\u0000` for a character of one byte
_MEMORY = 2**29  # bytes of address space
_SECONDS = 10.0  # of wall-clock time for a conversation
_SCRIPT = pathlib.Path(__file__).with_name('chat_worker.py')


class ChatTemplate:
  """A chat template.

  It is a Jinja program, which runs in a process of its own, which stays for further conversations. Its time, memory and
  output are bounded whatever it does, and the process ends with this object.

  A template may read the clock (`strftime_now`), as that of Llama 3.1 does. Its prompts then change from day to day.
  """

  def __init__(self, source: str, special_tokens: Mapping[str, str]):
    """Stores the Jinja text, compiled when it is first used, and special tokens by their names such as `bos_token`."""
    self.source, self.special_tokens = source, dict(special_tokens)
    self._lock, self._worker = threading.Lock(), None

  def __reduce__(self):
    return type(self), (self.source, self.special_tokens)

  def render(self, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation, messages with the texts `role` and `content`, as text up to where the model answers.

    Raises `ValueError` if the template is damaged, refuses the conversation or exceeds its bounds, or a message has
    something that is no text; the message says why.
    """
    _check_messages(messages)
    if not self.source.strip():
      raise ValueError('the chat template is empty')
    if len(self.source) > _MOST_SOURCE:
      raise ValueError(f'the chat template has {len(self.source):,} characters, the most are {_MOST_SOURCE:,}')
    if self._worker is not None and self._worker.owner != os.getpid():  # after a fork
      self._lock, self._worker = threading.Lock(), None
    given = {'source': self.source, 'special_tokens': self.special_tokens, 'messages': [dict(m) for m in messages]}
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


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
  for place, message in enumerate(messages):
    for name, value in message.items():
      if not TEXT.is_valid(name) or not TEXT.is_valid(value):
        raise ValueError(f'message {place + 1} must hold texts, got {shown(name)}: {shown(value)}')


def mark_special(special_tokens: Iterable[str]) -> dict[str, str]:
  """The mark of each special token."""
  return {token: f'{_BEGIN}{index}{_END}' for index, token in enumerate(sorted(special_tokens))}


def _substitute(text: str, replaced: Mapping[str, str]) -> str:
  """Replaces every key by its value, the longest of those that begin at a place, as tokenizers do."""
  pattern = '|'.join(map(re.escape, sorted(replaced, key=len, reverse=True)))
  return re.sub(pattern, lambda match: replaced[match[0]], text)


def render_marked(
  template: ChatTemplate, messages: Sequence[Mapping[str, str]], marks: Mapping[str, str]
) -> str | None:
  """The rendered conversation with marks in place of the template's own special tokens; None if no message spells one.

  What messages spell stays as they spell it, so that a tokenizer that knows only the marks reads it as text. To tell
  the two apart, the conversation is rendered a second time with marks in the messages. Put back, these must give the
  first text. This is exact for every template that trims, joins or encodes whole contents, and says so for a template
  that looks at the special token itself.
  """
  _check_messages(messages)
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
