"""Chat templates: Jinja programs that write a conversation in the form that a model was trained on."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectr_jax.io.untrusted import TEXT, one_line, shown

# Begins and ends a mark, which stands for a special token. Unicode assigns no characters to these code points.
_BEGIN, _END = '\ufdd0', '\ufdd1'

_MOST_SOURCE = 2**20  # characters
_MOST_OUTPUT = 2**22  # bytes of UTF-8
_MOST_ANSWER = 6 * _MOST_OUTPUT + 2**16  # bytes: JSON writes `\u0000` for a character of one byte
_MEMORY = 2**29  # bytes of address space
_SECONDS = 10.0  # of wall-clock time for a conversation
_WORKER = pathlib.Path(__file__).with_name('chat_worker.py')
# What Python itself may need, and the time zone.
_ENVIRONMENT = 'LD_LIBRARY_PATH', 'DYLD_LIBRARY_PATH', 'SYSTEMROOT', 'TZ', 'TZDIR'


class _Worker:
  """The process that renders a template; `chat_worker` says what it reads and writes."""

  def __init__(self):
    try:
      self._process = subprocess.Popen(
        [sys.executable, '-I', '-S', str(_WORKER), *_library_folders()],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,  # an interrupt from the keyboard is not meant for it
      )
    except OSError as error:
      raise ValueError(f'cannot start a process for the chat template: {one_line(error)}') from error
    self.owner = os.getpid()
    self.stop = weakref.finalize(self, _stop, self._process, self.owner)

  def is_alive(self) -> bool:
    return self.stop.alive and self._process.poll() is None

  def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """The worker's answer; ends the process if there is none."""
    end = time.monotonic() + _SECONDS
    # Only the end of the process interrupts reads and writes on every platform.
    timer = threading.Timer(_SECONDS, self._process.kill)
    timer.daemon = True
    timer.start()
    try:
      return self._exchange(json.dumps(request).encode() + b'\n')
    except (OSError, EOFError, ValueError) as error:
      self.stop()
      if time.monotonic() >= end:
        raise ValueError(f'it takes longer than {_SECONDS:g} seconds') from error
      raise ValueError(f'its process ended without an answer (exit code {self._process.returncode})') from error
    except BaseException:  # the answer to this conversation must not be read as that to the next
      self.stop()
      raise
    finally:
      timer.cancel()
      timer.join()
      if time.monotonic() >= end:
        self.stop()

  def _exchange(self, request: bytes) -> dict[str, Any]:
    write, read = self._process.stdin, self._process.stdout
    assert write is not None
    assert read is not None
    rest = memoryview(request)
    while rest:
      rest = rest[write.write(rest) :]
    parts, size = [], 0
    while not parts or not parts[-1].endswith(b'\n'):
      parts.append(read.read(2**16))
      size += len(parts[-1])
      if not parts[-1] or size > _MOST_ANSWER:
        raise EOFError
    answer = json.loads(b''.join(parts))
    if type(answer) is not dict:
      raise EOFError
    return answer


def _library_folders() -> list[str]:
  """The folders of what the worker imports, which it cannot find without this process's settings."""
  folders = []
  for name in ('jinja2', 'markupsafe'):
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
      raise ValueError(f'chat templates need the package {name}')
    folders.append(os.path.dirname(os.path.abspath(spec.submodule_search_locations[0])))
  return list(dict.fromkeys(folders))


def _stop(process: subprocess.Popen, owner: int) -> None:
  """Ends a process, or closes this end of it in a fork of the process that it belongs to."""
  if os.getpid() == owner:
    process.kill()
    process.wait()
  else:
    process.returncode = 0  # it is not for us to wait for it
  for file in (process.stdin, process.stdout):
    if file is not None:
      file.close()


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
    with self._lock:
      answer = self._ask(messages)
    text = answer.get('text')
    if isinstance(text, str):
      return text
    if 'damaged' in answer:
      line = answer.get('line')
      where = f', line {line}' if isinstance(line, int) else ''
      raise ValueError(f'the chat template is damaged{where}: {one_line(answer["damaged"])}')
    raise ValueError(f'the chat template refuses the conversation: {one_line(answer.get("refused"))}')

  def _ask(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    if self._worker is None or not self._worker.is_alive():
      self._worker = _Worker()
    given = {'source': self.source, 'special_tokens': self.special_tokens, 'messages': [dict(m) for m in messages]}
    try:
      return self._worker.ask({**given, 'limits': {'memory': _MEMORY, 'output': _MOST_OUTPUT, 'seconds': _SECONDS}})
    except ValueError as error:
      raise ValueError(f'the chat template fails: {error}') from error


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
