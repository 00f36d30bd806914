"""The seam of verification: decisions which tokens of a tree of guesses are kept, one row at a time."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from spectr_jax.couplings.coupling import Explanation
from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.sampling import draw
from spectr_jax.tree import TokenTree, Tree


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
    """The verdict that accepts everything down to a node of the row's tree; the arguments are scalars but the state."""
    path = jnp.maximum(jnp.asarray(tree.paths)[node], 0)
    return cls(path, jnp.asarray(tree.depths)[node], next_token, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decisions:
  """Up to T choices among W nodes each, in the order in which they are made.

  The shares of the nodes lie side by side from 0 on, in the order of `nodes`. The node in whose share the uniform falls
  is chosen; no node is chosen if it falls behind the last share.

  Attributes:
    is_made: bool `[T]`, the entries that are choices; all others are to be ignored.
    node: int32 `[T]`, the place of the choice: the node below which the others stand, or the one that is tested.
    nodes: int32 `[T, W]`, the nodes that could be chosen.
    is_valid: bool `[T, W]`, which of them exist.
    shares: `[T, W]`, the probability of each; 0 for those that do not exist. None if no uniform decides.
    uniform: `[T]`, in [0, 1), or None.
    chosen: int32 `[T]`, the node that is chosen, or -1 for none.
    numbers: Arrays `[T]` or `[T, W]` from which the shares are computed, by name.
  """

  is_made: jax.Array
  node: jax.Array
  nodes: jax.Array
  is_valid: jax.Array
  shares: jax.Array | None
  uniform: jax.Array | None
  chosen: jax.Array
  numbers: dict[str, jax.Array]

  @classmethod
  def of_one(
    cls,
    *,
    is_made: jax.Array,
    node: jax.Array,
    share: jax.Array,
    uniform: jax.Array,
    is_chosen: jax.Array,
    numbers: dict[str, jax.Array],
  ) -> Decisions:
    """A choice of one node or none, without the leading axis: `share` is the probability that the node is chosen."""
    return cls(
      is_made=is_made,
      node=node,
      nodes=node[None],
      is_valid=is_made[None],
      shares=share[None],
      uniform=uniform,
      chosen=jnp.where(is_chosen, node, -1),
      numbers=numbers,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
  """The decisions that led to a verdict on one row.

  Attributes:
    decisions: The decisions by kind: `accept` takes one of the candidates of a position or none, `pick` takes one
      without deciding whether it is kept, `keep` keeps the path down to a node, `race` compares arrival times. Empty
      if there was no guess.
    node: int32 scalar, the deepest accepted node.
    weights: `[V]`, the weights of the next token, not normalized.
    uniform: Scalar in [0, 1), by which the next token is drawn from them; None if it is not drawn by a uniform.
    credits: `[N + 1]`, the probability that each node or one below it is kept, once it is tried; None for verifiers
      that try no branches by credit.
  """

  decisions: dict[str, Decisions]
  node: jax.Array
  weights: jax.Array
  uniform: jax.Array | None
  credits: jax.Array | None = None


class Verifier(abc.ABC):
  """A verification algorithm; a frozen dataclass whose fields are its options, so that it is hashable.

  `verify` draws. `law` is the exact distribution of its draws, built from the same deterministic steps. Proofs
  enumerate `law`; tests compare the draws of `verify` with it. `explain` draws as `verify` does and records the
  decisions. A subclass that overrides `verify` overrides `explain` as well, or derives from `RecordedVerifier`, where
  one method serves both.

  The class attributes declare the cases that an algorithm covers. A `Method` refuses all others.

  Attributes:
    proposal_rules: The types of rules whose candidates it covers.
    takes_given: Whether candidates may be given (`Proposal.is_given`).
    takes_mixed: Whether given candidates may stand beside drawn ones at a position.
    takes_grown: Whether rows may have trees of their own (`Proposal.parents`).
    needs_constant_draft: Whether the draft's distribution after a text must be the same in every round. It is not where
      the draft reads the target's hidden states, which are there once a text is committed.
    tries_every_branch: Whether the next branch is tried after one that fails, so that chains beat trees that branch
      below the root.
    is_biased: Whether it deviates from the target's distribution on purpose, as configured.
    explanation: Words for its rule, for display.
  """

  proposal_rules: tuple[type[ProposalRule], ...]
  takes_given: bool = False
  takes_mixed: bool = False
  takes_grown: bool = False
  needs_constant_draft: bool = False
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
    """The distribution of `verify`'s decision, given the guesses; all arguments are those of `verify`.

    Returns:
      `[N + 1, V]`, at `[v, x]` the probability that the deepest accepted node is v and the next token is x.
    """

  def explain(
    self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any
  ) -> tuple[Verdict, Record | None]:
    """The verdict of `verify` for the same arguments, and its record; by default the record is None."""
    return self.verify(keys, tree, proposal, target_probs, state), None

  def without_candidates(self, keys: jax.Array, tree: Tree, target_probs: jax.Array, state: Any) -> Verdict:
    """The decision of `verify` on a row without candidates, where only the root's `target_probs` `[V]` are known."""
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
    """The state after a round that accepted down to `node` and emitted `token`, scalars; by default unchanged."""
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
    """The verdict on one row, and its record, which may lack the decisions unless `is_explained`."""

  def verify(self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any) -> Verdict:
    _check_wide(proposal, target_probs)
    return self.decide(keys, tree, proposal, target_probs, state, is_explained=False)[0]

  def explain(
    self, keys: jax.Array, tree: Tree, proposal: Proposal, target_probs: jax.Array, state: Any
  ) -> tuple[Verdict, Record | None]:
    _check_wide(proposal, target_probs)
    return self.decide(keys, tree, proposal, target_probs, state, is_explained=True)


class DepthVerifier(RecordedVerifier):
  """A verifier that draws uniforms at each depth: the last one is for the token after a path that ends there."""

  num_uniforms = 2  # of a depth

  def uniforms(self, keys: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Uniforms `[L + 1, num_uniforms]`."""
    return jax.vmap(lambda key: jax.random.uniform(key, (self.num_uniforms,), dtype))(keys)

  def without_candidates(self, keys: jax.Array, tree: Tree, target_probs: jax.Array, state: Any) -> Verdict:
    uniform = self.uniforms(keys, target_probs.dtype)[0, -1]
    return Verdict.at(tree, jnp.zeros((), jnp.int32), draw(uniform, target_probs), state)


def _check_wide(proposal: Proposal, target_probs: jax.Array) -> None:
  for name, probs in (('proposal.probs', proposal.probs), ('target_probs', target_probs)):
    if not jnp.issubdtype(probs.dtype, jnp.floating) or probs.dtype.itemsize < 4:
      raise ValueError(
        f'{name} must be float32 or wider, since draws and sums of fewer bits are biased; got {probs.dtype}'
      )


def uniforms_of_nodes(keys: jax.Array, tree: Tree, dtype: jnp.dtype) -> jax.Array:
  """Uniforms `[N + 2]` of a verifier that visits nodes: one for every node, and one for the next token."""
  return jax.random.uniform(keys[0], (tree.num_nodes + 2,), dtype)


def stop_at(
  tree: Tree, node: ArrayLike, weights: jax.Array, uniform: jax.Array, state: Any, decisions: dict[str, Decisions]
) -> tuple[Verdict, Record]:
  """The verdict that accepts all down to `node` and draws the next token from `weights`, and its record."""
  node = jnp.asarray(node, jnp.int32)
  return Verdict.at(tree, node, draw(uniform, weights), state), Record(decisions, node, weights, uniform)


def run_steps(
  is_going: Callable[[Any], jax.Array],
  step: Callable[[Any], tuple[Any, Any]],
  carry: Any,
  *,
  num_steps: int,
  describe: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
  """Repeats `step`, `carry -> (next carry, seen)`, while `is_going`; `verify` and `explain` both run their steps here.

  Returns the last carry, and `describe(number, carry, next carry, seen)` of `num_steps` steps, stacked, or None. Steps
  after the last are described too, with a carry that does not change any more.
  """
  if describe is None:
    return jax.lax.while_loop(is_going, lambda carry: step(carry)[0], carry), None

  def one(carry, number):
    following, seen = step(carry)
    described = describe(number, carry, following, seen)
    is_on = is_going(carry)
    return jax.tree.map(lambda new, old: jnp.where(is_on, new, old), following, carry), described

  return jax.lax.scan(one, carry, jnp.arange(num_steps))
