"""Theory: what methods reach and what the best could, as functions to compare with."""

from spectr_jax.theory.acceptance import kseq_acceptance, race_acceptance, recursive_acceptance
from spectr_jax.theory.optimal import optimal_acceptance
from spectr_jax.theory.transport import TransportCoupling, TransportPlan, optimal_transport

__all__ = [
  'TransportCoupling',
  'TransportPlan',
  'kseq_acceptance',
  'optimal_acceptance',
  'optimal_transport',
  'race_acceptance',
  'recursive_acceptance',
]
