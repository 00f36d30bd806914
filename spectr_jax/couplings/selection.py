"""Selections pick one of n i.i.d. candidates. Another rule decides whether it is kept."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp

from spectr_jax.couplings.coupling import (
  Coupling,
  Explanation,
  Outcome,
  SelectionExplanation,
  checked_result,
  one_after_another,
  ratio,
)
from spectr_jax.proposal import Independent
from spectr_jax.sampling import positive_part_or


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pick:
  """The pick at one position, and the distribution of picked tokens.

  Attributes:
    pick_probs: `[n]`, the probability that each candidate is picked. They sum to 1, or are all 0 without candidates.
    probs: `[V]`, the distribution of the picked token, averaged over candidates; all 0 without candidates.
    candidate_probs: `[n]`, the entries of `probs` at the candidates, 0 for invalid ones.
  """

  pick_probs: jax.Array
  probs: jax.Array
  candidate_probs: jax.Array


class Selection(abc.ABC):
  """Picks one of n i.i.d. candidates: a pure function, as a frozen dataclass whose fields are its options.

  Attributes:
    takes_mixed: Whether candidates may be given beside drawn ones. A call then takes a fifth argument `is_given`, bool
      `[n]`, which candidates are given.
    explanation: Words for its rule, for display.
  """

  takes_mixed: bool = False
  explanation: SelectionExplanation = SelectionExplanation()

  @abc.abstractmethod
  def __call__(
    self, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, is_valid: jax.Array
  ) -> Pick:
    """The pick at one position; the arguments are those of `Coupling.__call__`."""


def picked(
  selection: Selection, draft_probs: jax.Array, target_probs: jax.Array, candidates: jax.Array, *rows: jax.Array
) -> Pick:
  """The pick of a selection; `*rows` are `is_valid`, and `is_given` if it takes it. ValueError for other results."""
  own, whole = candidates.shape, target_probs.shape
  pick = selection(draft_probs, target_probs, candidates, *rows)
  return checked_result(selection, pick, Pick, pick_probs=own, probs=whole, candidate_probs=own)


def check_selection(selection: Selection) -> None:
  """Raises `ValueError` if what a verifier or a coupling is built on is no `Selection`."""
  if not isinstance(selection, Selection):
    raise ValueError(f'selection must be a subclass of spectr_jax.couplings.Selection, got {selection!r}')


@dataclasses.dataclass(frozen=True)
class Maximal(Coupling):
  """Accepts X with probability min(1, q(X)/p(X)), else draws from [q - p]+ (SpecTr, Algorithm 1).

  It is for a single candidate. With several valid ones the emitted token does not have the target's distribution.
  """

  proposal_rules = (Independent,)
  explanation = Explanation(
    'The candidate is accepted with probability min(1, q/p).',
    '[q − p]₊',
    'A guess is always accepted if the target finds it at least as likely as the draft does, and in proportion if not.'
    ' At the first rejection the token is drawn from what the draft offers too rarely.',
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Outcome:
    accept = jnp.minimum(1, ratio(target_probs[candidates], draft_probs[candidates]))
    return Outcome(one_after_another(accept, is_valid), positive_part_or(target_probs - draft_probs, target_probs))


@dataclasses.dataclass(frozen=True)
class SingleDraft(Selection):
  """Picks the only candidate.

  It is for single drafts. With several candidates `Pick.probs` is not the distribution of the picked token.
  """

  explanation = SelectionExplanation(
    path='The path is the draft.',
    token=Maximal.explanation.rule,
    law='p',
    plain_path='The draft is the path.',
    plain_token=Maximal.explanation.plain,
  )

  def __call__(self, draft_probs, target_probs, candidates, is_valid) -> Pick:
    del target_probs
    return Pick(
      is_valid.astype(draft_probs.dtype),
      jnp.where(jnp.any(is_valid), draft_probs, 0),
      jnp.where(is_valid, draft_probs[candidates], 0),
    )


@dataclasses.dataclass(frozen=True)
class MaximalAfter(Coupling):
  """Picks by `selection` and couples the picked candidate maximally with the target.

  Let pt be the distribution of the picked token. It is accepted with probability min(1, q/pt); otherwise the token is
  drawn from [q - pt]+.
  """

  selection: Selection
  proposal_rules = (Independent,)

  def __post_init__(self):
    check_selection(self.selection)

  @property
  def takes_mixed(self) -> bool:
    """True if the selection takes given candidates beside drawn ones."""
    return self.selection.takes_mixed

  @property
  def explanation(self) -> Explanation:
    """The description of the selection, as that of a coupling."""
    words = self.selection.explanation
    return Explanation(words.token, f'[q − {words.law}]₊' if words.law else '', words.plain_token)

  def numbers(self, draft_probs, target_probs, candidates, is_valid, *is_given) -> dict[str, jax.Array]:
    """The probability that each candidate is picked and its probability under pt, `[n]` each, for display."""
    pick = picked(self.selection, draft_probs, target_probs, candidates, is_valid, *is_given)
    return {'pick_prob': pick.pick_probs, 'picked_prob': pick.candidate_probs}

  def __call__(self, draft_probs, target_probs, candidates, is_valid, *is_given) -> Outcome:
    pick = picked(self.selection, draft_probs, target_probs, candidates, is_valid, *is_given)
    accept = jnp.minimum(1, ratio(target_probs[candidates], pick.candidate_probs))
    return Outcome(pick.pick_probs * accept, positive_part_or(target_probs - pick.probs, target_probs))
