"""Verifiers: a whole tree of guesses to the tokens kept."""

from spectr_jax.verify.verifier import Verdict, Verifier
from spectr_jax.verify.walk import Walk

__all__ = ['Verdict', 'Verifier', 'Walk']
