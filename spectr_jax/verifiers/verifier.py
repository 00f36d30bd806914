"""The seam of verification: decisions which tokens of a tree of guesses are kept, one row at a time."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from spectr_jax.couplings.explanation import Explanation
from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.sampling import draw
from spectr_jax.tree import TokenTree, Tree
from spectr_jax.verifiers.record import Decisions, Record


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
  """The decision of a verifier on one row.

  Attributes:
    path: int32 `[L]`, the accepted nodes from depth 1 down; entries from `num_accepted` on are arbitrary valid node
      numbers.
    num_accepted: int32 scalar, from 0 to L.
    next_token: int32 scalar, the token after the accepted ones: a correction, or a bonus where the path ended.
    state: The row's state for its next round.
  """

  path: jax.Array
  num_accepted: jax.Array
  next_token: jax.Array
  state: Any

  @classmethod
  def at(cls, tree: Tree, node: jax.Array, next_token: jax.Array, state: Any) -> Verdict:
    """The verdict that accepts everything down to a node.

    Args:
      tree: The row's tree.
      node: int32 scalar, the deepest accepted node.
      next_token: int32 scalar, the token after it.
      state: The row's state for its next round.
    """
    path = jnp.maximum(jnp.asarray(tree.paths)[node], 0)
    return cls(path, jnp.asarray(tree.depths)[node], next_token, state)


class Verifier(abc.ABC):
  """A verification algorithm; a frozen dataclass whose fields are its options, so that it is hashable.

  `verify` draws. `law` is the exact distribution of its draws, built from the same deterministic steps. Proofs
  enumerate `law`; tests compare the draws of `verify` with it. `explain` draws as `verify` does and records the
  decisions. A subclass that overrides `verify` overrides `explain` as well, or derives from `RecordedVerifier`, where
  one method serves both.

  The class attributes declare the cases that an algorithm covers. A `Method` refuses all others.

  Attributes:
    proposal_rules: The types of rules whose candidates it covers.
    is_token_level: Whether each position is decided by itself, so that acceptances there do not depend on the positions
      after it.
    takes_given: Whether candidates may be given (`Proposal.is_given`).
    takes_mixed: Whether given candidates may stand beside drawn ones at a position.
    takes_grown: Whether rows may have trees of their own (`Proposal.parents`).
    tries_every_branch: Whether the next branch is tried after one that fails, so that chains beat trees that branch
      below the root.
    is_biased: Whether it deviates from the target's distribution on purpose, as configured.
    explanation: Words for its rule, for display.
  """

  proposal_rules: tuple[type[ProposalRule], ...]
  is_token_level: bool = False
  takes_given: bool = False
  takes_mixed: bool = False
  takes_grown: bool = False
  tries_every_branch: bool = False
  is_biased: bool = False
  explanation: Explanation = Explanation()

  def init_state(self, tree: TokenTree) -> Any:
    """The state that a row starts with; by default `()`, for no state."""
    del tree
    return ()

  @abc.abstractmethod
  def verify(self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any) -> Verdict:
    """Decides one row.

    Args:
      keys: `[L + 1]`, the round's keys for verification, one per depth; the last one is for the token after a whole
        path.
      tree: The row's tree; it may be empty. A slot that a row does not use holds the token -1.
      proposal: `tokens` `[N]` and `probs` `[R, V]` of the row, and `is_given` `[N]` or None. A position's candidates
        are either all given or all drawn, unless it takes both beside each other.
      target_probs: `[N + 1, V]`, the target's distribution after each node.
      state: The row's state.
    """

  @abc.abstractmethod
  def law(self, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any) -> jax.Array:
    """The distribution of `verify`'s decision, given the guesses.

    Args:
      tree, proposal, target_probs, state: As for `verify`.

    Returns:
      `[N + 1, V]`, at `[v, x]` the probability that the deepest accepted node is v and the next token is x.
    """

  def explain(
    self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any
  ) -> tuple[Verdict, Record | None]:
    """Decides one row as `verify` does, and records how.

    Args:
      keys, tree, proposal, target_probs, state: As for `verify`.

    Returns:
      The verdict of `verify` for the same arguments, and its record. By default the record is None.
    """
    return self.verify(keys, tree, proposal, target_probs, state), None

  def without_candidates(self, keys: jax.Array, tree: Tree, target_probs: jax.Array, state: Any) -> Verdict:
    """The decision of `verify` on a row whose tree holds no candidate; by default by `verify` itself.

    Args:
      keys, tree, state: As for `verify`.
      target_probs: `[V]`, the target's distribution after the root.
    """
    size = tree.num_nodes
    proposal = Proposal(
      jnp.full(size, -1, jnp.int32),
      jnp.zeros((len(tree.parent_nodes), len(target_probs)), target_probs.dtype),
      is_given=jnp.zeros(size, bool),
    )
    return self.verify(keys, tree, proposal, jnp.broadcast_to(target_probs, (size + 1, len(target_probs))), state)

  def advance(
    self, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any, node: jax.Array, token: jax.Array
  ) -> Any:
    """The state after a round; by default unchanged.

    Args:
      tree, proposal, target_probs, state: As for `verify`.
      node: int32 scalar, the deepest node that the round accepted.
      token: int32 scalar, the token that it emitted next.
    """
    del tree, proposal, target_probs, node, token
    return state

  def for_rule(self, rule: ProposalRule) -> Verifier:
    """The version of this algorithm for candidates drawn by `rule`; by default itself, which may not cover the rule."""
    del rule
    return self

  def with_epsilon(self, epsilon: float) -> Verifier:
    """This algorithm with another amount of over-acceptance; by default itself, which never over-accepts."""
    del epsilon
    return self


class RecordedVerifier(Verifier):
  """A verifier that decides and records in one method, `decide`, which `verify` and `explain` both call.

  Both raise `ValueError` for distributions narrower than float32, whose draws and sums would be biased.
  """

  @abc.abstractmethod
  def decide(
    self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any, *, is_explained: bool
  ) -> tuple[Verdict, Record]:
    """Decides one row and records how, if that is asked for.

    Args:
      keys, tree, proposal, target_probs, state: As for `verify`.
      is_explained: Whether the decisions are read. If not, the record may lack them.

    Returns:
      The verdict, which does not depend on `is_explained`, and its record.
    """

  def verify(self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any) -> Verdict:
    _check_wide(proposal, target_probs)
    return self.decide(keys, tree, proposal, target_probs, state, is_explained=False)[0]

  def explain(
    self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any
  ) -> tuple[Verdict, Record | None]:
    _check_wide(proposal, target_probs)
    return self.decide(keys, tree, proposal, target_probs, state, is_explained=True)


def _check_wide(proposal: Proposal, target_probs: jax.Array) -> None:
  for name, probs in (('proposal.probs', proposal.probs), ('target_probs', target_probs)):
    if not jnp.issubdtype(probs.dtype, jnp.floating) or probs.dtype.itemsize < 4:
      raise ValueError(
        f'{name} must be float32 or wider, since draws and sums of fewer bits are biased; got {probs.dtype}'
      )


def uniforms_of_nodes(keys: jax.Array, tree: Tree, dtype: jnp.dtype) -> jax.Array:
  """Uniforms `[N + 2]` of a verifier that visits nodes: one for every node, and one for the next token.

  Args:
    keys: `[L + 1]`, as for `Verifier.verify`.
    tree: The row's tree.
    dtype: That of the distributions.
  """
  return jax.random.uniform(keys[0], (tree.num_nodes + 2,), dtype)


def stop_at(
  tree: Tree, node: ArrayLike, weights: jax.Array, uniform: jax.Array, state: Any, decisions: dict[str, Decisions]
) -> tuple[Verdict, Record]:
  """The verdict that accepts everything down to a node and draws the next token, and its record.

  Without guesses the node is the root, 0, and the weights are the target's distribution.

  Args:
    tree: The row's tree.
    node: int32 scalar, the deepest accepted node.
    weights: `[V]`, the weights of the next token, not normalized.
    uniform: Scalar in [0, 1), by which the token is drawn.
    state: The row's state for its next round.
    decisions: The decisions that led to the node, by kind.
  """
  node = jnp.asarray(node, jnp.int32)
  return Verdict.at(tree, node, draw(uniform, weights), state), Record(decisions, node, weights, uniform)
