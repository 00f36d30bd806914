"""Couplings: one token from n candidates."""

from spectr_jax.couplings.coupling import Coupling, Outcome
from spectr_jax.couplings.kseq import KSeq, solve_gamma
from spectr_jax.couplings.maximal import Maximal
from spectr_jax.couplings.over_accept import OverAccept
from spectr_jax.couplings.race import Race
from spectr_jax.couplings.recursive import Recursive
from spectr_jax.couplings.selection import Only, Pick, Selected, Selection

__all__ = [
  'Coupling',
  'KSeq',
  'Maximal',
  'Only',
  'Outcome',
  'OverAccept',
  'Pick',
  'Race',
  'Recursive',
  'Selected',
  'Selection',
  'solve_gamma',
]
