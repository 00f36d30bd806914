"""What every request passes before it is answered: it is counted, and whoever must not ask is refused.

A refusal reaches its client: what is left of the body is read first, within a bound, since most clients read nothing
before they have sent all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import urllib.parse
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.printable import printable
from decode.serving.answer import Served
from decode.serving.faults import failure
from decode.serving.metrics import KINDS, Metrics
from spectr_jax.io.foreign import one_line

READ_SECONDS = 30.0  # for a body
_OPEN = '/health'  # needs no key


def error_response(
  message: str,
  status: int,
  *,
  kind: str,
  field: str | None = None,
  code: str | None = None,
  headers: Mapping[str, str] | None = None,
) -> JSONResponse:
  """An error in the form of the interface, printable throughout.

  Args:
    message: What was wrong.
    status: The status.
    kind: The type of error.
    field: The field that is wrong, or None.
    code: The interface's name of the error, or None.
    headers: Further headers.
  """
  param = None if field is None else one_line(field, 80)
  said = {'message': printable(message[:500]), 'type': kind, 'param': param, 'code': code}
  return JSONResponse({'error': said}, status, headers=headers)


def is_address(name: str) -> bool:
  """Whether a name is an address of IPv4 or IPv6."""
  try:
    return bool(ipaddress.ip_address(name))
  except ValueError:
    return False


def is_loopback(name: str) -> bool:
  """Whether a name or an address is that of this machine for itself."""
  if is_address(name):
    return ipaddress.ip_address(name).is_loopback
  return name == 'localhost' or name.endswith('.localhost')


def host_of(authority: str) -> str | None:
  """The name in `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`, in small letters; None if it is none of them."""
  try:
    parts = urllib.parse.urlsplit(f'//{authority}')
    _ = parts.port
  except ValueError:
    return None
  is_plain = not (parts.path or parts.query or parts.fragment or '@' in authority)
  return parts.hostname.removesuffix('.') if is_plain and parts.hostname else None


class _Body:
  """The body of a request, as far as it was read; reading it has a time limit."""

  def __init__(self, headers: Headers, receive: Receive):
    self._receive = receive
    self._deadline = asyncio.get_running_loop().time() + READ_SECONDS
    self._is_asked_for = headers.get('expect', '').lower() != '100-continue'  # else the client sends when it is read
    self._is_over = 'transfer-encoding' not in headers and headers.get('content-length', '0') == '0'

  async def receive(self) -> Message:
    """What comes next.

    Raises:
      TimeoutError: The body did not come in time.
    """
    self._is_asked_for = True
    async with asyncio.timeout_at(None if self._is_over else self._deadline):
      message = await self._receive()
    self._is_over |= not message.get('more_body', False)
    return message

  async def drain(self) -> bool:
    """Reads what is left and forgets it; returns whether all of it came."""
    with contextlib.suppress(TimeoutError):
      while self._is_asked_for and not self._is_over:
        await self.receive()
    return self._is_over


class _Count:
  """A request in the metrics; those of other kinds are not counted."""

  def __init__(self, metrics: Metrics, kind: str | None):
    self._metrics, self._kind = metrics, kind
    if kind is not None:
      metrics.add('requests_received_total', label=f'kind="{kind}"')

  def end(self, outcome: str) -> None:
    """Counts its outcome; only the first one counts."""
    if self._kind is not None:
      self._metrics.add('requests_total', label=f'kind="{self._kind}",outcome="{outcome}"')
    self._kind = None


def _outcome(status: int) -> str:
  return 'answered' if status < 400 else 'left' if status == 499 else 'refused' if status < 500 else 'failed'


class Gate:
  """The middleware. A handler that has to say that a stream failed sets `outcome` in the scope."""

  def __init__(self, app: ASGIApp, served: Served):
    self._app, self._served = app, served

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope['type'] != 'http':
      await self._app(scope, receive, send)
      return
    headers = Headers(scope=scope)
    count, body = _Count(self._served.worker.metrics, KINDS.get(scope['path'])), _Body(headers, receive)
    status = 0

    async def answer(message: Message) -> None:
      nonlocal status
      if message['type'] == 'http.response.start':
        status = message['status']
        if not await body.drain():
          message['headers'] = [*message['headers'], (b'connection', b'close')]
      elif not message.get('more_body', False):
        count.end(scope.get('outcome') or _outcome(status))  # before the client can look
      await send(message)

    try:
      response = self._refusal(headers, scope['path'])
      await (self._app if response is None else response)(scope, body.receive, answer)
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # a panic of the tokenizers is no Exception
      response = error_response(str(failure(error)), 500, kind='server_error')
      count.end('failed')
      if not status:
        await response(scope, body.receive, answer)
    finally:
      count.end('left')

  def _refusal(self, headers: Headers, path: str) -> Response | None:
    """The response to whoever must not ask, or None."""
    served, host = self._served, host_of(headers.get('host', ''))
    if served.hosts is not None and 'host' in headers and not self._is_known(host):
      return error_response(
        f'the Host {one_line(headers["host"], 80)} is not served here: --allowed_hosts names those that are',
        403,
        kind='permission_error',
      )
    for origin in headers.getlist('origin'):
      name = host_of(origin.partition('://')[2])
      if not (self._is_known(name) if served.hosts is not None else name is not None and name == host):
        return error_response(
          f'pages of {one_line(origin, 80)} may not ask here: --allowed_hosts names those that may',
          403,
          kind='permission_error',
        )
    given = headers.getlist('authorization')
    if len(given) > 1:
      return error_response('there are several Authorization headers', 400, kind='invalid_request_error')
    if served.api_key is None or path == _OPEN or _is_key(served.api_key, ''.join(given)):
      return None
    return error_response(
      'the key is missing or wrong', 401, kind='authentication_error', headers={'WWW-Authenticate': 'Bearer'}
    )

  def _is_known(self, name: str | None) -> bool:
    hosts = self._served.hosts or ()
    return '*' in hosts or (name is not None and (is_loopback(name) or name in hosts))


def _is_key(key: str, given: str) -> bool:
  scheme, _, own = given.partition(' ')
  return scheme.lower() == 'bearer' and hmac.compare_digest(own.strip(' ').encode('utf-8', 'replace'), key.encode())
