"""Serves a model by the interface of completions: `python -m decode.serve --target=MODEL`.

It answers `/v1/completions`, `/v1/chat/completions` (streamed or not), `/v1/models`, `/health` and `/metrics`. Requests
of any sampling parameters share a batch; a seed gives the same text whatever runs beside it, up to rounding. It is one
process with one model. SIGTERM and Ctrl-C end it after the answers that have begun, a second one at once.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import NamedTuple

from absl import flags

from common import command_line, extras, help_text
from common.printable import printable
from decode.experiment.console import show_progress
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting
from decode.experiment.workload import load_models
from spectr_jax import Decoder
from spectr_jax.auto.trial import Notify
from spectr_jax.engine import Budget
from spectr_jax.io.untrusted import first_line
from spectr_jax.unicode import check_unicode

# Fields of `DecodeOptions` that mean nothing here.
_UNUSED = (
  'acceptance', 'grid', 'calibration', 'share_of_optimum', 'breakdown', 'profile_dir', 'prompt', 'prompts', 'skip_long',
  'mesh', 'logprobs', 'chat', 'system', 'stop', 'gumbel', 'num_prompts', 'num_samples', 'num_seeds', 'draft_mesh',
  'regex', 'json_schema', 'choice', 'presence_penalty', 'frequency_penalty', 'repetition_penalty', 'logit_bias',
  'min_tokens', 'ignore_eos', 'bad_words',
)  # fmt: skip

_LONGEST_PROMPT = _MOST_NEW = 1024  # tokens, unless options say otherwise


class Bounds(NamedTuple):
  """The most tokens of a prompt, of a continuation, and of both together; `together` is None for their sum."""

  longest_prompt: int
  max_new_tokens: int
  together: int | None = None


def choose_bounds(context: int | None, longest_prompt: int | None, max_new_tokens: int | None) -> Bounds:
  """Bounds that requests may reach at once, or together where neither is asked for and the context is short.

  `context` is the most tokens that the models take. What it leaves beside `max_new_tokens` bounds `longest_prompt`, at
  most 1024 unless asked for; `max_new_tokens` of None is what it leaves, at most 1024. No room is a `ValueError`.
  """
  if context is None:
    return Bounds(longest_prompt or _LONGEST_PROMPT, max_new_tokens or _MOST_NEW)
  if longest_prompt is max_new_tokens is None and 1 < context < _LONGEST_PROMPT + _MOST_NEW:
    return Bounds(min(_LONGEST_PROMPT, context - 1), min(_MOST_NEW, context - 1), context)
  new = max_new_tokens or max(1, min(_MOST_NEW, context - (longest_prompt or _LONGEST_PROMPT)))
  if new >= context:
    raise ValueError(f'max_new_tokens must be below {context}, the context of the models')
  return Bounds(min(longest_prompt or _LONGEST_PROMPT, context - new), new)


def start_worker(
  options: DecodeOptions,
  *,
  longest_prompt: int | None = None,
  max_new_tokens: int | None = None,
  most_waiting: int,
  has_penalties: bool = False,
  prefix_cache_bytes: int,
  notify: Notify,
  budget: Budget | None = None,
):
  """The thread that decodes, started with its programs compiled, the tokenizer, and the bounds of requests."""
  from decode.serving.worker import Worker

  setting = only_setting(options)
  models = load_models(options)
  bounds = choose_bounds(models.context_length, longest_prompt, max_new_tokens)
  size = bounds.longest_prompt + bounds.max_new_tokens if bounds.together is None else bounds.together
  decoder = Decoder.make(
    models.target,
    setting.drafter(models.draft),
    method=setting.method,
    tree=setting.tree,
    max_new_tokens=bounds.max_new_tokens,
    cache_size=size,
    eos_id=models.tokenizer.eos_ids,
    logprobs=True,
  )
  worker = Worker(
    decoder,
    models.tokenizer,
    batch_size=options.prompts.batch_size,
    longest_prompt=bounds.longest_prompt,
    most_waiting=most_waiting,
    has_penalties=has_penalties,
    prefix_cache_bytes=prefix_cache_bytes,
    budget=budget,
  )
  worker.compile(lambda done, total: notify('compiling; /health says starting', done, total))
  worker.start()
  return worker, models.tokenizer, bounds


def read_key(given: str | None, path: str | None) -> str | None:
  if given is not None and path is not None:
    raise ValueError('give --api_key or --api_key_file, not both')
  if path is not None:
    given = pathlib.Path(path).read_text(encoding='utf-8')[:10_000].strip()
  if given is not None and (not given or not given.isascii() or not given.isprintable() or ' ' in given):
    raise ValueError('the key must be at least one ASCII character, without blanks')
  return given


def read_hosts(names: list[str]) -> frozenset[str]:
  """The names by which the server may be asked, besides those of this machine for itself."""
  from decode.serving.gate import is_address

  for name in names:
    if name != '*' and not re.fullmatch(r'[\w.-]+', name) and not is_address(name):
      raise ValueError(f'allowed_hosts must be names without ports, such as box.lan, or * for all; got {name!r}')
  return frozenset(name.lower() for name in names)


if __name__ == '__main__':
  extras.need('serve', 'starlette', 'uvicorn')
  from decode.experiment.drafting import budget_of, define_row_flags, describe_in_help, with_default_drafting
  from decode.experiment.option_flags import read_values  # defines flags

  _HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0 for all of this machine.')
  _PORT = flags.DEFINE_integer('port', 8000, 'Port to listen on; 0 for a free one.', lower_bound=0, upper_bound=65535)
  _NAME = flags.DEFINE_string('served_name', None, "The model's name in the interface; default the target's.")
  _KEY = flags.DEFINE_string('api_key', None, 'Key that clients must send.')
  _KEY_FILE = flags.DEFINE_string('api_key_file', None, 'File that holds the key.')
  _LONGEST = flags.DEFINE_integer(
    'longest_prompt', None, 'The most tokens of a prompt (default 1024, or what a short context leaves).', lower_bound=1
  )
  _WAITING = flags.DEFINE_integer('most_waiting', 512, 'Continuations that may wait for a row.', lower_bound=1)
  _PENALTIES = flags.DEFINE_bool(
    'penalties',
    True,
    'Let requests ask for presence_penalty, frequency_penalty, repetition_penalty, logit_bias and min_tokens: every row'
    ' keeps counts of all tokens.',
  )
  _ALLOWED = flags.DEFINE_list(
    'allowed_hosts',
    None,
    'Names that requests may give as their Host, and whose pages may send some; * for all. Default: those of this'
    ' machine for itself, and any Host where --host lets others reach it.',
  )
  _KEEP = flags.DEFINE_integer(
    'keep_alive', 75, 'Seconds that a connection without a request stays open.', lower_bound=0, upper_bound=10**6
  )
  _TOOLS = flags.DEFINE_string(
    'tool_format',
    None,
    "How the model writes calls of tools: hermes, llama3_json or gemma4. Default the chat template's.",
  )
  _BUDGET, _PREFIXES = define_row_flags('auto')
  own = _HOST, _PORT, _NAME, _KEY, _KEY_FILE, _LONGEST, _WAITING, _PREFIXES, _PENALTIES, _ALLOWED, _KEEP, _TOOLS
  help_text.in_group('Options', _BUDGET, *own)
  flags.FLAGS.set_default('max_new_tokens', _MOST_NEW)
  flags.FLAGS['max_new_tokens'].help = 'New tokens per prompt, at most (default what the context leaves, up to 1024).'
  flags.FLAGS.set_default('batch_size', 8)
  describe_in_help()
  help_text.leave_out(*_UNUSED, 'calibration_prompts')

  def main():
    from decode.serving.answer import Served
    from decode.serving.app import Front, make_app
    from decode.serving.gate import is_loopback
    from decode.serving.server import Server, address_of, listen
    from decode.serving.tools import format_named

    budget = budget_of(_BUDGET.value, is_resized=True)
    options, key = DecodeOptions.of(**with_default_drafting(read_values())), read_key(_KEY.value, _KEY_FILE.value)
    options.check_unused(_UNUSED, 'decode.serve, where requests say what they want')
    name = _NAME.value or os.path.basename(options.models.target.rstrip('/')) or options.models.target
    check_unicode(name, 'served_name')
    hosts = None if _ALLOWED.value is None else read_hosts(_ALLOWED.value)
    if _TOOLS.value is not None:
      format_named(_TOOLS.value)
    most_new = None if flags.FLAGS['max_new_tokens'].using_default_value else options.prompts.max_new_tokens
    sock = listen(_HOST.value, _PORT.value)
    if hosts is None and is_loopback(sock.getsockname()[0]):
      hosts = frozenset([_HOST.value.lower()])
    front = Front()
    server = Server(front, sock, keep_alive=_KEEP.value)
    with show_progress() as notify:
      sizes = {'longest_prompt': _LONGEST.value, 'max_new_tokens': most_new, 'most_waiting': _WAITING.value}
      sizes |= {'prefix_cache_bytes': _PREFIXES.value, 'has_penalties': _PENALTIES.value}
      worker, tokenizer, bounds = start_worker(options, **sizes, notify=notify, budget=budget)
    more = {'together': bounds.together, 'hosts': hosts, 'tool_format': _TOOLS.value}
    more['constraint_after'] = options.sampling.constraint_after
    served = Served(worker, tokenizer, name, bounds.max_new_tokens, key, **more)
    served.prepare()
    front.app = make_app(served)
    print(f'serving {printable(name)} at http://{address_of(sock)}/v1, {options.prompts.batch_size} rows', flush=True)
    try:
      server.wait(worker)
    finally:
      worker.stop()
    if worker.fault is not None:
      fault = f'{type(worker.fault).__name__}: {first_line(worker.fault)}'
      raise ValueError(f'the thread that decodes has ended: {fault}') from worker.fault
    print('ended', file=sys.stderr)

  command_line.run(
    main,
    [
      '--target=ORG/NAME --draft=ORG/SMALL --dtype=bfloat16 --num_drafts=4 --draft_length=4',
      '--target=model.gguf --draft=HEAD --num_drafts=1 --draft_length=3 --batch_size=4 --port=8080',
      '--target=model.gguf',
      '--target=pretrained/target --draft=pretrained/draft --api_key_file=key.txt',
    ],
  )
