"""Why a request gets no answer, as its client hears it. What is wrong with a program is told on stderr alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse

from common.command_line import print_error
from common.printable import printable
from spectr_jax import NotFiniteError
from spectr_jax.io.untrusted import first_line, one_line

_RETRY_SECONDS = 2  # that a client is asked to wait for


class RequestError(Exception):
  """What a client hears in place of an answer: a status, and the interface's type, field and name of the error."""

  def __init__(
    self,
    message: str,
    status: int,
    kind: str,
    *,
    field: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status, self.kind, self.field, self.code, self.headers = status, kind, field, code, headers

  @property
  def body(self) -> dict[str, Any]:
    """The error in the form of the interface, printable throughout."""
    param = None if self.field is None else one_line(self.field, 80)
    message = printable(str(self)[:500])
    return {'error': {'message': message, 'type': self.kind, 'param': param, 'code': self.code}}

  def response(self) -> JSONResponse:
    return JSONResponse(self.body, self.status, headers=self.headers)


class RefusedError(RequestError):
  def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None):
    super().__init__(message, status, 'invalid_request_error', field=field, code=code)


@contextlib.contextmanager
def refusing(field: str | None) -> Iterator[None]:
  """Refuses a request where a check of a field raises `ValueError`."""
  try:
    yield
  except ValueError as error:
    raise RefusedError(str(error), field) from error


class FullError(RequestError):
  """Too many continuations wait."""

  def __init__(self):
    wait = {'Retry-After': str(_RETRY_SECONDS)}
    super().__init__(f'too many requests: try again in {_RETRY_SECONDS} s', 429, 'rate_limit_error', headers=wait)


class BusyError(RequestError):
  """The machine had too little time or memory for what was asked, and may have more at another time."""

  def __init__(self, message: str, field: str):
    wait = {'Retry-After': str(_RETRY_SECONDS)}
    super().__init__(message, 503, 'server_error', field=field, headers=wait)


STARTING = RequestError(
  f'the server is starting: try again in {_RETRY_SECONDS} s',
  503,
  'server_error',
  headers={'Retry-After': str(_RETRY_SECONDS)},
)


class EndedError(RequestError):
  """The thread decodes no more."""

  def __init__(self):
    super().__init__('the server is ending', 503, 'server_error')


class FailedError(RequestError):
  """A fault in the work for a request."""

  def __init__(self, message: str = 'a fault of the server ended this request'):
    super().__init__(message, 500, 'server_error')


def failure(error: BaseException) -> RequestError:
  """The error that a client hears of; one that it cannot know becomes a line on stderr."""
  if isinstance(error, RequestError):
    return error
  if isinstance(error, NotFiniteError):
    return FailedError(f'this continuation failed: {error}')
  print_error(f'a request failed: {type(error).__name__}: {first_line(error)}')
  return FailedError()
