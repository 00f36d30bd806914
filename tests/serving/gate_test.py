"""Who may ask, what is counted, and that nobody's request keeps another waiting."""

import asyncio
import collections
import json
import random
import re
import threading
import time

import pytest
from starlette.testclient import TestClient

from decode.serving import compiling, gate
from decode.serving.answer import Served
from decode.serving.gate import host_of
from decode.serving.worker import Job, Worker
from spectr_jax.io.constraints import ConstraintBusyError
from tests.serving.stub import LONGEST, NEW, StubRows, client_of, make_app_of, make_stub, patch

_POST = '/v1/completions'
_BODY = {'prompt': 'owl', 'max_tokens': 4}


def _client(stub, tokenizer, **options):
  stub.start()
  return client_of(stub, tokenizer, **options)


_WRONG_KEYS = '', 'secret', 'Bearer', 'Bearer ', 'Bearersecret', 'Basic secret', 'Bearer Secret', 'Bearer secret x'


def test_a_key_is_asked_for_in_any_case_of_its_scheme(stub, tokenizer):
  client = _client(stub, tokenizer, api_key='secret')

  def status(path, *given):
    method, body = ('POST', _BODY) if path == _POST else ('GET', None)
    return client.request(method, path, json=body, headers=[('Authorization', value) for value in given]).status_code

  for path in (_POST, '/v1/models', '/v1/models/tiny', '/metrics'):
    for right in ('Bearer secret', 'bearer secret', 'BEARER secret', 'bEaReR  secret'):
      assert status(path, right) == 200
    for wrong in _WRONG_KEYS:
      assert status(path, wrong) == 401, wrong
    assert status(path) == 401
    assert status(path, 'Bearer secret', 'Bearer no') == status(path, 'Bearer secret', 'Bearer secret') == 400
  assert status('/health') == 200
  assert status('/nowhere') == 401  # what there is, is not for others to know


def test_names_of_hosts_and_those_that_the_command_takes():
  for text, name in (
    ('Box.LAN:80', 'box.lan'), ('[::1]:8000', '::1'), ('localhost.', 'localhost'), ('a', 'a'), ('', None), ('[', None),
    ('a:b', None), ('a@b', None), ('a/b', None), (':80', None), ('a:80:90', None), ('[::1', None), ('a?b', None),
  ):  # fmt: skip
    assert host_of(text) == name, text
  from decode.serve import read_hosts

  assert read_hosts(['*']) == {'*'}
  assert read_hosts(['Box.lan', '10.0.0.7', '::2']) == {'box.lan', '10.0.0.7', '::2'}
  for wrong in ('', 'a:80', 'http://a', '*.lan', 'a/b', '[::1]', 'a@b', 'a b'):
    with pytest.raises(ValueError, match='allowed_hosts must be names'):
      read_hosts([wrong])


_OWN = 'localhost', 'localhost:8000', '127.0.0.1:8000', '127.1.2.3', '[::1]:8000', 'LOCALHOST', 'a.localhost', 'box.lan'
_OTHERS = (
  'evil.example', 'evil.example:8000', 'localhost.evil.example', '10.0.0.1', '0.0.0.0', '[::2]', 'box.lan.x', '[',
)  # fmt: skip


def test_pages_of_others_cannot_make_it_work(stub, tokenizer):
  client = _client(stub, tokenizer, hosts=frozenset(['box.lan']))

  def status(**headers):
    # A page needs nobody's leave to send plain text.
    return client.post(_POST, content=json.dumps(_BODY), headers={'Content-Type': 'text/plain'} | headers).status_code

  for own in _OWN:
    assert status(host=own) == 200, own
    assert status(host='localhost', origin=f'http://{own}') == 200, own
  for other in _OTHERS:
    assert status(host=other) == 403, other
    assert status(host='localhost', origin=f'https://{other}') == 403, other
    assert status(host=other, origin=f'http://{other}') == 403, other
  for origin in ('null', '', 'file://', 'http://', 'localhost', 'http://localhost@evil.example'):
    assert status(host='localhost', origin=origin) == 403, origin
  assert client.get('/v1/models', headers={'host': 'evil.example'}).status_code == 403
  assert f'spectr_jax_tokens_total {4 * 2 * len(_OWN)}\n' in stub.metrics.render()


