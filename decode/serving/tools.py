"""Tools: what requests say of them, how models write calls, and how calls are read from a text as it comes.

A `Format` is how models of one kind write calls. Over a tokenizer it is a `Style`, in whose texts tokens such as
`<tool_call>` stand between two characters that Unicode assigns to nobody, so that no other text is taken for them. A
constraint allows no other tokens with their first byte, so that these tokens alone can be written there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from decode.serving.faults import RefusedError, refusing
from spectr_jax.io.hub.chat_template import texts_of
from spectr_jax.io.json_regex import JSON, SPACE, Syntax, either, escaped
from spectr_jax.io.json_schema import schema_regex
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.io.untrusted import FLAG, TEXT, Kind, name_shown, named, shown

MOST_TOOLS, _MOST_CALLS = 128, 128  # of a request, as the interface has it, and of a message
_NAME = '[a-zA-Z0-9_-]{1,64}'
_EMPTY = {'type': 'object', 'properties': {}}
_BEGIN, _END = '\U0010fffe', '\U0010ffff'
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_QUOTE = f'{_BEGIN}<|"|>{_END}'
_LONGEST, _SPACES = 40, 64  # characters of a token of a format, and of space before a call that belong to it
_AS_QUOTE = re.escape(_QUOTE)


# What requests say.


class Tools(NamedTuple):
  """The tools of a request.

  Attributes:
    defined: The tools, as templates read them.
    names: Of those that may be called.
    is_required: Whether there must be a call.
    is_parallel: Whether there may be several.
  """

  defined: list[dict[str, Any]]
  names: tuple[str, ...]
  is_required: bool
  is_parallel: bool

  def constraint(self, style: Style) -> tuple[str, Any, str] | None:
    """What an answer must be, in the form of `CompletionRequest.constraint`."""
    functions = (tool['function'] for tool in self.defined)
    schemas = [(each['name'], each.get('parameters') or _EMPTY) for each in functions if each['name'] in self.names]
    return ('calls', [style.form.name, self.is_parallel, schemas], 'tools') if self.is_required else None


def read_tools(given: Mapping[str, Any]) -> Tools | None:
  """The tools that a request offers to the model, or None; a `RefusedError` names what is wrong."""
  defined, choice, field = given.get('tools', []), given.get('tool_choice', 'auto'), 'tool_choice'
  names = [_defined(tool, f'tools[{place}]') for place, tool in enumerate(defined)]
  if twice := [name for name in names if names.count(name) > 1]:
    raise RefusedError(f'tools have the name {twice[0]} twice', 'tools')
  with refusing('tools'):
    for _ in texts_of((), defined):
      pass
  if isinstance(choice, str):
    if choice not in ('auto', 'none', 'required'):
      raise RefusedError(f'tool_choice must be auto, none, required or a function, got {shown(choice)}', field)
  elif not isinstance(choice, dict) or choice.get('type') != 'function' or not set(choice) <= {'type', 'function'}:
    raise RefusedError('tool_choice must be auto, none, required, or of type function with a function', field)
  elif not isinstance(choice.get('function'), dict) or choice['function'].get('name') not in names:
    raise RefusedError(f'tool_choice names no function of tools, which are {", ".join(names) or "none"}', field)
  if not defined and choice not in ('auto', 'none'):
    raise RefusedError('tool_choice needs tools', field)
  if not defined or choice == 'none':
    return None
  is_named = isinstance(choice, dict)
  allowed = (choice['function']['name'],) if is_named else tuple(names)
  return Tools(defined, allowed, choice != 'auto', given.get('parallel_tool_calls', True) and not is_named)


def _defined(tool: Any, where: str) -> str:
  function = tool.get('function') if isinstance(tool, dict) else None
  if not isinstance(function, dict) or tool.get('type') != 'function':
    raise RefusedError(f'{where} must be of type function, with a function', 'tools')
  if more := sorted(set(tool) - {'type', 'function'} | set(function) - set(_FIELDS)):
    raise RefusedError(f'{where}: unknown field {name_shown(more[0])}', 'tools')
  for name, kind in _FIELDS.items():
    value = function.get(name)
    if not kind.is_valid(value) and (value is not None or name == 'name'):
      raise RefusedError(f'{where}.function.{name} must be {kind.words}, got {shown(value)}', 'tools')
  return function['name']


def _is_name(x: Any) -> bool:
  return isinstance(x, str) and re.fullmatch(_NAME, x) is not None


_FIELDS = {
  'name': Kind(f'a text that matches {_NAME}', _is_name),
  'description': TEXT,
  'parameters': Kind('a JSON schema of objects', lambda x: isinstance(x, dict) and x.get('type', 'object') == 'object'),
  'strict': FLAG,
}


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
  """Calls of an earlier message as templates read them, whose arguments are objects where they are JSON of one."""
  if not isinstance(calls, list) or len(calls) > _MOST_CALLS:
    raise RefusedError(f'{where} must be a list of at most {_MOST_CALLS} calls', where)
  found = []
  for call in calls:
    function = call.get('function') if isinstance(call, dict) else None
    if (
      not isinstance(function, dict) or call.get('type', 'function') != 'function' or not _is_name(function.get('name'))
    ):
      raise RefusedError(f'{where} must be calls of functions, each with a name', where)
    arguments, index = function.get('arguments', ''), call.get('id')
    if not isinstance(arguments, str) or not isinstance(index, str):
      raise RefusedError(f'{where} must have an id and arguments that are texts', where)
    parsed = _object(arguments or '{}')
    own = {'name': function['name'], 'arguments': arguments if parsed is None else parsed}
    found.append({'id': index, 'type': 'function', 'function': own})
  return found


def _object(text: str) -> dict[str, Any] | None:
  try:
    value = json.loads(text, strict=False)
    json.dumps(value, allow_nan=False)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _written(value: dict[str, Any]) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if TEXT.is_valid(text) else json.dumps(value)  # halves of characters by their numbers


# How models write calls.


@dataclasses.dataclass(frozen=True)
class Format:
  """How a call is written.

  Attributes:
    name: The format's name.
    begin: The text before a call; `end` the text behind it, which may be empty.
    field: The name of the arguments.
    signs: What the source of a template has that writes calls so; `others` it has not.
    syntax: How arguments are written.
    is_first: A text that begins with an object is a call, too, without `begin`.
    has_many: Whether a message may have several calls.
  """

  name: str
  begin: str
  end: str
  field: str
  signs: tuple[str, ...]
  others: tuple[str, ...] = ()
  syntax: Syntax = JSON
  is_first: bool = False
  has_many: bool = True
  before = r'\s*'  # an expression of what stands between `begin` and the object, and of a part of it that may go on
  pending = ''
  parts = rf'{_STRING}|"|[{{}}\[\]]'  # texts, and what opens and closes; a quote alone has no other half yet
  tokens = ()  # without which nothing can be written

  def regex(self, name: str, arguments: str) -> str:
    """The expression of a call without `begin` and `end`."""
    return rf'\{{"name":{SPACE}"{name}",{SPACE}"{self.field}":{SPACE}{arguments}{SPACE}\}}'

  def parse(self, head: re.Match[str], text: str) -> tuple[str, str] | None:
    """The function and its arguments, as a text of JSON, of a complete call; None if it is none."""
    del head
    value = _object(text) or {}
    found = [value[field] for field in ('arguments', 'parameters') if isinstance(value.get(field), dict)]
    if not _is_name(value.get('name')) or len(found) != 1:
      return None
    return value['name'], _written(found[0])

  def part(self, head: re.Match[str], text: str, is_whole: bool) -> tuple[str, str] | None:
    """The same as far as a text of `regex` has come."""
    del head
    found = re.match(rf'\{{"name": ?"({_NAME})", ?"{self.field}": ?', text)
    return found and (found[1], text[found.end() : len(text) - is_whole].rstrip())


class _Gemma(Format):
  """Names have no quotes, texts have others than JSON, and stand in them as they are."""

  before = rf'\s*call:({_NAME})\s*'
  pending = rf'\s*(?:c|ca|cal|call|call:(?:{_NAME}\s*)?)?'
  parts = rf'{_AS_QUOTE}[^{_BEGIN}]*{_AS_QUOTE}|{_AS_QUOTE}|{Format.parts}'
  tokens = '<|tool_call>', '<tool_call|>', '<|"|>'
  _pieces = re.compile(
    rf'{_AS_QUOTE}([^{_BEGIN}]*)({_AS_QUOTE})?|({_STRING})|([{{}}\[\],:])|\s+|([^\s{{}}\[\],:{_BEGIN}]+)|.', re.DOTALL
  )

  def regex(self, name: str, arguments: str) -> str:
    return f'call:{name}{arguments}'

  def parse(self, head: re.Match[str], text: str) -> tuple[str, str] | None:
    value = _object(self._json(text))
    return None if value is None else (head[1], _written(value))

  def part(self, head: re.Match[str], text: str, is_whole: bool) -> tuple[str, str] | None:
    return head[1], self._json(text)

  def _json(self, text: str) -> str:
    """A beginning of an object as one of JSON, without a last word that may go on."""
    found = []
    for piece in self._pieces.finditer(text):
      inner, is_closed, string, mark, word = piece.groups()
      if inner is not None:
        found.append(json.dumps(inner, ensure_ascii=False)[: None if is_closed else -1])
      elif word is None:
        found.append(string or mark or ('' if piece[0].isspace() else piece[0]))
      elif piece.end() < len(text):
        is_key = text[piece.end() :].lstrip().startswith(':')
        found.append(json.dumps(word) if is_key else {'None': 'null', 'none': 'null'}.get(word, word))
    return ''.join(found)


_RAW = Syntax(
  space='', quote=escaped(_QUOTE), character=f'[^{_BEGIN}{_END}]', short=f'[^{_BEGIN}{_END}]', null='(?:null|None)',
  spell=lambda text: text, bare=r'[\w$.-]+',
)  # fmt: skip
_FORMATS = (
  Format(
    'hermes', '<tool_call>', '</tool_call>', 'arguments', ('<tool_call>', 'arguments'), ('<function=', '<arg_key>'),
  ),
  Format(
    'llama3_json', '<|python_tag|>', '', 'parameters', ('"parameters"', 'ipython'), ('<tool_call>',), is_first=True,
    has_many=False,
  ),
  _Gemma('gemma4', '<|tool_call>', '<tool_call|>', '', ('<|tool_call>call:', '<tool_call|>'), syntax=_RAW),
)  # fmt: skip
FORMATS = {form.name: form for form in _FORMATS}


class Style:
  """A format over the tokens of a tokenizer.

  Attributes:
    form: The format.
    tokenizer: One whose texts have marks for the tokens of the format.
  """

  def __init__(self, form: Format, tokenizer: TokenizerBase):
    """Looks for the tokens; `ValueError` if there are none that the format needs."""
    self.form, texts = form, {}
    for name in form.tokens or filter(None, (form.begin, form.end)):
      ids = tokenizer.encode(name)
      if len(ids) == 1 and tokenizer.token(ids[0]) == name:
        texts[ids[0]] = name
      elif form.tokens:
        raise ValueError(f'the vocabulary has no token {name}, with which {form.name} writes calls')
    self._hidden = [name for index, name in texts.items() if index in tokenizer.special_token_names]
    marks = {index: f'{_BEGIN}{name}{_END}' for index, name in texts.items()}
    self.tokenizer = tokenizer.with_texts(marks) if marks else tokenizer
    if marks:
      first, contents = _BEGIN.encode()[0], self.tokenizer.token_contents
      kept = [b'' if first in each and index not in marks else each for index, each in enumerate(contents)]
      vars(self.tokenizer)['token_contents'] = kept
    self.begin, self.end = (f'{_BEGIN}{t}{_END}' if t in texts.values() else t for t in (form.begin, form.end))
    first = rf'|\A[\s;]{{0,{_SPACES}}}(?=\{{)' if form.is_first else ''
    self._begins = [re.compile(rf'\s{{0,{_SPACES}}}{re.escape(self.begin)}{more}') for more in ('', first)]
    self.before, self.pending = re.compile(form.before), re.compile(form.pending or form.before)
    self.parts = re.compile(form.parts, re.DOTALL)

  def find(self, text: str, is_first: bool) -> re.Match[str] | None:
    return self._begins[is_first].search(text)

  def num_certain(self, text: str, is_first: bool) -> int:
    """How many characters of a text without a call are before any that may come."""
    if is_first and self.form.is_first and re.fullmatch(rf'[\s;]{{0,{_SPACES}}}', text):
      return 0
    common = (n for n in range(min(len(text), len(self.begin) - 1), 0, -1) if text.endswith(self.begin[:n]))
    size = len(text) - next(common, 0)
    return max(len(text[:size].rstrip()), size - _SPACES)

  def plain(self, text: str) -> str:
    """A text without what special tokens add to it."""
    for name in self._hidden:
      text = text.replace(f'{_BEGIN}{name}{_END}', '')
    return spelled(text)

  def regex(self, is_many: bool, schemas: Sequence[tuple[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """The expression of calls of functions by their schemas, and what it leaves out, as `schema_regex` has it."""
    form, each, narrower = self.form, [], {}
    for name, schema in schemas:
      with named(f'the function {name}'):
        own = schema_regex(_sorted(schema) if form.syntax is _RAW else schema, form.syntax)
      each.append(form.regex(name, own.regex))
      narrower |= dict.fromkeys(own.narrower)
    line = '\n' if form.syntax is JSON else ''
    around = ('', '') if form.is_first else (escaped(self.begin + line), escaped(line + self.end))
    one = f'{around[0]}{either(each)}{around[1]}'
    return (f'(?:{one}{line and f"{line}?"})+' if is_many and form.has_many else one), tuple(narrower)


def _sorted(schema: Any) -> Any:
  """A schema whose properties are in the order in which Gemma's template writes arguments."""
  if isinstance(schema, list):
    return [_sorted(each) for each in schema]
  if not isinstance(schema, dict):
    return schema
  found = {name: _sorted(each) for name, each in schema.items()}
  if isinstance(found.get('properties'), dict):
    found['properties'] = dict(sorted(found['properties'].items(), key=lambda item: item[0].lower()))
  return found


