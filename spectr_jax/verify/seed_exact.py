"""Verification by one shared race: the target's own winner, whatever was guessed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.proposal import FirstArrivals
from spectr_jax.sampling import arrivals, first_arrival
from spectr_jax.verify.position import next_position
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

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    if tree.num_nodes == 0:
      token = first_arrival(arrivals(keys[0], target_probs[0]))
      return Verdict.at(tree, jnp.zeros((), jnp.int32), token, state)

    def is_walking(carry):
      return carry[2] < 0

    def walk(carry):
      node, depth, _ = carry
      token = first_arrival(arrivals(keys[depth], target_probs[node]))
      # Siblings differ: no other node spells what an accepted one spells.
      position = next_position(tree, proposal, target_probs, node, is_pooled=False)
      is_winner = position.is_valid & (position.tokens == token)
      is_any = jnp.any(is_winner)
      return (
        jnp.where(is_any, position.nodes[jnp.argmax(is_winner)], node),
        depth + is_any,
        jnp.where(is_any, -1, token),
      )

    start = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
    with jax.named_scope('path'):
      node, _, token = jax.lax.while_loop(is_walking, walk, start)
    return Verdict.at(tree, node, token, state)

  def law(self, tree, proposal, target_probs, state):
    raise NotImplementedError(
      'given the guesses, the law of an exponential race is not a finite sum; SeedExact is proven token for token'
    )
