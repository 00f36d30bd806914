"""A conversation with a model: its messages, its answers as they come, and commands that begin with `/`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import jax

from decode.experiment.prompts import check_known
from spectr_jax import SamplingParams, Session, StopStrings, TextStream
from spectr_jax.auto.trial import Notify
from spectr_jax.io.tokenizer import TokenizerBase
from spectr_jax.suggestion import did_you_mean
from spectr_jax.unicode import check_unicode


@dataclasses.dataclass
class AnswerStatistics:
  num_tokens: int = 0
  num_target_calls: int = 0
  seconds: float = 0.0  # the reading of the prompt included
  num_read: int = 0  # tokens of the prompt that the models had not read before
  prompt_seconds: float = 0.0  # of reading them
  num_left_out: int = 0  # messages at the beginning that the model no longer saw
  is_interrupted: bool = False  # by the user

  @property
  def tokens_per_second(self) -> float:
    """New tokens over the seconds after the prompt was read."""
    return self.num_tokens / max(self.seconds - self.prompt_seconds, 1e-9)


class Chat:
  """A conversation with a model: its `messages` with `role` and `content`, and figures of its `answers` so far."""

  def __init__(
    self,
    session: Session,
    tokenizer: TokenizerBase,
    *,
    system: str | None = None,
    stop: StopStrings | None = None,
    seed: int = 0,
  ):
    """Starts a conversation in a session with no text yet; without a system message it has the template's own."""
    self.messages = [] if system is None else [{'role': 'system', 'content': system}]
    self.answer = AnswerStatistics()
    self.session, self.answers = session, []
    self._tokenizer, self._stop = tokenizer, stop
    self._key, self._num_turns = jax.random.key(seed, impl='threefry2x32'), 0

  def reset(self, system: str | None = None) -> None:
    """Begins a new conversation, with the system message so far if no other is given."""
    if system is not None:
      self.messages = [{'role': 'system', 'content': system}]
    else:
      self.messages = [message for message in self.messages[:1] if message['role'] == 'system']

  def ask(self, text: str) -> Iterator[str]:
    """Adds a turn of the user, and yields the answer's text as it comes; new text may be empty.

    The oldest messages are left out if the conversation does not fit into the cache. The system message stays.

    Raises:
      ValueError: The message is not valid Unicode, does not fit, or has a token that the target does not have, or the
        template refuses it; the conversation stays as it was.
      NotFiniteError: A model's logits are not finite.
    """
    start, self.answer = time.perf_counter(), AnswerStatistics()
    check_unicode(text, 'the message')
    messages = [*self.messages, {'role': 'user', 'content': text}]
    prompt, self.answer.num_left_out = self._fitting(messages)
    stream, reply = TextStream(self._tokenizer, self._stop), ''
    key = jax.random.fold_in(self._key, self._num_turns)
    self._num_turns += 1
    try:
      for tokens in self.session.stream(key, prompt):
        new = stream.add(tokens)
        reply += new
        self.answer.num_tokens += len(tokens)
        self.answer.num_target_calls = self.session.num_target_calls
        self.answer.num_read, self.answer.prompt_seconds = self.session.num_read, self.session.prompt_seconds
        self.answer.seconds = time.perf_counter() - start
        yield new
        if stream.is_stopped or self.answer.is_interrupted:
          break
    except GeneratorExit:  # the caller has seen enough
      self._remember(messages, reply + stream.finish())
      raise
    new = stream.finish()
    self._remember(messages, reply + new)
    yield new

  def compile(self, notify: Notify, question: str | None = None) -> None:
    """Compiles what turns run, or only what a first question runs; ValueError as for `ask`."""
    size = None
    if question is not None:
      check_unicode(question, 'the message')
      size = len(self._fitting([*self.messages, {'role': 'user', 'content': question}])[0])
    self.session.compile(lambda done, total: notify('compiling', done, total), size)

  def interrupt(self) -> None:
    """Ends the answer in progress with its current round; what it says until then is the answer."""
    self.answer.is_interrupted = True

  def _remember(self, messages: list[dict[str, str]], reply: str) -> None:
    self.answers.append(self.answer)
    self.messages = [*messages, {'role': 'assistant', 'content': reply}]

  def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """The prompt, and the number of messages at the beginning that are left out of it."""
    first = int(messages[0]['role'] == 'system')
    for num_left_out in range(0, len(messages) - first, 2):  # a turn of the user and its answer
      prompt = self._tokenizer.encode_chat([*messages[:first], *messages[first + num_left_out :]])
      if len(prompt) <= self.session.longest_prompt:
        check_known(prompt, self._tokenizer, self.session.decoder.target.vocab_size, 'the conversation')
        return prompt, num_left_out
    raise ValueError(
      f'the message is too long, {len(prompt)} tokens with its template; at most {self.session.longest_prompt} are'
      ' allowed: --context less --max_new_tokens'
    )


