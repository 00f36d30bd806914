"""Requests for continuations, and what rows say of them and of their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax

from spectr_jax.constraint import Constraint
from spectr_jax.engine.result import NotFiniteError
from spectr_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue.

  Attributes:
    name: The name of its continuation.
    tokens: Ids, at least one.
    key: A typed key; the continuation depends on it, the prompt and the sampling parameters alone.
    sampling: Its own sampling parameters, scalars; None for those of all.
    max_new_tokens: Its own limit of new tokens, at most that of all; None for that.
    constraint: What its continuation must follow, or the number of one of the decoder's constraints, or None.
    keeps_tree: Whether rounds have the decoder's tree while it runs, so that no `auto` budget changes what is drawn.
  """

  name: Hashable
  tokens: Sequence[int]
  key: jax.Array
  sampling: SamplingParams | None = None
  max_new_tokens: int | None = None
  constraint: Constraint | int | None = None
  keeps_tree: bool = False


class Piece(NamedTuple):
  """New tokens of a request.

  Attributes:
    row: Its row.
    request: The request.
    start, end: The new tokens are `Rows.result.tokens[row, start:end]`.
    is_done: Whether these are its last ones.
    error: What ended it, if a model's logits were not finite.
  """

  row: int
  request: Request
  start: int
  end: int
  is_done: bool
  error: NotFiniteError | None


class Call(NamedTuple):
  """What a step ran.

  Attributes:
    num_rows: Rows of the loop, those without a request included.
    guesses: Those of a row, as `2x4` for two drafts of four tokens, the number of nodes of another tree, or 0.
    num_rounds: Rounds.
  """

  num_rows: int
  guesses: str
  num_rounds: int