def test_others_may_ask_where_that_is_said(stub, tokenizer):
  client = _client(stub, tokenizer)
  for host, origin, status in (
    ('any.example', None, 200), ('any.example:80', 'http://any.example', 200), ('any.example', 'http://evil', 403),
    ('any.example', 'null', 403),
  ):  # fmt: skip
    headers = {'host': host} | ({} if origin is None else {'origin': origin})
    assert client.post(_POST, json=_BODY, headers=headers).status_code == status
  client = client_of(stub, tokenizer, hosts=frozenset(['*']))
  for headers in ({'host': 'a', 'origin': 'http://b'}, {'host': 'a', 'origin': 'null'}, {'host': '['}):
    assert client.post(_POST, json=_BODY, headers=headers).status_code == 200


def _counts(text):
  counts = collections.defaultdict(dict)
  for name, label, value in re.findall(r'^spectr_jax_(\w+)\{(.*)\} (\S+)$', text, re.MULTILINE):
    counts[name][tuple(re.findall(r'"(.*?)"', label))] = float(value)
  return counts


def _check_sums(text):
  counts = _counts(text)
  for things in ('requests', 'continuations'):
    for (kind,), received in counts[f'{things}_received_total'].items():
      ended = sum(value for (own, _), value in counts[f'{things}_total'].items() if own == kind)
      assert received == ended + counts[f'{things}_in_progress'][kind,], (things, kind)
      assert counts[f'{things}_in_progress'][kind,] >= 0
  return counts


_FORM = {'response_format': {'type': 'json_object'}}
_CHAT = [{'role': 'user', 'content': 'owl'}]
# What is sent, and how it ends: the outcome of the request, and those of its continuations.
_TRAFFIC = [
  (_POST, _BODY, 'answered', ['answered']),
  (_POST, _BODY | {'n': 3, 'prompt': ['a', 'owl']}, 'answered', ['answered'] * 6),
  (_POST, _BODY | {'stream': True, 'n': 2}, 'answered', ['answered'] * 2),
  (_POST, _BODY | {'max_tokens': 0, 'echo': True}, 'answered', []),
  (_POST, _BODY | {'logprobs': 3, 'echo': True}, 'answered', ['answered']),
  (_POST, _BODY | {'top_p': 0}, 'refused', []), (_POST, _BODY | {'max_tokens': 10**6}, 'refused', []),
  (_POST, _BODY | {'model': 'other'}, 'refused', []), (_POST, _BODY | {'n': 16, 'prompt': ['a'] * 5}, 'refused', []),
  (_POST, b'{', 'refused', []), (_POST, b' ' * (2**22 + 1), 'refused', []),
  (_POST, {'prompt': [31, 1]}, 'failed', ['failed']), (_POST, {'prompt': [32, 1]}, 'failed', ['failed']),
  (_POST, {'prompt': [31, 1], 'stream': True}, 'failed', ['failed']),
  (_POST, {'prompt': [32], 'n': 2, 'stream': True}, 'failed', ['failed'] * 2),
  ('/v1/chat/completions', {'messages': _CHAT}, 'answered', ['answered']),
  ('/v1/chat/completions', {'messages': _CHAT, 'stream': True}, 'answered', ['answered']),
  ('/v1/chat/completions', {'messages': []}, 'refused', []), ('/v1/chat/completions', {}, 'refused', []),
]  # fmt: skip


def _asgi_scope(path, size):
  return {
    'type': 'http', 'method': 'POST', 'path': path, 'raw_path': path.encode(), 'query_string': b'', 'root_path': '',
    'headers': [(b'host', b'localhost'), (b'content-length', str(size).encode())], 'http_version': '1.1',
    'scheme': 'http', 'server': ('localhost', 80), 'client': ('localhost', 1), 'asgi': {'version': '3.0'},
  }  # fmt: skip


def _asgi(path, body, *, leave_after=None):
  """A scope, a `receive` and a `send` of a client, who may leave after so many messages."""
  scope = _asgi_scope(path, len(body))
  gone, messages = asyncio.Event(), [{'type': 'http.request', 'body': body, 'more_body': leave_after == -1}]
  if leave_after == 0:
    gone.set()

  async def receive():
    if messages:
      return messages.pop()
    if leave_after == -1:
      gone.set()
    await gone.wait()
    return {'type': 'http.disconnect'}

  sent = []

  async def send(message):
    sent.append(message)
    if leave_after is not None and len(sent) >= leave_after:
      gone.set()
      await asyncio.sleep(0)

  return scope, receive, send


