"""Constraints of requests: compiled one at a time beside the other work, and kept for the requests that come again."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from decode.serving.faults import BusyError, FullError, RefusedError
from decode.serving.tools import style_of
from spectr_jax import Constraint, compile_constraint
from spectr_jax.io.constraints import ConstraintBusyError
from spectr_jax.io.tokenizer import TokenizerBase

_MOST_KEPT, _MOST_BYTES = 64, 2**28  # constraints, and what they may take together
_MOST_WAITING = 16


class Compiler:
  """Compiles constraints in a thread of its own, so that a hostile one delays none but others of its kind."""

  def __init__(self):
    """Starts with no constraint."""
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'compiling')
    self._kept: collections.OrderedDict[str, Constraint | str] = collections.OrderedDict()
    self._num_waiting = 0

  def prepare(self, tokenizer: TokenizerBase, vocab_size: int) -> None:
    """Does what the first constraint would wait for, such as a look at the vocabulary, if any can be compiled."""
    with contextlib.suppress(ConstraintBusyError, MemoryError):
      _compiled(tokenizer, vocab_size, {'choices': ['a']})

  async def compile(
    self,
    asked: tuple[str, Any, str] | None,
    tokenizer: TokenizerBase,
    vocab_size: int,
    *,
    after: str | None = None,
    bad_words: Sequence[str] = (),
  ) -> Constraint | None:
    """The constraint that a request asks for, or None.

    Args:
      asked: `CompletionRequest.constraint`.
      tokenizer, vocab_size, after, bad_words: As for `compile_constraint`.

    Raises:
      RefusedError: It cannot be compiled.
      BusyError: There was too little time or memory to compile it.
      FullError: Too many wait.
    """
    if asked is None and not bad_words:
      return None
    kind, value, field = ('bad_words', list(bad_words), 'bad_words') if asked is None else asked
    given = {kind: value, 'bad_words': list(bad_words)} | ({'after': after} if asked and after else {})
    key = json.dumps(given)  # the order of properties counts
    found = self._kept.get(key)
    if found is None:
      if self._num_waiting >= _MOST_WAITING:
        raise FullError
      self._num_waiting += 1
      try:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, _compiled, tokenizer, vocab_size, given)
      except (ConstraintBusyError, MemoryError) as error:  # no fault of what was asked: nothing is kept
        raise BusyError(str(error) or 'there is not enough memory', field) from error
      finally:
        self._num_waiting -= 1
      self._kept[key] = found
    self._kept.move_to_end(key)
    while len(self._kept) > _MOST_KEPT or (len(self._kept) > 1 and self._num_bytes > _MOST_BYTES):
      self._kept.popitem(last=False)
    if isinstance(found, str):
      raise RefusedError(found, field)
    return found

  @property
  def _num_bytes(self) -> int:
    return sum(len(key) + (len(each) if isinstance(each, str) else each.nbytes) for key, each in self._kept.items())


def _compiled(tokenizer: TokenizerBase, vocab_size: int, given: Mapping[str, Any]) -> Constraint | str:
  """The constraint, or why there is none."""
  narrower, ((kind, value), *others) = (), given.items()
  more = dict(others)
  try:
    if kind == 'calls':  # `Tools.constraint`
      style = style_of(tokenizer, value[0])
      tokenizer, (expression, narrower) = style.tokenizer, style.regex(*value[1:])
      given = {'regex': expression, **more}
    made = compile_constraint(tokenizer, vocab_size=vocab_size, **given)
  except ValueError as error:
    return str(error)
  if narrower := made.narrower or narrower:
    print(f'{kind} is followed more narrowly: {"; ".join(narrower)}', file=sys.stderr)
  return made
