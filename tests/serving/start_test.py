"""A server from its first moment on, and constraints that take long: who hears what, and in which order."""

import concurrent.futures
import threading

import commands
import httpx
import pytest

from decode.serving import compiling
from decode.serving.app import Front
from decode.serving.server import Server, address_of, listen
from spectr_jax import Constraint
from tests.serving.stub import LONGEST, NEW, client_of, make_app_of, make_worker, running

_SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'null'}}, 'required': ['a']}
_FORM = {'response_format': {'type': 'json_schema', 'json_schema': {'name': 'it', 'schema': _SCHEMA}}}


def test_a_server_says_that_it_is_starting(stub, tokenizer):
  front, sock = Front(), listen('127.0.0.1', 0)
  server = Server(front, sock, keep_alive=5)
  address = f'http://{address_of(sock)}'
  try:
    health = httpx.get(f'{address}/health')
    assert (health.status_code, health.text) == (503, 'starting\n')
    for method, path, body in (
      ('POST', '/v1/completions', {'prompt': 'owl'}), ('POST', '/v1/chat/completions', {'prompt': 'x' * 10**6}),
      ('GET', '/v1/models', None), ('GET', '/nowhere', None),
    ):  # fmt: skip
      response = httpx.request(method, address + path, json=body)
      assert (response.status_code, response.headers['retry-after']) == (503, '2')
      assert response.json()['error']['message'] == 'the server is starting: try again in 2 s'
    stub.start()
    front.app = make_app_of(stub, tokenizer)
    assert httpx.get(f'{address}/health').text == 'ok\n'
    assert httpx.post(f'{address}/v1/completions', json={'prompt': 'owl'}).status_code == 200
  finally:
    server.should_exit = True
    server._thread.join(20)
  assert not server._thread.is_alive()


def test_the_longest_prompt_may_fill_the_caches(models, tokenizer):
  worker = make_worker(models, tokenizer, batch_size=1, longest=LONGEST + NEW - 1)
  worker.compile(lambda *_: None)
  with running(worker), client_of(worker, tokenizer, together=LONGEST + NEW) as client:
    body = {'prompt': [1] * (LONGEST + NEW - 1), 'max_tokens': 1}
    assert client.post('/v1/completions', json=body).json()['usage']['completion_tokens'] == 1


def test_a_schema_that_compiles_holds_nobody_up(stub, tokenizer, monkeypatch):
  begun, goes_on, order = threading.Event(), threading.Event(), []

  def compile_slowly(tokenizer, *, vocab_size, **_):
    begun.set()
    assert goes_on.wait(60)
    return Constraint([0] * vocab_size, [[0]], [True])

  monkeypatch.setattr(compiling, 'compile_constraint', compile_slowly)
  stub.start()
  client = client_of(stub, tokenizer)

  def ask(name, **more):
    response = client.post('/v1/completions', json={'prompt': 'owl'} | more)
    assert response.status_code == 200, response.text
    order.append(name)

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    slow = [pool.submit(ask, 'schema', **_FORM), pool.submit(ask, 'choice', structured_outputs={'choice': ['a']})]
    assert begun.wait(60)
    for name, more in (('plain', {}), ('streamed', {'stream': True}), ('logprobs', {'logprobs': 1})):
      ask(name, **more)
    assert client.get('/health').text == 'ok\n'
    assert not any(each.done() for each in slow)
    goes_on.set()
    for each in slow:
      each.result(60)
  assert order[:3] == ['plain', 'streamed', 'logprobs']
  assert sorted(order[3:]) == ['choice', 'schema']


@pytest.mark.slow
def test_the_command_answers_while_it_starts():
  with commands.socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  process = commands.start(
    'decode.serve', '--target=pretrained/draft', '--method=autoregressive', '--batch_size=1', f'--port={port}'
  )
  heard = []
  try:
    while process.poll() is None and heard[-1:] != ['ok\n']:
      try:
        said = httpx.get(f'http://127.0.0.1:{port}/health', timeout=60).text
      except httpx.ConnectError:  # it does not listen yet
        continue
      if said not in heard:
        heard.append(said)
    assert heard == ['starting\n', 'ok\n']
    assert process.stdout.readline() == f'serving draft at http://127.0.0.1:{port}/v1, 1 rows\n'
  finally:
    process.terminate()
    _, err = process.communicate(timeout=60)
  assert err.splitlines()[0] == '[0/7] compiling; /health says starting'
