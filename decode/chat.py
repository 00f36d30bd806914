"""Talks with a model in the terminal: `python -m decode.chat --target=MODEL`.

Every line of the input is a turn of the user, rendered by the model's chat template. The answer is printed as it comes.
The caches are kept between turns, so the models read only what is new. `--prompt=TEXT` asks one question and ends.

A turn that cannot be answered is reported in one line and forgotten, and the conversation goes on. Ctrl-C ends an
answer, which stays as far as it came. In a terminal it clears a line that is being typed, and on an empty line it ends
the conversation; lines that begin with `/` are commands, and `/help` lists them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from absl import flags

from common import command_line, help_text
from common.printable import printable
from decode.conversation import Chat, describe_drafting, obey
from decode.experiment.auto_choice import speeds_of
from decode.experiment.console import show_progress
from decode.experiment.drafting import with_default_drafting
from decode.experiment.model_options import AUTO, ROOT
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import Setting, only_setting
from decode.experiment.workload import Models, Workload, load_models
from spectr_jax import Decoder, NotFiniteError, Session
from spectr_jax.auto.trial import Notify

_LONGEST_LINE = 2**20  # characters
# What `auto` answers to compare settings, and tokens of those answers.
_QUESTIONS, _NEW_TOKENS = ROOT / 'pretrained' / 'questions.jsonl', 64
# Fields of `DecodeOptions` that mean nothing here.
_UNUSED = (
  'acceptance', 'share_of_optimum', 'breakdown', 'profile_dir', 'prompts', 'num_prompts', 'skip_long', 'batch_size',
  'num_samples', 'num_seeds', 'mesh', 'draft_mesh', 'logprobs',
)  # fmt: skip


def options_of(values: Mapping[str, Any]) -> DecodeOptions:
  """The options of a conversation, from fields of `DecodeOptions`; without a draft it decodes autoregressively."""
  values = {**values, 'chat': True}
  if 'target' not in values:
    raise ValueError(
      'decode.chat needs a model that answers: --target=MODEL, a folder, a .gguf file or ORG/NAME on the hub'
    )
  if 'draft' not in values:
    options = DecodeOptions.of(**{'method': ('autoregressive',)} | values)
    if options.methods.needs_draft:  # also of the shipped target, whose draft is not meant here
      raise ValueError(
        f'{options.methods.method[0]} needs a draft of the target: --draft=DRAFT, or --method=autoregressive'
      )
    return options
  return DecodeOptions.of(**values if AUTO in values.get('method', ()) else with_default_drafting(values))


def _choose(options: DecodeOptions, notify: Notify) -> tuple[Models, Setting]:
  """The models, and the fastest setting that `auto` times for short answers to questions of many kinds."""
  asked = {'prompts': str(_QUESTIONS), 'num_prompts': options.methods.calibration_prompts, 'prompt': None, 'chat': True}
  fewer = {'max_new_tokens': min(options.prompts.max_new_tokens, _NEW_TOKENS), 'stop': (), 'num_seeds': 1}
  work = Workload.load(options.replace(**asked, **fewer))
  return Models(work.target, work.draft, work.tokenizer, work.info['models']), speeds_of(work, notify)[0][0].setting


def start_chat(
  options: DecodeOptions, context: int, notify: Notify = lambda what, done, total: None, *, compiles_ahead: bool = False
) -> Chat:
  """Loads the models of a conversation of at most `context` tokens, those of an answer included.

  With `compiles_ahead` what answers run is compiled, or what the answer to the options' prompt runs if there is one.
  """
  options.check_unused(_UNUSED, 'decode.chat, which answers one user')
  asked, sampling = options.prompts, options.sampling
  if options.methods.is_auto:
    models, setting = _choose(options, notify)
  else:
    setting = only_setting(options)
    models = load_models(options)
  if getattr(models.tokenizer, 'chat_template', None) is None:
    models.tokenizer.encode_chat([])  # says so before anything is compiled
  limit = min(context, models.context_length or context)
  if limit - asked.max_new_tokens < 2:
    raise ValueError(
      f'max_new_tokens {asked.max_new_tokens} leaves no room for a prompt: the conversation may have {limit} tokens'
    )
  constraint = sampling.make_constraint(models.tokenizer, models.target.vocab_size)
  decoder = Decoder.make(
    models.target,
    setting.drafter(models.draft),
    method=setting.method,
    tree=setting.tree,
    max_new_tokens=asked.max_new_tokens,
    cache_size=limit,
    eos_id=models.tokenizer.eos_ids,
    constraints=[] if constraint is None else [constraint],
  )
  session = Session(decoder, sampling=sampling.params, constraint=-1 if constraint is None else 0)
  stop = asked.make_stop(models.tokenizer)
  chat = Chat(session, models.tokenizer, system=asked.system, stop=stop, seed=sampling.seed)
  if compiles_ahead:
    chat.compile(notify, asked.prompt)
  return chat


def is_typed() -> bool:
  """Whether a user types the input, and sees what is printed to stderr."""
  return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _line_editor() -> Callable[[], str]:
  """Reads a line that the user edits, with its end; empty at the end. Ctrl-C clears it, or else interrupts."""
  from prompt_toolkit import PromptSession
  from prompt_toolkit.filters import Condition, is_searching
  from prompt_toolkit.key_binding import KeyBindings
  from prompt_toolkit.output import create_output

  keys = KeyBindings()

  @keys.add('c-c', filter=Condition(lambda: bool(editor.default_buffer.text)) & ~is_searching)
  def _(event):
    event.current_buffer.reset()

  editor = PromptSession('> ', output=create_output(sys.stderr), key_bindings=keys)

  def read_line():
    try:
      return editor.prompt() + '\n'
    except EOFError:
      return ''

  return read_line


def read_turns() -> Iterator[str]:
  """The lines of the input that are not blank, with a sign where the user types them.

  In a terminal they can be edited, and earlier ones called up. Bytes that are no text come as lone surrogates. Lines
  that are too long are reported and left out.
  """
  if sys.stdin is None:  # closed
    return
  if hasattr(sys.stdin, 'reconfigure'):
    sys.stdin.reconfigure(errors='surrogateescape')
  read_line = _line_editor() if is_typed() else lambda: sys.stdin.readline(_LONGEST_LINE)
  while True:
    try:
      line = read_line()
    except KeyboardInterrupt:
      if not sys.stdin.isatty():
        raise
      line = ''
    if not line:
      return
    if len(line.removesuffix('\n')) >= _LONGEST_LINE:
      command_line.print_error(f'the message is too long, more than {_LONGEST_LINE:,} characters')
      while line and line[-1] != '\n':
        line = read_line()
    elif line.strip():
      yield line.strip()


@contextlib.contextmanager
def _interruptible(chat: Chat) -> Iterator[None]:
  """Lets Ctrl-C end the answer; a second one ends the program.

  The signal is handled between rounds: an exception within one would lose the caches, which a round takes over.
  """
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    yield
    return

  def interrupt(*_):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chat.interrupt()

  signal.signal(signal.SIGINT, interrupt)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def print_answer(chat: Chat, text: str) -> None:
  """Prints the answer to a turn as it comes, and its figures to stderr."""
  with _interruptible(chat):
    for new in chat.ask(text):
      print(printable(new), end='', flush=True)
  print(flush=True)
  answer = chat.answer
  left_out = f', without the first {answer.num_left_out} messages' if answer.num_left_out else ''
  interrupted = ', interrupted' if answer.is_interrupted else ''
  print(
    f'[{answer.num_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s,'
    f' {answer.num_tokens / max(answer.num_target_calls, 1):.2f} per target call; prompt'
    f' {answer.num_read} tokens in {answer.prompt_seconds:.2f} s{left_out}{interrupted}]',
    file=sys.stderr,
    flush=True,
  )


def talk(chat: Chat, turns: Iterable[str]) -> None:
  """Answers all turns; those that cannot be answered are reported and left out."""
  for text in turns:
    try:
      if text.startswith('/') and is_typed():
        print(obey(chat, text), file=sys.stderr, flush=True)
      else:
        print_answer(chat, text)
    except NotFiniteError:
      raise
    except ValueError as error:
      command_line.print_error(str(error))


if __name__ == '__main__':
  from decode.experiment.drafting import describe_in_help
  from decode.experiment.option_flags import read_values  # defines flags

  _CONTEXT = flags.DEFINE_integer(
    'context', 2048, 'Tokens that the conversation may have, those of an answer included.', lower_bound=3
  )
  flags.FLAGS.set_default('max_new_tokens', 512)
  flags.FLAGS.set_default('target', None)
  describe_in_help(takes_auto=True)
  help_text.leave_out(*_UNUSED, 'chat')

  def main():
    options = options_of(read_values())
    is_shown = options.methods.is_auto or sys.stderr.isatty()
    with show_progress() if is_shown else contextlib.nullcontext(lambda *_: None) as notify:
      chat = start_chat(options, _CONTEXT.value, notify, compiles_ahead=True)
    if options.methods.is_auto:
      print(f'auto: {describe_drafting(chat)}', file=sys.stderr)
    if options.prompts.prompt is None and is_typed():
      print(
        'Type a message, or /help. Ctrl-C ends an answer or clears the line. On an empty line it ends the'
        ' conversation, as Ctrl-D does.',
        file=sys.stderr,
      )
    if options.prompts.prompt is None:
      talk(chat, read_turns())
    else:
      print_answer(chat, options.prompts.prompt)

  command_line.run(
    main,
    [
      '--target=ORG/NAME',
      '--target=model.gguf --draft=HEAD',
      '--target=model.gguf --draft=HEAD --method=auto --calibration=auto.json',
      "--target=model.gguf --prompt='What is the capital of France?'",
    ],
  )
