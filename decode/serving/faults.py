"""Why a request gets no answer, as its client hears it. What is wrong with a program is told on stderr alone."""

from __future__ import annotations

from common.command_line import print_error
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.io.foreign import first_line


class FullError(Exception):
  """Too many continuations wait."""


class EndedError(Exception):
  """The thread decodes no more."""

  def __str__(self) -> str:
    return 'the server is ending'


class FailedError(Exception):
  """A fault of the program in the work for a request."""

  def __str__(self) -> str:
    return 'a fault of the server ended this request'


def failure(error: BaseException) -> Exception:
  """The error that a client hears of; one that it cannot know becomes a line on stderr."""
  if isinstance(error, NotFiniteError):
    return error
  print_error(f'a request failed: {type(error).__name__}: {first_line(error)}')
  return FailedError()
