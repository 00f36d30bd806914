"""A fault costs the request that met it, whatever fails: the thread goes on, and everybody hears of an end."""

import functools
import queue
import sys
import threading

import jax
import numpy as np
import pytest

from decode.serving import worker as worker_module
from decode.serving.faults import EndedError, FailedError
from decode.serving.worker import Job
from spectr_jax import SamplingParams
from spectr_jax.engine.likelihood import LogLikelihood
from spectr_jax.engine.stop import StopStrings
from tests.serving.stub import BAD_PUT, BAD_ROUND, NEW, client_of, make_stub, make_worker, patch, running, said


class _AskedJob(Job):
  def __init__(self, tokens, stop=None, sampling=SamplingParams()):  # noqa: B008 - it cannot change
    self.told = queue.Queue()
    super().__init__(tokens, _KEY, sampling, NEW, stop, self.told.put)

  def result(self):
    tokens = []
    while True:
      piece = self.told.get(timeout=120)
      if isinstance(piece, Exception):
        return piece
      tokens += piece.tokens
      if piece.finish_reason is not None:
        return tokens


_KEY = jax.random.key(0, impl='threefry2x32')


class _InjectedError(BaseException):
  """As a panic of the tokenizers, it is no Exception."""


class _Injector:
  """A profile function that raises at a call that the worker's code makes."""

  def __init__(self, place):
    self.place, self.num_calls = place, 0

  def __call__(self, frame, event, arg):
    caller = {'call': frame.f_back, 'c_call': frame}.get(event)
    name = frame.f_code.co_name if event == 'call' else arg.__name__ if event == 'c_call' else ''
    # Locks are the exception: one that is not let go stops everything.
    if caller is None or caller.f_code.co_filename != worker_module.__file__ or name in ('__enter__', '__exit__'):
      return
    self.num_calls += 1
    if self.num_calls - 1 == self.place:
      sys.setprofile(None)
      raise _InjectedError(name)


def _run_with_fault(tokenizer, place):
  """Runs a worker with a fault at one call; returns the calls that were made, and which jobs failed."""
  worker, injector = make_stub(tokenizer), _Injector(place)
  jobs = [_AskedJob([1, 2]), _AskedJob([3], StopStrings(tokenizer, ['qqq'])), _AskedJob([5, 6, 7]), _AskedJob([8])]
  scored = queue.Queue()
  worker.submit(jobs)
  worker.do(lambda: worker.read([[1, 2, 3]], 2), scored.put)
  threading.setprofile(injector)
  try:
    worker.start()
  finally:
    threading.setprofile(None)
  results = [job.result() for job in jobs]
  for job, result in zip(jobs, results, strict=True):
    assert isinstance(result, FailedError) or result == said(job.tokens), place
  assert isinstance(scored.get(timeout=20), LogLikelihood | FailedError), place
  num_calls = injector.num_calls
  later = _AskedJob([9, 9])
  worker.submit([later])
  assert later.result() == said([9, 9]), place
  assert worker.is_alive
  assert worker.fault is None
  worker.stop()
  assert worker.num_rows == worker.num_waiting == 0
  return num_calls, [isinstance(result, FailedError) for result in results]


def test_a_fault_at_any_call_fails_no_more_than_its_requests(monkeypatch, tokenizer, capsys):
  patch(monkeypatch)
  num_calls, failed = _run_with_fault(tokenizer, -1)
  assert num_calls > 100
  assert not any(failed)
  failures = [_run_with_fault(tokenizer, place)[1] for place in range(num_calls)]
  # Those that never were in a row beside the fault go on: two have rows at a time.
  assert max(map(sum, failures)) == 2
  assert sum(sum(each) == 1 for each in failures) > 10  # a fault in one row's work is its own
  assert 'a request failed: _InjectedError' in capsys.readouterr().err