def spelled(text: str) -> str:
  """A text in which tokens of a format are spelled by their names."""
  return re.sub(f'[{_BEGIN}{_END}]', '', text)


def format_named(name: str) -> Format:
  if name not in FORMATS:
    raise ValueError(f'tool_format must be one of {", ".join(FORMATS)}, got {shown(name)}')
  return FORMATS[name]


@functools.lru_cache(maxsize=8)
def style_of(tokenizer: TokenizerBase, name: str | None = None) -> Style:
  """The style of a model's calls, that of its chat template unless a format is named; `ValueError` if it has none."""
  template = getattr(tokenizer, 'chat_template', None)
  source = '' if template is None else template.tool_source or template.source
  if not re.search(r'\btools\b', source):
    raise ValueError('the chat template mentions no tools')
  if name is not None:
    return Style(format_named(name), tokenizer)
  for form in FORMATS.values():
    if all(sign in source for sign in form.signs) and not any(other in source for other in form.others):
      return Style(form, tokenizer)
  raise ValueError(f'the chat template writes calls in an unknown form: --tool_format may be {", ".join(FORMATS)}')


# How calls are read.


class Reader:
  """Reads calls from a text as it comes: what is outside of them is content, and so is what is no call after all.

  Attributes:
    content: The content so far.
    calls: The calls so far, in the interface's form.
    is_open: Whether the last call is not complete.
  """

  def __init__(self, style: Style, tools: Tools):
    self.style, self.content, self.is_open = style, '', False
    self.calls: list[dict[str, Any]] = []
    self._is_sure, self._most = tools.is_required, None if tools.is_parallel else 1
    self._text, self._tail, self._is_first = '', '', True  # the tail may be the beginning of a token of the format
    self._place: tuple[int, int] | None = None  # as far as brackets were counted, and those that are open
    self._is_begun = False  # whether a part of the call that is being read is in `calls`
    self._sent: list[dict[str, Any]] = []  # of the calls, with the next delta

  def add(self, text: str, is_end: bool = False) -> dict[str, Any]:
    """Adds text; what is certain by now, as a `delta` of a stream.

    A call is certain when it is complete, and under a constraint as far as it has come.
    """
    text = self._tail + text
    cut = text.rfind(_BEGIN, max(0, len(text) - _LONGEST))
    cut = len(text) if is_end or cut < 0 or _END in text[cut:] else cut
    self._text, self._tail = self._text + text[:cut], text[cut:]
    content, self._sent = len(self.content), []
    while self._text and self._advance(is_end):
      pass
    delta = {'content': self.content[content:], 'tool_calls': self._sent}
    return {name: value for name, value in delta.items() if value}

  def _advance(self, is_end: bool) -> bool:
    """Takes the next content or call off the text; returns whether there may be another."""
    begin = self.style.find(self._text, self._is_first)
    if begin is None:
      self._give(len(self._text) if is_end else self.style.num_certain(self._text, self._is_first))
      return False
    if begin.start():
      self._give(begin.start())
      return True
    size = self._read(begin.end(), is_end)
    if size is None and not is_end:
      return False
    if size:
      self._text, self._is_first = self._text[size:], True
    elif not self._is_begun:  # no call after all
      self._give(max(begin.end(), 1))
    else:
      self._text = ''
    self._place, self._is_begun = None, False
    return True

  def _give(self, size: int) -> None:
    text, self._text = self._text[:size], self._text[size:]
    if not self.calls or (text.strip() and not self._is_sure):  # not the beginning of a second call that was cut
      self.content += spelled(text)
    self._is_first &= not text

  def _read(self, start: int, is_end: bool) -> int | None:
    """The size of the call at the beginning of the text; 0 if there is none, None if it is not complete."""
    text, form = self._text, self.style.form
    brace = text.find('{', start)
    if brace < 0:
      return None if self.style.pending.fullmatch(text, start) else 0
    head = self.style.before.fullmatch(text, start, brace)
    if head is None:
      return 0
    end = self._end(brace)
    if self._is_sure and (part := form.part(head, text[brace:end], end is not None)) is not None:
      self._tell(*part, is_open=end is None)
    if end is None:
      return None
    tail, rest = self.style.end, text[end:].lstrip()
    if not rest.startswith(tail):
      if not tail.startswith(rest):
        return 0
      if not is_end:
        return None
    call = form.parse(head, text[brace:end])
    if not self._is_sure and call is not None and (self._most is None or len(self.calls) < self._most):
      self._tell(*call, is_open=False)
    return len(text) - len(rest) + min(len(tail), len(rest)) if call is not None or self._is_sure else 0

  def _end(self, brace: int) -> int | None:
    """Where the object ends that begins at a brace."""
    place, depth = self._place or (brace, 0)
    for part in self.style.parts.finditer(self._text, place):
      if part[0] in ('"', _QUOTE):  # its text has no end yet
        place = part.start()
        break
      place = part.end()
      depth += (part[0] in ('{', '[')) - (part[0] in ('}', ']'))
      if not depth:
        return place
    self._place = place, depth
    return None

  def _tell(self, name: str, arguments: str, *, is_open: bool) -> None:
    if self._is_begun:
      function = self.calls[-1]['function']
      new = {'function': {'arguments': arguments[len(function['arguments']) :]}}
    else:
      function = {'name': name, 'arguments': arguments}
      new = {'id': f'call_{secrets.token_hex(12)}', 'type': 'function', 'function': function}
      self.calls.append(new)
      new = new | {'function': {**function}}
    if not self._is_begun or new['function']['arguments']:
      self._sent.append({'index': len(self.calls) - 1, **new})
    function['arguments'], self.is_open, self._is_begun = arguments, is_open, True
