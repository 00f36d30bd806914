"""Renders a chat template in a process of its own, with bounds that hold whatever the template does.

`chat_template` starts this file as a script. It imports Jinja and the standard library alone, so it starts quickly.

It reads lines of JSON, `{"source": ..., "special_tokens": ..., "messages": ..., "limits": ...}`, and answers each with
one line: `{"text": ...}`, or `{"damaged": ...}` for a template that cannot be compiled, or `{"refused": ...}` for a
conversation that cannot be rendered. A template is compiled here as well, since Jinja computes constant expressions
when it compiles.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import signal
import sys

try:
  import resource
except ImportError:  # not a POSIX system
  resource = None


def _limit_resources(memory):
  """Bounds this process's memory, and keeps it from writing files, of which a memory dump would be one."""
  if resource is None:
    return
  for name, most in (('RLIMIT_AS', memory), ('RLIMIT_FSIZE', 0), ('RLIMIT_CORE', 0)):
    kind = getattr(resource, name, None)
    if kind is None:
      continue
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(OSError, ValueError):  # some systems name limits that they do not have
      resource.setrlimit(kind, (most, most))


def _end_after(seconds):
  """Ends this process after some time, should the parent be gone by then; 0 lifts that."""
  if hasattr(signal, 'setitimer'):
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _environment():
  """The environment that templates of the hub are written for. Templates are programs of others, hence the sandbox."""
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}` around what the assistant says: a notice for training, which renders its content."""

    tags = {'generation'}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return jinja2.nodes.Scope(body).set_lineno(line)

  def refuse(message):
    raise jinja2.TemplateError(message)

  def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter writes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = to_json
  environment.globals |= {
    'raise_exception': refuse,
    'strftime_now': lambda form: datetime.datetime.now().strftime(form),
  }
  return environment


def _problem(error):
  if isinstance(error, MemoryError):
    return 'it needs too much memory'
  if isinstance(error, RecursionError):
    return 'it is nested too deeply'
  if isinstance(error, SyntaxError):
    return error.msg
  return str(error)[:1000] or type(error).__name__


@functools.lru_cache(maxsize=1)
def _compiled(source):
  template = _environment().from_string(source)
  # What stays need not be looked through after every conversation.
  gc.collect()
  gc.freeze()
  return template


def _answer(request):
  try:
    template = _compiled(request['source'])
  except Exception as error:  # what Jinja and Python's compiler raise for a text of somebody else
    # Python's compiler has other lines than the template.
    return {
      'damaged': _problem(error),
      'line': None if isinstance(error, SyntaxError) else getattr(error, 'lineno', None),
    }
  parts, size, most = [], 0, request['limits']['output']
  given = {'messages': request['messages'], 'add_generation_prompt': True, 'tools': None, 'documents': None}
  try:
    for part in template.generate(**given, **request['special_tokens']):
      parts.append(part)
      size += len(part.encode())
      if size > most:
        return {'refused': f'it writes more than {most:,} bytes'}
    return {'text': ''.join(parts)}
  except UnicodeEncodeError:
    return {'refused': 'it writes characters that are none'}
  except Exception as error:  # a template is a program, which may fail in any way
    return {'refused': _problem(error)}


def _main():
  sys.path += sys.argv[1:]
  if hasattr(signal, 'SIGALRM'):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
  requests, answers = sys.stdin.buffer, sys.stdout.buffer
  # Ends when the other end is closed, which happens at the latest when the parent ends.
  while line := requests.readline():
    request = json.loads(line)
    _limit_resources(request['limits']['memory'])
    _end_after(request['limits']['seconds'] + 1)
    try:
      answer = json.dumps(_answer(request))
    except MemoryError:
      answer = json.dumps({'refused': 'it needs too much memory'})
    answers.write(f'{answer}\n'.encode())
    answers.flush()
    _end_after(0)
    # Nothing of the conversation stays; what templates leave behind has references in circles.
    del line, request, answer
    gc.collect()


if __name__ == '__main__':
  _main()
