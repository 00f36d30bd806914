"""The loop: draft, score, verify, commit, on the device until every row is done."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.aot.hlo_report import out_of_memory
from spectr_jax.draft import Drafter
from spectr_jax.engine.result import (
  FAILED_DRAFT,
  FAILED_TARGET,
  ORIGIN_BONUS,
  ORIGIN_CORRECTION,
  ORIGIN_DRAFT,
  Generation,
)
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState, init_decode, state_shardings
from spectr_jax.engine.statistics import round_statistics
from spectr_jax.methods import Method
from spectr_jax.model import Model, ModelOutput
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.tree import TokenTree
from spectr_jax.verify import Verdict

ROUNDS = 'rounds'  # scope of the loop in compiled programs
_PURPOSE_DRAFT, _PURPOSE_VERIFY, _PURPOSE_POSITION = range(3)


def _failures(state: DecodeState, proposal: Proposal, target_probs: jax.Array) -> jax.Array:
  """Which models gave logits that are not finite, `[B]`; a law that is NaN is NaN for every token."""
  is_bad_target = jnp.any(jnp.isnan(target_probs[:, :, 0]), axis=1)
  is_bad_draft = jnp.any(jnp.isnan(proposal.probs[:, :, 0]), axis=1)
  failures = FAILED_TARGET * is_bad_target + FAILED_DRAFT * is_bad_draft
  return jnp.where(state.is_done, 0, failures).astype(jnp.int32)


def _record(state: DecodeState, proposal: Proposal, verdict, failures) -> tuple[Generation, jax.Array]:
  """Adds a round's tokens to the result, up to EOS or the limit, and says which rows are done."""
  result, tree = state.result, state.tree
  max_new_tokens = result.tokens.shape[1]
  accepted = verdict.num_accepted[:, None]
  places = jnp.arange(tree.max_depth + 1)
  guesses = jnp.take_along_axis(proposal.tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
  guesses = jnp.pad(guesses, ((0, 0), (0, 1)))
  tokens = jnp.where(places < accepted, guesses, verdict.next_token[:, None])  # repeated behind its place
  path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
  deepest = jnp.take_along_axis(path, accepted, axis=1)
  is_path_end = jnp.asarray(tree.num_children)[deepest] == 0
  own = jnp.where(is_path_end, ORIGIN_BONUS, ORIGIN_CORRECTION)
  origins = jnp.where(places < accepted, ORIGIN_DRAFT, own)

  is_eos = jnp.zeros(tokens.shape, bool)
  for eos_id in state.eos_ids:
    is_eos |= tokens == eos_id
  has_eos = jnp.any(is_eos, axis=1)
  count = jnp.where(has_eos, jnp.argmax(is_eos, axis=1), verdict.num_accepted) + 1
  count = jnp.minimum(count, max_new_tokens - result.lengths).astype(jnp.int32)
  count = jnp.where(state.is_done | (failures != 0), 0, count)
  is_kept = places < count[:, None]
  slots = jnp.where(is_kept, result.lengths[:, None] + places, max_new_tokens)
  put = jax.vmap(lambda row, slots, values: row.at[slots].set(values, mode='drop'))
  lengths = result.lengths + count
  # An EOS that the limit cut off does not matter: its row is done as well.
  is_done = state.is_done | has_eos | (lengths >= max_new_tokens)
  result = dataclasses.replace(
    result,
    tokens=put(result.tokens, slots, tokens),
    lengths=lengths,
    num_target_calls=result.num_target_calls + ~state.is_done,
    accepted_by_depth=result.accepted_by_depth + (is_kept & (places < accepted))[:, : tree.max_depth],
    origins=put(result.origins, slots, origins),
    failures=failures,
  )
  return result, is_done


def noise_keys(state: DecodeState) -> tuple[jax.Array, jax.Array]:
  """Keys `[B, L + 1]` for drafting and for verification, one per depth of the tree."""
  depths = jnp.arange(state.tree.max_depth + 1)

  def fold(key, *data):
    return functools.reduce(jax.random.fold_in, data, key)

  def of_positions(key, root_position):
    return jax.vmap(lambda depth: fold(key, _PURPOSE_POSITION, root_position + 1 + depth))(depths)

  def of_round(key, root_position, purpose):
    # By the committed length, never by a token's own position: noise behind a rejection has already influenced the
    # decision, and reusing it biases what follows.
    round_key = fold(key, root_position + 1, purpose)
    return jax.vmap(lambda depth: fold(round_key, depth))(depths)

  if state.method.is_seed_exact:
    keys = jax.vmap(of_positions)(state.keys, state.root_position)
    return keys, keys
  return tuple(
    jax.vmap(of_round, (0, 0, None))(state.keys, state.root_position, purpose)
    for purpose in (_PURPOSE_DRAFT, _PURPOSE_VERIFY)
  )


# The parts of a round, one after another; `decode.experiment.latency` times them one by one.


def propose(state: DecodeState, keys: jax.Array) -> Proposal:
  """The drafter's guesses; none without one."""
  if state.drafter is None:
    batch_size, vocab_size = state.keys.shape[0], state.target.vocab_size
    return Proposal(jnp.zeros((batch_size, 0), jnp.int32), jnp.zeros((batch_size, 0, vocab_size)))
  return state.drafter.propose(keys, state.draft_state, state.tree, state.sampling, state.method.proposal_rule)


def score(state: DecodeState, tokens: jax.Array) -> ModelOutput:
  """The target's call on the last token and the guesses `[B, N]`."""
  return state.target.apply(
    jnp.concatenate([state.last_token[:, None], jnp.maximum(tokens, 0)], axis=1),
    state.root_position[:, None] + jnp.asarray(state.tree.depths),
    jnp.asarray(state.tree.ancestors),
    state.target_cache,
  )


def judge(state: DecodeState, keys: jax.Array, rows: Proposal, logits: jax.Array) -> tuple[jax.Array, Verdict]:
  """The target's laws `[B, N + 1, V]`, and what the method keeps of the guesses."""
  target_probs = logits_to_probs(logits, state.sampling)
  verdict = jax.vmap(lambda key, row, target, own: state.method.verifier.verify(key, state.tree, row, target, own))(
    keys, rows, target_probs, state.verifier_state
  )
  return target_probs, verdict


def commit(
  state: DecodeState, proposal: Proposal, output: ModelOutput, target_probs: jax.Array, verdict: Verdict
) -> DecodeState:
  """The state after the round: what was kept is recorded and moved to its place in the caches."""
  result, is_done = _record(state, proposal, verdict, _failures(state, proposal, target_probs))
  if result.statistics is not None:
    rows = dataclasses.replace(proposal, state=None)
    visited = jax.vmap(functools.partial(round_statistics, state.tree))(rows, target_probs, verdict)
    visited = jax.tree.map(lambda x: jax.vmap(jnp.multiply)(x, ~state.is_done), visited)
    result = dataclasses.replace(result, statistics=result.statistics + visited)
  path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
  # No token is negative: what is written to the caches depends on the logits, also where nothing was drafted. So the
  # compiler sees that it is written after all was read, and copies no cache.
  num_committed = jnp.where(state.is_done | (verdict.next_token < 0), 0, verdict.num_accepted + 1)
  draft_state = state.draft_state
  if state.drafter is not None:
    draft_state = state.drafter.commit(
      proposal.state, path, num_committed, output.features, tree=state.tree, next_token=verdict.next_token
    )
  return dataclasses.replace(
    state,
    last_token=jnp.where(state.is_done, state.last_token, verdict.next_token),
    root_position=state.root_position + num_committed,
    is_done=is_done,
    target_cache=state.target.commit_fn(output.cache, path, num_committed),
    draft_state=draft_state,
    verifier_state=verdict.state,
    result=result,
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
  """What a round has seen and decided.

  Attributes:
    keys: Typed keys `[B, L + 1]`, those for verification.
    proposal: The guesses; `state` is None.
    target_probs: `[B, N + 1, V]`, the target's laws.
    verdict: What was kept.
  """

  keys: jax.Array
  proposal: Proposal
  target_probs: jax.Array
  verdict: Verdict


def run_round(state: DecodeState) -> tuple[DecodeState, Round]:
  """One target call: draft, score, verify, commit. Rows that are done stay as they are."""
  draft_keys, verify_keys = noise_keys(state)
  proposal = propose(state, draft_keys)
  output = score(state, proposal.tokens)
  rows = dataclasses.replace(proposal, state=None)
  target_probs, verdict = judge(state, verify_keys, rows, output.logits)
  state = commit(state, proposal, output, target_probs, verdict)
  return state, Round(verify_keys, rows, target_probs, verdict)


@functools.partial(jax.jit, donate_argnames='carry')
def _run_rounds(target: Model, drafter: Any, carry: DecodeState, num_rounds: jax.Array) -> DecodeState:
  """`decode_rounds` on a state without its models, which are not donated."""

  def is_running(loop):
    state, done_rounds = loop
    return (done_rounds < num_rounds) & ~jnp.all(state.is_done) & ~jnp.any(state.result.failures != 0)

  def advance(loop):
    state, done_rounds = loop
    state, _ = run_round(dataclasses.replace(state, target=target, drafter=drafter))
    state = dataclasses.replace(state, target=None, drafter=None)
    if state.sharding is not None:
      state = jax.lax.with_sharding_constraint(state, state_shardings(state, target, drafter))
    return state, done_rounds + 1

  with jax.named_scope(ROUNDS):
    state, _ = jax.lax.while_loop(is_running, advance, (carry, jnp.zeros((), jnp.int32)))
  return state


def compile_decode(
  target: Model,
  drafter: Drafter | None,
  *,
  method: Method,
  tree: TokenTree,
  batch_size: int,
  prompt_length: int,
  max_new_tokens: int,
  sharding: DecodeSharding,
) -> jax.stages.Compiled:
  """Compiles the loop for devices that need not be there, from shapes alone.

  Args:
    target: The target; its parameters may be shapes.
    drafter: The drafter, or None for methods that draft nothing.
    method: The method.
    tree: A tree that it takes.
    batch_size: B.
    prompt_length: P, tokens of the longest prompt.
    max_new_tokens: Limit of new tokens.
    sharding: The mesh, which may be a description.

  Raises:
    ValueError: Rows, heads or parameters cannot be divided, or the program needs more memory than the devices have.
  """
  sharding.check(batch_size, target, drafter)
  state = jax.eval_shape(
    functools.partial(init_decode, method=method, tree=tree, max_new_tokens=max_new_tokens, eos_id=0),
    jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl='threefry2x32'), batch_size)),
    target,
    drafter,
    jax.ShapeDtypeStruct((batch_size, prompt_length), jnp.int32),
    jax.ShapeDtypeStruct((batch_size,), jnp.int32),
  )
  carry = dataclasses.replace(state, target=None, drafter=None, sharding=sharding)
  places = sharding.of_model(target), sharding.of_drafter(drafter), state_shardings(carry, target, drafter)
  arguments = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (target, drafter, carry), places
  )
  lowered = _run_rounds.lower(*arguments, jax.ShapeDtypeStruct((), jnp.int32))
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    raise out_of_memory(error, 'fewer rows, shorter texts or more devices need less') or error from error


