"""What a request may say: the fields of completions and chat completions, checked one by one.

Every field is either known, and does what it says, or refused by its name. Fields of the interface that this endpoint
does not have are accepted where their value turns them off, such as `length_penalty` 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from decode.serving.faults import RefusedError, refusing
from decode.serving.tools import MOST_TOOLS, Tools, read_calls, read_tools
from spectr_jax import SamplingParams
from spectr_jax.engine.stop import check_stop_texts
from spectr_jax.io.untrusted import ANYTHING, FLAG, Kind, name_shown, real, shown, whole
from spectr_jax.unicode import check_unicode

MOST_PROMPTS, MOST_SAMPLES, MOST_TOP, MOST_STOPS, MOST_MESSAGES, MOST_BIASES = 64, 16, 20, 16, 1_000, 1_024
_ROLES = 'system', 'developer', 'user', 'assistant', 'tool'
DEFAULT_TOKENS = 16  # of a completion that names no limit, as the interface has it


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
  prompts: Sequence[Any]  # texts, or ids `[P]` each, to continue; or one conversation
  is_chat: bool
  sampling: SamplingParams  # scalars
  seed: int | None
  num_samples: int  # of each prompt
  max_tokens: int | None  # None for the default; 0 only with `echo` or `has_choice_probs`
  stop: tuple[str, ...]
  is_streamed: bool
  has_usage: bool  # a stream ends with counts of tokens
  has_usage_in_chunks: bool  # every chunk of a stream has the counts so far
  top_logprobs: int | None  # likeliest tokens that are named with every token; None for no log probabilities
  echo: bool  # the prompt is returned in front
  # a keyword argument of `compile_constraint`, and the field that asks for it
  constraint: tuple[str, Any, str] | None = None
  constraint_after: str | None = None  # where the constraint begins: empty for at once, None for the server's default
  bad_words: tuple[str, ...] = ()
  has_choice_probs: bool = False  # the response says how likely each of the constraint's choices is
  tools: Tools | None = None  # that may be called


def _is_text(x: Any) -> bool:
  return isinstance(x, str)


def _is_ids(x: Any) -> bool:
  return isinstance(x, list) and bool(x) and all(map(whole().is_valid, x))


def _is_stop(x: Any) -> bool:
  return _is_text(x) or (isinstance(x, list) and len(x) <= MOST_STOPS and all(map(_is_text, x)))


def _is_top_p(x: Any) -> bool:
  # In float32, in which it is used, a smaller one is none.
  return real(0, 1).is_valid(x) and bool(np.float32(x) > 0)


def _off(*values: Any) -> Kind:
  """What a field may be that asks for nothing that is not offered here; other values are refused without words."""
  return Kind('', lambda x: any(x == off and isinstance(x, bool) == isinstance(off, bool) for off in values))


def _is_bias(x: Any) -> bool:
  if not isinstance(x, dict) or len(x) > MOST_BIASES:
    return False
  return all(name.isascii() and name.isdigit() and len(name) < 10 and real(-100, 100).is_valid(x[name]) for name in x)


_STREAM_OPTIONS = {'include_usage': FLAG, 'continuous_usage_stats': FLAG, 'include_obfuscation': _off(False)}


def _is_stream_options(x: Any) -> bool:
  return isinstance(x, dict) and all(
    value is None or (name in _STREAM_OPTIONS and _STREAM_OPTIONS[name].is_valid(value)) for name, value in x.items()
  )


_TEXT = Kind('a text', _is_text)
_LIMIT = Kind('a whole number of tokens', whole().is_valid)
# Fields of this interface and of others' extensions of it that do nothing here, with the values that ask for nothing.
# Those without such a value always ask for something: empty options of a web search are one with the usual options.
_OFF: dict[str, Kind] = {
  **dict.fromkeys(('no_repeat_ngram_size', 'priority'), _off(0)),
  **dict.fromkeys(('mirostat', 'dry_multiplier', 'xtc_probability', 'dynatemp_range', 'penalty_alpha'), _off(0)),
  **dict.fromkeys(('repeat_penalty', 'length_penalty', 'typical_p'), _off(1)),
  **dict.fromkeys(('num_beams', 'num_return_sequences'), _off(1)),
  **dict.fromkeys(('tools', 'functions', 'stop_token_ids', 'logits_processors', 'documents'), _off([])),
  **dict.fromkeys(('metadata', 'prompt_cache_options', 'chat_template_kwargs'), _off({})),
  **dict.fromkeys(('mm_processor_kwargs', 'media_io_kwargs', 'kv_transfer_params', 'vllm_xargs'), _off({})),
  **dict.fromkeys(('store', 'include_stop_str_in_output', 'use_beam_search', 'early_stopping'), _off(False)),
  **dict.fromkeys(('return_token_ids', 'return_tokens_as_token_ids', 'return_full_text', 'watermark'), _off(False)),
  **dict.fromkeys(('return_token_offsets', 'return_prompt_text', 'return_hidden_states', 'no_stop_trim'), _off(False)),
  **dict.fromkeys(('skip_special_tokens', 'use_cache'), _off(True)),
  **dict.fromkeys(('parallel_tool_calls', 'spaces_between_special_tokens', 'include_reasoning'), _off(True, False)),
  **dict.fromkeys(('tool_choice', 'function_call'), _off('none', 'auto')),
  **dict.fromkeys(('audio', 'prediction', 'moderation', 'web_search_options'), _off()),
  'best_of': _off(1),
  'suffix': _off(''),
  'modalities': _off(['text']),
  'service_tier': _off('auto', 'default'),
  'reasoning_effort': _off('none'),
  'verbosity': _off('medium'),
  'prompt_cache_retention': _off('in_memory'),
}
# The same of messages.
_MESSAGE_OFF = {
  **dict.fromkeys(('annotations', 'tool_calls'), _off([])),
  **dict.fromkeys(('refusal', 'reasoning', 'reasoning_content'), _off('')),
  **dict.fromkeys(('function_call', 'audio'), _off()),
}
# What fields of both kinds of requests may be.
_SHARED: dict[str, Kind] = {
  **_OFF,
  'model': _TEXT,
  'temperature': Kind('a number of at least 0', real(0, 1e6).is_valid),
  'top_p': Kind('a number above 0 and at most 1', _is_top_p),
  'top_k': Kind('a whole number of at least 0 (0 keeps all)', whole(-1).is_valid),
  'min_p': Kind('a number from 0 to 1', real(0, 1).is_valid),
  'seed': Kind('a whole number of 64 bits', whole(-(2**63), 2**63 - 1).is_valid),
  'n': whole(1, MOST_SAMPLES),
  'stop': Kind(f'a text, or a list of at most {MOST_STOPS}', _is_stop),
  'stream': FLAG,
  'stream_options': Kind('an object with include_usage or continuous_usage_stats', _is_stream_options),
  'max_tokens': _LIMIT,
  'max_new_tokens': _LIMIT,
  'do_sample': FLAG,
  'presence_penalty': Kind('a number from -2 to 2', real(-2, 2).is_valid),
  'frequency_penalty': Kind('a number from -2 to 2', real(-2, 2).is_valid),
  'repetition_penalty': Kind('a number from 0.01 to 100', real(0.01, 100).is_valid),
  'logit_bias': Kind(f'an object of at most {MOST_BIASES} ids with numbers from -100 to 100', _is_bias),
  'min_tokens': _LIMIT,
  'ignore_eos': FLAG,
  'bad_words': Kind('a list of texts', lambda x: isinstance(x, list) and all(map(_is_text, x))),
  'constraint_after': _TEXT,
  'response_format': Kind('an object with a type', lambda x: isinstance(x, dict)),
  'choice_probs': FLAG,
  'structured_outputs': Kind('an object with json, regex, choice or json_object', lambda x: isinstance(x, dict)),
  # They name who asks, and change no answer.
  **dict.fromkeys(('user', 'safety_identifier', 'prompt_cache_key'), _TEXT),
}
_COMPLETION = {
  **_SHARED,
  'prompt': ANYTHING,
  'logprobs': whole(0, MOST_TOP),
  'echo': FLAG,
  'add_special_tokens': _off(True),
}
_CHAT = {
  **_SHARED,
  'messages': Kind(f'a list of 1 to {MOST_MESSAGES}', lambda x: isinstance(x, list) and 1 <= len(x) <= MOST_MESSAGES),
  'max_completion_tokens': _LIMIT,
  'logprobs': FLAG,
  'top_logprobs': whole(0, MOST_TOP),
  'tools': Kind(f'a list of at most {MOST_TOOLS}', lambda x: isinstance(x, list) and len(x) <= MOST_TOOLS),
  'tool_choice': ANYTHING,
  'parallel_tool_calls': FLAG,
  **dict.fromkeys(
    ('functions', 'function_call'),
    Kind('left out, since tools and tool_choice have taken its place', lambda x: x in ([], 'none', 'auto')),
  ),
  **dict.fromkeys(('echo', 'add_special_tokens', 'continue_final_message'), _off(False)),
  'add_generation_prompt': _off(True),
}


def check_model(name: str, served: str) -> None:
  if name != served:
    message = f'there is no model {shown(name)}; this endpoint serves {served!r}'
    raise RefusedError(message, 'model', 404, 'model_not_found')


def parse(body: Any, *, is_chat: bool, model: str) -> CompletionRequest:
  """Reads the body of a request, parsed JSON; a `RefusedError` names a field that is unknown or wrong."""
  if not isinstance(body, dict):
    raise RefusedError('the body must be a JSON object')
  fields = _CHAT if is_chat else _COMPLETION | {'best_of': _off(1, body.get('n'))}
  given = {name: value for name, value in body.items() if value is not None}
  for name, value in given.items():
    if name not in fields:
      raise RefusedError(f'unknown field {shown(name)}', name)
    if not fields[name].is_valid(value):
      words = fields[name].words
      wanted = f'must be {words}, got {shown(value)}' if words else 'is not offered here: leave it out'
      raise RefusedError(f'{name} {wanted}', name)
  check_model(given.get('model', model), model)
  stop, options = given.get('stop', ()), given.get('stream_options', {})
  request = CompletionRequest(
    prompts=_messages(given) if is_chat else _prompts(given),
    is_chat=is_chat,
    sampling=_sampling(given),
    seed=given.get('seed'),
    num_samples=given.get('n', 1),
    max_tokens=_limit(given),
    stop=(stop,) if isinstance(stop, str) else tuple(stop),
    is_streamed=given.get('stream', False),
    has_usage=bool(options.get('include_usage')),
    has_usage_in_chunks=bool(options.get('continuous_usage_stats')),
    top_logprobs=_top(given, is_chat),
    echo=given.get('echo', False),
    constraint=_constraint(given),
    constraint_after=given.get('constraint_after'),
    bad_words=tuple(given.get('bad_words', ())),
    has_choice_probs=given.get('choice_probs', False),
    tools=read_tools(given) if is_chat else None,
  )
  _check_together(request, given)
  return request


def _check_together(request: CompletionRequest, given: Mapping[str, Any]) -> None:
  if (request.has_usage or request.has_usage_in_chunks) and not request.is_streamed:
    raise RefusedError('stream_options is for streams', 'stream_options')
  temperature = request.sampling.temperature
  if given.get('do_sample', temperature > 0) != (temperature > 0):
    raise RefusedError(f'do_sample is {given["do_sample"]}, temperature {temperature:g}', 'do_sample')
  if request.is_streamed and request.echo:
    raise RefusedError('echo is not offered for streams', 'echo')
  if request.is_streamed and request.top_logprobs:
    name = 'top_logprobs' if request.is_chat else 'logprobs'
    raise RefusedError('the likeliest tokens are not offered for streams: ask for 0 of them', name)
  if request.constraint and request.tools:
    field = request.constraint[2]
    raise RefusedError(f'{field} beside tools is offered with tool_choice none alone', field)
  forms = request.constraint and request.constraint[2], request.tools and request.tools.is_required and 'tool_choice'
  form = next(filter(None, (*forms, request.bad_words and 'bad_words')), None)
  if form and (request.top_logprobs or (request.echo and request.top_logprobs is not None)):
    name = 'top_logprobs' if request.is_chat else 'logprobs'
    raise RefusedError(f'with {form} only log probabilities of the new tokens are offered', name)
  has_choices = request.constraint is not None and request.constraint[0] == 'choices'
  if request.has_choice_probs and (request.is_streamed or not has_choices):
    raise RefusedError('choice_probs needs structured_outputs.choice, and is not offered for streams', 'choice_probs')
  if request.max_tokens == 0 and not (request.echo or request.has_choice_probs):
    raise RefusedError('max_tokens 0 is for echo and choice_probs', 'max_tokens')
  if request.constraint_after and (request.constraint is None or request.has_choice_probs):
    said = 'is not for choice_probs' if request.has_choice_probs else 'needs response_format or structured_outputs'
    raise RefusedError(f'constraint_after {said}', 'constraint_after')
  if request.sampling.ignore_eos and form:
    raise RefusedError(f'ignore_eos is not for {form}: a constraint ends where it is complete', 'ignore_eos')
  if request.max_tokens is not None and (request.sampling.min_tokens or 0) > request.max_tokens:
    raise RefusedError(f'min_tokens must be at most max_tokens, {request.max_tokens}', 'min_tokens')
  with refusing('stop'):
    check_stop_texts(request.stop)


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
  top_k = given.get('top_k', 0)
  return SamplingParams(
    temperature=float(given.get('temperature', 1.0)),
    top_k=0 if top_k == -1 else top_k,  # other servers write -1 for all
    top_p=float(given.get('top_p', 1.0)),
    min_p=float(given.get('min_p', 0.0)),
    # What changes nothing is left out: it needs no server that is prepared for it.
    presence_penalty=given.get('presence_penalty') or None,
    frequency_penalty=given.get('frequency_penalty') or None,
    repetition_penalty=None if given.get('repetition_penalty', 1) == 1 else given['repetition_penalty'],
    logit_bias={int(token): value for token, value in given.get('logit_bias', {}).items()} or None,
    min_tokens=given.get('min_tokens') or None,
    ignore_eos=given.get('ignore_eos') or None,
  )


def _constraint(given: Mapping[str, Any]) -> tuple[str, Any, str] | None:
  found = [
    (*each, field)
    for field, read in (('response_format', _format), ('structured_outputs', _structure))
    if (each := read(given.get(field, {}))) is not None
  ]
  if len(found) > 1:
    raise RefusedError('response_format and structured_outputs both ask for a form: choose one', 'structured_outputs')
  return found[0] if found else None


def _format(form: Mapping[str, Any]) -> tuple[str, Any] | None:
  """What `response_format` asks for."""
  field, kind = 'response_format', form.get('type', None if form else 'text')
  inner = form.get('json_schema') if kind == 'json_schema' else None
  if kind not in ('text', 'json_object', 'json_schema'):
    raise RefusedError('response_format.type must be text, json_object or json_schema', field)
  if more := set(form) - {'type', 'json_schema'}:
    raise RefusedError(f'unknown field response_format.{name_shown(min(more))}', field)
  if kind != 'json_schema':
    return None if kind == 'text' else ('json_schema', True)
  if not isinstance(inner, dict) or not isinstance(inner.get('schema'), dict):
    raise RefusedError('response_format.json_schema must be an object with a schema', field)
  if more := set(inner) - {'name', 'schema', 'strict', 'description'}:
    raise RefusedError(f'unknown field response_format.json_schema.{name_shown(min(more))}', field)
  return 'json_schema', inner['schema']


def _structure(form: Mapping[str, Any]) -> tuple[str, Any] | None:
  """What `structured_outputs` asks for, as vLLM has it."""
  names, given = {'json': 'json_schema', 'regex': 'regex', 'choice': 'choices', 'json_object': 'json_schema'}, []
  for name, value in form.items():
    if value is None or value is False:
      continue
    if name not in names:
      raise RefusedError(f'structured_outputs.{name_shown(name)} is not offered here', 'structured_outputs')
    if name == 'json_object' and value is not True or name == 'json' and not isinstance(value, dict | str):
      raise RefusedError(f'structured_outputs.{name} has a wrong value', 'structured_outputs')
    given.append((names[name], value))
  if len(given) > 1:
    raise RefusedError('structured_outputs asks for several forms: choose one', 'structured_outputs')
  return given[0] if given else None


def _limit(given: Mapping[str, Any]) -> int | None:
  limits = {given[name] for name in ('max_tokens', 'max_completion_tokens') if name in given}
  if len(limits) > 1:
    raise RefusedError('max_tokens and max_completion_tokens are different', 'max_tokens')
  # Harnesses send their own default as `max_tokens` beside the limit of a task, so that both hold.
  return min(limits | {given[name] for name in ('max_new_tokens',) if name in given}, default=None)


def _top(given: Mapping[str, Any], is_chat: bool) -> int | None:
  if not is_chat:
    return given.get('logprobs')
  if not given.get('logprobs', False):
    if given.get('top_logprobs', 0):
      raise RefusedError('top_logprobs needs logprobs true', 'top_logprobs')
    return None
  return given.get('top_logprobs', 0)


def _prompts(given: Mapping[str, Any]) -> list[Any]:
  if 'prompt' not in given:
    raise RefusedError('prompt is missing', 'prompt')
  prompt = given['prompt']
  prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
  if not isinstance(prompts, list) or not 1 <= len(prompts) <= MOST_PROMPTS:
    raise RefusedError(f'prompt must be a text, token ids, or a list of 1 to {MOST_PROMPTS} of them', 'prompt')
  if not all(map(_is_text, prompts)) and not all(map(_is_ids, prompts)):
    raise RefusedError('prompt must be texts, or lists of token ids', 'prompt')
  with refusing('prompt'):
    for text in filter(_is_text, prompts):
      check_unicode(text, 'prompt')
  return prompts


def _messages(given: Mapping[str, Any]) -> list[Any]:
  if 'messages' not in given:
    raise RefusedError('messages is missing', 'messages')
  messages, known = [_message(entry, f'messages[{place}]') for place, entry in enumerate(given['messages'])], set()
  for place, message in enumerate(messages):
    known |= {call['id'] for call in message.get('tool_calls', ())}
    if message.get('tool_call_id', None) not in {None, *known}:
      where = f'messages[{place}].tool_call_id'
      raise RefusedError(f'{where} is that of no call before it', where)
  return [messages]


def _message(entry: Any, where: str) -> dict[str, Any]:
  calls = entry.get('tool_calls') if isinstance(entry, dict) and entry.get('role') == 'assistant' else None
  if not isinstance(entry, dict) or 'role' not in entry or not (calls or 'content' in entry):
    raise RefusedError(f'{where} must be an object with role and content', where)
  role, content, name = entry['role'], entry.get('content'), entry.get('name')
  more = {'tool_calls'} if role == 'assistant' else {'tool_call_id'} if role == 'tool' else set()
  _check_others(entry, {'role', 'content', 'name', *more}, where)
  if role not in _ROLES:
    raise RefusedError(f'{where}.role must be one of {", ".join(_ROLES)}', f'{where}.role')
  if content is None and role == 'assistant':
    content = ''
  if isinstance(content, list):
    content = ''.join(_part(part, where) for part in content)
  if not isinstance(content, str):
    raise RefusedError(f'{where}.content must be a text, or a list of texts', f'{where}.content')
  with refusing(f'{where}.content'):
    check_unicode(content, f'{where}.content')
  message: dict[str, Any] = {'role': 'system' if role == 'developer' else role, 'content': content}
  if calls:
    message['tool_calls'] = read_calls(calls, f'{where}.tool_calls')
  for field, value, is_needed in (('name', name, False), ('tool_call_id', entry.get('tool_call_id'), role == 'tool')):
    if value is None and not is_needed:
      continue
    if not isinstance(value, str):
      raise RefusedError(f'{where}.{field} must be a text', f'{where}.{field}')
    with refusing(f'{where}.{field}'):
      check_unicode(value, f'{where}.{field}')
    message[field] = value
  return message


def _part(part: Any, where: str) -> str:
  if not isinstance(part, dict) or part.get('type') != 'text' or not isinstance(part.get('text'), str):
    raise RefusedError(f'{where}.content: a part must be of type text', f'{where}.content')
  _check_others(part, {'type', 'text'}, f'{where}.content')
  return part['text']


def _check_others(entry: Mapping[str, Any], known: Collection[str], where: str) -> None:
  """Checks that fields of a message that are not known ask for nothing."""
  for name in sorted(set(entry) - set(known)):
    if entry[name] is not None and not _MESSAGE_OFF.get(name, _off()).is_valid(entry[name]):
      raise RefusedError(f'{where}.{name_shown(name)} is not offered here', f'{where}.{name}')
