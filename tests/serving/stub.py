"""Workers: of a tiny pair, and one whose rows need no model, so that nothing is compiled and the prompt says all."""

import contextlib
import os
import sys
import time
import types

import numpy as np
import tiny_hub
from starlette.testclient import TestClient

from decode.serving import server as server_module
from decode.serving import worker as worker_module
from decode.serving.answer import Served
from decode.serving.app import make_app
from decode.serving.server import Server, listen
from decode.serving.worker import Worker
from spectr_jax import Decoder, TokenTree
from spectr_jax.engine.likelihood import LogLikelihood
from spectr_jax.engine.request import Call, Piece
from spectr_jax.engine.result import Generation, NotFiniteError
from spectr_jax.io.hub.hub_tokenizer import HubTokenizer

NEW, LONGEST, ROWS, DEPTH = 12, 60, 3, 2
EOS = 41
SIZE, WORDS = 2, 30  # tokens of a round, and ids that are words
# A prompt that begins with it fails where it is put, in its first round, or ends the thread.
BAD_PUT, BAD_ROUND, BAD_POOL = 31, 32, 33


def said(prompt, num_tokens=NEW):
  return [(sum(prompt) + place) % WORDS for place in range(num_tokens)]


class StubRows:
  """As `Rows`; a round takes some seconds."""

  seconds, call = 0.0, Call(1, '0', 0)

  def __init__(self, decoder, *, batch_size, **options):
    del decoder, options
    self.state, self.owners, self.free, self.prefixes = None, {}, list(range(batch_size)), None
    self.num_kept = np.zeros(batch_size, np.int64)
    self._lengths = [0] * batch_size

  def put(self, requests):
    if any(request.tokens[0] == BAD_PUT for request in requests):
      raise RuntimeError('cannot be put')
    for request in requests:
      row = self.free.pop(0)
      self.owners[row], self._lengths[row] = request, 0

  def step(self):
    time.sleep(self.seconds)
    pieces = []
    for row, request in self.owners.items():
      if request.tokens[0] == BAD_POOL:
        worker_module.Rows = None
        raise RuntimeError('the device is lost')
      error = NotFiniteError(row, 0, 1) if request.tokens[0] == BAD_ROUND else None
      start, self._lengths[row] = self._lengths[row], min(self._lengths[row] + SIZE, NEW)
      pieces.append(Piece(row, request, start, self._lengths[row], error is not None, error))
    return pieces

  def end(self, rows):
    for row in list(rows):
      del self.owners[row]
      self.free.append(row)

  @property
  def result(self):
    tokens = np.full((len(self._lengths), NEW), -1)
    for row, request in self.owners.items():
      tokens[row] = said(request.tokens)
    lengths = np.array(self._lengths)
    return Generation(
      tokens, lengths, lengths // SIZE, np.zeros((len(lengths), 1)), np.zeros_like(tokens), 0 * lengths,
      logprobs=np.zeros(tokens.shape, np.float32),
    )  # fmt: skip


def read(target, texts, *, num_top, width):
  assert (num_top, width) == (min(20, target.vocab_size), 128)  # one program for all
  shape = 1, len(texts[0])
  tops = np.tile(np.arange(num_top), (*shape, 1))
  return LogLikelihood(np.zeros(shape), np.zeros(shape, bool), tops, -1.0 * tops)


def patch(patcher):
  """Puts the stub in place of the engine."""
  patcher.setattr(worker_module, 'Rows', StubRows)
  patcher.setattr(worker_module, 'log_likelihood', read)


def make_tokenizer(template=tiny_hub.CHAT):
  return HubTokenizer.from_parts(tiny_hub.backend(), bos_id=None, eos_ids=(EOS,), add_bos=False, chat_template=template)


@contextlib.contextmanager
def running(worker):
  worker.start()
  try:
    yield worker
  finally:
    worker.stop()


def make_app_of(worker, tokenizer, *, most_new=NEW, **options):
  return make_app(Served(worker, tokenizer, 'tiny', most_new, **options))


def client_of(worker, tokenizer, **options):
  return TestClient(make_app_of(worker, tokenizer, **options))


def make_worker(models, tokenizer, *, most_waiting=64, batch_size=ROWS, most_new=NEW, longest=LONGEST, **options):
  """A worker whose caches hold the longest prompt and its continuation; the two may be longer one by one."""
  decoder = Decoder.make(
    *models, method='race_traversal', tree=TokenTree.chains(2, DEPTH), max_new_tokens=most_new,
    cache_size=LONGEST + NEW, eos_id=tokenizer.eos_ids, logprobs=True,
  )  # fmt: skip
  sizes = {'batch_size': batch_size, 'longest_prompt': longest, 'most_waiting': most_waiting}
  return Worker(decoder, tokenizer, **sizes, **{'prefix_cache_bytes': 2**20} | options)


def make_stub(tokenizer, *, batch_size=2, most_waiting=64):
  target = types.SimpleNamespace(vocab_size=tokenizer.vocab_size)
  decoder = types.SimpleNamespace(target=target, cache_size=LONGEST + NEW)
  return Worker(decoder, tokenizer, batch_size=batch_size, longest_prompt=LONGEST, most_waiting=most_waiting)


def serve(connection, folder, host, seconds, keep_alive, options):
  """The server in a process of its own: sends its port, prints into a folder, and ends as the command does."""
  for number in (1, 2):
    os.dup2(os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT), number)
  worker_module.Rows, worker_module.log_likelihood = StubRows, read
  StubRows.seconds, server_module.QUIET_SECONDS = seconds, 1.0
  tokenizer = make_tokenizer()
  worker, sock = make_stub(tokenizer), listen(host, 0)
  worker.start()
  server = Server(make_app_of(worker, tokenizer, **options), sock, keep_alive=keep_alive)
  connection.send(sock.getsockname()[1])
  server.wait(worker)
  worker.stop()
  sys.exit(3 if worker.fault is not None else 0)
