"""Token-level verification: a walk down the tree with one coupling per position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.couplings.coupling import Coupling, Explanation, Outcome, ThresholdCoupling, checked_result, ratio
from spectr_jax.couplings.given import Given
from spectr_jax.kernels.dispatch import ACCELERATORS, operation
from spectr_jax.kernels.on_demand import map_needed
from spectr_jax.proposal import Independent, Proposal, ProposalRule
from spectr_jax.tree import Tree
from spectr_jax.verifiers.contexts import Position, next_position
from spectr_jax.verifiers.verifier import Decisions, DepthVerifier, Record, Verdict, run_steps, stop_at

_GIVEN = Given()
# Positions whose thresholds an accelerator finds together; chains rarely have more with several candidates.
_THRESHOLDS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Walk(DepthVerifier):
  """Applies `coupling` at the root, then below each accepted node (SpecTr, Algorithm 3).

  Where there is no candidate, a bonus token comes from the target. A coupling with `takes_mixed` judges given
  candidates beside drawn ones; otherwise the coupling `Given` replaces `coupling` where candidates are given. A record
  has the decisions position by position; they are named `accept`.

  Attributes:
    coupling: Selects one of the candidates of a position.
    is_pooled: Whether the children of all nodes that spell the accepted prefix are candidates, or only those of the
      accepted node itself.
  """

  coupling: Coupling
  is_pooled: bool = True
  takes_given = True
  takes_grown = True

  def __post_init__(self):
    if not isinstance(self.coupling, Coupling):
      raise ValueError(f'coupling must be a subclass of spectr_jax.couplings.Coupling, got {self.coupling!r}')

  @property
  def proposal_rules(self) -> tuple[type[ProposalRule], ...]:
    """The coupling's rules."""
    return self.coupling.proposal_rules

  @property
  def takes_mixed(self) -> bool:
    """True if the coupling takes given candidates beside drawn ones."""
    return self.coupling.takes_mixed

  @property
  def is_biased(self) -> bool:
    """True if the coupling is biased."""
    return self.coupling.is_biased

  @property
  def explanation(self) -> Explanation:
    """The coupling's words."""
    words = self.coupling.explanation
    # If siblings differ, no two nodes spell the same, so there is nothing to pool.
    if self.is_pooled or not words.rule or Independent not in self.proposal_rules:
      return words
    return Explanation(
      f'{words.rule} After the first position only the accepted draft goes on.',
      words.residual,
      'The drafts compete for the first token alone. After it only the accepted draft goes on, one token at a time.',
    )

  def with_epsilon(self, epsilon: float) -> Walk:
    """The walk with another amount of over-acceptance; itself if its coupling never over-accepts."""
    coupling = self.coupling.with_epsilon(epsilon)
    return self if coupling is self.coupling else dataclasses.replace(self, coupling=coupling)

  def _outcome(self, position: Position) -> Outcome:
    """The outcome at a position, by the coupling for drawn or for given candidates."""
    laws, is_given = (position.draft_probs, position.target_probs, position.tokens), position.is_given
    shapes = {'accept_probs': position.tokens.shape, 'residual': position.target_probs.shape}
    if is_given is None or self.takes_mixed:
      given = () if is_given is None else (is_given,)
      return checked_result(self.coupling, self.coupling(*laws, position.is_valid, *given), Outcome, **shapes)
    is_given = jnp.any(is_given)
    # Given candidates are invalid for the coupling, so that it has no work at them.
    drawn = checked_result(self.coupling, self.coupling(*laws, position.is_valid & ~is_given), Outcome, **shapes)
    given = _GIVEN(*laws, position.is_valid)
    return Outcome(
      jnp.where(is_given, given.accept_probs, drawn.accept_probs),
      jnp.where(is_given, given.residual, drawn.residual),
    )

  def _step(self, tree: Tree, proposal: Proposal, target_probs, node, is_walking=True) -> tuple[Position, Outcome]:
    """The candidates after an accepted node, and the outcomes; no candidates, and so no work, for a walk that ended."""
    position = next_position(tree, proposal, target_probs, node, is_pooled=self.is_pooled)
    position = dataclasses.replace(position, is_valid=position.is_valid & is_walking)
    outcome = self._outcome(position)
    is_any = jnp.any(position.is_valid)
    return position, Outcome(
      jnp.where(is_any & position.is_valid, outcome.accept_probs, 0),
      jnp.where(is_any, outcome.residual, position.target_probs),
    )

  def _start(self):
    """The node, its depth, and whether the walk goes on."""
    return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.ones((), bool)

  def _walk(self, tree: Tree, proposal: Proposal, target_probs, uniforms, carry):
    """Goes one position further; also returns the position and its possible outcomes."""
    node, depth, is_walking = carry
    position, outcome = self._step(tree, proposal, target_probs, node, is_walking)
    # A parallel cumulative sum can rise at a zero, so without the second condition an empty slot could be accepted.
    accept_probs = outcome.accept_probs
    is_accepted = (uniforms[depth, 0] < jnp.cumsum(accept_probs)) & (accept_probs > 0)
    is_any = jnp.any(is_accepted)
    accepted = position.nodes[jnp.argmax(is_accepted)]
    return (jnp.where(is_any, accepted, position.node), depth + is_any, is_any), (position, outcome)

  def _decision(self, uniforms, carry, following, position: Position, outcome: Outcome) -> Decisions:
    """The choice among the candidates of a position, for display."""
    p, q = position.draft_probs[position.tokens], position.target_probs[position.tokens]
    laws = position.draft_probs, position.target_probs, position.tokens
    shown = (position.is_valid,)
    if position.is_given is not None:
      p = jnp.where(position.is_given, 1, p)  # drawn from a point mass
      is_drawn = position.is_valid & ~position.is_given
      shown = (position.is_valid, position.is_given) if self.takes_mixed else (is_drawn,)
    numbers = self.coupling.numbers(*laws, *shown)
    return Decisions(
      is_made=carry[2] & jnp.any(position.is_valid),
      node=position.node,
      nodes=position.nodes,
      is_valid=position.is_valid,
      shares=outcome.accept_probs,
      uniform=uniforms[carry[1], 0],
      chosen=jnp.where(following[2], following[0], -1),
      numbers={'draft_prob': p, 'target_prob': q, 'ratio': ratio(q, p)} | numbers,
    )

  def decide(
    self, keys, tree: Tree, proposal: Proposal, target_probs, state, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    uniforms = self.uniforms(keys, target_probs.dtype)  # for the candidates of a depth, and for the token after it
    if tree.num_nodes == 0:
      return stop_at(tree, 0, target_probs[0], uniforms[0, 1], state, {})

    if not is_explained:
      node, depth, residual = _end_of_walk(self, tree, proposal, target_probs, uniforms)
      return stop_at(tree, node, residual, uniforms[depth, 1], state, {})
    (node, depth, _), decisions = self._path(tree, proposal, target_probs, uniforms, is_explained=True)
    residual = self._step(tree, proposal, target_probs, node)[1].residual
    return stop_at(tree, node, residual, uniforms[depth, 1], state, {'accept': decisions})

  def _path(self, tree: Tree, proposal: Proposal, target_probs, uniforms, *, is_explained: bool):
    """The carry at the end of the walk, and the decisions if they are asked for."""

    # The walk needs acceptances alone. The residual is computed once, after the walk, at the node where it stops.
    # Inside the loop every depth would compute one, and under vmap for all rows.
    def walk(carry):
      return self._walk(tree, proposal, target_probs, uniforms, carry)

    def describe(_, carry, following, seen):
      return self._decision(uniforms, carry, following, *seen)

    with jax.named_scope('path'):
      return run_steps(
        lambda carry: carry[2],
        walk,
        self._start(),
        num_steps=tree.max_depth + 1,
        describe=describe if is_explained else None,
      )

  def _by_table(self, coupling: ThresholdCoupling, tree: Tree, proposal: Proposal, target_probs, uniforms):
    """The node where the walk stops, its depth, and the residual there, by a table of what follows each node.

    An accelerator takes no longer for all nodes than for one, so all thresholds are found together.
    """
    all_nodes = jnp.arange(tree.num_nodes + 1)

    def after(node):
      return next_position(tree, proposal, target_probs, node, is_pooled=self.is_pooled)

    positions = jax.vmap(after)(all_nodes)
    number = jnp.sum(positions.is_valid, axis=1)
    law_rows = jnp.asarray(tree.parent_index)
    rows = law_rows[positions.node]
    nodes = tree.parent_nodes
    is_searched = (number[nodes] > 1) & (positions.node[nodes] == nodes)
    with jax.named_scope('gammas'):
      gammas = map_needed(
        coupling.gamma,
        is_searched,
        jnp.ones(len(nodes), target_probs.dtype),
        ((proposal.probs, np.arange(len(nodes))), (target_probs, nodes)),
        (number[nodes],),
        at_once=_THRESHOLDS_AT_ONCE,
      )
    gammas = gammas[jnp.maximum(rows, 0)]
    p = proposal.probs[jnp.maximum(rows, 0)[:, None], positions.tokens]
    q = target_probs[positions.node[:, None], positions.tokens]
    accept_probs = jax.vmap(coupling.accept_probs)(p, q, positions.is_valid, gammas)
    is_accepted = (uniforms[jnp.asarray(tree.depths), :1] < jnp.cumsum(accept_probs, axis=1)) & (accept_probs > 0)
    is_chosen = jnp.argmax(is_accepted, axis=1)[:, None] == jnp.arange(is_accepted.shape[1])
    following = jnp.sum(jnp.where(is_chosen, positions.nodes, 0), axis=1, dtype=positions.nodes.dtype)
    following = jnp.where(jnp.any(is_accepted, axis=1), following, all_nodes)
    # Twice as far with every turn, up to the last depth.
    for _ in range(tree.max_depth.bit_length()):
      following = jnp.sum(jnp.where(following[:, None] == all_nodes, following, 0), axis=1)
    is_end = all_nodes == following[0]

    def at_end(values):
      """The entry at the end, as a sum with one term, which is one operation where an index is several."""
      return jnp.sum(jnp.where(is_end.reshape(-1, *[1] * (values.ndim - 1)), values, 0), axis=0, dtype=values.dtype)

    node, is_valid = at_end(positions.node), jnp.any(is_end[:, None] & positions.is_valid, axis=0)
    q = target_probs[node]
    outcome = coupling.outcome(
      proposal.probs[at_end(jnp.maximum(rows, 0))], q, at_end(positions.tokens), is_valid, at_end(gammas)
    )
    residual = jnp.where(jnp.any(is_valid), outcome.residual, q)
    return node, at_end(jnp.asarray(tree.depths, jnp.int32)), residual

  def law(self, tree, proposal, target_probs, state):
    del state
    if tree.num_nodes == 0:
      return target_probs
    size = tree.num_nodes + 1

    def at_node(reach, node):
      """Passes `reach` `[N + 1]` of `node` on to its candidates; also returns the probability of a stop, `[V]`."""
      position, outcome = self._step(tree, proposal, target_probs, node)
      into = jnp.where(position.is_valid, position.nodes, size)
      stop = reach[node] * (1 - jnp.sum(outcome.accept_probs))
      law = stop * outcome.residual / jnp.sum(outcome.residual)
      return reach.at[into].add(reach[node] * outcome.accept_probs, mode='drop'), (position.node, law)

    start = jnp.zeros(size, target_probs.dtype).at[0].set(1)
    _, (nodes, laws) = jax.lax.scan(at_node, start, jnp.arange(size))
    return jnp.zeros_like(target_probs).at[nodes].add(laws)


@operation
def _end_of_walk(walk: Walk, tree: Tree, proposal: Proposal, target_probs: jax.Array, uniforms: jax.Array):
  """The node where a walk stops, its depth, and the residual there, step by step."""
  (node, depth, _), _ = walk._path(tree, proposal, target_probs, uniforms, is_explained=False)
  return node, depth, walk._step(tree, proposal, target_probs, node)[1].residual


def _has_table(walk, tree, proposal, target_probs, uniforms):
  return isinstance(walk.coupling, ThresholdCoupling) and proposal.is_given is None


@_end_of_walk.form(ACCELERATORS, takes=_has_table)
def _end_by_table(walk, tree, proposal, target_probs, uniforms):
  return walk._by_table(walk.coupling, tree, proposal, target_probs, uniforms)
