"""Drafters: the sources of guesses."""

from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest
from spectr_jax.draft.model_drafter import as_drafter, model_drafter

__all__ = ['Commitment', 'DraftContext', 'DraftRequest', 'Drafter', 'as_drafter', 'model_drafter']