def test_metrics_add_up_whatever_comes(stub, tokenizer, monkeypatch):
  monkeypatch.setattr(StubRows, 'seconds', 0.001)
  app, draws = make_app_of(stub, tokenizer), random.Random(0)
  expected = {'requests': collections.Counter(), 'continuations': collections.Counter()}
  stub.start()

  async def one(path, body, outcome, continuations, leave_after):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    await app(*_asgi(path, content, leave_after=leave_after))
    kind = 'chat' if 'chat' in path else 'completions'
    if leave_after is None:
      expected['requests'][kind, outcome] += 1
      expected['continuations'].update((kind, each) for each in continuations)
    _check_sums(TestClient(app).get('/metrics').text) if draws.random() < 0.05 else None

  async def crowd():
    chosen = [draws.choice(_TRAFFIC) for _ in range(60)] + _TRAFFIC
    await asyncio.gather(*(one(*each, None) for each in chosen))
    counts = _check_sums(stub.metrics.render(rows=0, queue=0))
    for things, own in expected.items():
      assert {pair: value for pair, value in counts[f'{things}_total'].items() if value} == own
      assert not any(counts[f'{things}_in_progress'].values())
    # Some leave: before the body is there, while they wait, and within a stream.
    await asyncio.gather(*(one(*each, draws.choice([-1, 0, 0, 1, 2])) for each in chosen + chosen))
    return expected

  asyncio.run(crowd())
  counts = _check_sums(stub.metrics.render(rows=0, queue=0))
  for things in ('requests', 'continuations'):
    assert not any(counts[f'{things}_in_progress'].values())
    assert counts[f'{things}_total']['completions', 'left'] > 0
  deadline = time.monotonic() + 20
  while not stub.is_idle and time.monotonic() < deadline:
    time.sleep(0.01)
  assert stub.is_idle  # whoever left has no row any more


def test_a_full_queue_and_an_end_are_said_and_counted(stub, tokenizer):
  client = client_of(stub, tokenizer)
  assert client.get('/health').status_code == 503  # nobody decodes
  stub.most_waiting = 1  # beside two rows
  stub._waiting += [Job([1], None, None, NEW, None, print) for _ in range(3)]
  full = client.post(_POST, json=_BODY)
  assert (full.status_code, stub.num_waiting) == (429, 3)
  assert int(full.headers['Retry-After']) > 0
  many = client.post(_POST, json=_BODY | {'n': 4})
  assert (many.status_code, many.json()['error']['param']) == (400, 'n')
  stub._waiting.clear()
  stub.stop()
  ended = client.post(_POST, json=_BODY)
  assert (ended.status_code, ended.json()['error']['message']) == (503, 'the server is ending')
  counts = _check_sums(client.get('/metrics').text)
  assert counts['requests_total']['completions', 'refused'] == 2
  assert counts['requests_total']['completions', 'failed'] == 1
  assert counts['continuations_total']['completions', 'refused'] == 2


def test_a_fault_in_a_handler_is_one_line(stub, tokenizer, monkeypatch, capsys):
  client = _client(stub, tokenizer)

  def fail(*_):
    raise KeyError('\x1b[2J')

  monkeypatch.setattr(Worker, 'submit', fail)
  response = client.post(_POST, json=_BODY)
  assert response.status_code == 500
  assert response.json()['error']['message'] == 'a fault of the server ended this request'
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: a request failed: KeyError')
  assert line.isprintable()
  assert _check_sums(client.get('/metrics').text)['requests_total']['completions', 'failed'] == 1


def test_a_body_that_does_not_come_is_not_waited_for(stub, tokenizer, monkeypatch):
  monkeypatch.setattr(gate, 'READ_SECONDS', 0.2)
  app, sent = make_app_of(stub, tokenizer), []

  async def trickle():
    await asyncio.sleep(0.05)
    return {'type': 'http.request', 'body': b'{', 'more_body': True}

  async def send(message):
    sent.append(message)

  async def ask(scope):
    await asyncio.wait_for(app(scope, trickle, send), 5)

  scope = _asgi_scope(_POST, 500)
  asyncio.run(ask(scope))
  asyncio.run(ask(scope | {'path': '/nowhere'}))
  starts = [message for message in sent if message['type'] == 'http.response.start']
  assert [message['status'] for message in starts] == [408, 404]
  assert all((b'connection', b'close') in message['headers'] for message in starts)
  assert _check_sums(stub.metrics.render(rows=0, queue=0))['requests_total']['completions', 'refused'] == 1


