"""Talks with a model in the terminal: `python -m decode.chat --target=MODEL`.

Every line of the input is a turn of the user, rendered by the model's chat template. The answer is printed as it comes.
The caches are kept between turns, so the models read only what is new. `--prompt=TEXT` asks one question and ends.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator

import jax
from absl import flags

from common import command_line
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting
from decode.experiment.workload import load_models
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.session import Session
from spectr_jax.engine.stop import StopStrings
from spectr_jax.io.text_stream import TextStream
from spectr_jax.io.tokenizer import TokenizerBase

# Fields of `DecodeOptions` that mean nothing here.
_UNUSED = (
  'acceptance', 'calibration', 'share_of_optimum', 'breakdown', 'profile_dir', 'prompts', 'skip_long', 'mesh',
  'logprobs',
)  # fmt: skip


@dataclasses.dataclass
class Answer:
  """The figures of an answer, so far or in the end.

  Attributes:
    num_tokens: New tokens so far.
    num_target_calls: Rounds so far.
    seconds: Time that it has taken, the reading of the prompt included.
    num_left_out: Messages at the conversation's beginning that the model no longer saw.
  """

  num_tokens: int = 0
  num_target_calls: int = 0
  seconds: float = 0.0
  num_left_out: int = 0


class Chat:
  """A conversation with a model.

  Attributes:
    messages: All messages so far, each with `role` and `content`.
    answer: Figures of the last answer.
  """

  def __init__(
    self,
    session: Session,
    tokenizer: TokenizerBase,
    *,
    system: str | None = None,
    stop: StopStrings | None = None,
    seed: int = 0,
  ):
    """Starts a conversation.

    Args:
      session: The session, with no text yet.
      tokenizer: The target's tokenizer.
      system: The system message, or None for the template's own.
      stop: Texts that end an answer, or None.
      seed: The seed of all answers.
    """
    self.messages = [] if system is None else [{'role': 'system', 'content': system}]
    self.answer = Answer()
    self._session, self._tokenizer, self._stop = session, tokenizer, stop
    self._key, self._num_turns = jax.random.key(seed, impl='threefry2x32'), 0

  def ask(self, text: str) -> Iterator[str]:
    """Adds a turn of the user, and yields the answer's text as it comes.

    The oldest messages are left out if the conversation does not fit into the cache. The system message stays.

    Args:
      text: The user's message.

    Yields:
      New text, which may be empty.

    Raises:
      ValueError: The message alone does not fit, or the template refuses it.
    """
    start = time.perf_counter()
    messages = [*self.messages, {'role': 'user', 'content': text}]
    prompt, num_left_out = self._fitting(messages)
    self.messages = messages
    stream, reply = TextStream(self._tokenizer, self._stop), ''
    self.answer = Answer(num_left_out=num_left_out)
    key = jax.random.fold_in(self._key, self._num_turns)
    self._num_turns += 1
    for tokens in self._session.stream(key, prompt):
      new = stream.add(token for token in tokens if token not in self._tokenizer.eos_ids)
      reply += new
      self.answer.num_tokens += len(tokens)
      self.answer.num_target_calls = self._session.num_target_calls
      self.answer.seconds = time.perf_counter() - start
      yield new
      if stream.is_stopped:
        break
    new = stream.finish()
    self.messages.append({'role': 'assistant', 'content': reply + new})
    yield new

  def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[int], int]:
    """The prompt, and the number of messages at the beginning that are left out of it."""
    first = int(messages[0]['role'] == 'system')
    for num_left_out in range(0, len(messages) - first, 2):  # a turn of the user and its answer
      prompt = self._tokenizer.encode_chat([*messages[:first], *messages[first + num_left_out :]])
      if len(prompt) <= self._session.longest_prompt:
        return prompt, num_left_out
    raise ValueError(
      f'the message is too long, {len(prompt)} tokens with its template; at most {self._session.longest_prompt} are'
      ' allowed: --context less --max_new_tokens'
    )


def start_chat(options: DecodeOptions, context: int) -> Chat:
  """Loads the models of a conversation.

  Args:
    options: The options; they name one method, K, L and tree.
    context: Tokens that the conversation may have, those of an answer included.

  Raises:
    ValueError: Options or models are unusable; the message says why.
  """
  for name in _UNUSED:
    if getattr(options, name):
      raise ValueError(f'{name} is not for decode.chat, which answers one user')
  setting = only_setting(options)
  target, draft, tokenizer, _ = load_models(options)
  limits = [model.context_length for model in (target, draft) if model is not None]
  limit = min([context, *(limit for limit in limits if limit is not None)])
  if limit - options.max_new_tokens < 2:
    raise ValueError(
      f'max_new_tokens {options.max_new_tokens} leaves no room for a prompt: the conversation may have {limit} tokens'
    )
  decoder = Decoder.make(
    target,
    setting.drafter(draft),
    method=setting.method,
    tree=setting.tree,
    max_new_tokens=options.max_new_tokens,
    cache_size=limit,
    eos_id=tokenizer.eos_ids,
  )
  session = Session(decoder, **options.sampling)
  return Chat(session, tokenizer, system=options.system, stop=options.make_stop(tokenizer), seed=options.seed)


def read_turns() -> Iterator[str]:
  """The lines of the input that are not blank, with a sign where the user types them."""
  is_typed = sys.stdin.isatty()
  while True:
    if is_typed:
      print('> ', end='', file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
      return
    if line.strip():
      yield line.strip()


def talk(chat: Chat, turns: Iterable[str]) -> None:
  """Prints the answer to every turn as it comes, and its figures to stderr.

  Args:
    chat: The conversation.
    turns: The user's messages.
  """
  for text in turns:
    for new in chat.ask(text):
      print(new, end='', flush=True)
    print(flush=True)
    answer = chat.answer
    left_out = f', without the first {answer.num_left_out} messages' if answer.num_left_out else ''
    print(
      f'[{answer.num_tokens} tokens, {answer.num_tokens / answer.seconds:.1f} tokens/s,'
      f' {answer.num_tokens / max(answer.num_target_calls, 1):.2f} per target call{left_out}]',
      file=sys.stderr,
      flush=True,
    )


if __name__ == '__main__':
  from decode.experiment.option_flags import read_options  # defines flags

  _CONTEXT = flags.DEFINE_integer(
    'context', 2048, 'Tokens that the conversation may have, those of an answer included.', lower_bound=3
  )
  # One setting: without a draft of its own a conversation decodes autoregressively.
  flags.FLAGS.set_default('max_new_tokens', 512)

  def main(argv):
    del argv
    if flags.FLAGS['method'].using_default_value:
      has_draft = not flags.FLAGS['draft'].using_default_value
      flags.FLAGS.set_default('method', ['race_traversal' if has_draft else 'autoregressive'])
    options = read_options(chat=True)
    chat = start_chat(options, _CONTEXT.value)
    talk(chat, read_turns() if options.prompt is None else [options.prompt])

  command_line.run(main)
