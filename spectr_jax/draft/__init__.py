"""Drafters: the sources of guesses."""

from spectr_jax.draft.assistant_drafter import assistant_drafter
from spectr_jax.draft.corpus import LookupCorpus, lookup_corpus
from spectr_jax.draft.drafter import Commitment, DraftContext, Drafter, DraftRequest, Growth
from spectr_jax.draft.drawing import DrawingDrafter
from spectr_jax.draft.growth import Confident, Estimated, Likeliest, growing
from spectr_jax.draft.head_drafter import head_drafter
from spectr_jax.draft.lookup import lookup_beside, lookup_drafter
from spectr_jax.draft.medusa_drafter import medusa_drafter
from spectr_jax.draft.model_drafter import as_drafter, model_drafter
from spectr_jax.draft.one_pass_drafter import one_pass_drafter
from spectr_jax.draft.shared_vocabulary import SharedVocabulary
from spectr_jax.draft.vocabulary_drafter import vocabulary_drafter

__all__ = [
  'Commitment',
  'Confident',
  'DraftContext',
  'DraftRequest',
  'Drafter',
  'DrawingDrafter',
  'Estimated',
  'Growth',
  'Likeliest',
  'LookupCorpus',
  'SharedVocabulary',
  'as_drafter',
  'assistant_drafter',
  'growing',
  'head_drafter',
  'lookup_beside',
  'lookup_corpus',
  'lookup_drafter',
  'medusa_drafter',
  'model_drafter',
  'one_pass_drafter',
  'vocabulary_drafter',
]
