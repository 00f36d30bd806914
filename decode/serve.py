"""Serves a model by the interface of completions: `python -m decode.serve --target=MODEL`.

It answers `/v1/completions`, `/v1/chat/completions` (streamed or not), `/v1/models`, `/health` and `/metrics`. Requests
of any sampling parameters share a batch; a seed gives the same text whatever runs beside it, up to rounding. It is one
process with one model. SIGTERM and Ctrl-C end it after the answers that have begun.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys

from absl import flags

from common import command_line, extras, help_text
from common.printable import printable
from decode.experiment.console import show_progress
from decode.experiment.options import DecodeOptions
from decode.experiment.settings import only_setting
from decode.experiment.workload import load_models
from spectr_jax.auto.trial import Notify
from spectr_jax.engine.decoder import Decoder

# Fields of `DecodeOptions` that mean nothing here.
_UNUSED = (
  'acceptance', 'grid', 'calibration', 'share_of_optimum', 'breakdown', 'profile_dir', 'prompt', 'prompts', 'skip_long',
  'mesh', 'logprobs', 'chat', 'system', 'stop', 'gumbel', 'num_prompts', 'num_samples', 'num_seeds', 'draft_mesh',
)  # fmt: skip


def start_worker(options: DecodeOptions, *, longest_prompt: int, most_waiting: int, notify: Notify):
  """Loads the models, compiles, and starts the thread that decodes.

  Args:
    options: The options; they name one method, K, L and tree.
    longest_prompt: The most tokens of a prompt.
    most_waiting: Continuations that may wait for a row.
    notify: Called with the current activity, the steps done and the steps in total.

  Returns:
    The worker, and the tokenizer.

  Raises:
    ValueError: Options or models are unusable; the message says why.
  """
  from decode.serving.worker import Worker

  options.check_unused(_UNUSED, 'decode.serve, where requests say what they want')
  setting = only_setting(options)
  models = load_models(options)
  limit = models.context_length
  if limit is not None and longest_prompt + options.max_new_tokens > limit:
    longest_prompt = limit - options.max_new_tokens
    if longest_prompt < 1:
      raise ValueError(f'max_new_tokens must be below {limit}, the context of the models')
  decoder = Decoder.make(
    models.target,
    setting.drafter(models.draft),
    method=setting.method,
    tree=setting.tree,
    max_new_tokens=options.max_new_tokens,
    cache_size=longest_prompt + options.max_new_tokens,
    eos_id=models.tokenizer.eos_ids,
    logprobs=True,
  )
  worker = Worker(
    decoder,
    models.tokenizer,
    batch_size=options.batch_size,
    longest_prompt=longest_prompt,
    most_waiting=most_waiting,
    rounds_at_a_time=1,
  )
  worker.compile(lambda done, total: notify('compiling', done, total))
  worker.start()
  return worker, models.tokenizer


def read_key(given: str | None, path: str | None) -> str | None:
  """The key that clients must send, or None.

  Args:
    given: The key.
    path: A file that holds it.

  Raises:
    ValueError: Both are given, or the file holds none.
  """
  if given is not None and path is not None:
    raise ValueError('give --api_key or --api_key_file, not both')
  if path is not None:
    given = pathlib.Path(path).read_text(encoding='utf-8')[:10_000].strip()
  if given is not None and (not given or not given.isascii() or not given.isprintable() or ' ' in given):
    raise ValueError('the key must be at least one ASCII character, without blanks')
  return given


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens, before models are loaded.

  Args:
    host: The address.
    port: The port; 0 for a free one.

  Raises:
    ValueError: Somebody listens there already, or there is no such address.
  """
  try:
    return socket.create_server((host, port))
  except OSError as error:
    raise ValueError(f'cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}') from error


if __name__ == '__main__':
  extras.need('serve', 'starlette', 'uvicorn')
  from decode.experiment.drafting import describe_in_help, with_default_drafting
  from decode.experiment.option_flags import read_values  # defines flags

  _HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; 0.0.0.0 for all of this machine.')
  _PORT = flags.DEFINE_integer('port', 8000, 'Port to listen on; 0 for a free one.', lower_bound=0, upper_bound=65535)
  _NAME = flags.DEFINE_string('served_name', None, "The model's name in the interface; default the target's.")
  _KEY = flags.DEFINE_string('api_key', None, 'Key that clients must send.')
  _KEY_FILE = flags.DEFINE_string('api_key_file', None, 'File that holds the key.')
  _LONGEST = flags.DEFINE_integer('longest_prompt', 1024, 'The most tokens of a prompt.', lower_bound=1)
  _WAITING = flags.DEFINE_integer('most_waiting', 512, 'Continuations that may wait for a row.', lower_bound=1)
  help_text.in_group('Options', _HOST, _PORT, _NAME, _KEY, _KEY_FILE, _LONGEST, _WAITING)
  flags.FLAGS.set_default('max_new_tokens', 256)
  flags.FLAGS.set_default('batch_size', 8)
  describe_in_help()
  help_text.leave_out(*_UNUSED, 'calibration_prompts')

  def main(argv):
    import uvicorn

    from decode.serving.answer import Served
    from decode.serving.app import make_app

    del argv
    options, key = DecodeOptions(**with_default_drafting(read_values())), read_key(_KEY.value, _KEY_FILE.value)
    sock = listen(_HOST.value, _PORT.value)
    with show_progress() as notify:
      sizes = {'longest_prompt': _LONGEST.value, 'most_waiting': _WAITING.value}
      worker, tokenizer = start_worker(options, **sizes, notify=notify)
    name = _NAME.value or os.path.basename(options.target.rstrip('/')) or options.target
    app = make_app(Served(worker, tokenizer, name, options.max_new_tokens, key))
    server = uvicorn.Server(uvicorn.Config(app, log_level='warning', access_log=False))
    host, port = sock.getsockname()[:2]
    print(f'serving {printable(name)} at http://{host}:{port}/v1, {options.batch_size} rows', flush=True)
    # The server ends by them in order, and then raises them again.
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, lambda *_: None)
    try:
      server.run(sockets=[sock])
    finally:
      worker.stop()
    if worker.fault is not None:
      raise worker.fault
    print('ended', file=sys.stderr)

  command_line.run(
    main,
    [
      '--target=ORG/NAME --draft=ORG/SMALL --dtype=bfloat16 --num_drafts=4 --draft_length=4',
      '--target=model.gguf --draft=HEAD --num_drafts=1 --draft_length=3 --batch_size=4 --port=8080',
      '--target=pretrained/target --draft=pretrained/draft --api_key_file=key.txt',
    ],
  )
