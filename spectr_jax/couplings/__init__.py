"""Couplings: one token from n candidates."""

from spectr_jax.couplings.coupling import Coupling, Explanation, Outcome, SelectionExplanation, ThresholdCoupling
from spectr_jax.couplings.given import Given
from spectr_jax.couplings.highest_ratio import HighestRatio
from spectr_jax.couplings.kseq import KSeq, solve_gamma
from spectr_jax.couplings.over_accept import OverAccept
from spectr_jax.couplings.race import Race
from spectr_jax.couplings.recursive import Recursive
from spectr_jax.couplings.selection import Maximal, MaximalAfter, Pick, Selection, SingleDraft

__all__ = [
  'Coupling',
  'Explanation',
  'Given',
  'HighestRatio',
  'KSeq',
  'Maximal',
  'MaximalAfter',
  'Outcome',
  'OverAccept',
  'Pick',
  'Race',
  'Recursive',
  'Selection',
  'SelectionExplanation',
  'SingleDraft',
  'ThresholdCoupling',
  'solve_gamma',
]
