"""Rows are free as soon as nobody waits for them, and whoever waits hears of the end."""

import queue
import time

import jax
import pytest

from decode.serving.faults import EndedError
from decode.serving.worker import Job
from spectr_jax import SamplingParams
from tests.serving.served import make_worker


def _job(found, tokens=(1, 2), **more):
  options = {'sampling': SamplingParams(0.5), 'max_tokens': 12, 'stop': None} | more
  return Job(tokens, jax.random.key(0, impl='threefry2x32'), tell=found.put, **options)


def test_cancelled_jobs_free_their_rows(models, tokenizer):
  worker = make_worker(models, tokenizer, batch_size=1)
  first, second = queue.Queue(), queue.Queue()
  jobs = [_job(first), _job(second)]
  worker.submit(jobs)
  jobs[0].is_cancelled = True  # while it waits: it never has a row
  worker.start()
  try:
    pieces = [second.get(timeout=120)]
    while pieces[-1].finish_reason is None:
      pieces.append(second.get(timeout=120))
    assert sum(len(piece.tokens) for piece in pieces) <= 12
    assert first.empty()
    # In its row: the next one takes it.
    third, fourth = queue.Queue(), queue.Queue()
    running = _job(third)
    worker.submit([running])
    third.get(timeout=120)
    running.is_cancelled = True
    worker.submit([_job(fourth)])
    assert fourth.get(timeout=120).tokens
  finally:
    worker.stop()


def test_the_end_is_told(models, tokenizer):
  worker, found = make_worker(models, tokenizer), queue.Queue()
  worker.submit([_job(found)])
  worker.stop()  # before it began
  worker.start()
  assert 'ending' in str(found.get(timeout=60))
  scored = queue.Queue()
  deadline = time.monotonic() + 60
  while worker.is_alive and time.monotonic() < deadline:
    time.sleep(0.01)
  with pytest.raises(EndedError):
    worker.score([[1, 2]], 0, scored.put)
