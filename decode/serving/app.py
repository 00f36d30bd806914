"""The routes of the endpoint, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from common.printable import printable
from decode.serving.answer import Answer, Choice, Served
from decode.serving.protocol import RefusedError, check_model, parse
from decode.serving.worker import EndedError, FullError
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.io.foreign import parse_json

_MOST_BYTES = 2**22  # of a body
_RETRY_SECONDS = 2  # that a client is asked to wait for


def _error(
  message: str, status: int, *, kind: str, field: str | None = None, code: str | None = None, **headers: str
) -> JSONResponse:
  said = {'message': printable(message)[:500], 'type': kind, 'param': field, 'code': code}
  return JSONResponse({'error': said}, status, headers=headers)


def _refused(error: RefusedError) -> JSONResponse:
  return _error(str(error), error.status, kind='invalid_request_error', field=error.field, code=error.code)


async def _body(request: Request) -> Any:
  """The parsed body, of bounded size."""
  found = bytearray()
  async for part in request.stream():
    found += part
    if len(found) > _MOST_BYTES:
      raise RefusedError(f'the body is larger than {_MOST_BYTES:,} bytes', status=413)
  try:
    return parse_json(found.decode('utf-8'), 'the body')
  except UnicodeDecodeError as error:
    raise RefusedError(f'the body is not UTF-8: {error.reason} at byte {error.start}') from error
  except ValueError as error:
    raise RefusedError(str(error)) from error


def _allowed(served: Served, request: Request) -> bool:
  if served.api_key is None:
    return True
  given = request.headers.get('authorization', '')
  return hmac.compare_digest(given.encode('utf-8', 'replace'), f'Bearer {served.api_key}'.encode())


def _sent(content: Any) -> str:
  return f'data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n'


async def _stream(answer: Answer) -> AsyncIterator[str]:
  """The events of a stream. Whoever goes away ends it, and frees its rows."""
  pieces: asyncio.Queue = asyncio.Queue()

  async def follow(choice: Choice) -> None:
    try:
      async for piece in answer.pieces_of(choice):
        await pieces.put(answer.chunk(choice, piece))
      await pieces.put(None)
    except Exception as error:
      await pieces.put(error)

  tasks = [asyncio.create_task(follow(choice)) for choice in answer.choices]
  left = len(tasks)
  try:
    while left:
      found = await pieces.get()
      if isinstance(found, Exception):
        yield _sent(json.loads(bytes(_failed(found).body)))
        return
      if found is None:
        left -= 1
        continue
      yield _sent(found)
    answer.served.worker.metrics.add('prompt_tokens_total', answer.usage()['prompt_tokens'])
    if answer.asked.has_usage:
      yield _sent(answer.head(is_chunk=True) | {'choices': [], 'usage': answer.usage()})
    yield _sent('[DONE]')
  finally:
    answer.cancel()
    for task in tasks:
      task.cancel()


def _failed(error: Exception) -> JSONResponse:
  if isinstance(error, NotFiniteError):
    return _error(f'this continuation failed: {error}', 500, kind='server_error')
  if isinstance(error, FullError):
    wait = {'Retry-After': str(_RETRY_SECONDS)}
    return _error(f'too many requests: try again in {_RETRY_SECONDS} s', 429, kind='rate_limit_error', **wait)
  return _error(str(error) or type(error).__name__, 503, kind='server_error')


async def _until_gone(request: Request) -> None:
  while not await request.is_disconnected():
    await asyncio.sleep(0.2)


async def _whole(answer: Answer, request: Request) -> Response:
  """The response that is not streamed; whoever goes away before frees its rows."""
  waiting = asyncio.create_task(answer.finish())
  gone = asyncio.create_task(_until_gone(request))
  try:
    await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
      return Response(status_code=499)
    waiting.result()
    return JSONResponse(answer.whole())
  finally:
    answer.cancel()
    waiting.cancel()
    gone.cancel()


def make_app(served: Served) -> Starlette:
  """The application.

  Args:
    served: What it serves.
  """

  async def complete(request: Request) -> Response:
    if not _allowed(served, request):
      return _error('the key is missing or wrong', 401, kind='authentication_error')
    try:
      body = await _body(request)
      answer = Answer(served, parse(body, is_chat=request.url.path.endswith('/chat/completions'), model=served.name))
      answer.submit()
    except RefusedError as error:
      return _refused(error)
    except (FullError, EndedError) as error:
      served.worker.metrics.add('requests_total', label='outcome="refused"')
      return _failed(error)
    except ClientDisconnect:
      return Response(status_code=499)
    if answer.asked.is_streamed:
      return StreamingResponse(_stream(answer), media_type='text/event-stream', headers={'Cache-Control': 'no-store'})
    try:
      return await _whole(answer, request)
    except Exception as error:
      return _failed(error)

  async def models(request: Request) -> Response:
    if not _allowed(served, request):
      return _error('the key is missing or wrong', 401, kind='authentication_error')
    return JSONResponse({'object': 'list', 'data': [_model(served)]})

  async def model(request: Request) -> Response:
    if not _allowed(served, request):
      return _error('the key is missing or wrong', 401, kind='authentication_error')
    try:
      check_model(request.path_params['name'], served.name)
    except RefusedError as error:
      return _refused(error)
    return JSONResponse(_model(served))

  async def health(request: Request) -> Response:
    del request
    worker = served.worker
    return PlainTextResponse('ok\n') if worker.is_alive else PlainTextResponse('the decoding thread has ended\n', 503)

  async def metrics(request: Request) -> Response:
    del request
    worker = served.worker
    text = worker.metrics.render(rows=worker.num_rows, queue=worker.num_waiting)
    return PlainTextResponse(text, media_type='text/plain; version=0.0.4')

  async def unknown(request: Request, error: Exception) -> Response:
    del error
    return _error(f'there is no {request.method} {request.url.path}', 404, kind='invalid_request_error')

  routes = [
    Route('/v1/models', models),
    Route('/v1/models/{name:path}', model),
    Route('/v1/completions', complete, methods=['POST']),
    Route('/v1/chat/completions', complete, methods=['POST']),
    Route('/health', health),
    Route('/metrics', metrics),
  ]
  return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def _model(served: Served) -> dict[str, Any]:
  return {'id': served.name, 'object': 'model', 'created': 0, 'owned_by': 'spectr_jax'}
