"""Selections: which of n i.i.d. candidates to pick, without deciding whether it is kept."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import Outcome, ratio
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pick:
  """Which candidate is picked at one position, and how picked tokens are distributed.

  Attributes:
    pick_probs: `[n]`, the probability that each candidate is picked; all 0 if there is none, else they sum to 1.
    probs: `[V]`, the law of the picked token, averaged over candidates; 0 everywhere if there is none.
    candidate_probs: `[n]`, the same at the candidates; 0 where there is none.
  """

  pick_probs: jax.Array
  probs: jax.Array
  candidate_probs: jax.Array


class Selection(Protocol):
  """Picks one of n candidates drawn i.i.d.; a pure function, hashable, options are fields."""

  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Pick:
    """The pick at one position; arguments as of a `Coupling`."""


@dataclasses.dataclass(frozen=True)
class Only:
  """Picks the one candidate there is. For single drafts: with more, `Pick.probs` is not the picked one's law."""

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Pick:
    del target_probs
    return Pick(
      is_valid.astype(draft_probs.dtype),
      jnp.where(jnp.any(is_valid), draft_probs, 0),
      jnp.where(is_valid, draft_probs[candidates], 0),
    )


@dataclasses.dataclass(frozen=True)
class Selected:
  """Couples what `selection` picks with the target, maximally: accepted with probability min(1, q/pt), pt its law.

  Attributes:
    selection: The selection.
  """

  selection: Selection
  proposal_rules = (Independent,)

  def numbers(self, draft_probs, target_probs, candidates, is_valid) -> dict[str, jax.Array]:
    """What picks a candidate, and the law pt of what is picked at it, `[n]`, to be shown; arguments as of a call."""
    pick = self.selection(draft_probs, target_probs, candidates, is_valid)
    return {'pick_prob': pick.pick_probs, 'picked_prob': pick.candidate_probs}

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    pick = self.selection(draft_probs, target_probs, candidates, is_valid)
    accept = jnp.minimum(1, ratio(target_probs[candidates], pick.candidate_probs))
    return Outcome(pick.pick_probs * accept, positive_part_or(target_probs - pick.probs, target_probs))
