"""What a verifier is: a whole tree of guesses to the tokens kept, one row at a time."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.tree import TokenTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a verifier decided for one row.

  Attributes:
    path: int32 `[L]`, the accepted nodes from depth 1 down; entries from `num_accepted` on mean nothing but are valid
      node numbers.
    num_accepted: int32 scalar, 0..L.
    next_token: int32 scalar, the token after the accepted ones: a correction, or a bonus where the path ended.
    state: The row's state for its next round.
  """

  path: jax.Array
  num_accepted: jax.Array
  next_token: jax.Array
  state: Any

  @classmethod
  def at(cls, tree: TokenTree, node: jax.Array, next_token: jax.Array, state: Any) -> Verdict:
    """Everything down to `node` is accepted and `next_token` follows."""
    path = jnp.maximum(jnp.asarray(tree.paths)[node], 0)
    return cls(path, jnp.asarray(tree.depths)[node], next_token, state)


class Verifier(Protocol):
  """A verification algorithm; hashable, options are fields.

  `verify` draws; `law` is the exact law of what it draws, built from the same deterministic steps. Proofs enumerate
  `law`; tests hold the draws of `verify` against it. A verifier may have a method `record`, of the arguments of
  `verify`, that gives a `Record` of the same decisions, to be shown.

  Attributes:
    proposal_rules: The types of rules whose candidates it is right for.
  """

  proposal_rules: tuple[type[ProposalRule], ...]

  def init_state(self, tree: TokenTree) -> Any:
    """The state a row starts with; `()` for verifiers that keep none."""

  def verify(
    self, keys: jax.Array, tree: TokenTree, proposal: Proposal, target_probs: jax.Array, state: Any
  ) -> Verdict:
    """Decides one row.

    Args:
      keys: `[L + 1]`, the round's keys for verification, one per depth; the last is for the token after a whole path.
      tree: The tree, static; it may be empty.
      proposal: `tokens` `[N]` and `probs` `[R, V]` of the row.
      target_probs: `[N + 1, V]`, the target's law after each node.
      state: The row's state.
    """

  def law(self, tree: TokenTree, proposal: Proposal, target_probs: jax.Array, state: Any) -> jax.Array:
    """Probability, given the guesses, that the deepest accepted node is v and the next token x; `[N + 1, V]`."""

  def advance(
    self, tree: TokenTree, proposal: Proposal, target_probs: jax.Array, state: Any, node: jax.Array, token: jax.Array
  ) -> Any:
    """The state after a round that accepted everything down to `node` and emitted `token`."""


class Stateless:
  """A verifier that keeps nothing between rounds."""

  def init_state(self, tree):
    del tree
    return ()

  def advance(self, tree, proposal, target_probs, state, node, token):
    del tree, proposal, target_probs, node, token
    return state
