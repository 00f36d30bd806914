"""Renders chat templates, for `chat_template`, in a process of its own.

It imports Jinja and the standard library alone. A template is compiled here as well, since Jinja computes constant
expressions when it compiles.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json


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


@functools.lru_cache(maxsize=2)  # one of them for tools
def _compiled(source):
  template = _environment().from_string(source)
  # What stays need not be looked through after every conversation.
  gc.collect()
  gc.freeze()
  return template


def answer(request):
  """Answers `{"source": ..., "special_tokens": ..., "messages": ..., "tools": ..., "most": bytes}`: `{"text": ...}`.

  In its place there is `{"damaged": ...}` for a template that cannot be compiled, or `{"refused": ...}` for a
  conversation that cannot be rendered.
  """
  try:
    template = _compiled(request['source'])
  except Exception as error:  # what Jinja and Python's compiler raise for a text of somebody else
    # Python's compiler has other lines than the template.
    return {
      'damaged': _problem(error),
      'line': None if isinstance(error, SyntaxError) else getattr(error, 'lineno', None),
    }
  parts, size, most = [], 0, request['most']
  given = {'messages': request['messages'], 'add_generation_prompt': True}
  given |= {'tools': request['tools'], 'documents': None}
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
