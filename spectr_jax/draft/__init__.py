"""Drafters: where guesses come from."""

from spectr_jax.draft.drafter import Drafter
from spectr_jax.draft.model_drafter import ModelDrafter

__all__ = ['Drafter', 'ModelDrafter']
