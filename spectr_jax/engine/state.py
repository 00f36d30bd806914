"""The loop's state between two rounds, and the first one: prompts checked and prefilled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from spectr_jax.draft import DraftContext, Drafter
from spectr_jax.engine import checks
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.result import Generation
from spectr_jax.engine.sharding import DecodeSharding, tracing_with
from spectr_jax.engine.statistics import Statistics
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams

_constrain = jax.lax.with_sharding_constraint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """The arrays that change from round to round.

  Attributes:
    keys: Typed keys `[B]`, one per row, from which every round derives its own.
    sampling: The rows' sampling parameters.
    last_token: int32 `[B]`, the last committed token, the root of the next tree.
    root_position: int32 `[B]`, its position; committed tokens minus one.
    limits: int32 `[B]`, the most new tokens of each row.
    is_done: bool `[B]`, rows that have ended.
    target_cache: The target's cache, with all committed tokens but the last.
    draft_state: The drafter's state, or None.
    verifier_state: The verifier's state of each row, any pytree of arrays with B in front.
    text: int32 `[B, cache_size]`, the committed tokens if the drafter reads them, else None.
    features: `[B, cache_size, F, D]`, the target's hidden states at all committed tokens but the last if the drafter
      reads them, else None.
    result: The tokens so far.
  """

  keys: jax.Array
  sampling: SamplingParams
  last_token: jax.Array
  root_position: jax.Array
  limits: jax.Array
  is_done: jax.Array
  target_cache: Any
  draft_state: Any
  verifier_state: Any
  text: jax.Array | None
  features: jax.Array | None
  result: Generation

  def draft_context(self, decoder: Decoder) -> DraftContext:
    """The text and hidden states that the drafter may read."""
    return DraftContext(self.root_position + 1, decoder.target, self.text, self.features)


def sample_keys(keys: jax.Array, num_samples: int) -> jax.Array:
  """The keys `[B * num_samples]` of several samples of each row of `[B]`, those of a row one after another.

  Sample 0 has the row's own key. The others have `fold_in(fold_in(key, 0), i)`. A round never folds 0 into a row's key
  first, so no sample shares a key with a round of another one. ValueError if `num_samples` is not a positive int.
  """
  checks.check_count('num_samples', num_samples)
  return _fold_samples(keys, num_samples)


@functools.partial(jax.jit, static_argnames='num_samples')
def _fold_samples(keys: jax.Array, num_samples: int) -> jax.Array:
  def of_row(key):
    others = jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(key, 0), i))(jnp.arange(num_samples))
    return others.at[0].set(key)

  return jax.vmap(of_row)(keys).reshape(-1)


def init_decode(
  decoder: Decoder,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  *,
  sampling: SamplingParams | None = None,
  num_samples: int = 1,
  max_new_tokens: ArrayLike | None = None,
) -> DecodeState:
  """The state before the first round, with prompts checked and prefilled.

  Args:
    decoder: Made by `Decoder.make`.
    rng_key, sampling: As for `generate`.
    prompts, prompt_lengths: Integers `[B, P]`, right-padded, and integers `[B]`, from 1 to P.
    num_samples: Rows of each prompt, as for `generate`; it is prefilled once and its row of the state is repeated.
    max_new_tokens: Limit of new tokens, one or `[B]`, at most the decoder's; None for the decoder's.

  Raises:
    ValueError: As for `generate`; or prompts and new tokens do not fit the caches.
  """
  checks.check_count('num_samples', num_samples)
  rows = checked_rows(decoder, rng_key, prompts, prompt_lengths, sampling, max_new_tokens)
  state = prefilled(decoder, rows)
  if num_samples == 1:
    return state
  keys = sample_keys(rows.keys, num_samples)
  keys = keys if decoder.sharding is None else decoder.sharding.put_rows(keys)
  return _repeat_rows(decoder, state, keys, num_samples)


class Rows(NamedTuple):
  """Prompts and what belongs to each of them, checked and on their devices."""

  keys: jax.Array  # typed, [B]
  sampling: SamplingParams  # of arrays [B]
  prompts: Any  # int32 [B, P], right-padded
  lengths: Any  # int32 [B], from 1 to P
  limits: Any  # int32 [B], the most new tokens


def checked_rows(
  decoder: Decoder,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  sampling: SamplingParams | None,
  max_new_tokens: ArrayLike | None,
  like: SamplingParams | None = None,
) -> Rows:
  """The rows of prompts as for `init_decode`, with all filters that `like` has."""
  prompts = checks.as_integers('prompts', prompts)
  prompt_lengths = checks.as_integers('prompt_lengths', prompt_lengths)
  checks.check_shapes(prompts, prompt_lengths)
  batch_size = prompts.shape[0]
  limits = checks.as_limits(decoder.max_new_tokens if max_new_tokens is None else max_new_tokens, batch_size)
  decoder.check_prompts(prompts, prompt_lengths, limits)
  sampling = SamplingParams() if sampling is None else sampling
  if not isinstance(sampling, SamplingParams):
    raise ValueError(f'sampling must be SamplingParams, such as SamplingParams(temperature=0.7), got {sampling!r}')
  params = sampling.for_rows(batch_size)
  rows = Rows(
    checks.row_keys(rng_key, batch_size),
    params if like is None else params.with_filters_of(like),
    prompts.astype(jnp.int32),
    prompt_lengths.astype(jnp.int32),
    limits,
  )
  if decoder.sharding is None:
    return rows
  decoder.sharding.check_rows(batch_size)
  return decoder.sharding.put_rows(rows)


def prefilled(decoder: Decoder, rows: Rows) -> DecodeState:
  """The state of rows before the first round."""
  sizes = {'cache_size': decoder.cache_size, 'sharding': decoder.sharding}
  target_cache, features = _prefill_target(decoder.target, rows.prompts, rows.lengths, **sizes)
  draft_state = None
  if decoder.drafter is not None:
    context = DraftContext(rows.lengths, decoder.target, rows.prompts, features)
    draft_state = _prefill_draft(decoder.drafter, context, **sizes, classes=decoder.drafter_classes)
  return first_state(decoder, rows, target_cache, features, draft_state)


# Each prefill is a program of its own, which all methods and trees share.


@functools.partial(jax.jit, static_argnames=('cache_size', 'sharding'))
def _prefill_target(target: Model, prompts, prompt_lengths, *, cache_size: int, sharding: DecodeSharding | None):
  """The target's cache, and the prompt's features `[B, P, F, D]` or None."""
  with tracing_with(sharding):
    cache = target.init_cache_fn(prompts.shape[0], cache_size)
    cache, features = target.prefill(prompts, prompt_lengths - 1, cache)
  if sharding is not None:
    cache = _constrain(cache, sharding.of_cache(cache, target))
  return cache, features


@functools.partial(jax.jit, static_argnames=('cache_size', 'sharding', 'classes'))
def _prefill_draft(
  drafter: Drafter,
  context: DraftContext,
  *,
  cache_size: int,
  sharding: DecodeSharding | None,
  classes: tuple[type, ...] = (),
):
  del classes  # they tell apart drafters of equal fields, see `Decoder.drafter_classes`
  with tracing_with(sharding):
    state = drafter.init(context, cache_size)
  return state if sharding is None else _constrain(state, sharding.of_draft_state(state, drafter))


@functools.partial(jax.jit, donate_argnames=('target_cache', 'draft_state'))
def first_state(
  decoder: Decoder, rows: Rows, target_cache: Any, features: jax.Array | None, draft_state: Any
) -> DecodeState:
  """The state before the first round, of caches with all tokens of the prompts but the last."""
  batch_size, tree = len(rows.lengths), decoder.tree
  verifier_state = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x))), decoder.method.verifier.init_state(tree)
  )
  zeros = jnp.zeros(batch_size, jnp.int32)
  nothing = jnp.full((batch_size, decoder.num_slots), -1, jnp.int32)

  def to_cache_size(values):
    return jnp.pad(values, [(0, 0), (0, decoder.cache_size - values.shape[1])] + [(0, 0)] * (values.ndim - 2))

  drafter = decoder.drafter
  state = DecodeState(
    keys=rows.keys,
    sampling=rows.sampling,
    last_token=jnp.take_along_axis(rows.prompts, rows.lengths[:, None] - 1, axis=1)[:, 0],
    root_position=rows.lengths - 1,
    limits=rows.limits,
    is_done=jnp.zeros(batch_size, bool),
    target_cache=target_cache,
    draft_state=draft_state,
    verifier_state=verifier_state,
    text=to_cache_size(rows.prompts) if drafter is not None and drafter.reads_tokens else None,
    features=None if features is None else to_cache_size(features),
    result=Generation(
      tokens=nothing,
      lengths=zeros,
      num_target_calls=zeros,
      accepted_by_depth=jnp.zeros((batch_size, tree.max_depth), jnp.int32),
      origins=nothing,
      failures=zeros,
      statistics=Statistics.zeros(batch_size, tree) if decoder.has_statistics else None,
      logprobs=jnp.full(nothing.shape, jnp.nan, jnp.float32) if decoder.has_logprobs else None,
    ),
  )
  return constrain(decoder, state)


@functools.partial(jax.jit, static_argnames='num_samples')
def _repeat_rows(decoder: Decoder, state: DecodeState, keys: jax.Array, num_samples: int) -> DecodeState:
  """`state` with every row repeated, and other keys `[B * num_samples]`."""
  rows = dataclasses.replace(state, keys=None)
  rows = jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0) if x.ndim else x, rows)
  return constrain(decoder, dataclasses.replace(rows, keys=keys))


@jax.jit
def _end_rows(decoder: Decoder, is_done: jax.Array, is_ended: jax.Array) -> jax.Array:
  is_done = is_done | is_ended
  return is_done if decoder.sharding is None else _constrain(is_done, decoder.sharding.of_rows(is_done))


def finish(decoder: Decoder, state: DecodeState, rows: Sequence[int] | np.ndarray) -> DecodeState:
  """Ends rows from the host, between rounds: they emit nothing any more, and `refill` may give them to other prompts.

  Args:
    decoder, state: Of the batch, between rounds; both stay usable.
    rows: Integers `[R]`, rows of the batch; those that are done stay so.

  Raises:
    ValueError: There is no such row.
  """
  batch_size = len(state.keys)
  if not all(0 <= row < batch_size for row in rows):
    raise ValueError(f'rows must be from 0 to {batch_size - 1}, got {list(rows)}')
  is_ended = np.zeros(batch_size, bool)
  is_ended[np.asarray(rows, np.int64)] = True
  return dataclasses.replace(state, is_done=_end_rows(decoder, state.is_done, is_ended))


def state_shardings(decoder: Decoder, state: DecodeState) -> DecodeState:
  """The shardings in place of the arrays, or shapes, of a state; ValueError if the decoder has no sharding."""
  sharding = decoder.sharding
  if sharding is None:
    raise ValueError('state_shardings needs a decoder with a sharding')
  rows = sharding.of_rows(dataclasses.replace(state, target_cache=None, draft_state=None))
  return dataclasses.replace(
    rows,
    target_cache=sharding.of_cache(state.target_cache, decoder.target),
    draft_state=sharding.of_draft_state(state.draft_state, decoder.drafter),
  )


def constrain(decoder: Decoder, state: DecodeState) -> DecodeState:
  """Constrains all arrays of a state to their shardings, inside of a program."""
  return state if decoder.sharding is None else _constrain(state, state_shardings(decoder, state))
