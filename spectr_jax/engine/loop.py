"""The loop: draft, score, verify, commit, on the device until every row is done."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.constraint import masked
from spectr_jax.draft import Commitment, DraftRequest
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.result import (
  FAILED_DRAFT,
  FAILED_TARGET,
  ORIGIN_BONUS,
  ORIGIN_CORRECTION,
  ORIGIN_DRAFT,
  Generation,
)
from spectr_jax.engine.sharding import tracing_with
from spectr_jax.engine.state import DecodeState, constrain
from spectr_jax.engine.statistics import round_statistics
from spectr_jax.kernels import noise
from spectr_jax.kernels.cache_writes import write_rows
from spectr_jax.kernels.dispatch import round_on_one_device
from spectr_jax.kernels.layouts import in_rows
from spectr_jax.kernels.softmax import log_totals
from spectr_jax.model import ModelOutput
from spectr_jax.penalties import path_tokens
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import logits_to_probs
from spectr_jax.tree import TokenTree
from spectr_jax.verifiers import Record, Verdict
from spectr_jax.verify import decide_rows, emitted

# Scopes in compiled programs: of the loop, and of the parts of a round.
ROUNDS = 'rounds'
PARTS = DRAFT, TARGET, PROBS, VERIFY, COMMIT = 'draft', 'target', 'probs', 'verify', 'commit'
_PURPOSE_DRAFT, _PURPOSE_VERIFY, _PURPOSE_POSITION = range(3)


def noise_keys(decoder: Decoder, state: DecodeState) -> tuple[jax.Array, jax.Array]:
  """The next round's keys `[B, L + 1]` for drafting and for verification, one per depth of the tree."""
  depths, own_keys = jnp.arange(decoder.tree.max_depth + 1), noise.for_rounds(state.keys)
  fold_each = jax.vmap(jax.random.fold_in, (None, 0))

  def of_positions(key, root_position):
    return fold_each(jax.random.fold_in(key, _PURPOSE_POSITION), root_position + 1 + depths)

  def of_round(key, root_position):
    # Keyed by the committed length, never by a token's own position: noise behind a rejection has already influenced
    # the decision, and reusing it would bias the tokens that follow.
    purposes = jnp.array([_PURPOSE_DRAFT, _PURPOSE_VERIFY])
    own = fold_each(jax.random.fold_in(key, root_position + 1), purposes)
    return jax.vmap(fold_each, (0, None))(own, depths)

  if decoder.method.is_seed_exact:
    keys = jax.vmap(of_positions)(own_keys, state.root_position)
    return keys, keys
  keys = jax.vmap(of_round)(own_keys, state.root_position)
  return keys[:, 0], keys[:, 1]


def _over_rows(
  function: Callable[[Decoder, DecodeState], Any],
  decoder: Decoder,
  state: DecodeState,
  outputs: Callable[[Any, Any], Any],
) -> Any:
  """`function(decoder, state)`, on each device's rows apart where the sharding says so, see `over_rows`."""
  sharding = decoder.sharding
  if sharding is not None and sharding.runs_rows_apart(decoder.drafter, state.keys.shape[0]):
    function = sharding.over_rows(function, state, outputs)
  with tracing_with(sharding):
    return function(decoder, state)


# The parts of a round, one after another; `decode.experiment.latency` times them one by one.


@jax.named_scope(DRAFT)
def propose(decoder: Decoder, state: DecodeState, keys: jax.Array) -> Proposal:
  """The drafter's guesses by the keys for drafting; an empty proposal without a drafter or a tree, ValueError for an
  undeclared one.
  """
  if decoder.drafter is None or not decoder.tree.num_nodes:
    batch_size, vocab_size = state.keys.shape[0], decoder.target.vocab_size
    return Proposal(jnp.zeros((batch_size, 0), jnp.int32), jnp.zeros((batch_size, 0, vocab_size)))
  drafter, rule = decoder.drafter, decoder.method.proposal_rule
  guess, sharding = type(drafter).propose, decoder.sharding
  is_alone = sharding is None or sharding.drafts_alone(drafter, len(keys))
  limits = {'constraints': decoder.constraints, 'states': state.constraint_states}
  request = DraftRequest(keys, state.sampling, decoder.tree, rule, **limits, penalties=state.penalties(decoder))
  if sharding is not None and is_alone:
    guess = sharding.on_each_device(guess)
  with round_on_one_device(is_alone):
    proposal = guess(drafter, state.draft_state, state.draft_context(decoder), request)
  # The method was checked against the drafter's declarations, so proposals must agree with them.
  for field, declared in (('is_given', 'has_given_candidates'), ('parents', 'has_grown_trees')):
    if (getattr(proposal, field) is not None) != (is_declared := getattr(drafter, declared)):
      raise ValueError(f'the drafter declares {declared}={is_declared}, but its proposals have another {field}')
  return proposal


