"""The server as a process: whom it listens to, and how it ends. Its rows need no model."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import threading
import time

import commands
import httpx
import pytest

from decode.serving.server import listen
from tests.serving.stub import BAD_POOL, serve

_BODY = {'prompt': 'owl', 'max_tokens': 12}


class _Server:
  def __init__(self, folder, *, host='127.0.0.1', seconds=0.0, keep_alive=75, **options):
    context = commands._fork_server()
    connection, other = context.Pipe()
    self._folder = pathlib.Path(folder)
    self.process = context.Process(target=serve, args=(other, str(folder), host, seconds, keep_alive, options))
    self.process.start()
    assert connection.poll(60)
    self.host, self.port = host, connection.recv()

  def connect(self):
    return socket.create_connection((self.host, self.port), 20)

  def send(self, number):
    os.kill(self.process.pid, number)

  def end(self, timeout=20):
    self.process.join(timeout)
    assert self.process.exitcode is not None, 'it has not ended'
    return self.process.exitcode, (self._folder / '2').read_text()


@pytest.fixture
def start(tmp_path):
  servers = []

  def start(**options):
    servers.append(_Server(tmp_path, **options))
    return servers[-1]

  yield start
  for each in servers:
    each.process.kill()


def _head(length, *lines, path='/v1/completions', method='POST'):
  return '\r\n'.join(
    [f'{method} {path} HTTP/1.1', 'Host: localhost', f'Content-Length: {length}', *lines, '', '']
  ).encode()


def _request(**more):
  body = json.dumps(_BODY | more).encode()
  return _head(len(body)) + body


def _answer(client):
  """The status and the body of a response, read to the end of its connection or its length."""
  read = b''
  while b'\r\n\r\n' not in read:
    part = client.recv(2**16)
    assert part, read
    read += part
  head, _, body = read.partition(b'\r\n\r\n')
  length = re.search(rb'content-length: (\d+)', head)
  while length is None or len(body) < int(length[1]):
    part = client.recv(2**16)
    if not part:
      break
    body += part
  return int(head.split()[1]), body


def test_it_serves_by_ipv6(start):
  server = start(host='::1', hosts=frozenset())
  response = httpx.post(f'http://[::1]:{server.port}/v1/completions', json=_BODY)
  assert response.status_code == 200
  assert len(response.json()['choices']) == 1


def test_hosts_that_are_none_are_one_line():
  unknown = '1.2.3.4.5', '256.1.1.1', '::g', '[::1]', 'no-such-name.invalid', 'a..b', 'a b', 'x' * 300, 'ü' * 70, ''
  for host in unknown:
    with pytest.raises(ValueError, match='cannot listen on') as caught:
      listen(host, 0)
    assert 'Unknown error' not in str(caught.value)
    assert '\n' not in str(caught.value)
  with pytest.raises(ValueError, match=r'192\.0\.2\.1:0: Cannot assign'):
    listen('192.0.2.1', 0)
  for host in ('127.0.0.1', '::1', 'localhost', '::'):
    listen(host, 0).close()


def test_refusals_reach_who_sends_much(start):
  server = start(api_key='secret')
  key = 'Authorization: Bearer secret'
  for size, lines, status in (
    (50_000_000, [key], 413), (50_000_000, [], 401), (2**22, [], 401), (2**22, [key, 'Origin: http://evil'], 403),
    (2**22, [key, key], 400),
  ):  # fmt: skip
    for more in ([], ['Connection: close'])[size > 2**22 :]:
      with server.connect() as client:
        client.sendall(_head(size, *lines, *more))
        client.sendall(b' ' * size)  # as clients do that read nothing before all is sent
        answered, body = _answer(client)
        assert answered == status
        assert json.loads(body)['error']['message']
  for path, method, status in (('/v1/models', 'POST', 405), ('/nowhere', 'POST', 404)):
    with server.connect() as client:
      client.sendall(_head(2**22, key, 'Connection: close', path=path, method=method) + b' ' * 2**22)
      assert _answer(client)[0] == status
  # In chunks, whose sum nobody knows before.
  with server.connect() as client:
    client.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: a\r\n{key}\r\nTransfer-Encoding: chunked\r\n\r\n'.encode())
    for _ in range(100):
      client.sendall(b'10000\r\n' + b' ' * 2**16 + b'\r\n')
    client.sendall(b'0\r\n\r\n')
    assert _answer(client)[0] == 413
  # Who asks first whether to send is told at once.
  with server.connect() as client:
    client.sendall(_head(10**9, key, 'Expect: 100-continue'))
    assert _answer(client)[0] == 413


def _is_counted(server, number, *, num_held=0):
  """Waits until so many requests were received, and so many continuations hold a row or wait for one."""

  def total(pattern):
    text = httpx.get(f'http://127.0.0.1:{server.port}/metrics').text
    return sum(map(int, re.findall(pattern, text)))

  deadline = time.monotonic() + 20
  for pattern, least in ((r'requests_received_total\{.*\} (\d+)', number), (r'_(?:rows|queue) (\d+)', num_held)):
    while total(pattern) < least and time.monotonic() < deadline:
      time.sleep(0.02)


def test_the_end_waits_for_no_half_request(start):
  server = start()
  parts = [
    b'POST /v1/comp', _head(500) + b'{"pr', _head(500), _head(10**7) + b'{', _head(500, 'Expect: 100-continue'),
    b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"pr\r\n',
  ]  # fmt: skip
  with contextlib.ExitStack() as stack:
    for part in parts:
      stack.enter_context(server.connect()).sendall(part)
    _is_counted(server, 5)
    begin = time.monotonic()
    server.send(signal.SIGTERM)
    code, err = server.end()
    assert 1 <= time.monotonic() - begin < 10
  assert (code, err) == (0, '')


def test_the_end_waits_for_answers(start):
  server = start(seconds=0.2)
  answers = []

  def ask(stream):
    with server.connect() as client:
      client.sendall(_request(stream=stream))
      answers.append(_answer(client))

  asked = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False, True, False)]
  for each in asked:
    each.start()
  _is_counted(server, 4, num_held=1)
  server.send(signal.SIGINT)
  code, err = server.end()
  assert code == 0
  assert re.fullmatch('ending once [1-4] answers? in progress (is|are) complete; a second signal .*\n', err)
  for each in asked:
    each.join(20)
  assert [status for status, _ in answers] == [200] * 4
  assert sum(b'[DONE]' in body for _, body in answers) == 2


@pytest.mark.parametrize('numbers', [(signal.SIGTERM,) * 2, (signal.SIGINT,) * 2, (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_ends_it_at_once(start, numbers):
  server = start(seconds=5)
  with server.connect() as client, server.connect() as half:
    client.sendall(_request(stream=True))
    half.sendall(_head(500) + b'{"pr')
    _is_counted(server, 2, num_held=1)
    server.send(numbers[0])
    time.sleep(0.5)
    assert server.process.is_alive()
    begin = time.monotonic()
    server.send(numbers[1])
    code, err = server.end()
    assert time.monotonic() - begin < 3
  assert code == 128 + numbers[1]
  said, *end = err.splitlines(keepends=True)
  assert re.fullmatch('ending once 1 answer in progress is complete; a second signal ends it at once\n', said)
  assert ''.join(end) == 'error: ended at once, answers that had begun are incomplete\n'


def test_idle_connections_are_closed_after_a_while(start):
  server = start(keep_alive=1)
  with server.connect() as client:
    for _ in range(2):
      client.sendall(_request())
      assert _answer(client)[0] == 200
      time.sleep(0.3)
    begin = time.monotonic()
    assert client.recv(1) == b''
    assert 0.4 < time.monotonic() - begin < 10


def test_a_thread_that_ends_ends_the_process(start):
  server = start()
  with server.connect() as client, server.connect() as half:
    half.sendall(_head(500) + b'{"pr')
    client.sendall(_request(prompt=[BAD_POOL]))
    assert _answer(client)[0] == 500
    code, err = server.end()
  assert code == 3
  assert 'Traceback' not in err
