"""Couplings: one token from n candidates."""

from spectr_jax.couplings.coupling import Coupling, Outcome
from spectr_jax.couplings.kseq import KSeq, solve_gamma
from spectr_jax.couplings.maximal import Maximal

__all__ = ['Coupling', 'KSeq', 'Maximal', 'Outcome', 'solve_gamma']
