"""Commands within a conversation of `decode.chat`: lines that begin with `/`."""

from __future__ import annotations

import dataclasses

from decode.conversation import Chat
from spectr_jax.sampling import SamplingParams
from spectr_jax.suggestion import did_you_mean
from spectr_jax.unicode import check_unicode

_HELP = {
  'help': ('', 'lists these commands'),
  'reset': ('', 'begins a new conversation'),
  'system': ('TEXT', 'begins a new conversation with this system message'),
  'temperature': ('X', 'sets the sampling temperature of the next answers; 0 decodes greedily'),
  'draft': ('', 'says which method and tree make the guesses'),
  'stats': ('', 'says how many tokens there were, how fast and how many per call of the target'),
}


def obey(chat: Chat, line: str) -> str:
  """Carries out a command, and returns what there is to say about it.

  Args:
    chat: The conversation.
    line: `/`, the command, and perhaps its argument.

  Raises:
    ValueError: There is no such command, or its argument is wrong.
  """
  name, _, argument = line.removeprefix('/').partition(' ')
  argument = argument.strip()
  if name not in _HELP:
    raise ValueError(f'there is no command /{name[:40]}{did_you_mean(name, _HELP)}; /help lists them')
  takes = _HELP[name][0]
  if bool(takes) != bool(argument):
    raise ValueError(f'/{name} takes {takes}' if takes else f'/{name} takes nothing')
  return {
    'help': _help,
    'reset': _reset,
    'system': _system,
    'temperature': _temperature,
    'draft': _draft,
    'stats': _stats,
  }[name](chat, argument)


def _help(chat, argument):
  del chat, argument
  return '\n'.join(f'{f"/{name} {takes}":<16}{what}' for name, (takes, what) in _HELP.items())


def _reset(chat, argument):
  del argument
  chat.reset()
  return 'a new conversation'


def _system(chat, argument):
  check_unicode(argument, 'the system message')
  chat.reset(argument)
  return 'a new conversation with this system message'


def _temperature(chat, argument):
  try:
    value = float(argument)
  except ValueError:
    raise ValueError(f'/temperature takes a number, got {argument[:40]}') from None
  sampling = dataclasses.replace(chat.session.sampling or SamplingParams(), temperature=value)
  if not 0 <= value < float('inf'):
    raise ValueError(f'the temperature must be finite and at least 0, got {value}')
  chat.session.sampling = sampling
  return f'temperature {value:g}'


def _draft(chat, argument):
  del argument
  decoder = chat.session.decoder
  if decoder.drafter is None:
    return 'no draft: one token per call of the target'
  return f'{decoder.method.name} on trees of {decoder.tree.num_nodes} guesses, {decoder.tree.max_depth} deep'


def _stats(chat, argument):
  del argument
  tokens, calls = (sum(getattr(each, name) for each in chat.answers) for name in ('num_tokens', 'num_target_calls'))
  if not calls:
    return 'no answer yet'
  seconds = sum(each.seconds for each in chat.answers)
  used, room = len(chat.session.tokens), chat.session.decoder.cache_size
  return (
    f'{len(chat.answers)} answers, {tokens} tokens, {tokens / seconds:.1f} tokens/s, {tokens / calls:.2f} per target'
    f' call; {used} of {room} tokens of context'
  )