@jax.named_scope(TARGET)
def score(decoder: Decoder, state: DecodeState, proposal: Proposal) -> ModelOutput:
  """The target's call on the last token and the N guesses: logits `[B, N + 1, V]`, and a cache with these pending.

  Under constraints the logits of tokens that are not allowed are -inf.
  """
  tree = decoder.tree
  mask = jax.vmap(lambda parents: tree.of_row(parents).ancestors)(proposal.parents) if tree.is_grown else tree.ancestors
  output = decoder.target.apply(
    jnp.concatenate([state.last_token[:, None], jnp.maximum(proposal.tokens, 0)], axis=1),
    state.root_position[:, None] + jnp.asarray(tree.depths),
    mask,
    state.target_cache,
  )
  states = state.node_states(decoder, proposal)
  return dataclasses.replace(output, logits=masked(decoder.constraints, output.logits, states))


def judge(
  decoder: Decoder,
  state: DecodeState,
  keys: jax.Array,
  rows: Proposal,
  logits: jax.Array,
  *,
  is_explained: bool = False,
) -> tuple[jax.Array, Verdict, Record | None]:
  """The target's distributions `[B, N + 1, V]` by logits of equal shape, the verdicts, and their records or None."""
  with jax.named_scope(PROBS):
    if (penalties := state.penalties(decoder)) is not None:
      logits = penalties.apply(logits, path_tokens(decoder.tree, rows.tokens, rows.parents))
    target_probs = in_rows(logits_to_probs(logits, state.sampling))
  with jax.named_scope(VERIFY):
    verdict, record = decide_rows(
      decoder.method.verifier, keys, decoder.tree, rows, target_probs, state.verifier_state, is_explained=is_explained
    )
  return target_probs, verdict, record


def _failures(state: DecodeState, proposal: Proposal, target_probs: jax.Array) -> jax.Array:
  """The failures of each row as in `Generation`, `[B]`; logits that are not finite give a distribution of NaN."""
  is_bad_target = jnp.any(jnp.isnan(target_probs[:, :, 0]), axis=1)
  is_bad_draft = jnp.any(jnp.isnan(proposal.probs[:, :, 0]), axis=1)
  failures = FAILED_TARGET * is_bad_target + FAILED_DRAFT * is_bad_draft
  return jnp.where(state.is_done, 0, failures).astype(jnp.int32)


def _log_probs(output: ModelOutput, path: jax.Array, tokens: jax.Array) -> jax.Array:
  """The target's log probability `[B, L + 1]` of each of a round's tokens, after the nodes `path` of equal shape."""
  logits = jax.vmap(lambda row, nodes: row[nodes])(output.logits, path)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  return (own - log_totals(logits)[..., 0]).astype(jnp.float32)


def _is_path_end(tree: TokenTree, proposal: Proposal, path: jax.Array, num_accepted: jax.Array) -> jax.Array:
  """bool `[B, 1]`: whether the deepest accepted node has no children."""
  deepest = jnp.take_along_axis(path, num_accepted, axis=1)
  if not tree.is_grown:
    return jnp.asarray(tree.num_children)[deepest] == 0
  return jax.vmap(lambda parents, node: tree.of_row(parents).num_children[node] == 0)(proposal.parents, deepest)


def _record(
  decoder: Decoder,
  state: DecodeState,
  proposal: Proposal,
  output: ModelOutput,
  verdict: Verdict,
  tokens: jax.Array,
  failures: jax.Array,
) -> tuple[Generation, jax.Array]:
  """The result with a round's tokens, up to EOS or the limit, and bool `[B]`, which rows are done."""
  result, tree = state.result, decoder.tree
  accepted = verdict.num_accepted[:, None]
  places = jnp.arange(tree.max_depth + 1)
  path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
  own = jnp.where(_is_path_end(tree, proposal, path, accepted), ORIGIN_BONUS, ORIGIN_CORRECTION)
  origins = jnp.where(places < accepted, ORIGIN_DRAFT, own)

  is_eos = functools.reduce(jnp.logical_or, [tokens == eos_id for eos_id in decoder.eos_ids])
  if state.sampling.ignore_eos is not None:
    is_eos &= ~state.sampling.ignore_eos[:, None]
  has_eos = jnp.any(is_eos, axis=1)
  count = jnp.where(has_eos, jnp.argmax(is_eos, axis=1), verdict.num_accepted) + 1
  count = jnp.minimum(count, state.limits - result.lengths).astype(jnp.int32)
  count = jnp.where(state.is_done | (failures != 0), 0, count)
  is_kept = places < count[:, None]
  slots = jnp.where(is_kept, result.lengths[:, None] + places, decoder.result_size)
  lengths = result.lengths + count
  # An EOS beyond the limit makes no difference, because the limit has ended its row.
  is_done = state.is_done | has_eos | (lengths >= state.limits)
  rows, values = [result.tokens, result.origins], [tokens, origins]
  if result.logprobs is not None:
    rows, values = [*rows, result.logprobs], [*values, _log_probs(output, path, tokens)]
  new_tokens, new_origins, *logprobs = write_rows(rows, slots, values)
  is_accepted = (is_kept & (places < accepted))[:, : tree.max_depth]
  num_deeper = result.accepted_by_depth.shape[1] - tree.max_depth  # of a budget's deepest tree
  result = dataclasses.replace(
    result,
    tokens=new_tokens,
    lengths=lengths,
    num_target_calls=result.num_target_calls + ~state.is_done,
    accepted_by_depth=result.accepted_by_depth + jnp.pad(is_accepted, ((0, 0), (0, num_deeper))),
    origins=new_origins,
    failures=failures,
    logprobs=logprobs[0] if logprobs else None,
  )
  return result, is_done