def decode_rounds(state: DecodeState, num_rounds: int | None = None) -> DecodeState:
  """Runs up to `num_rounds` rounds, until every row is done or one has failed; one program for any number.

  `state` is donated, all but its models: use the returned one from here on. `state.result` holds the tokens so far.

  Args:
    state: From `init_decode` or an earlier call.
    num_rounds: Rounds at most, None for no limit.

  Raises:
    ValueError: `num_rounds` is negative.
  """
  if num_rounds is None:
    num_rounds = np.iinfo(np.int32).max
  if isinstance(num_rounds, int) and num_rounds < 0:
    raise ValueError(f'num_rounds must not be negative, got {num_rounds}')
  carry = dataclasses.replace(state, target=None, drafter=None)
  carry = _run_rounds(state.target, state.drafter, carry, np.int32(num_rounds))
  return dataclasses.replace(carry, target=state.target, drafter=state.drafter)


def generate(
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
) -> Generation:
  """Continues prompts with the target's law, guessing ahead with a draft.

  The loop is one program, compiled once per shape, method and tree; sampling parameters, keys and prompt lengths may
  change without compiling again.

  Args:
    rng_key: One typed key, from which row i takes `fold_in(rng_key, i)`, or a key array `[B]`. With a key array a row's
      tokens depend on its key and prompt alone, up to rounding not on its batch or padding.
    target: The model whose law comes out.
    draft: A model or drafter with the same vocabulary, or None for methods that draft nothing.
    prompts: Integers `[B, P]`, right-padded; what stands behind a prompt is not read.
    prompt_lengths: Integers `[B]`, from 1 to P.
    method: A name of `METHODS`, or a `Method`.
    tree: The guesses of a round, such as `TokenTree.chains(K, L)`; methods that draft nothing need none and ignore it.
    max_new_tokens: Limit of new tokens per row, static.
    temperature: Scalar or `[B]`; 0 decodes greedily.
    top_k: Scalar or `[B]`; 0 keeps all.
    top_p: Scalar or `[B]`, in (0, 1].
    eos_id: Id or ids that end a row, or None.
    statistics: Whether to count what happens at the positions visited; sorts the laws there, so it takes time.
    sharding: How to divide rows, models and caches over the devices of a mesh, or None for one device. Models that are
      divided so already, by `DecodeSharding.put_models`, are not moved. Tokens are the same up to rounding.

  Returns:
    The new tokens and how they came about.

  Raises:
    ValueError: A shape, range, vocabulary, method or tree does not fit; the message says what does. Outside of a trace,
      `NotFiniteError` where a model's logits are not finite.
  """
  state = init_decode(
    rng_key,
    target,
    draft,
    prompts,
    prompt_lengths,
    method=method,
    tree=tree,
    max_new_tokens=max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    eos_id=eos_id,
    statistics=statistics,
    sharding=sharding,
  )
  result = decode_rounds(state).result
  if not isinstance(result.failures, jax.core.Tracer):
    result.check()
  return result
