"""The tokenizers of the package `tokenizers`, with errors of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tokenizers

from spectr_jax.io.untrusted import one_line

_T = TypeVar('_T')


def guarded(name: str, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
  """Calls `tokenizers`, whose bare `Exception` and `PanicException`, no `Exception` itself, become `ValueError`."""
  try:
    return function(*args, **kwargs)
  except BaseException as error:
    is_foreign = type(error) in (Exception, TypeError, OverflowError) or type(error).__name__ == 'PanicException'
    if not is_foreign:
      raise
    raise ValueError(f'{name}: the tokenizer fails: {one_line(error)}') from error


class Ids(NamedTuple):
  """The ids of a text."""

  ids: list[int]


class Backend:
  """A tokenizer of `tokenizers`, whose methods are called by `guarded`. A wrapped one keeps its name and its rules."""

  __slots__ = ('tokenizer', 'name', 'rewrite')

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer | Backend,
    name: str = 'the vocabulary',
    rewrite: Callable[[list[int]], list[int]] | None = None,
  ):
    is_wrapped = isinstance(tokenizer, Backend)
    self.tokenizer: tokenizers.Tokenizer = tokenizer.tokenizer if is_wrapped else tokenizer
    self.name: str = tokenizer.name if is_wrapped else name  # where it is from, for messages
    # Changes the ids that the tokenizer gives a text, if it cannot express all of its rules.
    self.rewrite = tokenizer.rewrite if is_wrapped else rewrite

  def encode(self, *args: Any, **kwargs: Any) -> Any:
    """The encoding of a text; its ids alone where they are rewritten."""
    encoding = guarded(self.name, self.tokenizer.encode, *args, **kwargs)
    return encoding if self.rewrite is None else Ids(self.rewrite(encoding.ids))

  def encode_batch_fast(self, *args: Any, **kwargs: Any) -> list[Any]:
    """The encodings of texts, as `encode` gives them."""
    encodings = guarded(self.name, self.tokenizer.encode_batch_fast, *args, **kwargs)
    return encodings if self.rewrite is None else [Ids(self.rewrite(each.ids)) for each in encodings]

  def to_str(self, *args: Any, **kwargs: Any) -> str:
    """The content of the tokenizer's `tokenizer.json`."""
    if self.rewrite is not None:
      raise ValueError(f'{self.name}: tokenizer.json has no pieces that are merged and are no tokens')
    return guarded(self.name, self.tokenizer.to_str, *args, **kwargs)

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith('_') or attribute in self.__slots__:
      raise AttributeError(attribute)
    value = getattr(self.tokenizer, attribute)
    if not callable(value):
      return value
    return lambda *args, **kwargs: guarded(self.name, value, *args, **kwargs)
