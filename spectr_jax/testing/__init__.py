"""Tests of losslessness, for this library's own tests and for verifiers added by its users."""

from spectr_jax.testing.checks import Check, ChiSquare, chi_square, detectable_bias
from spectr_jax.testing.conformance import Conformance, check_verifier
from spectr_jax.testing.controls import CONTROLS
from spectr_jax.testing.engine import (
  engine_counts,
  ordinary_law,
  sample_counts,
  simulated_rejections,
  tiny_transformers,
)
from spectr_jax.testing.enumeration import enumerated_rejections, enumeration_error, expected_acceptance, joint_law
from spectr_jax.testing.proof import Proof, prove
from spectr_jax.testing.tables import ContextTables, constant_tables, random_tables

__all__ = [
  'CONTROLS',
  'Check',
  'ChiSquare',
  'Conformance',
  'ContextTables',
  'Proof',
  'check_verifier',
  'chi_square',
  'constant_tables',
  'detectable_bias',
  'engine_counts',
  'enumerated_rejections',
  'enumeration_error',
  'expected_acceptance',
  'joint_law',
  'ordinary_law',
  'prove',
  'random_tables',
  'sample_counts',
  'simulated_rejections',
  'tiny_transformers',
]
