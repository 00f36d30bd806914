"""Prompts into rows: what a row's caches hold of a prompt already is kept, the models read the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.draft import DraftContext, Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.sharding import DecodeSharding, tracing_with
from spectr_jax.engine.state import (
  DecodeState,
  Held,
  Prompts,
  checked_prompts,
  constrain,
  first_state,
  held_shardings,
  sample_keys,
  to_size,
)  # fmt: skip
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams
from spectr_jax.sharding import fetch

# Tokens that a program reads of a few new ones; a second program reads any number. So two programs serve all lengths.
_FEW = 32


def init_decode(
  decoder: Decoder,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  sampling: SamplingParams | None = None,
  num_samples: int = 1,
  max_new_tokens: ArrayLike | None = None,
  constraint: ArrayLike | None = None,
) -> DecodeState:
  """The state before the first round, with prompts checked and prefilled.

  Args:
    decoder: Made by `Decoder.make`.
    rng_key, sampling: As for `generate`.
    prompts, prompt_lengths: Integers `[B, P]`, right-padded, and integers `[B]`, from 1 to P.
    num_samples: Rows of each prompt, as for `generate`; it is prefilled once and its row of the state is repeated.
    max_new_tokens: Limit of new tokens, one or `[B]`, at most the decoder's; None for the decoder's.
    constraint: Integers, one or `[B]`: which of the decoder's constraints each row follows, -1 for none; None for none.

  Raises:
    ValueError: As for `generate`; or prompts and new tokens do not fit the caches, or there is no such constraint.
  """
  checks.check_count('num_samples', num_samples)
  rows = checked_prompts(decoder, rng_key, prompts, prompt_lengths, sampling, max_new_tokens, constraint=constraint)
  state = first_state(decoder, rows, _read(decoder, rows, None, None, None, rows.tokens.shape[1]))
  if num_samples == 1:
    return state
  keys = sample_keys(rows.keys, num_samples)
  keys = keys if decoder.sharding is None else decoder.sharding.put_rows(keys)
  return _repeat_rows(decoder, state, keys, num_samples)


@functools.partial(jax.jit, static_argnames='num_samples')
def _repeat_rows(decoder: Decoder, state: DecodeState, keys: jax.Array, num_samples: int) -> DecodeState:
  """`state` with every row repeated, and other keys `[B * num_samples]`."""
  rows = dataclasses.replace(state, keys=None)
  rows = jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0) if x.ndim else x, rows)
  return constrain(decoder, dataclasses.replace(rows, keys=keys))


def refill(
  decoder: Decoder,
  state: DecodeState,
  rows: ArrayLike,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  num_kept: ArrayLike | None = None,
  sampling: SamplingParams | None = None,
  max_new_tokens: ArrayLike | None = None,
  constraint: ArrayLike | None = None,
) -> DecodeState:
  """Gives rows, done or not, to other prompts, of which the models read what the rows do not hold yet.

  Rows that use filters which no row used before make the loop compile once more. Two programs for each R read prompts
  of all lengths.

  `state` is donated: only the returned one may be used afterwards. A row decodes as it would by itself, up to rounding.

  Args:
    decoder: The decoder that `state` was made with; its `cache_size` must hold the prompts and the new tokens.
    state: Between rounds.
    rows: Integers `[R]`, different rows; entries of B or more are dropped, with their prompts.
    rng_key, sampling: As for `generate`, of R rows.
    prompts, prompt_lengths: Integers `[R, P]`, right-padded, and integers `[R]`, from 1 to P.
    num_kept: Integers `[R]`, the number of tokens that a row's prompt and its text share at their beginning; None for
      0. The text is the row's last prompt and its new tokens. The caller vouches for it; it is not checked.
    max_new_tokens: Limit of new tokens, one or `[R]`, at most the decoder's; None for the decoder's.
    constraint: As for `init_decode`, one or `[R]`.

  Raises:
    ValueError: As for `generate`; or a row is negative or occurs twice; or `num_kept` is not `[R]`, from 0 to the
      length of each prompt.
  """
  rows, prompts = np.asarray(rows), checks.as_integers('prompts', prompts)
  batch_size = state.keys.shape[0]
  real = rows[rows < batch_size]
  if rows.shape != prompts.shape[:1] or (real < 0).any() or len(set(real.tolist())) < len(real):
    raise ValueError(f'rows must be one different row of {batch_size} for each prompt, got {rows.tolist()}')
  own = {'like': state.sampling, 'constraint': constraint, 'width': decoder.cache_size}
  new = checked_prompts(decoder, rng_key, prompts, prompt_lengths, sampling, max_new_tokens, **own)
  lengths = np.asarray(prompt_lengths)
  num_kept = np.zeros_like(lengths) if num_kept is None else np.asarray(checks.as_integers('num_kept', num_kept))
  if num_kept.shape != lengths.shape or (num_kept < 0).any() or (num_kept > lengths).any():
    raise ValueError(f'num_kept must be [{len(lengths)}], from 0 to the length of each prompt, got {num_kept.tolist()}')
  if num_kept.any():  # a row's caches lack the last token of its text, and the last one of a prompt is always read
    held = np.asarray(fetch(state.root_position))[np.minimum(rows, batch_size - 1)]
    num_kept = np.minimum(np.minimum(num_kept, held), lengths - 1)
    if not decoder.can_truncate:
      num_kept = np.where((num_kept == held) & decoder.keeps_ends, num_kept, 0)
  return read_rows(decoder, state, rows, rows, new, lengths, num_kept)


def read_rows(
  decoder: Decoder,
  state: DecodeState,
  rows: np.ndarray,
  sources: np.ndarray,
  prompts: Prompts,
  lengths: np.ndarray,
  num_kept: np.ndarray,
  *,
  fill: Callable[[Held], Held] = lambda held: held,
  num_drafted: np.ndarray | None = None,
) -> DecodeState:
  """`state`, which is donated, with checked prompts `[R, cache_size]` in `rows` `[R]`, as `refill`.

  Row `rows[i]` begins with the first `num_kept[i]` tokens, at most all but the last of its prompt, that row
  `sources[i]` holds, which may be another one, or that `fill` puts there, given what the R rows hold. The drafter's
  state has the first `num_drafted[i]` of them, if that is given.
  """
  # All rows in their places stay where they are.
  is_whole = np.array_equal(rows, np.arange(len(state.keys))) and np.array_equal(rows, sources)
  held = state.held if is_whole else take_rows(decoder, state, sources.astype(np.int32))
  held, few = fill(held), min(_FEW, decoder.cache_size)
  reads_rest = (decoder.can_truncate or decoder.keeps_ends) and num_drafted is None
  num_new = few if reads_rest and (lengths - num_kept).max() <= 2 * few + 1 else decoder.cache_size
  num_drafted = num_kept if num_drafted is None else num_drafted
  while True:
    ends = np.minimum(lengths, num_kept + num_new + 1).astype(np.int32)
    part = prompts._replace(lengths=_put(decoder, ends))
    kept, drafted = (_put(decoder, each.astype(np.int32)) for each in (num_kept, num_drafted))
    held = _read(decoder, part, held, kept, drafted, num_new)
    if (ends == lengths).all():
      break
    num_kept = num_drafted = np.maximum(num_kept, ends - 1)
  if is_whole:
    return first_state(decoder, prompts, held)
  return _put_rows(decoder, state, rows.astype(np.int32), prompts, held)


def _put(decoder: Decoder, array: np.ndarray) -> Any:
  return array if decoder.sharding is None else decoder.sharding.put_rows(array)


def empty_state(decoder: Decoder, batch_size: int, filters: SamplingParams | None = None) -> DecodeState:
  """The state of B rows that are done and hold nothing; it has every filter of `filters`, scalars."""
  key = jax.random.key(0, impl='threefry2x32')
  zeros = np.zeros((batch_size, 1), np.int32)
  rows = checked_prompts(decoder, key, zeros, zeros[:, 0] + 1, filters, 1)
  state = first_state(decoder, rows, _hold_nothing(decoder, batch_size))
  state = dataclasses.replace(state, is_done=~state.is_done)
  params = [leaf for leaf in jax.tree.leaves(decoder.target.params) if isinstance(leaf, jax.Array)]
  devices = {device for leaf in params for device in leaf.devices()}
  # Arrays that are bound to a device, as results beside parameters from a file are, have programs of their own.
  return jax.device_put(state, devices.pop()) if decoder.sharding is None and len(devices) == 1 else state


@functools.partial(jax.jit, static_argnames='batch_size')
def _hold_nothing(decoder: Decoder, batch_size: int) -> Held:
  target, drafter, size = decoder.target, decoder.drafter, decoder.cache_size
  cache = target.init_cache_fn(batch_size, size)
  zeros = jnp.zeros((batch_size, 1), jnp.int32)
  like = jax.eval_shape(target.prefill, zeros, zeros[:, 0], cache)[1]
  features = None if like is None else jnp.zeros((batch_size, size, *like.shape[2:]), like.dtype)
  held = Held(cache, features, None if drafter is None else drafter.init(batch_size, size))
  return constrain_held(decoder.sharding, target, drafter, held)


def constrain_held(sharding: DecodeSharding | None, target: Model, drafter: Drafter | None, held: Held) -> Held:
  if sharding is None:
    return held
  return jax.lax.with_sharding_constraint(held, held_shardings(sharding, target, drafter, held))


@jax.jit
def take_rows(decoder: Decoder, state: DecodeState, rows: jax.Array) -> Held:
  """Copies of what `rows` `[R]` hold; entries of B or more give any row."""
  held = jax.tree.map(lambda x: x.at[rows].get(mode='clip') if x.ndim else x, state.held)
  return constrain_held(decoder.sharding, decoder.target, decoder.drafter, held)


@functools.partial(jax.jit, donate_argnames='state')
def _put_rows(decoder: Decoder, state: DecodeState, rows: jax.Array, prompts: Prompts, held: Held) -> DecodeState:
  """`state` with prompts in `rows` `[R]`; entries that are not rows are dropped."""
  fresh = first_state(decoder, prompts, held)
  own, new = state.sampling.with_filters_of(fresh.sampling), fresh.sampling.with_filters_of(state.sampling)
  state, fresh = dataclasses.replace(state, sampling=own), dataclasses.replace(fresh, sampling=new)
  replaced = jax.tree.map(lambda old, new: old.at[rows].set(new, mode='drop') if old.ndim else old, state, fresh)
  return constrain(decoder, replaced)


@functools.partial(jax.jit, donate_argnames='state')
def forget_rows(decoder: Decoder, state: DecodeState, is_forgotten: jax.Array) -> DecodeState:
  """`state` in which some rows, bool `[B]`, are done and hold nothing: what is not finite must not stay behind."""

  def without(x):
    return jax.vmap(lambda row, is_gone: jnp.where(is_gone, jnp.zeros_like(row), row))(x, is_forgotten)

  held = jax.tree.map(lambda x: without(x) if x.ndim else x, state.held)
  result = dataclasses.replace(state.result, failures=without(state.result.failures))
  is_done = state.is_done | is_forgotten
  return constrain(decoder, dataclasses.replace(state, **held._asdict(), result=result, is_done=is_done))


def _read(
  decoder: Decoder,
  prompts: Prompts,
  held: Held | None,
  num_kept: jax.Array | None,
  num_drafted: jax.Array | None,
  num_new: int,
) -> Held:
  """What rows hold after all tokens of prompts but the last, at most `num_new` more than `num_kept` `[B]` of `held`, of
  which the drafter has `num_drafted` `[B]`.

  `held` is donated. None stands for nothing; then a program of its own reads for the target, which all methods and
  trees share, and so for the draft.
  """
  target, drafter = decoder.target, decoder.drafter
  sizes = {'num_new': num_new, 'cache_size': decoder.cache_size, 'sharding': decoder.sharding}
  own = (None, None) if held is None else (held.target_cache, held.features)
  cache, features = _read_target(target, own, prompts.tokens, prompts.lengths, num_kept, **sizes)
  draft_state = None
  if drafter is not None:
    context = DraftContext(prompts.lengths, target, prompts.tokens, features)
    draft_state = None if held is None else held.draft_state
    draft_state = _read_draft(drafter, draft_state, context, num_drafted, **sizes, classes=decoder.drafter_classes)
  return Held(cache, features, draft_state)


@functools.partial(jax.jit, static_argnames=('num_new', 'cache_size', 'sharding'), donate_argnames='held')
def _read_target(
  target: Model,
  held: tuple[Any, jax.Array | None],
  prompts: jax.Array,
  lengths: jax.Array,
  num_kept: jax.Array | None,
  *,
  num_new: int,
  cache_size: int,
  sharding: DecodeSharding | None,
) -> tuple[Any, jax.Array | None]:
  """The target's cache, and features `[B, cache_size, F, D]` or None."""
  cache, features = held
  kept = jnp.zeros_like(lengths) if num_kept is None else num_kept
  with tracing_with(sharding):
    cache = target.init_cache_fn(len(lengths), cache_size) if cache is None else cache
    cache, new = target.prefill_rest(to_size(prompts, cache_size), lengths - 1, cache, kept, num_new)
  if new is not None:
    features = jnp.zeros((len(lengths), cache_size, *new.shape[2:]), new.dtype) if features is None else features
    places = kept[:, None] + jnp.arange(num_new)
    features = jax.vmap(lambda row, places, new: row.at[places].set(new, mode='drop'))(features, places, new)
  return constrain_held(sharding, target, None, Held(cache, features, None))[:2]


@functools.partial(jax.jit, static_argnames=('num_new', 'cache_size', 'sharding', 'classes'), donate_argnames='state')
def _read_draft(
  drafter: Drafter,
  state: Any,
  context: DraftContext,
  num_kept: jax.Array | None,
  *,
  num_new: int,
  cache_size: int,
  sharding: DecodeSharding | None,
  classes: tuple[type, ...],
) -> Any:
  """The drafter's state; `context` holds prompts `[B, P]`."""
  del classes  # they tell apart drafters of equal fields, see `Decoder.drafter_classes`
  kept = jnp.zeros_like(context.lengths) if num_kept is None else num_kept
  assert context.tokens is not None
  context = dataclasses.replace(context, tokens=to_size(context.tokens, cache_size))
  with tracing_with(sharding):
    # Without the barrier XLA folds attention over a cache of zeros, which takes longer than the rest of compilation.
    if state is None:
      state = jax.lax.optimization_barrier(drafter.init(len(context.lengths), cache_size))
    state = drafter.read(state, context, kept, num_new)
  return state if sharding is None else jax.lax.with_sharding_constraint(state, sharding.of_draft_state(state, drafter))
