"""What a drafter is: where guesses come from."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from spectr_jax.proposal import Proposal, ProposalRule
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree


class Drafter(Protocol):
  """Guesses tokens for a tree; a registered pytree whose arrays are parameters.

  All arguments are batched. A drafter's state is a pytree of arrays with the batch in front, or a cache.
  """

  vocab_size: int
  max_length: int | None

  def init(self, prompts: jax.Array, prompt_lengths: jax.Array, max_length: int) -> Any:
    """The state after right-padded prompts `[B, P]`, with room for `max_length` tokens per row."""

  def propose(
    self, keys: jax.Array, state: Any, tree: TokenTree, sampling: SamplingParams, rule: ProposalRule
  ) -> Proposal:
    """Guesses for every node.

    Args:
      keys: Keys `[B, L + 1]`, one per row and depth of the parent; the last depth draws nothing.
      state: The drafter's state.
      tree: The tree, static, with at least one node.
      sampling: The rows' sampling parameters, the same as the target's.
      rule: How children are drawn.
    """

  def commit(
    self,
    state: Any,
    path: jax.Array,
    num_accepted: jax.Array,
    features: Any,
    *,
    tree: TokenTree,
    next_token: jax.Array,
  ) -> Any:
    """The state after a round.

    Args:
      state: `Proposal.state` of the round.
      path: int32 `[B, L + 1]`, the committed nodes: the root, then the accepted ones.
      num_accepted: int32 `[B]`, how many entries of `path` are committed; 0 leaves a row untouched.
      features: The target's `ModelOutput.features` of the round, or None.
      tree: The tree of the round.
      next_token: int32 `[B]`, the token after the path, the next round's root.
    """