def test_what_fails_alone_is_told_alone(stub):
  bad, good, worse, other = _AskedJob([BAD_PUT]), _AskedJob([1]), _AskedJob([BAD_ROUND]), _AskedJob([2])
  odd, beside = _AskedJob([3]), _AskedJob([4])
  odd.max_tokens = None  # what it is told cannot be made
  stub.submit([odd, beside, bad, good, worse, other])
  stub.start()
  assert isinstance(odd.result(), FailedError)
  assert beside.result() == said([4])
  assert isinstance(bad.result(), FailedError)
  assert 'not finite' in str(worse.result())
  assert (good.result(), other.result()) == (said([1]), said([2]))


def test_rows_that_a_failed_program_took_are_made_anew(models, tokenizer, monkeypatch):
  worker = make_worker(models, tokenizer)
  put, failures = worker_module.Rows.put, [1]

  def put_once_badly(self, requests):
    if failures:
      failures.clear()
      for array in jax.tree.leaves(self.state):
        array.delete()
      raise RuntimeError('out of memory')
    put(self, requests)

  monkeypatch.setattr(worker_module.Rows, 'put', put_once_badly)
  first, second = _AskedJob([1, 2]), _AskedJob([1, 2])
  worker.submit([first])
  with running(worker):
    assert isinstance(first.result(), FailedError)
    unknown, ill = _AskedJob([1, 10**6]), _AskedJob([1, 2], sampling=SamplingParams(1.0, top_p=1e-300))
    worker.submit([unknown, second, ill])
    assert len(second.result()) > 1
    assert isinstance(unknown.result(), FailedError)
    assert isinstance(ill.result(), FailedError)


def test_cancelled_jobs_free_their_rows(models, tokenizer):
  worker = make_worker(models, tokenizer, batch_size=1)
  never, second, current, last = (_AskedJob([1, 2], sampling=SamplingParams(0.5)) for _ in range(4))
  worker.submit([never, second])
  never.is_over = True  # while it waits: it never has a row
  with running(worker):
    assert len(second.result()) <= NEW
    assert never.told.empty()
    # In its row: the next one takes it.
    worker.submit([current])
    current.told.get(timeout=120)
    current.is_over = True
    worker.submit([last])
    assert last.told.get(timeout=120).tokens


def test_the_end_is_told(stub):
  waiting = _AskedJob([1, 2])
  stub.submit([waiting])
  stub.stop()  # before it began
  stub.start()
  assert 'ending' in str(waiting.result())
  stub._thread.join(20)
  assert not stub.is_alive
  with pytest.raises(EndedError):
    stub.do(lambda: stub.read([[1, 2]], 0), print)


def test_a_thread_that_cannot_go_on_says_so(stub, monkeypatch, tokenizer):
  waiting, scored = [_AskedJob([1]), _AskedJob([2]), _AskedJob([3])], queue.Queue()
  stub.submit(waiting)
  stub.do(lambda: stub.read([[1, 2]], 0), scored.put)

  def fail(*_, **__):
    raise RuntimeError('the device is lost')

  monkeypatch.setattr(stub._rows, 'step', fail)
  monkeypatch.setattr(worker_module, 'Rows', fail)
  stub.start()
  results = [job.result() for job in waiting]
  assert [type(result) for result in results] == [FailedError, FailedError, EndedError]
  assert scored.get(timeout=20) is not None
  stub._thread.join(20)
  assert not stub.is_alive
  assert 'lost' in str(stub.fault)
  with pytest.raises(EndedError):
    stub.submit([_AskedJob([1])])
  client = client_of(stub, tokenizer)
  assert client.get('/health').status_code == 503
  assert client.post('/v1/completions', json={'prompt': 'owl'}).status_code == 503


