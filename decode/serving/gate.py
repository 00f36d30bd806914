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

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode.serving.answer import Served
from decode.serving.counters import KINDS
from decode.serving.faults import RefusedError, RequestError, failure
from spectr_jax.io.untrusted import one_line

READ_SECONDS = 30.0  # for a body
_MOST_BYTES = 2**22  # of a body
_OPEN = '/health'  # needs no key


def is_address(name: str) -> bool:
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


class Body:
  """The body of a request, as far as it was read; its size is bounded, and the time that it may take."""

  def __init__(self, headers: Headers, receive: Receive):
    self._receive = receive
    self._deadline = asyncio.get_running_loop().time() + READ_SECONDS
    self._size, self._announced = 0, int(headers.get('content-length', 0))
    self._is_asked_for = headers.get('expect', '').lower() != '100-continue'  # else the client sends when it is read
    self._is_over = 'transfer-encoding' not in headers and not self._announced

  async def receive(self) -> Message:
    """What comes next; a `RefusedError` if the body is too large, or did not come in time."""
    self._check_size(self._announced)
    try:
      message = await self._next()
    except TimeoutError as error:
      raise RefusedError(f'the body did not come within {READ_SECONDS:g} seconds', status=408) from error
    self._size += len(message.get('body', b''))
    self._check_size(self._size)
    return message

  def _check_size(self, size: int) -> None:
    if size > _MOST_BYTES:
      raise RefusedError(f'the body is larger than {_MOST_BYTES:,} bytes', status=413)

  async def _next(self) -> Message:
    self._is_asked_for = True
    async with asyncio.timeout_at(None if self._is_over else self._deadline):
      message = await self._receive()
    self._is_over |= not message.get('more_body', False)
    return message

  async def drain(self) -> bool:
    """Reads what is left and forgets it; returns whether all of it came."""
    with contextlib.suppress(TimeoutError):
      while self._is_asked_for and not self._is_over:
        await self._next()
    return self._is_over


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
    body, metrics, status = Body(headers, receive), self._served.worker.metrics, 0
    kind = KINDS.get(scope['path'])  # requests of others are not counted
    if kind is not None:
      metrics.add('requests_received_total', kind=kind)

    def end(outcome: str) -> None:
      """Counts the outcome; only the first one counts."""
      nonlocal kind
      if kind is not None:
        metrics.add('requests_total', kind=kind, outcome=outcome)
      kind = None

    async def answer(message: Message) -> None:
      nonlocal status
      if message['type'] == 'http.response.start':
        status = message['status']
        if not await body.drain():
          message['headers'] = [*message['headers'], (b'connection', b'close')]
      elif not message.get('more_body', False):
        end(scope.get('outcome') or _outcome(status))  # before the client can look
      await send(message)

    try:
      self._check_host(headers)
      self._check_key(headers, scope['path'])
      await self._app(scope, body.receive, answer)
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # a panic of the tokenizers is no Exception
      told = failure(error)
      if status:
        end('failed')
      else:
        await told.response()(scope, body.receive, answer)
    finally:
      end('left')

  def _check_host(self, headers: Headers) -> None:
    """Refuses requests to other hosts than those that are served, and those of others' pages."""
    hosts, host = self._served.hosts, host_of(headers.get('host', ''))
    if hosts is not None and 'host' in headers and not self._is_known(host):
      name = one_line(headers['host'], 80)
      message = f'the Host {name} is not served here: --allowed_hosts names those that are'
      raise RequestError(message, 403, 'permission_error')
    for origin in headers.getlist('origin'):
      name = host_of(origin.partition('://')[2])
      if not (self._is_known(name) if hosts is not None else name is not None and name == host):
        message = f'pages of {one_line(origin, 80)} may not ask here: --allowed_hosts names those that may'
        raise RequestError(message, 403, 'permission_error')

  def _is_known(self, name: str | None) -> bool:
    hosts = self._served.hosts or ()
    return '*' in hosts or (name is not None and (is_loopback(name) or name in hosts))

  def _check_key(self, headers: Headers, path: str) -> None:
    key, given = self._served.api_key, headers.getlist('authorization')
    if len(given) > 1:
      raise RefusedError('there are several Authorization headers')
    scheme, _, own = ''.join(given).partition(' ')
    is_right = scheme.lower() == 'bearer' and hmac.compare_digest(
      own.strip(' ').encode('utf-8', 'replace'), (key or '').encode()
    )
    if key is not None and path != _OPEN and not is_right:
      wanted = {'WWW-Authenticate': 'Bearer'}
      raise RequestError('the key is missing or wrong', 401, 'authentication_error', headers=wanted)
