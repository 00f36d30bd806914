"""What the loop keeps between two rounds, and how it begins: requests checked, prompts prefilled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.draft import Drafter, ModelDrafter
from spectr_jax.engine import checks as request
from spectr_jax.engine.result import Generation
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.statistics import Statistics
from spectr_jax.methods import Method, get_method
from spectr_jax.model import Model
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree

_constrain = jax.lax.with_sharding_constraint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """Everything between two rounds.

  Attributes:
    target: The target model.
    drafter: The drafter, or None.
    keys: Typed keys `[B]`, one per row, never spent.
    sampling: The rows' sampling parameters.
    last_token: int32 `[B]`, the last committed token, the root of the next tree.
    root_position: int32 `[B]`, its position; committed tokens minus one.
    is_done: bool `[B]`.
    target_cache: The target's cache, all committed tokens but the last.
    draft_state: The drafter's state, or None.
    verifier_state: Per-row state of the verifier, batch in front.
    result: Tokens so far.
    room: Tokens that a row's caches hold, static.
    method, tree, eos_ids, sharding: What the program is compiled for.
    classes: So are these, of all containers in `target` and `drafter`. JAX takes structures of dataclasses with equal
      static fields for equal, also of different classes, and might run one drafter with another's program.
  """

  target: Model
  drafter: Any
  keys: jax.Array
  sampling: SamplingParams
  last_token: jax.Array
  root_position: jax.Array
  is_done: jax.Array
  target_cache: Any
  draft_state: Any
  verifier_state: Any
  result: Generation
  room: int = dataclasses.field(metadata={'static': True})
  method: Method = dataclasses.field(metadata={'static': True})
  tree: TokenTree = dataclasses.field(metadata={'static': True})
  eos_ids: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  sharding: DecodeSharding | None = dataclasses.field(metadata={'static': True})
  classes: tuple[type, ...] = dataclasses.field(metadata={'static': True})


def _classes_in(structure: jax.tree_util.PyTreeDef) -> tuple[type, ...]:
  """The classes of a tree's nodes, depth first."""
  node = structure.node_data()
  return (() if node is None else (node[0],)) + tuple(c for child in structure.children() for c in _classes_in(child))


def init_decode(
  rng_key: jax.Array,
  target: Model,
  draft: Model | Drafter | None,
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  *,
  method: str | Method,
  tree: TokenTree | None = None,
  max_new_tokens: int,
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  eos_id: int | tuple[int, ...] | None = None,
  statistics: bool = False,
  sharding: DecodeSharding | None = None,
  room: int | None = None,
) -> DecodeState:
  """Checks the request and prefills; the arguments are those of `generate`, and one more.

  Args:
    room: Tokens that a row's caches hold, static; by default as many as prompt and new tokens take. Where it is more,
      `refill` can give a row to a longer prompt.

  Raises:
    ValueError: As `generate`, or there is not room enough.
  """
  method = get_method(method)
  tree = method.tree_for(tree)
  if method.max_drafts == 0:
    draft = None
  drafter = ModelDrafter(draft) if isinstance(draft, Model) else draft
  request.check_models(target, drafter, method)
  prompts, prompt_lengths = jnp.asarray(prompts), jnp.asarray(prompt_lengths)
  limits = [model.max_length for model in (target, drafter) if model is not None and model.max_length is not None]
  request.check_prompts(prompts, prompt_lengths, max_new_tokens, target.vocab_size, min(limits, default=None))
  eos_ids = () if eos_id is None else (eos_id,) if isinstance(eos_id, int | np.integer) else tuple(eos_id)
  batch_size = prompts.shape[0]
  needed = prompts.shape[1] + max_new_tokens
  room = needed if room is None else room
  if room < needed:
    raise ValueError(
      f'room must be at least {needed}, for prompts of {prompts.shape[1]} tokens and new ones; got {room}'
    )
  rows = (
    request.row_keys(rng_key, batch_size),
    SamplingParams.make(batch_size, temperature=temperature, top_k=top_k, top_p=top_p),
    prompts.astype(jnp.int32),
    prompt_lengths.astype(jnp.int32),
  )
  if sharding is not None:
    sharding.check(batch_size, target, drafter)
    rows, (target, drafter) = sharding.put_rows(rows), sharding.put_models(target, drafter)
  prompts, prompt_lengths = rows[2:]
  sizes = {'max_length': room, 'sharding': sharding}
  classes = [_classes_in(jax.tree.structure(each)) for each in (target, drafter)]
  state = _first_state(
    *rows,
    _prefill_target(target, prompts, prompt_lengths, classes=classes[0], **sizes),
    None if drafter is None else _prefill_draft(drafter, prompts, prompt_lengths, classes=classes[1], **sizes),
    method=method,
    tree=tree,
    max_new_tokens=max_new_tokens,
    eos_ids=tuple(int(i) for i in eos_ids),
    statistics=statistics,
    sharding=sharding,
    classes=classes[0] + classes[1],
    room=room,
  )
  return dataclasses.replace(state, target=target, drafter=drafter)


