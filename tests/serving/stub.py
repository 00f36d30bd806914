"""A worker whose rows need no model: what they say depends on the prompt alone. Nothing is compiled."""

import types

import numpy as np

from decode.serving import worker as worker_module
from decode.serving.worker import Worker
from spectr_jax.engine.likelihood import LogLikelihood
from spectr_jax.engine.result import Generation, NotFiniteError
from tests.serving.served import LONGEST, NEW

SIZE, WORDS = 2, 30  # tokens of a round, and ids that are words
BAD_PUT, BAD_ROUND = 31, 32  # a prompt that begins with it fails where it is put, or in its first round


def said(prompt, num_tokens=NEW):
  """What follows a prompt."""
  return [(sum(prompt) + place) % WORDS for place in range(num_tokens)]


class StubPool:
  """As `Pool`."""

  def __init__(self, decoder, requests, *, batch_size, longest_prompt):
    del requests, longest_prompt
    self.state, self.owners, self._decoder = None, {0: None}, decoder
    self._lengths = dict.fromkeys(range(batch_size), 0)

  @property
  def free(self):
    return [row for row in self._lengths if row not in self.owners]

  def put(self, requests):
    if any(request.tokens[0] == BAD_PUT for request in requests):
      raise RuntimeError('cannot be put')
    taken = dict(zip(self.free, requests, strict=False))
    self.owners |= taken
    self._lengths |= dict.fromkeys(taken, 0)

  def advance(self, num_rounds):
    for row, request in self.owners.items():
      if request.tokens[0] == BAD_ROUND:
        raise NotFiniteError(row, 0, 1)
      self._lengths[row] = min(self._lengths[row] + SIZE * num_rounds, NEW)

  def forgive(self, row):
    return self.owners.pop(row)

  def end(self, rows):
    assert all(row in self._lengths for row in rows)

  def result(self):
    tokens = np.full((len(self._lengths), NEW), -1)
    for row, request in self.owners.items():
      tokens[row] = said(request.tokens)
    lengths = np.array(list(self._lengths.values()))
    return Generation(
      tokens, lengths, lengths // SIZE, np.zeros((len(lengths), 1)), np.zeros_like(tokens), 0 * lengths,
      logprobs=np.zeros(tokens.shape, np.float32),
    )  # fmt: skip


def read(target, texts, *, num_top=0):
  """As `log_likelihood`."""
  assert num_top == min(20, target.vocab_size)  # one program for all numbers
  shape = 1, len(texts[0])
  tops = np.tile(np.arange(num_top), (*shape, 1))
  return LogLikelihood(np.zeros(shape), np.zeros(shape, bool), tops, -1.0 * tops)


def patch(patcher):
  """Puts the stub in place of the engine.

  Args:
    patcher: As pytest's `monkeypatch`.
  """
  patcher.setattr(worker_module, 'Pool', StubPool)
  patcher.setattr(worker_module, 'log_likelihood', read)


def make_stub(tokenizer, *, batch_size=2, most_waiting=64):
  """A worker, where `patch` holds."""
  target = types.SimpleNamespace(vocab_size=tokenizer.vocab_size)
  decoder = types.SimpleNamespace(target=target, cache_size=LONGEST + NEW)
  sizes = {'batch_size': batch_size, 'longest_prompt': LONGEST, 'most_waiting': most_waiting}
  return Worker(decoder, tokenizer, rounds_at_a_time=1, **sizes)
