"""Theory: what the best method could do, as functions to compare the others with."""

from spectr_jax.theory.optimal import optimal_acceptance
from spectr_jax.theory.transport import TransportCoupling, TransportPlan, optimal_transport

__all__ = ['TransportCoupling', 'TransportPlan', 'optimal_acceptance', 'optimal_transport']