# The prefills are programs of their own, so that methods and trees share them.


@functools.partial(jax.jit, static_argnames=('max_length', 'sharding', 'classes'))
def _prefill_target(target: Model, prompts, prompt_lengths, *, max_length, sharding, classes):
  del classes  # compiled for them
  cache = target.init_cache_fn(prompts.shape[0], max_length)
  cache = target.prefill(prompts, prompt_lengths - 1, cache)
  return cache if sharding is None else _constrain(cache, sharding.of_cache(cache, target))


@functools.partial(jax.jit, static_argnames=('max_length', 'sharding', 'classes'))
def _prefill_draft(drafter: Drafter, prompts, prompt_lengths, *, max_length, sharding, classes):
  del classes  # compiled for them
  state = drafter.init(prompts, prompt_lengths, max_length)
  return state if sharding is None else _constrain(state, sharding.of_draft_state(state, drafter))


@functools.partial(
  jax.jit,
  static_argnames=('method', 'tree', 'max_new_tokens', 'eos_ids', 'statistics', 'sharding', 'classes', 'room'),
  donate_argnames=('target_cache', 'draft_state'),
)
def _first_state(
  keys,
  sampling,
  prompts,
  prompt_lengths,
  target_cache,
  draft_state,
  *,
  method,
  tree,
  max_new_tokens,
  eos_ids,
  statistics,
  sharding,
  classes,
  room,
):
  """The state before the first round, without its models: a jitted function would return copies of them."""
  batch_size = prompts.shape[0]
  verifier_state = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (batch_size, *jnp.shape(x))), method.verifier.init_state(tree)
  )
  zeros = jnp.zeros(batch_size, jnp.int32)
  nothing = jnp.full((batch_size, max_new_tokens), -1, jnp.int32)
  state = DecodeState(
    target=None,
    drafter=None,
    keys=keys,
    sampling=sampling,
    last_token=jnp.take_along_axis(prompts, prompt_lengths[:, None] - 1, axis=1)[:, 0],
    root_position=prompt_lengths - 1,
    is_done=jnp.zeros(batch_size, bool),
    target_cache=target_cache,
    draft_state=draft_state,
    verifier_state=verifier_state,
    result=Generation(
      tokens=nothing,
      lengths=zeros,
      num_target_calls=zeros,
      accepted_by_depth=jnp.zeros((batch_size, tree.max_depth), jnp.int32),
      origins=nothing,
      failures=zeros,
      statistics=Statistics.zeros(batch_size, tree) if statistics and tree.num_nodes else None,
    ),
    method=method,
    tree=tree,
    eos_ids=eos_ids,
    sharding=sharding,
    classes=classes,
    room=room,
  )
  if sharding is None:
    return state
  rows = dataclasses.replace(state, target_cache=None, draft_state=None)
  rows = _constrain(rows, sharding.of_rows(rows))
  return dataclasses.replace(rows, target_cache=target_cache, draft_state=draft_state)


def state_shardings(state: DecodeState, target: Model, drafter: Drafter | None) -> DecodeState:
  """Shardings of a state without its models, which are given apart, in place of its arrays."""
  sharding = state.sharding
  rows = sharding.of_rows(dataclasses.replace(state, target_cache=None, draft_state=None))
  return dataclasses.replace(
    rows,
    target_cache=sharding.of_cache(state.target_cache, target),
    draft_state=sharding.of_draft_state(state.draft_state, drafter),
  )
