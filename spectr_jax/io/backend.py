"""The tokenizers of the package `tokenizers`, with errors of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tokenizers

from spectr_jax.io.foreign import one_line

_T = TypeVar('_T')


def guarded(name: str, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
  """Calls something that `tokenizers` does.

  The package raises bare `Exception`, and where it panics a `PanicException`, which is not even that.

  Args:
    name: The tokenizer, for messages.
    function: What is called.
    *args: Its arguments.
    **kwargs: Its arguments.

  Raises:
    ValueError: It fails; the message is one line.
  """
  try:
    return function(*args, **kwargs)
  except BaseException as error:
    is_foreign = type(error) in (Exception, TypeError, OverflowError) or type(error).__name__ == 'PanicException'
    if not is_foreign:
      raise
    raise ValueError(f'{name}: the tokenizer fails: {one_line(error)}') from error


class Backend:
  """A tokenizer of `tokenizers`. Its methods are called by `guarded`, whatever they are.

  Attributes:
    tokenizer: The tokenizer itself.
    name: Where it is from, for messages.
  """

  __slots__ = ('tokenizer', 'name')

  def __init__(self, tokenizer: tokenizers.Tokenizer | Backend, name: str = 'the vocabulary'):
    """Wraps a tokenizer; one that is wrapped already keeps its name."""
    is_wrapped = isinstance(tokenizer, Backend)
    self.tokenizer: tokenizers.Tokenizer = tokenizer.tokenizer if is_wrapped else tokenizer
    self.name: str = tokenizer.name if is_wrapped else name

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith('_') or attribute in self.__slots__:
      raise AttributeError(attribute)
    found = getattr(self.tokenizer, attribute)
    if not callable(found):
      return found
    return lambda *args, **kwargs: guarded(self.name, found, *args, **kwargs)
