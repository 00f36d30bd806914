"""How losslessness is shown, for this library's tests and for verifiers added by its users."""

from spectr_jax.testing.chi_square import ChiSquare, chi_square, sample_counts
from spectr_jax.testing.controls import CONTROLS
from spectr_jax.testing.enumeration import enumeration_error, expected_acceptance, joint_law
from spectr_jax.testing.tables import ContextTables, constant_tables, random_tables

__all__ = [
  'CONTROLS',
  'ChiSquare',
  'ContextTables',
  'chi_square',
  'constant_tables',
  'enumeration_error',
  'expected_acceptance',
  'joint_law',
  'random_tables',
  'sample_counts',
]
