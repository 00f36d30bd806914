"""The loop's state between two rounds, and the first one."""

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
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.statistics import Statistics
from spectr_jax.model import Model
from spectr_jax.penalties import Penalties, TokenCounts
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import SamplingParams
from spectr_jax.verifiers import Verdict

_constrain = jax.lax.with_sharding_constraint


class Held(NamedTuple):
  """What rows hold of their texts; the fields are those of `DecodeState`."""

  target_cache: Any
  features: jax.Array | None
  draft_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """The arrays that change from round to round: all that rows hold. `HeldTexts` is the host's copy of their texts.

  A row's text is in `target_cache`, its new tokens in `result`, and all of its tokens in `text` if the drafter reads
  them. `reading` and `PrefixCache` write prompts, `loop.commit` what a round keeps, `finish` ends rows.

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
    constraint_states: int32 `[B]`, the rows' states in `Decoder.constraints`, 0 for rows without a constraint; None if
      the decoder has none.
    counts: The tokens of the rows' texts if `sampling` reads them, else None.
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
  constraint_states: jax.Array | None = None
  counts: TokenCounts | None = None

  @property
  def held(self) -> Held:
    """What the rows hold of their texts."""
    return Held(self.target_cache, self.features, self.draft_state)

  def draft_context(self, decoder: Decoder) -> DraftContext:
    """The text and hidden states that the drafter may read."""
    read, cache = () if decoder.drafter is None else decoder.drafter.kv_layers, self.target_cache
    target_kv = tuple((cache.keys[layer], cache.values[layer]) for layer in read) or None
    return DraftContext(self.root_position + 1, decoder.target, self.text, self.features, target_kv)

  def penalties(self, decoder: Decoder) -> Penalties | None:
    """The penalties of the next round, or None."""
    return Penalties.of(self.sampling, self.counts, self.result.lengths, decoder.eos_ids)

  def node_states(self, decoder: Decoder, proposal: Proposal) -> jax.Array | None:
    """The states `[B, N + 1]` of the root and of all guesses under the constraints, or None without constraints."""
    if decoder.constraints is None or self.constraint_states is None:
      return None
    return decoder.constraints.of_nodes(self.constraint_states, proposal.tokens, decoder.tree, proposal.parents)

  def states_after(self, decoder: Decoder, proposal: Proposal, verdict: Verdict) -> jax.Array | None:
    """The rows' states `[B]` after a round, or None: those after the last accepted guesses and the tokens behind."""
    of_nodes = self.node_states(decoder, proposal)
    if decoder.constraints is None or self.constraint_states is None or of_nodes is None:
      return None
    path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
    deepest = jnp.take_along_axis(path, verdict.num_accepted[:, None], axis=1)
    own = jnp.take_along_axis(of_nodes, deepest, axis=1)[:, 0]
    return jnp.where(self.is_done, self.constraint_states, decoder.constraints.after(own, verdict.next_token))


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


class Prompts(NamedTuple):
  """Prompts and what belongs to each of them, checked and on their devices."""

  keys: jax.Array  # typed, [B]
  sampling: SamplingParams  # of arrays [B]
  tokens: Any  # int32 [B, P], right-padded
  lengths: Any  # int32 [B], from 1 to P
  limits: Any  # int32 [B], the most new tokens
  constraint_states: Any = None  # int32 [B], as in `DecodeState`


