"""Verification by one shared race: the target's own winner is emitted, whatever the guesses are."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation
from spectr_jax.proposal import FirstArrivals
from spectr_jax.sampling import arrivals, first_arrival
from spectr_jax.verifiers.contexts import Position, next_position
from spectr_jax.verifiers.verifier import Decisions, Record, RecordedVerifier, Verdict, run_steps


@dataclasses.dataclass(frozen=True)
class SeedExact(RecordedVerifier):
  """ERSD ("Speculative Decoding via Exponential Races", Algorithms 2 and 5).

  Candidates are the first arrivals of a race with the draft's distribution. The emitted token is the winner of the race
  with the target's distribution, run on the same exponentials. If it is among the candidates, the walk goes on there.
  With one key per absolute position, shared by drafting and verification, the output equals that of ordinary Gumbel-max
  sampling with these keys, token for token, for every draft and tree. So candidates may also be given.

  A record has the decisions position by position, named `race`; they have arrival times and no uniforms.
  """

  proposal_rules = (FirstArrivals,)
  takes_given = True
  takes_grown = True
  explanation = Explanation(
    "Every token x has one exponential E. Candidates are the first to arrive at E/p; the target's own winner is the"
    ' first at E/q. If it is a candidate, the walk goes on there.',
    "q: it is the winner of the target's race",
    'Draft and target run the same race with the same random times, each with its own odds. The winner of the target is'
    ' the next token in any case, and the round goes on if it is among the candidates.',
  )

  def _start(self):
    """The node, its depth, and the winner at which the walk has stopped, or -1."""
    return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)

  def _walk(self, keys, tree, proposal, target_probs, carry):
    """Goes one position further; also returns the position and the target's arrival times `[V]`."""
    node, depth, _ = carry
    times = arrivals(keys[depth], target_probs[node])
    token = first_arrival(times)
    # First arrivals differ, so no other node spells the same as an accepted one.
    position = next_position(tree, proposal, target_probs, node, is_pooled=False)
    is_winner = position.is_valid & (position.tokens == token)
    is_any = jnp.any(is_winner)
    following = (
      jnp.where(is_any, position.nodes[jnp.argmax(is_winner)], node),
      depth + is_any,
      jnp.where(is_any, -1, token),
    )
    return following, (position, times)

  def _decision(self, keys, carry, following, position: Position, times) -> Decisions:
    """The race at a position, for display."""
    node, depth, winner = carry
    draft_probs = position.draft_probs
    if position.is_given is not None:
      draft_probs = jnp.where(jnp.any(position.is_given), 1, draft_probs)  # each drawn from a point mass
    return Decisions(
      is_made=(winner < 0) & jnp.any(position.is_valid),
      node=node,
      nodes=position.nodes,
      is_valid=position.is_valid,
      shares=None,
      uniform=None,
      chosen=jnp.where(following[2] < 0, following[0], -1),
      numbers={
        'draft_prob': draft_probs[position.tokens],
        'target_prob': position.target_probs[position.tokens],
        'draft_time': arrivals(keys[depth], draft_probs)[position.tokens],
        'target_time': times[position.tokens],
        'winner': first_arrival(times),
        'winner_time': jnp.min(times),
      },
    )

  def decide(self, keys, tree, proposal, target_probs, state, *, is_explained: bool) -> tuple[Verdict, Record]:
    if tree.num_nodes == 0:
      node = jnp.zeros((), jnp.int32)
      token = first_arrival(arrivals(keys[0], target_probs[0]))
      return Verdict.at(tree, node, token, state), Record({}, node, target_probs[0], None)

    def walk(carry):
      return self._walk(keys, tree, proposal, target_probs, carry)

    def describe(_, carry, following, seen):
      return self._decision(keys, carry, following, *seen)

    with jax.named_scope('path'):
      (node, _, token), decisions = run_steps(
        lambda carry: carry[2] < 0,
        walk,
        self._start(),
        num_steps=tree.max_depth + 1,
        describe=describe if is_explained else None,
      )
    decisions = {'race': decisions} if is_explained else {}
    return Verdict.at(tree, node, token, state), Record(decisions, node, target_probs[node], None)

  def law(self, tree, proposal, target_probs, state):
    raise NotImplementedError(
      'given the guesses, the law of an exponential race is not a finite sum; SeedExact is proven token for token'
    )
