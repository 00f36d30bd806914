"""Commands within a conversation of `decode.chat`: lines that begin with `/`."""

from __future__ import annotations

import dataclasses
import math

from decode.conversation import Chat
from spectr_jax.sampling import SamplingParams
from spectr_jax.suggestion import did_you_mean
from spectr_jax.unicode import check_unicode


def _help(chat, argument):
  del chat, argument
  return '\n'.join(f'{f"/{name} {takes}":<16}{what}' for name, (takes, what, _) in _COMMANDS.items())


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
  if not 0 <= value < math.inf:
    raise ValueError(f'the temperature must be finite and at least 0, got {value}')
  chat.session.sampling = dataclasses.replace(chat.session.sampling or SamplingParams(), temperature=value)
  return f'temperature {value:g}'


def describe_drafting(chat: Chat) -> str:
  """Which method verifies which guesses in a conversation."""
  decoder = chat.session.decoder
  if decoder.drafter is None:
    return 'no draft: one token per call of the target'
  return f'{decoder.method.name} on trees of {decoder.tree.num_nodes} guesses, {decoder.tree.max_depth} deep'


def _draft(chat, argument):
  del argument
  return describe_drafting(chat)


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


# What each command takes, what it does, and the function that does it.
_COMMANDS = {
  'help': ('', 'lists these commands', _help),
  'reset': ('', 'begins a new conversation', _reset),
  'system': ('TEXT', 'begins a new conversation with this system message', _system),
  'temperature': ('X', 'sets the sampling temperature of the next answers; 0 decodes greedily', _temperature),
  'draft': ('', 'says which method and tree make the guesses', _draft),
  'stats': ('', 'says how many tokens there were, how fast and how many per call of the target', _stats),
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
  if name not in _COMMANDS:
    hint = did_you_mean(name, _COMMANDS).replace('mean ', 'mean /')
    raise ValueError(f'there is no command /{name[:40]}{hint}; /help lists them')
  takes, _, carry_out = _COMMANDS[name]
  if bool(takes) != bool(argument):
    raise ValueError(f'/{name} takes {takes or "nothing"}')
  return carry_out(chat, argument)