def checked_prompts(
  decoder: Decoder,
  rng_key: jax.Array,
  prompts: ArrayLike,
  prompt_lengths: ArrayLike,
  sampling: SamplingParams | None,
  max_new_tokens: ArrayLike | None,
  like: SamplingParams | None = None,
  constraint: ArrayLike | None = None,
  width: int | None = None,
) -> Prompts:
  """Prompts as for `init_decode`, with all filters that `like` has, padded to `width` on the host if that is given."""
  prompts = checks.as_integers('prompts', prompts)
  prompt_lengths = checks.as_integers('prompt_lengths', prompt_lengths)
  checks.check_shapes(prompts, prompt_lengths)
  batch_size = prompts.shape[0]
  limits = checks.as_limits(decoder.max_new_tokens if max_new_tokens is None else max_new_tokens, batch_size)
  decoder.check_prompts(prompts, prompt_lengths, limits)
  sampling = SamplingParams() if sampling is None else sampling
  if not isinstance(sampling, SamplingParams):
    raise ValueError(f'sampling must be SamplingParams, such as SamplingParams(temperature=0.7), got {sampling!r}')
  params = sampling.for_rows(batch_size, decoder.target.vocab_size)
  starts = decoder.start_states(constraint, batch_size)
  if params.ignore_eos is not None and starts is not None and np.any(np.asarray(params.ignore_eos) & (starts > 0)):
    raise ValueError('ignore_eos and a constraint are both given: a constraint ends where it is complete')
  if width is not None:
    prompts = np.pad(np.asarray(prompts), ((0, 0), (0, width - prompts.shape[1])))
  checked = Prompts(
    checks.row_keys(rng_key, batch_size),
    params if like is None else params.with_filters_of(like),
    prompts.astype(jnp.int32),
    prompt_lengths.astype(jnp.int32),
    limits,
    starts,
  )
  if decoder.sharding is None:
    return checked
  decoder.sharding.check_rows(batch_size)
  return decoder.sharding.put_rows(checked)


@functools.partial(jax.jit, donate_argnames='held')
def first_state(decoder: Decoder, prompts: Prompts, held: Held) -> DecodeState:
  """The state before the first round; `held` is of all tokens of the prompts but the last."""
  batch_size, tree, drafter = len(prompts.lengths), decoder.tree, decoder.drafter
  verifier_state = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x))), decoder.method.verifier.init_state(tree)
  )
  zeros = jnp.zeros(batch_size, jnp.int32)
  nothing = jnp.full((batch_size, decoder.result_size), -1, jnp.int32)
  state = DecodeState(
    keys=prompts.keys,
    sampling=prompts.sampling,
    last_token=jnp.take_along_axis(prompts.tokens, prompts.lengths[:, None] - 1, axis=1)[:, 0],
    root_position=prompts.lengths - 1,
    limits=prompts.limits,
    is_done=jnp.zeros(batch_size, bool),
    target_cache=held.target_cache,
    draft_state=held.draft_state,
    verifier_state=verifier_state,
    text=to_size(prompts.tokens, decoder.cache_size) if drafter is not None and drafter.reads_tokens else None,
    features=held.features,
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
    constraint_states=prompts.constraint_states,
  )
  if prompts.sampling.counts_tokens:
    counts = TokenCounts.of_prompts(prompts.tokens, prompts.lengths, decoder.target.vocab_size)
    state = dataclasses.replace(state, counts=counts)
  return constrain(decoder, state)


def to_size(values: jax.Array, size: int) -> jax.Array:
  """Values `[B, S, ...]` with zeros behind them, `[B, size, ...]`."""
  return jnp.pad(values, [(0, 0), (0, size - values.shape[1])] + [(0, 0)] * (values.ndim - 2))


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
  if decoder.sharding is None:
    raise ValueError('state_shardings needs a decoder with a sharding')
  rows = decoder.sharding.of_rows(dataclasses.replace(state, target_cache=None, draft_state=None))
  held = held_shardings(decoder.sharding, decoder.target, decoder.drafter, state.held)
  return dataclasses.replace(rows, target_cache=held.target_cache, draft_state=held.draft_state)


def held_shardings(sharding: DecodeSharding, target: Model, drafter: Drafter | None, held: Held) -> Held:
  """The shardings in place of the arrays, or shapes, of what rows hold."""
  return Held(
    sharding.of_cache(held.target_cache, target),
    sharding.of_rows(held.features),
    sharding.of_draft_state(held.draft_state, drafter),
  )


def constrain(decoder: Decoder, state: DecodeState) -> DecodeState:
  """Constrains all arrays of a state to their shardings, inside of a program."""
  return state if decoder.sharding is None else _constrain(state, state_shardings(decoder, state))
