"""The decoder: models, method, tree and limits, put together and checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from spectr_jax.constraint import FEWEST, Constraint, ConstraintTables, TableSizes
from spectr_jax.draft import Drafter, as_drafter
from spectr_jax.draft.model_drafter import ModelDrafter
from spectr_jax.engine import checks
from spectr_jax.engine.result import FAILED_DRAFT, FAILED_TARGET, Generation, NotFiniteError
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.methods import DEFAULT_METHOD, Method, check_fit, get_method
from spectr_jax.model import NO_LIMIT, Model, static_field
from spectr_jax.sharding import fetch
from spectr_jax.tree import TokenTree


def buffer_size(num_tokens: int) -> int:
  """The size of a buffer for so many tokens: one of few, so that other limits and prompts share compiled programs."""
  # An eighth to spare at most, from 512 tokens on.
  step = max(64, 1 << max(0, num_tokens.bit_length() - 4))
  return -(-num_tokens // step) * step


def choose_cache_size(target: Model, draft: Model | Drafter | None, num_tokens: int) -> int:
  """The size of caches for texts of so many tokens, within the context of all models."""
  own = draft.model if isinstance(draft, ModelDrafter) else draft
  limits = [each.context_length for each in (target, own) if isinstance(each, Model)]
  known = [limit for limit in limits if limit is not None]
  # A model that states no context may have no cache and compute on all that fits, so its size is exact.
  return num_tokens if len(known) < len(limits) else max(num_tokens, min(buffer_size(num_tokens), *known))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoder:
  """The constants of decoding: parameters and limits, and the static values that programs are compiled for.

  `Decoder.make` makes one and checks that its parts fit each other. Decoders that differ in parameters, in the limit of
  new tokens or in the ids that end rows share their programs, as long as their buffers have the same sizes.

  Attributes:
    target: The target model; its calls return the features that the drafter reads.
    drafter: The drafter, or None for methods that draft nothing.
    method: The method.
    tree: The tree of every round, or the bounds of the rows' trees if the drafter grows them.
    max_new_tokens: int32 scalar, the most new tokens of a row; rows may have lower limits of their own.
    eos_ids: int32 scalars, ids that end a row, filled to a multiple of 4 by -1, which is no token.
    result_size: New tokens that a row of a result has room for, at least `max_new_tokens`.
    cache_size: Committed tokens that a row can hold, those of the prompt included.
    has_statistics: Whether `Statistics` are counted.
    has_logprobs: Whether the log probabilities of new tokens are kept.
    sharding: The sharding over devices, or None for one device.
    drafter_classes: The classes of the drafter and of what it consists of. JAX takes pytrees for equal whose classes
      have equal fields, and would let them share programs.
    constraints: The constraints that rows may follow, joined, or None.
  """

  target: Model
  drafter: Drafter | None
  max_new_tokens: np.int32
  eos_ids: tuple[np.int32, ...]
  method: Method = static_field()
  tree: TokenTree = static_field()
  result_size: int = static_field()
  cache_size: int = static_field()
  has_statistics: bool = static_field(False)
  has_logprobs: bool = static_field(False)
  sharding: DecodeSharding | None = static_field(None)
  drafter_classes: tuple[type, ...] = static_field(())
  constraints: ConstraintTables | None = None

  @classmethod
  def make(
    cls,
    target: Model,
    draft: Model | Drafter | None,
    *,
    method: str | Method | None = None,
    tree: TokenTree | None = None,
    max_new_tokens: int,
    cache_size: int,
    eos_id: int | Sequence[int] | None = None,
    statistics: bool = False,
    sharding: DecodeSharding | None = None,
    logprobs: bool = False,
    constraints: Sequence[Constraint] = (),
  ) -> Decoder:
    """Puts a decoder together, with its models on their devices.

    Args:
      target, draft, method, eos_id, sharding: As for `generate`; parameters may be shapes, to compile only.
      tree: The guesses of a round; None for two drafts of four tokens, or one where the method takes one, or fewer
        tokens where the drafter guesses less far ahead, or four nodes of each of four depths where it grows trees.
        Methods that draft nothing ignore it.
      max_new_tokens: Limit of new tokens per row.
      cache_size: Committed tokens that a row can hold: those of the longest prompt and `max_new_tokens`.
      statistics: Whether to count `Statistics`.
      logprobs: Whether to keep the log probabilities of new tokens, see `Generation`.
      constraints: The constraints that rows may follow; `init_decode` takes their numbers.

    Raises:
      ValueError: The parts do not fit each other; the message names what would fit.
    """
    if not isinstance(target, Model):
      raise ValueError(f'target must be a Model, got {type(target).__name__}')
    if not isinstance(draft, Model | Drafter | None):
      raise ValueError(f'draft must be a Model, a Drafter or None, got {type(draft).__name__}')
    method = get_method(method or (DEFAULT_METHOD if draft is not None else 'autoregressive'))
    drafter = None if method.max_drafts == 0 else as_drafter(draft)
    tree = method.tree_for(_default_tree(method, drafter) if tree is None else tree)
    _check_drafter(target, drafter, method, tree)
    checks.check_count('max_new_tokens', max_new_tokens)
    eos_ids = () if eos_id is None else (eos_id,) if isinstance(eos_id, int | np.integer) else tuple(eos_id)
    unknown = [i for i in eos_ids if not 0 <= i < target.vocab_size]
    if unknown:
      raise ValueError(f'eos_id must be a token, from 0 to {target.vocab_size - 1}, got {unknown[0]}')
    if drafter is not None:
      target = target.with_features(drafter.feature_layers)
      num_layers = target.num_kv_layers if drafter.kv_layers else 0
      if any(not 0 <= layer < num_layers for layer in drafter.kv_layers):
        raise ValueError(
          f"the drafter reads keys and values of the target's layers {', '.join(map(str, drafter.kv_layers))}, and it"
          f' has those of {num_layers}'
        )
    if sharding is not None:
      target, drafter = sharding.put_models(target, drafter)
    decoder = cls(
      target=target,
      drafter=drafter,
      max_new_tokens=np.int32(max_new_tokens),
      eos_ids=tuple(map(np.int32, [*eos_ids, *[-1] * (4 - len(eos_ids) % 4)])),
      method=method,
      tree=tree,
      result_size=buffer_size(max_new_tokens),
      cache_size=cache_size,
      has_statistics=statistics and tree.num_nodes > 0,
      has_logprobs=logprobs,
      sharding=sharding,
      drafter_classes=() if drafter is None else _classes_of(drafter),
    )
    return decoder.with_constraints(constraints) if constraints else decoder

  def with_constraints(
    self, constraints: Sequence[Constraint], *, keeps_sizes: bool = False, sizes: TableSizes = FEWEST
  ) -> Decoder:
    """The decoder with other constraints that rows may follow.

    Args:
      constraints: The constraints.
      keeps_sizes: Whether its tables are to be at least as large as those of this decoder, to share programs.
      sizes: Those of its tables at least, if it has none of this decoder's.

    Raises:
      ValueError: As for `ConstraintTables.join`.
    """
    eos_ids = [int(token) for token in self.eos_ids if token >= 0]
    sizes = self.constraints.sizes if keeps_sizes and self.constraints is not None else sizes
    tables = ConstraintTables.join(constraints, self.target.vocab_size, eos_ids, sizes)
    return dataclasses.replace(self, constraints=tables if self.sharding is None else self.sharding.put_whole(tables))

  def adopt(self, state: Any, other: Decoder, places: Sequence[int]) -> Any:
    """A `DecodeState` of another decoder, between two rounds, for this one, which has other constraints alone.

    Args:
      state: The state; it stays usable.
      other: Its decoder.
      places: Which of this decoder's constraints each of the other's is; -1 for those that no row in progress has.
    """
    states = np.zeros(len(state.keys), np.int32)
    if self.constraints is not None and other.constraints is not None:
      # States are numbered constraint by constraint; 0 is that of rows without one.
      states, old, new = fetch((state.constraint_states, other.constraints.starts, self.constraints.starts))
      number = np.searchsorted(old[: len(places)], states, side='right') - 1
      owner = np.maximum(number, 0)
      place = np.array(places, np.int32)[owner]
      states = np.where((number < 0) | (place < 0), 0, states - old[owner] + new[place])
    states = states.astype(np.int32)
    own = jax.numpy.asarray(states) if self.sharding is None else self.sharding.put_rows(states)
    return dataclasses.replace(state, constraint_states=own)

  def start_states(self, constraint: ArrayLike | None, batch_size: int) -> np.ndarray | None:
    """The states int32 `[B]` in which rows begin, see `init_decode`; None for a decoder without constraints.

    Raises:
      ValueError: There is no such constraint, or there are not as many numbers as rows.
    """
    if self.constraints is None:
      if constraint is not None and np.any(np.asarray(constraint) >= 0):
        raise ValueError('the decoder has no constraints: give them to Decoder.make')
      return None
    numbers = np.asarray(-1 if constraint is None else constraint)
    starts = np.asarray(fetch(self.constraints.starts))
    if numbers.shape not in ((), (batch_size,)) or numbers.dtype.kind != 'i' or numbers.max() >= np.sum(starts > 0):
      raise ValueError(
        f'constraint must be from -1 to {np.sum(starts > 0) - 1}, one or [{batch_size}], got {numbers.tolist()}'
      )
    return np.broadcast_to(np.where(numbers < 0, 0, starts[numbers]), (batch_size,)).astype(np.int32)

  @property
  def can_truncate(self) -> bool:
    """Whether what a row holds can go back to a beginning of its text; if not, rows read prompts from their start."""
    return all(each.can_truncate for each in (self.target, self.drafter) if each is not None)

  @property
  def keeps_ends(self) -> bool:
    """Whether what a row holds, which cannot go back, can be continued where it ends."""
    return all(each.can_truncate or each.keeps_ends for each in (self.target, self.drafter) if each is not None)

  @property
  def context_length(self) -> int | None:
    """The longest prompt plus continuation that both models were made for, in tokens, or None for no limit."""
    limits = [each.context_length for each in (self.target, self.drafter) if each is not None]
    return min((limit for limit in limits if limit is not None), default=None)

  def check_prompts(self, prompts: checks.Integers, prompt_lengths: checks.Integers, limits: np.ndarray) -> None:
    """Checks that prompts `[B, P]` fit with their limits of new tokens `[B]`, outside of a trace also lengths and ids.

    Raises:
      ValueError: A limit, a length or an id does not fit, or a text may exceed the cache or the models' limit.
    """
    size, is_known = prompts.shape[1], not isinstance(prompts, Tracer) and not isinstance(prompt_lengths, Tracer)
    if limits.max() > self.max_new_tokens:
      raise ValueError(f'max_new_tokens must be at most {self.max_new_tokens} here, got {limits.max()}')
    lengths = np.asarray(prompt_lengths) if is_known else np.full(len(limits), size)
    if lengths.min() < 1 or lengths.max() > size:
      raise ValueError(
        f'prompt_lengths must be from 1 to {size}: a prompt has at least one token; got {lengths.min()} to'
        f' {lengths.max()}'
      )
    needed = max(size, int((lengths + limits).max()))
    if self.cache_size < needed:
      raise ValueError(
        f'cache_size must be at least {needed}, for prompts of {size} tokens and new ones; got {self.cache_size}'
      )
    if not is_known:
      return
    used = np.asarray(prompts)[np.arange(size) < lengths[:, None]]
    vocab_size, longest = self.target.vocab_size, self.context_length
    if used.min() < 0 or used.max() >= vocab_size:
      raise ValueError(f'prompts hold ids from {used.min()} to {used.max()}, the vocabulary is 0 to {vocab_size - 1}')
    row = int(np.argmax(lengths + limits))
    if longest is not None and lengths[row] + limits[row] > longest:
      raise ValueError(
        f"the longest prompt has {lengths[row]} tokens; with {limits[row]} new ones that exceeds the models'"
        f' limit of {longest}'
      )

  def check(self, result: Generation) -> None:
    """Checks that no model failed, in every process; NotFiniteError if the run was stopped since one did."""
    failures, num_rounds = fetch((result.failures, result.num_target_calls))
    if failures.any():
      raise self.error(row := int(np.argmax(failures != 0)), int(num_rounds[row]), int(failures[row]))

  def error(self, row: int, num_rounds: int, failure: int) -> NotFiniteError:
    """The error of a row whose logits were not finite; it says what the model may lack."""
    error = NotFiniteError(row, num_rounds, failure)
    models = (FAILED_TARGET, self.target), (FAILED_DRAFT, self.drafter)
    lacks_limit = any(failure & bit and model is not None and model.context_length is None for bit, model in models)
    return error.with_hint(NO_LIMIT) if lacks_limit else error


def _classes_of(part: Any) -> tuple[type, ...]:
  """The classes of the dataclasses that a drafter consists of, in order, those in containers included."""
  if isinstance(part, Mapping):
    return tuple(each for inner in part.values() for each in _classes_of(inner))
  if isinstance(part, list | tuple):
    return tuple(each for inner in part for each in _classes_of(inner))
  if not dataclasses.is_dataclass(part):
    return ()
  own = (getattr(part, field.name) for field in dataclasses.fields(part))
  return (type(part), *(each for inner in own for each in _classes_of(inner)))


def _default_tree(method: Method, drafter: Drafter | None) -> TokenTree:
  """A small tree that pays on most devices; which one pays best has to be measured."""
  depth = 4 if drafter is None or drafter.max_depth is None else min(4, drafter.max_depth)
  if drafter is not None and drafter.has_grown_trees:
    return TokenTree.slots((method.max_drafts or 4,) * depth)
  return TokenTree.chains(min(2, method.max_drafts or 2), depth)


def _check_drafter(target: Model, drafter: Drafter | None, method: Method, tree: TokenTree) -> None:
  if drafter is None:
    if method.max_drafts != 0:
      raise ValueError(f'{method.name} needs a draft model, got None')
    return
  if drafter.vocab_size != target.vocab_size:
    raise ValueError(
      f'draft and target must share a vocabulary: {drafter.vocab_size} and {target.vocab_size} tokens; fit_draft'
      ' makes a drafter of a model with another tokenizer'
    )
  check_fit(method, tree, drafter)
  if drafter.can_skip_trees and (drafter.has_mixed_positions or not drafter.has_given_candidates):
    raise ValueError(
      'a drafter with can_skip_trees must give all its candidates: has_given_candidates, not has_mixed_positions'
    )
