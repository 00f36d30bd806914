"""Block verification: how much of a whole path is kept, on a single draft or on the path that a selection picks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import ratio
from spectr_jax.couplings.selection import Pick, Selection
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import draw, positive_part
from spectr_jax.tree import TokenTree
from spectr_jax.verify.position import Position, next_position
from spectr_jax.verify.record import Decisions, Record
from spectr_jax.verify.verifier import Stateless, Verdict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Step:
  """What may happen at one depth of a path that has been picked down to a node.

  Attributes:
    position: The candidates of the next position.
    pick: Which of them is picked.
    accept: Scalar, the probability that the path is kept down to here, given that nothing deeper is.
    residual: `[V]`, weights of the next token if it is.
  """

  position: Position
  pick: Pick
  accept: jax.Array
  residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Block(Stateless):
  """Picks a path by `selection`, then verifies it as a block, in which a later token can make up for an earlier one.

  The path: from the root on, one candidate of each position is picked, and the nodes that spell the same stay active,
  until there is no candidate. Then with P_0 = 1 and, for the picked tokens and the laws pt that they were picked from,

      P_i = min(1, P_{i-1} q(x_i) / pt(x_i)),    S_i = sum of [P_i q - pt]+ over the token at i + 1,
      h_i = S_i / (S_i + 1 - P_i),

  the path is kept down to the largest i with u_i < h_i, and the next token comes from [P_i q - pt]+. At the path's end
  pt is 0, so that h = P and the residual is q.

  With `Only` on a chain this is block verification (Sun et al. 2024, "Block Verification Accelerates Speculative
  Decoding"), which accepts the most that a single draft allows without a state between rounds. With `Race` it is race
  block verification, beyond the papers: lossless on any tree with i.i.d. children, since a picked token and the nodes
  that agree with it act as one token of an extended alphabet, whose second part has the same conditional law under
  draft and target.

  Attributes:
    selection: Picks one candidate per position.
  """

  selection: Selection
  proposal_rules = (Independent,)

  def _step(self, tree: TokenTree, proposal: Proposal, target_probs, node, log_kept) -> _Step:
    """The step at `node`, where log P is `log_kept`; its logarithm, since products of many ratios underflow."""
    position = next_position(tree, proposal, target_probs, node)
    pick = self.selection(position.draft_probs, position.target_probs, position.tokens, position.is_valid)
    kept = jnp.exp(log_kept)
    residual = positive_part(kept * position.target_probs - pick.probs)
    mass = jnp.sum(residual)
    total = mass - jnp.expm1(log_kept)
    # P = 1 and no residual: draft and target agree, so accept, and let whatever is emitted be the target's.
    is_agreed = total <= 0
    return _Step(
      position,
      pick,
      jnp.where(is_agreed, 1, mass / jnp.where(is_agreed, 1, total)),
      jnp.where(mass > 0, residual, position.target_probs),
    )

  def _log_kept_below(self, step: _Step, log_kept, slot):
    """log P after the candidate in `slot` is picked."""
    token = step.position.tokens[slot]
    log_ratio = jnp.log(ratio(step.position.target_probs[token], step.pick.candidate_probs[slot]))
    return jnp.minimum(0, log_kept + log_ratio)

  def _uniforms(self, keys, dtype):
    """`[L + 1, 3]`: for keeping a path down to a depth, for the pick below it, for the token after it."""
    return jax.vmap(lambda key: jax.random.uniform(key, (3,), dtype))(keys)

  def _start(self, dtype):
    """Node, or -1 behind the path's end; depth; log P; and the same three where the path is cut so far."""
    zero, log_one = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
    return zero, zero, log_one, (zero, zero, log_one)

  def _walk(self, tree: TokenTree, proposal: Proposal, target_probs, uniforms, carry):
    """One node further; also the step, the slot that is picked, and whether the path is kept down to here."""
    node, depth, log_kept, stop = carry
    step = self._step(tree, proposal, target_probs, node, log_kept)
    # Depth 0 is kept whenever nothing deeper is; a deeper node that is kept overrules the ones above it.
    is_kept = (depth == 0) | (uniforms[depth, 0] < step.accept)
    here = step.position.node, depth, log_kept
    pick_probs = step.pick.pick_probs
    is_picked = (uniforms[depth, 1] * jnp.sum(pick_probs) < jnp.cumsum(pick_probs)) & (pick_probs > 0)
    slot = jnp.where(jnp.any(is_picked), jnp.argmax(is_picked), jnp.argmax(pick_probs > 0))
    is_end = ~jnp.any(step.position.is_valid)
    following = (
      jnp.where(is_end, -1, step.position.nodes[slot]),
      depth + 1,
      self._log_kept_below(step, log_kept, slot),
      jax.tree.map(lambda new, old: jnp.where(is_kept, new, old), here, stop),
    )
    return following, (step, slot, is_kept)

  def verify(self, keys, tree, proposal, target_probs, state) -> Verdict:
    dtype = target_probs.dtype
    uniforms = self._uniforms(keys, dtype)
    if tree.num_nodes == 0:
      return Verdict.at(tree, jnp.zeros((), jnp.int32), draw(uniforms[0, 2], target_probs[0]), state)

    def is_walking(carry):
      return carry[0] >= 0

    # Where the path is cut, the residual is made once more, after the walk: every depth would carry one, `[V]`.
    def walk(carry):
      return self._walk(tree, proposal, target_probs, uniforms, carry)[0]

    with jax.named_scope('path'):
      node, depth, log_kept = jax.lax.while_loop(is_walking, walk, self._start(dtype))[3]
    residual = self._step(tree, proposal, target_probs, node, log_kept).residual
    return Verdict.at(tree, node, draw(uniforms[depth, 2], residual), state)

  def record(self, keys, tree, proposal, target_probs, state) -> Record:
    """What `verify` decides, depth by depth: `pick`, the path, and `keep`, how far it is kept, the last one wins."""
    del state
    uniforms = self._uniforms(keys, target_probs.dtype)

    def one_depth(carry, _):
      node, depth, log_kept, _ = carry
      following, (step, slot, is_kept) = self._walk(tree, proposal, target_probs, uniforms, carry)
      position, pick = step.position, step.pick
      is_walking = node >= 0
      picks = Decisions(
        is_made=is_walking & jnp.any(position.is_valid),
        node=position.node,
        nodes=position.nodes,
        is_valid=position.is_valid,
        shares=pick.pick_probs,
        uniform=uniforms[depth, 1] * jnp.sum(pick.pick_probs),
        chosen=position.nodes[slot],
        numbers={
          'draft_prob': position.draft_probs[position.tokens],
          'target_prob': position.target_probs[position.tokens],
          'picked_prob': pick.candidate_probs,
        },
      )
      keeps = Decisions.of_one(
        is_made=is_walking & (depth > 0),
        node=position.node,
        share=step.accept,
        uniform=uniforms[depth, 0],
        is_chosen=is_kept,
        numbers={'log_kept': log_kept},
      )
      # Behind the end of a path nothing is decided.
      following = jax.tree.map(lambda new, old: jnp.where(is_walking, new, old), following, carry)
      return following, (picks, keeps)

    carry, (picks, keeps) = jax.lax.scan(one_depth, self._start(target_probs.dtype), length=tree.max_depth + 1)
    node, depth, log_kept = carry[3]
    residual = self._step(tree, proposal, target_probs, node, log_kept).residual
    return Record({'pick': picks, 'keep': keeps}, node, residual, uniforms[depth, 2])

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    size, dtype = tree.num_nodes + 1, target_probs.dtype
    log_kept, reach = jnp.zeros(size, dtype), jnp.zeros(size, dtype).at[0].set(1)
    steps, into = [], []
    for node in range(size):
      step = self._step(tree, proposal, target_probs, node, log_kept[node])
      steps.append(step)
      into.append(jnp.where(step.position.is_valid, step.position.nodes, size))
      slots = jnp.arange(len(step.position.nodes))
      below = jax.vmap(self._log_kept_below, (None, None, 0))(step, log_kept[node], slots)
      # Nodes that spell the same have the same value, so it does not matter which of them writes it last.
      log_kept = log_kept.at[into[node]].set(below, mode='drop')
      reach = reach.at[into[node]].add(reach[node] * step.pick.pick_probs, mode='drop')
    law = jnp.zeros_like(target_probs)
    nothing_from = jnp.zeros(size + 1, dtype)  # given that a node is reached, nothing is kept from it on
    for node in reversed(range(size)):
      step = steps[node]
      below = jnp.sum(step.pick.pick_probs * nothing_from[into[node]])
      nothing_below = jnp.where(jnp.any(step.position.is_valid), below, 1)
      accept = jnp.ones((), dtype) if node == 0 else step.accept
      nothing_from = nothing_from.at[node].set((1 - accept) * nothing_below)
      residual = step.residual / jnp.sum(step.residual)
      law = law.at[step.position.node].add(reach[node] * accept * nothing_below * residual)
    return law