def test_what_is_too_long_is_refused_unread_and_nothing_else(stub, tokenizer, monkeypatch):
  longest = max(range(tokenizer.vocab_size), key=lambda index: len(tokenizer.decode([index])))
  text = tokenizer.decode([longest] * LONGEST)
  assert len(text) <= Served(stub, tokenizer, 'tiny', NEW).most_characters < 2_000
  client = _client(stub, tokenizer)

  def fail(*_):
    raise AssertionError('it was read')

  for name in ('encode_prompt', 'encode_prompts', 'encode_chat', 'encode'):
    monkeypatch.setattr(tokenizer, name, fail)
  text = 'owl ' * 10**6
  for path, body in (
    ('completions', {'prompt': text}),
    ('completions', {'prompt': ['owl', text]}),
    ('completions', {'prompt': 'owl', 'max_tokens': NEW + 1}),
    ('completions', {'prompt': ['owl'] * 64, 'n': 2}),
    ('completions', {'prompt': [1] * (LONGEST + 1)}),
    ('chat/completions', {'messages': [{'role': 'user', 'content': text}]}),
    ('chat/completions', {'messages': [{'role': 'user', 'content': text[:500]}] * 999}),
  ):
    response = client.post(f'/v1/{path}', json=body)
    assert response.status_code == 400, response.text
    assert response.json()['error']['param'] in ('prompt', 'messages', 'max_tokens', 'n')


def test_who_is_read_for_long_keeps_nobody_waiting(stub, tokenizer, monkeypatch):
  begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

  def encode_chat(messages, tools):
    del messages, tools
    begun.set()
    let_go.wait(5)
    ended.set()
    return [1]

  monkeypatch.setattr(tokenizer, 'encode_chat', encode_chat)
  with _client(stub, tokenizer) as client:
    asked = [
      threading.Thread(target=lambda: client.post('/v1/chat/completions', json={'messages': _CHAT})) for _ in range(3)
    ]
    for each in asked:
      each.start()
    try:
      assert begun.wait(20)
      assert client.get('/health').status_code == 200
      assert not ended.is_set()
    finally:
      let_go.set()
      for each in asked:
        each.join(20)


@pytest.fixture
def held(monkeypatch, tokenizer):
  """Makes an endpoint of so many rows and places, whose rounds wait for an event."""
  patch(monkeypatch)
  let_go, workers, step = threading.Event(), [], StubRows.step

  def wait(self):
    assert let_go.wait(20)
    return step(self)

  monkeypatch.setattr(StubRows, 'step', wait)

  def make(**sizes):
    workers.append(make_stub(tokenizer, **sizes))
    workers[0].start()
    return workers[0], make_app_of(workers[0], tokenizer), let_go

  yield make
  let_go.set()
  workers[0].stop()


async def _until(is_so):
  deadline = time.monotonic() + 20
  while not is_so():
    assert time.monotonic() < deadline
    await asyncio.sleep(0.005)


def _begin(app, body, path=_POST):
  """A request on its way, what was sent of it, and what lets its client go away."""
  scope, receive, send = _asgi(path, json.dumps(body).encode())
  gone, sent = asyncio.Event(), []

  async def receive_or_leave():
    message = asyncio.ensure_future(receive())
    left = asyncio.ensure_future(gone.wait())
    try:
      await asyncio.wait({message, left}, return_when=asyncio.FIRST_COMPLETED)
      return message.result() if message.done() else {'type': 'http.disconnect'}
    finally:
      message.cancel()
      left.cancel()

  async def keep(message):
    sent.append(message)
    await send(message)

  return asyncio.create_task(app(scope, receive_or_leave, keep)), sent, gone


