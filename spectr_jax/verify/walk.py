"""Token-level verification: walk down the tree, one coupling per position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Coupling, Outcome, ratio
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import draw
from spectr_jax.tree import TokenTree
from spectr_jax.verify.position import Position, next_position
from spectr_jax.verify.record import Decisions, Record
from spectr_jax.verify.verifier import Stateless, Verdict


@dataclasses.dataclass(frozen=True)
class Walk(Stateless):
  """Applies `coupling` at the root, then below each accepted node (SpecTr, Algorithm 3).

  Where there is no candidate, a bonus token comes from the target.

  Attributes:
    coupling: Selects one of the candidates of a position.
    is_pooled: Whether the children of all nodes that spell the accepted prefix are candidates, or only those of the
      accepted node itself.
  """

  coupling: Coupling
  is_pooled: bool = True

  @property
  def proposal_rules(self):
    return self.coupling.proposal_rules

  def _step(self, tree: TokenTree, proposal: Proposal, target_probs, node, is_walking=True) -> tuple[Position, Outcome]:
    """The candidates after an accepted node, and what may happen among them; the target's law if there are none.

    There are none for a row that walks no more: it has no work then while others do.
    """
    position = next_position(tree, proposal, target_probs, node, is_pooled=self.is_pooled)
    position = dataclasses.replace(position, is_valid=position.is_valid & is_walking)
    outcome = self.coupling(position.draft_probs, position.target_probs, position.tokens, position.is_valid)
    is_any = jnp.any(position.is_valid)
    return position, Outcome(
      jnp.where(is_any & position.is_valid, outcome.accept_probs, 0),
      jnp.where(is_any, outcome.residual, position.target_probs),
    )

  def _uniforms(self, keys, dtype):
    """`[L + 1, 2]`: for the candidates of a depth, and for the token after it."""
    return jax.vmap(lambda key: jax.random.uniform(key, (2,), dtype))(keys)

  def _start(self):
    """Node, depth, and whether the walk goes on."""
    return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.ones((), bool)

  def _walk(self, tree: TokenTree, proposal: Proposal, target_probs, uniforms, carry):
    """One position further; also the position and what could happen there."""
    node, depth, is_walking = carry
    position, outcome = self._step(tree, proposal, target_probs, node, is_walking)
    # A parallel sum can rise at a zero: without the second condition a slot that holds no candidate could be taken.
    accept_probs = outcome.accept_probs
    is_accepted = (uniforms[depth, 0] < jnp.cumsum(accept_probs)) & (accept_probs > 0)
    is_any = jnp.any(is_accepted)
    accepted = position.nodes[jnp.argmax(is_accepted)]
    return (jnp.where(is_any, accepted, position.node), depth + is_any, is_any), (position, outcome)

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    uniforms = self._uniforms(keys, target_probs.dtype)
    if tree.num_nodes == 0:
      token = draw(uniforms[0, 1], target_probs[0])
      return Verdict.at(tree, jnp.zeros((), jnp.int32), token, state)

    def is_walking(carry):
      return carry[2]

    # The walk needs acceptances alone. Where it stops the residual is made once, after it: inside the loop every depth
    # would make one, and under vmap all rows would.
    def walk(carry):
      return self._walk(tree, proposal, target_probs, uniforms, carry)[0]

    with jax.named_scope('path'):
      node, depth, _ = jax.lax.while_loop(is_walking, walk, self._start())
    _, outcome = self._step(tree, proposal, target_probs, node)
    token = draw(uniforms[depth, 1], outcome.residual)
    return Verdict.at(tree, node, token, state)

  def record(self, keys, tree, proposal, target_probs, state) -> Record:
    """What `verify` decides, position by position; the decisions are named `accept`."""
    del state
    uniforms = self._uniforms(keys, target_probs.dtype)

    def step(carry, _):
      following, (position, outcome) = self._walk(tree, proposal, target_probs, uniforms, carry)
      p, q = position.draft_probs[position.tokens], position.target_probs[position.tokens]
      laws = position.draft_probs, position.target_probs, position.tokens, position.is_valid
      numbers = getattr(self.coupling, 'numbers', lambda *_: {})(*laws)
      return following, Decisions(
        is_made=carry[2] & jnp.any(position.is_valid),
        node=position.node,
        nodes=position.nodes,
        is_valid=position.is_valid,
        shares=outcome.accept_probs,
        uniform=uniforms[carry[1], 0],
        chosen=jnp.where(following[2], following[0], -1),
        numbers={'draft_prob': p, 'target_prob': q, 'ratio': ratio(q, p)} | numbers,
      )

    (node, depth, _), decisions = jax.lax.scan(step, self._start(), length=tree.max_depth + 1)
    _, outcome = self._step(tree, proposal, target_probs, node)
    return Record({'accept': decisions}, node, outcome.residual, uniforms[depth, 1])

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    reach = jnp.zeros(tree.num_nodes + 1, target_probs.dtype).at[0].set(1)
    law = jnp.zeros_like(target_probs)
    for node in range(tree.num_nodes + 1):
      position, outcome = self._step(tree, proposal, target_probs, node)
      reached = reach[node]
      into = jnp.where(position.is_valid, position.nodes, tree.num_nodes + 1)
      reach = reach.at[into].add(reached * outcome.accept_probs, mode='drop')
      residual = outcome.residual / jnp.sum(outcome.residual)
      law = law.at[position.node].add(reached * (1 - jnp.sum(outcome.accept_probs)) * residual)
    return law