def describe_drafting(chat: Chat) -> str:
  """Which method verifies which guesses in a conversation."""
  decoder = chat.session.decoder
  if decoder.drafter is None:
    return 'no draft: one token per call of the target'
  return f'{decoder.method.name} on trees of {decoder.tree.num_nodes} guesses, {decoder.tree.max_depth} deep'


def _reset(chat: Chat, system: str = '') -> str:
  if not system:
    chat.reset()
    return 'a new conversation'
  check_unicode(system, 'the system message')
  chat.reset(system)
  return 'a new conversation with this system message'


def _temperature(chat: Chat, argument: str) -> str:
  try:
    value = float(argument)
  except ValueError:
    raise ValueError(f'/temperature takes a number, got {argument[:40]}') from None
  if not 0 <= value < math.inf:
    raise ValueError(f'the temperature must be finite and at least 0, got {value}')
  chat.session.sampling = dataclasses.replace(chat.session.sampling or SamplingParams(), temperature=value)
  return f'temperature {value:g}'


def _stats(chat: Chat) -> str:
  tokens, calls = (sum(getattr(each, name) for each in chat.answers) for name in ('num_tokens', 'num_target_calls'))
  if not calls:
    return 'no answer yet'
  seconds = max(sum(each.seconds - each.prompt_seconds for each in chat.answers), 1e-9)
  used, room = len(chat.session.tokens), chat.session.decoder.cache_size
  return (
    f'{len(chat.answers)} answers, {tokens} tokens, {tokens / seconds:.1f} tokens/s, {tokens / calls:.2f} per target'
    f' call; {used} of {room} tokens of context'
  )


def _help(chat: Chat) -> str:
  del chat
  return '\n'.join(f'{f"/{name} {takes}":<16}{what}' for name, (takes, what, _) in _COMMANDS.items())


# What each command takes, what it does, and the function that does it.
_COMMANDS = {
  'help': ('', 'lists these commands', _help),
  'reset': ('', 'begins a new conversation', _reset),
  'system': ('TEXT', 'begins a new conversation with this system message', _reset),
  'temperature': ('X', 'sets the sampling temperature of the next answers; 0 decodes greedily', _temperature),
  'draft': ('', 'says which method and tree make the guesses', describe_drafting),
  'stats': ('', 'says how many tokens there were, how fast and how many per call of the target', _stats),
}


def obey(chat: Chat, line: str) -> str:
  """Carries out a command, `/`, its name and perhaps an argument, and returns what there is to say about it."""
  name, _, argument = line.removeprefix('/').partition(' ')
  argument = argument.strip()
  if name not in _COMMANDS:
    hint = did_you_mean(name, _COMMANDS).replace('mean ', 'mean /')
    raise ValueError(f'there is no command /{name[:40]}{hint}; /help lists them')
  takes, _, carry_out = _COMMANDS[name]
  if bool(takes) != bool(argument):
    raise ValueError(f'/{name} takes {takes or "nothing"}')
  return carry_out(chat, argument) if takes else carry_out(chat)
