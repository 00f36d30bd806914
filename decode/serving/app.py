"""The routes of the endpoint, as a Starlette application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decode.serving.answer import Answer, Choice, Served
from decode.serving.faults import EndedError, FailedError, FullError, failure
from decode.serving.gate import READ_SECONDS, Gate, error_response
from decode.serving.protocol import RefusedError, check_model, parse
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.io.foreign import parse_json

_MOST_BYTES = 2**22  # of a body
_RETRY_SECONDS = 2  # that a client is asked to wait for


_T = TypeVar('_T')


def _refused(error: RefusedError) -> JSONResponse:
  return error_response(str(error), error.status, kind='invalid_request_error', field=error.field, code=error.code)


async def _body(request: Request) -> bytearray:
  """The body, of bounded size."""
  found = bytearray()

  def check(size: int) -> None:
    if size > _MOST_BYTES:
      raise RefusedError(f'the body is larger than {_MOST_BYTES:,} bytes', status=413)

  check(int(request.headers.get('content-length', 0)))
  try:
    async for part in request.stream():
      found += part
      check(len(found))
  except TimeoutError as error:
    raise RefusedError(f'the body did not come within {READ_SECONDS:g} seconds', status=408) from error
  return found


def _parsed(body: bytearray) -> Any:
  try:
    return parse_json(body.decode('utf-8'), 'the body')
  except UnicodeDecodeError as error:
    raise RefusedError(f'the body is not UTF-8: {error.reason} at byte {error.start}') from error
  except ValueError as error:
    raise RefusedError(str(error)) from error


async def _in_thread(served: Served, function: Callable[[], _T]) -> _T:
  """What a function returns that may take longer than other requests should wait."""
  return await asyncio.get_running_loop().run_in_executor(served.threads, function)


def _sent(content: Any) -> str:
  return f'data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n'


class _Stream(StreamingResponse):
  """A stream of events. Whoever goes away ends it, and frees its rows."""

  def __init__(self, answer: Answer, scope: Scope):
    super().__init__(_events(answer, scope), media_type='text/event-stream', headers={'Cache-Control': 'no-store'})
    self._answer = answer

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:  # also where no event was asked for
      self._answer.close()


async def _events(answer: Answer, scope: Scope) -> AsyncIterator[str]:
  pieces: asyncio.Queue = asyncio.Queue()

  async def follow(choice: Choice) -> None:
    try:
      async for piece in answer.pieces_of(choice):
        await pieces.put(answer.chunk(choice, piece))
      await pieces.put(None)
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # a panic of the tokenizers is no Exception
      await pieces.put(error)

  tasks = [asyncio.create_task(follow(choice)) for choice in answer.choices]
  left = len(tasks)
  try:
    while left:
      found = await pieces.get()
      if isinstance(found, BaseException):
        scope['outcome'] = 'failed'
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
    answer.close()
    for task in tasks:
      task.cancel()


def _failed(error: BaseException) -> JSONResponse:
  if isinstance(error, FullError):
    wait = {'Retry-After': str(_RETRY_SECONDS)}
    return error_response(
      f'too many requests: try again in {_RETRY_SECONDS} s', 429, kind='rate_limit_error', headers=wait
    )
  if not isinstance(error, FailedError | EndedError):
    error = failure(error)
  said = f'this continuation failed: {error}' if isinstance(error, NotFiniteError) else str(error)
  return error_response(said, 503 if isinstance(error, EndedError) else 500, kind='server_error')


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
    return await _in_thread(answer.served, lambda: JSONResponse(answer.whole()))
  except asyncio.CancelledError:
    raise
  except BaseException as error:
    return _failed(error)
  finally:
    answer.close()
    waiting.cancel()
    gone.cancel()


def make_app(served: Served) -> Starlette:
  """The application.

  Args:
    served: What it serves.
  """

  async def complete(request: Request) -> Response:
    loop, is_chat = asyncio.get_running_loop(), request.scope['path'].endswith('/chat/completions')

    def submitted(body: bytearray) -> Answer:
      answer = Answer(served, parse(_parsed(body), is_chat=is_chat, model=served.name))
      answer.submit(loop)
      return answer

    try:
      body = await _body(request)
      answer = await _in_thread(served, lambda: submitted(body))
    except RefusedError as error:
      return _refused(error)
    except (FullError, EndedError) as error:
      return _failed(error)
    except ClientDisconnect:
      return Response(status_code=499)
    return _Stream(answer, request.scope) if answer.asked.is_streamed else await _whole(answer, request)

  async def models(request: Request) -> Response:
    del request
    return JSONResponse({'object': 'list', 'data': [_model(served)]})

  async def model(request: Request) -> Response:
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
    # A wrong method has a header that names the right ones.
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
    said = f'there is no {request.method} {request.scope["path"]}'
    return error_response(said, status, kind='invalid_request_error', headers=headers)

  routes = [
    Route('/v1/models', models),
    Route('/v1/models/{name:path}', model),
    Route('/v1/completions', complete, methods=['POST']),
    Route('/v1/chat/completions', complete, methods=['POST']),
    Route('/health', health),
    Route('/metrics', metrics),
  ]
  app = Starlette(
    routes=routes, exception_handlers={404: unknown, 405: unknown}, middleware=[Middleware(Gate, served=served)]
  )
  app.router.redirect_slashes = False  # their address would be the one that the client named
  return app


def _model(served: Served) -> dict[str, Any]:
  return {'id': served.name, 'object': 'model', 'created': 0, 'owned_by': 'spectr_jax'}