@pytest.mark.parametrize('more', [{}, {'stream': True}, {'n': 3}, {'n': 3, 'stream': True}, {'prompt': ['owl', 'a']}])
def test_who_leaves_the_queue_frees_it_at_once(held, more):
  worker, app, let_go = held(batch_size=1, most_waiting=3)

  async def ask():
    first, *_ = _begin(app, _BODY)
    await _until(lambda: worker.num_rows == 1)
    size = more.get('n', 1) * len(more.get('prompt', 'x'))
    for _ in range(3):  # the queue is full again and again
      leavers = [_begin(app, _BODY | more) for _ in range(3 // size)]
      await _until(lambda: worker.num_waiting == 3 // size * size)
      refused = _begin(app, _BODY | {'n': 4 - 3 // size * size})
      await refused[0]
      assert refused[1][0]['status'] == 429
      for task, _, gone in leavers:
        gone.set()
        await task
      assert worker.num_waiting == 0
      text = worker.metrics.render(rows=worker.num_rows, queue=worker.num_waiting)
      assert 'spectr_jax_queue 0\n' in text
      assert _check_sums(text)['requests_in_progress']['completions',] == 1
    fifth, sent, _ = _begin(app, _BODY | {'n': 3})
    await _until(lambda: worker.num_waiting == 3)
    let_go.set()
    await asyncio.gather(first, fifth)
    assert sent[0]['status'] == 200

  asyncio.run(ask())


def test_who_leaves_while_a_form_is_compiled_frees_the_place(held, monkeypatch):
  let_go, num_begun = threading.Event(), []

  def compile_slowly(*_):
    num_begun.append(1)
    assert let_go.wait(20)
    return 'no'

  monkeypatch.setattr(compiling, '_compiled', compile_slowly)
  worker, app, _ = held(batch_size=1, most_waiting=3)

  async def ask():
    forms = [_BODY | {'structured_outputs': {'regex': 'a' * size}} for size in range(1, 19)]
    leavers = [_begin(app, form) for form in forms[:16]]
    await _until(lambda: num_begun)
    await _until(lambda: _counts(worker.metrics.render())['requests_received_total']['completions',] == 16)
    await asyncio.sleep(0.1)  # they are read
    refused = _begin(app, forms[16])
    await refused[0]
    assert refused[1][0]['status'] == 429
    for task, _, gone in leavers:
      gone.set()
      await task
    last = _begin(app, forms[17])
    await asyncio.sleep(0.1)
    let_go.set()
    await last[0]
    assert last[1][0]['status'] == 400  # it was compiled
    assert len(num_begun) == 2

  asyncio.run(ask())


def test_a_burst_fills_rows_and_queue(held):
  worker, app, let_go = held(batch_size=8, most_waiting=8)

  async def burst(number, **more):
    begun = [_begin(app, _BODY | more) for _ in range(number)]
    await _until(lambda: sum(bool(sent) for _, sent, _ in begun) + worker.num_held // more.get('n', 1) >= number)
    let_go.set()
    await asyncio.gather(*(task for task, *_ in begun))
    await _until(lambda: worker.is_idle)
    let_go.clear()
    return collections.Counter(sent[0]['status'] for _, sent, _ in begun)

  assert asyncio.run(burst(24)) == {200: 16, 429: 8}
  assert asyncio.run(burst(24, stream=True)) == {200: 16, 429: 8}
  assert asyncio.run(burst(9, n=2)) == {200: 8, 429: 1}
  assert asyncio.run(burst(16)) == {200: 16}


def test_a_lack_of_time_is_no_fault_of_a_schema(held, monkeypatch):
  answers = []

  def answer(*_, **__):
    error = answers.pop(0)
    if error is not None:
      raise error

  monkeypatch.setattr(compiling, 'compile_constraint', answer)
  worker, app, _ = held(batch_size=1, most_waiting=3)
  for path, body in ((_POST, _BODY), ('/v1/chat/completions', {'messages': _CHAT})):
    client, form = TestClient(app), {'structured_outputs': {'regex': 'a'}} if path == _POST else _FORM
    answers[:] = [ConstraintBusyError('it takes longer than 30 seconds'), MemoryError(), ValueError('no text'), None]
    for words in ('longer than 30 seconds', 'memory'):
      response = client.post(path, json=body | form)
      assert (response.status_code, response.json()['error']['type']) == (503, 'server_error')
      assert int(response.headers['Retry-After']) > 0
      assert words in response.json()['error']['message']
      assert response.json()['error']['param'] == [*form][0]
    for _ in range(2):  # what the schema forbids is kept
      response = client.post(path, json=body | form)
      assert (response.status_code, response.json()['error']['message']) == (400, 'no text')
    assert len(answers) == 1
  counts = _check_sums(worker.metrics.render())['requests_total']
  assert counts['completions', 'failed'] == counts['chat', 'failed'] == 2