def _after_logits(num_committed: jax.Array, verdict: Verdict) -> jax.Array:
  """`num_committed` `[B]` as it is, but for the compiler a result of the logits, also without a draft.

  Writes to the caches take it, so the compiler sees that they follow all reads, and copies no cache.
  """
  is_negative = verdict.next_token < 0  # never: the compiler does not know that tokens count from 0
  return jnp.where(is_negative, 0, num_committed)


@jax.named_scope(COMMIT)
def commit(
  decoder: Decoder,
  state: DecodeState,
  proposal: Proposal,
  output: ModelOutput,
  target_probs: jax.Array,
  verdict: Verdict,
) -> DecodeState:
  """The state after the round; the target's distributions are `[B, N + 1, V]`, or `[B, 1, V]` of the roots alone."""
  tokens = emitted(proposal, verdict)
  failures = _failures(state, proposal, target_probs)
  result, is_done = _record(decoder, state, proposal, output, verdict, tokens, failures)
  # The target's call on the roots alone, where no row has a guess, visits no position.
  if result.statistics is not None and output.logits.shape[1] > 1:
    tree = decoder.tree
    visited = jax.vmap(lambda row, target, kept: round_statistics(tree.of_row(row.parents), row, target, kept))(
      dataclasses.replace(proposal, state=None), target_probs, verdict
    )
    visited = jax.tree.map(lambda x: jax.vmap(jnp.multiply)(x, ~state.is_done), visited)
    result = dataclasses.replace(result, statistics=result.statistics + visited)
  path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
  # What the text does not keep, behind EOS or the limit, is not committed either: recurrent states cannot go back.
  num_committed = _after_logits(result.lengths - state.result.lengths, verdict)
  is_new = jnp.arange(tokens.shape[1]) < num_committed[:, None]
  state = dataclasses.replace(
    _extend_context(state, output, tokens, path, num_committed),
    constraint_states=state.states_after(decoder, proposal, verdict),
    counts=None if state.counts is None else state.counts.add(tokens, is_new),
    last_token=jnp.where(state.is_done, state.last_token, verdict.next_token),
    root_position=state.root_position + num_committed,
    is_done=is_done,
    target_cache=decoder.target.commit_fn(output.cache, path[:, : output.logits.shape[1]], num_committed),
    verifier_state=verdict.state,
    result=result,
  )
  if decoder.drafter is None or not decoder.tree.num_nodes:  # a drafter that pauses reads the text later
    return state
  commitment = Commitment(path, num_committed, verdict.next_token, decoder.tree)
  draft_state = decoder.drafter.commit(proposal.state, state.draft_context(decoder), commitment)
  return dataclasses.replace(state, draft_state=draft_state)


def _extend_context(state: DecodeState, output: ModelOutput, tokens, path, num_committed) -> DecodeState:
  """`state` with the round's tokens and features if the drafter reads them; call it before `root_position` moves on."""
  places = jnp.arange(path.shape[1])
  is_new = places < num_committed[:, None]
  text, features = state.text, state.features
  if text is not None:  # the tokens after the root
    slots = jnp.where(is_new, state.root_position[:, None] + 1 + places, text.shape[1])
    (text,) = write_rows([text], slots, [tokens])
  if features is not None:  # those of the root and of the accepted nodes
    slots = jnp.where(is_new, state.root_position[:, None] + places, features.shape[1])
    (features,) = write_rows([features], slots, [jax.vmap(lambda row, nodes: row[nodes])(output.features, path)])
  return dataclasses.replace(state, text=text, features=features)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
  """The inputs and the outcome of a round's verification."""

  keys: jax.Array  # typed, [B, L + 1], for verification
  proposal: Proposal  # without its state
  target_probs: jax.Array  # [B, N + 1, V]
  verdict: Verdict
  record: Record | None = None


