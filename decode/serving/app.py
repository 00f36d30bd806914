"""The routes of the endpoint, as a Starlette application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from decode.serving.answer import Answer, Served
from decode.serving.faults import STARTING, RefusedError, RequestError, failure, refusing
from decode.serving.gate import Body, Gate
from decode.serving.protocol import check_model, parse
from spectr_jax.io.untrusted import one_line, parse_json

_T = TypeVar('_T')


def _parsed(body: bytes) -> Any:
  try:
    text = body.decode('utf-8')
  except UnicodeDecodeError as error:
    raise RefusedError(f'the body is not UTF-8: {error.reason} at byte {error.start}') from error
  with refusing(None):
    return parse_json(text, 'the body')


def _check_encoding(request: Request) -> None:
  for name in ','.join(request.headers.getlist('content-encoding')).split(','):
    if name.strip().lower() not in ('', 'identity'):
      said = f'Content-Encoding {one_line(name.strip(), 80)} is not read here: send the body as it is'
      raise RefusedError(said, status=415)


async def _in_thread(served: Served, function: Callable[[], _T]) -> _T:
  """What a function returns that may take longer than other requests should wait."""
  return await asyncio.get_running_loop().run_in_executor(served.threads, function)


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
  def event(content: Any) -> str:
    return f'data: {json.dumps(content, ensure_ascii=False)}\n\n'

  try:
    async for choice, piece in answer.pieces():
      yield event(answer.chunk(choice, piece))
    answer.count_prompts()
    if answer.request.has_usage:
      yield event(answer.head(is_chunk=True) | {'choices': [], 'usage': answer.usage()})
    yield 'data: [DONE]\n\n'
  except (asyncio.CancelledError, GeneratorExit):
    raise
  except BaseException as error:  # a panic of the tokenizers is no Exception
    scope['outcome'] = 'failed'
    yield event(failure(error).body)
  finally:
    answer.close()


async def _until_gone(request: Request) -> None:
  while (await request.receive())['type'] != 'http.disconnect':
    pass


async def _unless_gone(request: Request, wanted: Coroutine[Any, Any, _T]) -> _T:
  """What is waited for; a `ClientDisconnect` ends it if the client goes away before."""
  waiting, gone = asyncio.create_task(wanted), asyncio.create_task(_until_gone(request))
  try:
    await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
      raise ClientDisconnect
    return waiting.result()
  finally:
    waiting.cancel()
    gone.cancel()


async def _whole(answer: Answer, request: Request) -> Response:
  """The response that is not streamed; whoever goes away before frees its rows."""
  try:
    await _unless_gone(request, answer.finish())
    return await _in_thread(answer.served, lambda: JSONResponse(answer.whole()))
  finally:
    answer.close()


class Front:
  """The application from a server's first moment on. Until there is an `app`, everybody hears that it is starting."""

  def __init__(self):
    self.app: ASGIApp | None = None

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if self.app is not None:
      await self.app(scope, receive, send)
      return
    await Body(Headers(scope=scope), receive).drain()
    is_health = scope['path'] == '/health'
    said = PlainTextResponse('starting\n', 503, STARTING.headers) if is_health else STARTING.response()
    await said(scope, receive, send)


def make_app(served: Served) -> Starlette:
  worker, own_model = served.worker, {'id': served.name, 'object': 'model', 'created': 0, 'owned_by': 'spectr_jax'}

  async def complete(request: Request) -> Response:
    loop, is_chat = asyncio.get_running_loop(), request.scope['path'].endswith('/chat/completions')
    _check_encoding(request)
    body = await request.body()

    asked = await _in_thread(served, lambda: parse(_parsed(body), is_chat=is_chat, model=served.name))
    is_decoded = asked.max_tokens != 0
    asked_for, words = (served.constraint_of(asked), asked.bad_words) if is_decoded else (None, ())
    after = served.constraint_after if asked.constraint_after is None else asked.constraint_after
    compiling = served.compiler.compile(
      asked_for, served.tokenizer, worker.vocab_size, after=after or None, bad_words=words
    )
    constraint = await _unless_gone(request, compiling)

    def submitted() -> Answer:
      answer = Answer(served, asked, constraint)
      answer.submit(loop)
      return answer

    answer = await _in_thread(served, submitted)
    return _Stream(answer, request.scope) if answer.request.is_streamed else await _whole(answer, request)

  async def responses(request: Request) -> Response:
    raise RefusedError(
      'there is no /v1/responses: let the client use chat completions, such as OpenAIChatModel of pydantic-ai, or'
      " set_default_openai_api('chat_completions') of openai-agents",
      status=404,
    )

  async def models(request: Request) -> Response:
    del request
    return JSONResponse({'object': 'list', 'data': [own_model]})

  async def model(request: Request) -> Response:
    check_model(request.path_params['name'], served.name)
    return JSONResponse(own_model)

  async def health(request: Request) -> Response:
    del request
    return PlainTextResponse('ok\n') if worker.is_alive else PlainTextResponse('the decoding thread has ended\n', 503)

  async def metrics(request: Request) -> Response:
    del request
    text = worker.metrics.render(rows=worker.num_rows, queue=worker.num_waiting, prefix_bytes=worker.prefix_bytes)
    return PlainTextResponse(text, media_type='text/plain; version=0.0.4')

  async def unknown(request: Request, error: HTTPException) -> Response:
    said = f'there is no {request.method} {request.scope["path"]}'
    # A wrong method has a header that names the right ones.
    return RequestError(said, error.status_code, 'invalid_request_error', headers=error.headers).response()

  async def refused(request: Request, error: RequestError) -> Response:
    del request
    return error.response()

  async def gone(request: Request, error: ClientDisconnect) -> Response:
    del request, error
    return Response(status_code=499)

  routes = [
    Route('/v1/models', models),
    Route('/v1/models/{name:path}', model),
    Route('/v1/completions', complete, methods=['POST']),
    Route('/v1/chat/completions', complete, methods=['POST']),
    Route('/v1/responses', responses, methods=['POST']),
    Route('/health', health),
    Route('/metrics', metrics),
  ]
  handlers: Any = {HTTPException: unknown, RequestError: refused, ClientDisconnect: gone}
  app = Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Gate, served=served)])
  app.router.redirect_slashes = False  # their address would be the one that the client named
  return app