# Numbers that no type of the machine holds, and texts that are none.
_BIG = '1' * 400
_HOSTILE = [
  *(f'{{"prompt": "a", "{name}": {sign}{_BIG}{end}}}'
    for name in ('temperature', 'top_p', 'min_p', 'top_k', 'seed', 'n', 'max_tokens', 'logprobs', 'best_of', 'other',
                 'presence_penalty', 'prompt', 'stream', 'stop', 'user')
    for sign in ('', '-') for end in ('', '.5')),
  *(f'{{"prompt": "a", "temperature": {value}}}' for value in ('NaN', 'Infinity', '-Infinity', '1e999', '-1e999')),
  f'{{"prompt": [{_BIG}]}}', f'{{"prompt": [1, {_BIG}]}}', f'{{"prompt": [[{_BIG}]]}}',
  f'{{"prompt": "a", "stream": true, "stream_options": {{"include_usage": {_BIG}}}}}',
  f'{{"prompt": "a", "temperature": {"9" * 5000}}}',
  r'{"prompt": "a", "\ud800": 1}', r'{"prompt": "a", "\u001b[2J": 1}', r'{"prompt": "a", "x\ny\u202e\u0000": 1}',
  r'{"prompt": "\udfff"}', r'{"prompt": ["a", "\ud800"]}', r'{"prompt": "a", "stop": "\ud800"}',
  r'{"prompt": "a", "model": "\ud800"}', r'{"prompt": "a", "stop": ["x", "\u001b\ud800"]}',
  r'{"prompt": "a", "stream": true, "stream_options": {"\ud800": true}}', r'{"prompt": "a", "echo": "\ud800"}',
  '{"prompt": "a", "temperature": ' + '[' * 900 + ']' * 900 + '}', '{"prompt": ' + '[' * 950 + ']' * 950 + '}',
  '{"prompt": "a", "logit_bias": ' + '{"a":' * 900 + '1' + '}' * 900 + '}', '{"prompt": "a", "' + 'x' * 10**6 + '": 1}',
  '{"prompt": "a", "stop": ["' + 'x' * 10**6 + '\ufffd"]}', '{"prompt": "a", "temperature": "' + 'x' * 10**6 + '"}',
]  # fmt: skip
_HOSTILE_CHATS = [
  r'{"messages": [{"role": "user", "content": "a", "\ud800": 1}]}',
  r'{"messages": [{"role": "user", "content": "a", "\u001b[31m": 1}]}',
  r'{"messages": [{"role": "user", "content": "\ud800"}]}',
  r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\udc00"}]}]}',
  r'{"messages": [{"role": "\ud800", "content": "a"}]}', r'{"messages": [{"\ud800": "user"}]}',
  f'{{"messages": [{_BIG}]}}', f'{{"messages": {_BIG}}}', f'{{"messages": [{{"role": {_BIG}, "content": "a"}}]}}',
  f'{{"messages": [{{"role": "user", "content": {_BIG}}}]}}',
  f'{{"messages": [{{"role": "user", "content": "a"}}], "top_logprobs": {_BIG}}}',
  '{"messages": [{"role": "user", "content": "a", "' + 'x' * 10**6 + '": 1}]}',
]  # fmt: skip


def test_hostile_bodies_are_refused_in_printable_words(stub, tokenizer):
  stub.start()
  client = client_of(stub, tokenizer)
  for path, bodies in (('completions', _HOSTILE), ('chat/completions', _HOSTILE_CHATS)):
    for body in bodies:
      response = client.post(f'/v1/{path}', content=body)
      if '"user": 111' not in body and response.status_code == 404:
        assert '"model"' in body
      else:
        assert response.status_code == 400, (body[:200], response.text)
      error = response.json()['error']
      assert error['message'].isprintable(), body[:200]
      assert error['param'] is None or error['param'].isprintable(), body[:200]
      assert len(response.content) < 2_000


def test_numbers_of_likeliest_tokens_share_a_program(stub):
  stub.start()
  for num_top in (0, 3, 20):
    told = queue.Queue()
    stub.do(functools.partial(stub.read, [[1, 2, 3]], num_top), told.put)
    result = told.get(timeout=20)
    assert result.top_tokens.shape == result.top_logprobs.shape == (1, 3, num_top)
    np.testing.assert_array_equal(result.top_tokens[0, 1], range(num_top))