def run_round(decoder: Decoder, state: DecodeState, *, is_explained: bool = False) -> tuple[DecodeState, Round]:
  """One round with one target call: draft, score, verify, commit. Rows that are done stay as they are."""

  def one(decoder, state):
    draft_keys, verify_keys = noise_keys(decoder, state)
    proposal = propose(decoder, state, draft_keys)
    output = score(decoder, state, proposal)
    rows = dataclasses.replace(proposal, state=None)
    target_probs, verdict, record = judge(decoder, state, verify_keys, rows, output.logits, is_explained=is_explained)
    state = commit(decoder, state, proposal, output, target_probs, verdict)
    return state, Round(verify_keys, rows, target_probs, verdict, record)

  return _over_rows(one, decoder, state, lambda state, row: (state, row))


def _treeless_round(decoder: Decoder, state: DecodeState) -> DecodeState:
  """A round in which no row has a guess, as an autoregressive step: its tokens are those of `run_round`, up to
  rounding.
  """
  draft_keys, verify_keys = noise_keys(decoder, state)
  proposal = propose(decoder, state, draft_keys)
  output = decoder.target.apply(
    state.last_token[:, None], state.root_position[:, None], jnp.ones((1, 1), bool), state.target_cache
  )
  states = None if state.constraint_states is None else state.constraint_states[:, None]
  output = dataclasses.replace(output, logits=masked(decoder.constraints, output.logits, states))
  logits, penalties = output.logits, state.penalties(decoder)
  if penalties is not None:
    logits = penalties.apply(logits, jnp.zeros((*logits.shape[:2], 0), jnp.int32))
  target_probs = logits_to_probs(logits, state.sampling)
  verifier, tree = decoder.method.verifier, decoder.tree
  verdict = jax.vmap(lambda keys, probs, own: verifier.without_candidates(keys, tree, probs, own))(
    verify_keys, target_probs[:, 0], state.verifier_state
  )
  return commit(decoder, state, proposal, output, target_probs, verdict)


def _has_guess(decoder: Decoder, state: DecodeState) -> jax.Array:
  """bool `[B]`: the rows with a guess in the next round. The keys draw nothing, since all candidates are given."""
  tokens = propose(decoder, state, noise_keys(decoder, state)[0]).tokens
  return jnp.any(tokens >= 0, axis=1)


@functools.partial(jax.jit, donate_argnames='state')
def run_rounds(decoder: Decoder, state: DecodeState, num_rounds: jax.Array) -> DecodeState:
  """`decode_rounds` as one program, for int32 scalars `num_rounds`."""

  def is_running(loop):
    state, done_rounds = loop
    return (done_rounds < num_rounds) & ~jnp.all(state.is_done) & ~jnp.any(state.result.failures != 0)

  def advance(loop):
    state, done_rounds = loop
    return constrain(decoder, run_round(decoder, state)[0]), done_rounds + 1

  def advance_without_tree(loop):
    state, done_rounds = loop
    state = _over_rows(_treeless_round, decoder, state, lambda state, row: state)
    return constrain(decoder, state), done_rounds + 1

  def has_guess(loop):
    state, _ = loop
    has_guess = _over_rows(_has_guess, decoder, state, lambda state, row: row)
    return jnp.any(has_guess & ~state.is_done)

  def advance_either(loop):
    # Two loops, and not two branches, which would copy the caches.
    loop = jax.lax.while_loop(lambda loop: is_running(loop) & ~has_guess(loop), advance_without_tree, loop)
    return jax.lax.while_loop(lambda loop: is_running(loop) & has_guess(loop), advance, loop)

  can_skip_trees = decoder.drafter is not None and decoder.drafter.can_skip_trees and decoder.tree.num_nodes > 0
  with jax.named_scope(ROUNDS):
    start = state, jnp.zeros((), jnp.int32)
    state, _ = jax.lax.while_loop(is_running, advance_either if can_skip_trees else advance, start)
  return state


def decode_rounds(decoder: Decoder, state: DecodeState, num_rounds: int | None = None) -> DecodeState:
  """Runs up to `num_rounds` rounds, until every row is done or one has failed; one program serves any number.

  `state` is donated: only the returned one may be used afterwards. Its `result` holds the tokens so far.

  Args:
    decoder: The decoder that `state` was made with.
    state: From `init_decode` or an earlier call.
    num_rounds: The most rounds, at least 0, or None for no limit; ValueError if it is negative.
  """
  if num_rounds is None:
    num_rounds = np.iinfo(np.int32).max
  if isinstance(num_rounds, int) and num_rounds < 0:
    raise ValueError(f'num_rounds must not be negative, got {num_rounds}')
  return run_rounds(decoder, state, np.int32(num_rounds))
