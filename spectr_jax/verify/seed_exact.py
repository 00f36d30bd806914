"""Verification by one shared race: the target's own winner, whatever was guessed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.proposal import FirstArrivals
from spectr_jax.sampling import arrivals, first_arrival
from spectr_jax.verify.position import next_position
from spectr_jax.verify.record import Decisions, Record
from spectr_jax.verify.verifier import Stateless, Verdict


@dataclasses.dataclass(frozen=True)
class SeedExact(Stateless):
  """ERSD ("Speculative Decoding via Exponential Races", Algorithms 2 and 5).

  Candidates are the first arrivals of a race with the draft's law; the token that is emitted is the winner of the race
  with the target's, run on the same exponentials. If it is among the candidates the walk goes on there. With one key
  per absolute position, which drafting and verification share, what comes out is ordinary Gumbel-max sampling with
  these keys, token for token, whatever the draft and the tree are.
  """

  proposal_rules = (FirstArrivals,)

  def _start(self):
    """Node, depth, and the winner where the walk has stopped, or -1."""
    return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)

  def _walk(self, keys, tree, proposal, target_probs, carry):
    """One position further; also the position and the target's arrival times `[V]`."""
    node, depth, _ = carry
    times = arrivals(keys[depth], target_probs[node])
    token = first_arrival(times)
    # Siblings differ: no other node spells what an accepted one spells.
    position = next_position(tree, proposal, target_probs, node, is_pooled=False)
    is_winner = position.is_valid & (position.tokens == token)
    is_any = jnp.any(is_winner)
    following = (
      jnp.where(is_any, position.nodes[jnp.argmax(is_winner)], node),
      depth + is_any,
      jnp.where(is_any, -1, token),
    )
    return following, (position, times)

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    if tree.num_nodes == 0:
      token = first_arrival(arrivals(keys[0], target_probs[0]))
      return Verdict.at(tree, jnp.zeros((), jnp.int32), token, state)

    def is_walking(carry):
      return carry[2] < 0

    def walk(carry):
      return self._walk(keys, tree, proposal, target_probs, carry)[0]

    with jax.named_scope('path'):
      node, _, token = jax.lax.while_loop(is_walking, walk, self._start())
    return Verdict.at(tree, node, token, state)

  def record(self, keys, tree, proposal, target_probs, state) -> Record:
    """What `verify` decides; the decisions are named `race`, have arrival times and no uniforms."""
    del state

    def step(carry, _):
      node, depth, winner = carry
      following, (position, times) = self._walk(keys, tree, proposal, target_probs, carry)
      is_walking = winner < 0
      decisions = Decisions(
        is_made=is_walking & jnp.any(position.is_valid),
        node=node,
        nodes=position.nodes,
        is_valid=position.is_valid,
        shares=None,
        uniform=None,
        chosen=jnp.where(following[2] < 0, following[0], -1),
        numbers={
          'draft_prob': position.draft_probs[position.tokens],
          'target_prob': position.target_probs[position.tokens],
          'draft_time': arrivals(keys[depth], position.draft_probs)[position.tokens],
          'target_time': times[position.tokens],
          'winner': first_arrival(times),
          'winner_time': jnp.min(times),
        },
      )
      return jax.tree.map(lambda new, old: jnp.where(is_walking, new, old), following, carry), decisions

    (node, _, _), decisions = jax.lax.scan(step, self._start(), length=tree.max_depth + 1)
    return Record({'race': decisions}, node, target_probs[node], None)

  def law(self, tree, proposal, target_probs, state):
    raise NotImplementedError(
      'given the guesses, the law of an exponential race is not a finite sum; SeedExact is proven token for token'
    )
