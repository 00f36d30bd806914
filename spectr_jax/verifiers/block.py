"""Block verification of a whole path: of a single draft, or of the path that a selection picks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Explanation, ratio
from spectr_jax.couplings.selection import Pick, Selection, check_selection, picked
from spectr_jax.proposal import Independent, Proposal
from spectr_jax.sampling import positive_part
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Position, next_position
from spectr_jax.verifiers.verifier import Decisions, DepthVerifier, Record, Verdict, run_steps, stop_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Step:
  """The possible outcomes at one depth of a path that has been picked down to a node."""

  position: Position  # the candidates of the next position
  pick: Pick  # the pick among them
  accept: jax.Array  # the probability that the path is kept down to here, given that nothing deeper is kept
  residual: jax.Array  # `[V]`, weights of the next token in that case


@dataclasses.dataclass(frozen=True)
class Block(DepthVerifier):
  """Picks a path by `selection`, then verifies it as a block, in which a later token can make up for an earlier one.

  From the root on, one candidate of each position is picked, and the nodes that spell the same stay active, until no
  candidate is left. Then, with P_0 = 1 and, for the picked tokens and the distributions pt of picked tokens,

      P_i = min(1, P_{i-1} q(x_i) / pt(x_i)),    S_i = sum of [P_i q - pt]+ over the token at i + 1,
      h_i = S_i / (S_i + 1 - P_i),

  the path is kept down to the largest i with u_i < h_i, and the next token comes from [P_i q - pt]+. At the path's end
  pt is 0, so that h = P and the residual is q.

  With `SingleDraft` on a chain this is block verification (Sun et al. 2024, "Block Verification Accelerates Speculative
  Decoding"), which accepts the most that a single draft allows without a state between rounds. With `Race` it is race
  block verification, beyond the papers: lossless on any tree with i.i.d. children, since a picked token and the nodes
  that agree with it act as one token of an extended alphabet, whose second part has the same conditional distribution
  under draft and target.

  A record has the decisions depth by depth: `pick` is the path; of `keep`, the last one that is kept wins.

  Attributes:
    selection: Picks one candidate per position.
  """

  selection: Selection
  proposal_rules = (Independent,)
  takes_grown = True
  num_uniforms = 3  # for keeping a path down to a depth, for the pick below it, for the token after it

  def __post_init__(self):
    check_selection(self.selection)

  @property
  def takes_mixed(self) -> bool:
    """True if the selection takes given candidates beside drawn ones."""
    return self.selection.takes_mixed

  @property
  def takes_given(self) -> bool:
    """True if the selection takes given candidates."""
    return self.takes_mixed

  @property
  def explanation(self) -> Explanation:
    """The rule of block verification in words, with those of the selection."""
    words = self.selection.explanation
    if not words.path:
      return Explanation()
    return Explanation(
      f'{words.path} With P = min(1, P · q/{words.law}) along the path and S = Σ [Pq − {words.law}]₊ at its next'
      ' position, the path is kept down to the deepest token with u < h = S/(S + 1 − P); at its end h = P.',
      f'[Pq − {words.law}]₊',
      f'{words.plain_path} It is judged as a whole: a likely continuation makes up for an unlikely token before it, and'
      ' the longest part that passes is kept.'
      if words.plain_path
      else '',
    )

  def _step(self, tree: Tree, proposal: Proposal, target_probs, node, log_kept) -> _Step:
    """The step at `node`, where log P is `log_kept`; in logarithms, since products of many ratios underflow."""
    position = next_position(tree, proposal, target_probs, node)
    given = () if position.is_given is None else (position.is_given,)
    pick = picked(
      self.selection, position.draft_probs, position.target_probs, position.tokens, position.is_valid, *given
    )
    kept = jnp.exp(log_kept)
    residual = positive_part(kept * position.target_probs - pick.probs)
    mass = jnp.sum(residual)
    total = mass - jnp.expm1(log_kept)
    # With P = 1 and no residual, draft and target agree: the path is accepted, and the next token is the target's.
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

  def _start(self, dtype):
    """The node, or -1 behind the path's end; its depth; log P; and the same three at the cut found so far."""
    zero, log_one = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
    return zero, zero, log_one, (zero, zero, log_one)

  def _walk(self, tree: Tree, proposal: Proposal, target_probs, uniforms, carry):
    """Goes one node further; also returns the step, the slot picked, and whether the path is kept down to here."""
    node, depth, log_kept, stop = carry
    step = self._step(tree, proposal, target_probs, node, log_kept)
    # Depth 0 is always kept, and a deeper node that is kept overrules the ones above it.
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

  def _decisions(self, uniforms, carry, step: _Step, slot, is_kept) -> tuple[Decisions, Decisions]:
    """The pick among the candidates of a depth, and whether the path is kept down to there, for display."""
    node, depth, log_kept, _ = carry
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
    return picks, keeps

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    dtype = target_probs.dtype
    uniforms = self.uniforms(keys, dtype)
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[0, 2], state, {})

    # The residual at the cut is computed again after the walk, which would otherwise carry one, `[V]`, for every depth.
    def walk(carry):
      return self._walk(tree, proposal, target_probs, uniforms, carry)

    def describe(_, carry, following, seen):
      del following
      return self._decisions(uniforms, carry, *seen)

    with jax.named_scope('path'):
      (*_, stop), decisions = run_steps(
        lambda carry: carry[0] >= 0,
        walk,
        self._start(dtype),
        num_steps=tree.max_depth + 1,
        describe=describe if is_explained else None,
      )
    node, depth, log_kept = stop
    residual = self._step(tree, proposal, target_probs, node, log_kept).residual
    decisions = {'pick': decisions[0], 'keep': decisions[1]} if is_explained else {}
    return stop_at(tree, node, residual, uniforms[depth, 2], state, decisions)

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    size, dtype = tree.num_nodes + 1, target_probs.dtype
    no_node = jnp.zeros(size, dtype)

    def downwards(carry, node):
      """Passes log P and the probability that the path reaches `node` on to the candidates after it."""
      log_kept, reach = carry
      step = self._step(tree, proposal, target_probs, node, log_kept[node])
      position, pick_probs = step.position, step.pick.pick_probs
      into = jnp.where(position.is_valid, position.nodes, size)
      slots = jnp.arange(len(position.nodes))
      below = jax.vmap(self._log_kept_below, (None, None, 0))(step, log_kept[node], slots)
      # Nodes that spell the same write the same value, so the order of the writes does not matter.
      log_kept = log_kept.at[into].set(below, mode='drop')
      own_reach, accept = reach[node], jnp.where(node == 0, 1, step.accept)
      reach = reach.at[into].add(own_reach * pick_probs, mode='drop')
      residual = step.residual / jnp.sum(step.residual)
      return (log_kept, reach), (node, into, pick_probs, own_reach, accept, position.node, residual)

    def upwards(nothing_from, step):
      """Updates `nothing_from` `[N + 2]`: the probability that nothing is kept from a node on, once there."""
      node, into, pick_probs, reach, accept, stop, residual = step
      below = jnp.where(jnp.any(into < size), jnp.sum(pick_probs * nothing_from[into]), 1)
      return nothing_from.at[node].set((1 - accept) * below), (stop, reach * accept * below * residual)

    _, steps = jax.lax.scan(downwards, (no_node, no_node.at[0].set(1)), jnp.arange(size))
    _, (nodes, laws) = jax.lax.scan(upwards, jnp.zeros(size + 1, dtype), steps, reverse=True)
    return jnp.zeros_like(target_probs).at[nodes].add(laws)
