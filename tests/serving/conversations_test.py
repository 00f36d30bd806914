"""What `benchmarks.serving --turns` asks and counts, at an endpoint that answers by hand."""

import asyncio
import collections
import http.server
import json
import threading
import time

import pytest

from benchmarks import serving

_PROMPTS = [f'prompt {number}' for number in range(12)]
_ANSWER, _WAIT = ['It', ' was', ' so.'], 0.05


class _Endpoint(http.server.BaseHTTPRequestHandler):
  asked: list[dict]
  counts_tokens = True

  def log_message(self, *_):
    pass

  def _begin(self, kind):
    self.send_response(200)
    self.send_header('Content-Type', kind)
    self.end_headers()

  def _write(self, *lines):
    for line in lines:
      self.wfile.write(f'{line}\n\n'.encode())

  def do_GET(self):
    self._begin('application/json')
    self._write(json.dumps({'data': [{'id': 'it'}]}))

  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    self.asked.append(request)
    deltas = [{'role': 'assistant', 'content': None}, *({'content': piece} for piece in _ANSWER), {}]
    head, *rest = (f'data: {json.dumps({"choices": [{"delta": delta}]})}' for delta in deltas)
    usage = {'prompt_tokens': len(request['messages']), 'completion_tokens': len(_ANSWER)}
    if self.counts_tokens:
      rest.append(f'data: {json.dumps({"choices": [], "usage": usage})}')
    self._begin('text/event-stream')
    self._write(': a comment', head)
    time.sleep(_WAIT)  # so the role alone is no first piece
    self._write(*rest, 'data: [DONE]')


@pytest.fixture
def endpoint():
  handler = type('Endpoint', (_Endpoint,), {'asked': []})
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield handler, f'http://127.0.0.1:{server.server_port}/v1'
  server.shutdown()
  server.server_close()


def _converse(url):
  sizes = {'num_clients': 2, 'seconds': 1.0, 'max_tokens': 16, 'num_turns': 3}
  return asyncio.run(serving.converse(url, _PROMPTS, **sizes))


def test_conversations_grow_and_are_counted(endpoint):
  handler, url = endpoint
  found = _converse(url)
  lengths = collections.Counter(len(request['messages']) for request in handler.asked)
  assert set(lengths) == {2, 4, 6}
  assert lengths[2] >= lengths[4] >= lengths[6] >= 2
  assert found['answers'] == len(handler.asked)
  assert found['prompt_tokens'] == sum(length * number for length, number in lengths.items())
  assert found['completion_tokens'] == len(_ANSWER) * len(handler.asked)
  for request in handler.asked:
    header, *turns = request['messages']
    assert header['role'] == 'system'
    assert all(prompt in header['content'] for prompt in _PROMPTS[:8])
    assert [turn['role'] for turn in turns] == (['user', 'assistant'] * 3)[: len(turns)]
    assert {turn['content'] for turn in turns[1::2]} <= {''.join(_ANSWER)}
    assert (request['model'], request['temperature'], request['max_tokens']) == ('it', 0, 16)
  first = found['first_seconds']
  assert _WAIT <= first['median'] <= first['p90'] < found['seconds']
  rate = found['completion_tokens'] / found['seconds']
  assert f'{rate:.1f} tokens/s' in serving.describe(found)[0]


def test_an_endpoint_that_does_not_count_is_refused(endpoint):
  handler, url = endpoint
  handler.counts_tokens = False
  with pytest.raises(ValueError, match='200, and does not count tokens'):
    _converse(url)


def test_an_endpoint_that_is_not_there_is_named():
  with pytest.raises(ValueError, match='^http://127.0.0.1:9/v1: .'):
    _converse('http://127.0.0.1:9/v1')
