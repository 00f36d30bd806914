"""Lossless multi-draft speculative decoding in JAX."""

import importlib
from typing import TYPE_CHECKING

from spectr_jax import auto, models
from spectr_jax.constraint import Constraint
from spectr_jax.draft import (
  Confident,
  DraftContext,
  Drafter,
  Estimated,
  Likeliest,
  LookupCorpus,
  SharedVocabulary,
  growing,
  lookup_beside,
  lookup_corpus,
  lookup_drafter,
  model_drafter,
  vocabulary_drafter,
)
from spectr_jax.engine import (
  ORIGIN_BONUS,
  ORIGIN_CORRECTION,
  ORIGIN_DRAFT,
  ChoiceProbs,
  Continuation,
  Decoder,
  DecodeSharding,
  DecodeState,
  Generation,
  LogLikelihood,
  NotFiniteError,
  Request,
  Session,
  Statistics,
  Stop,
  StopStrings,
  choice_probs,
  decode_rounds,
  finish,
  finish_reason,
  generate,
  generate_many,
  init_decode,
  log_likelihood,
  refill,
  sample_keys,
)
from spectr_jax.methods import METHODS, Method, get_method, register, with_children, with_epsilon, with_gumbel
from spectr_jax.model import KVCache, Model, ModelOutput
from spectr_jax.models import table
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.text import TextContinuation, generate_text
from spectr_jax.tree import TokenTree
from spectr_jax.tree_search import optimal_factors
from spectr_jax.verifiers import Verdict, Verifier
from spectr_jax.verify import Verification, verify

if TYPE_CHECKING:
  from spectr_jax import testing, theory
  from spectr_jax.io.compilation_cache import cache_programs
  from spectr_jax.io.constraints import compile_constraint
  from spectr_jax.io.fit_draft import fit_draft
  from spectr_jax.io.heads.load import load_drafter
  from spectr_jax.io.heads.save import save_drafter
  from spectr_jax.io.hub.save import save_model
  from spectr_jax.io.load import load_model
  from spectr_jax.io.text_stream import TextStream
  from spectr_jax.io.tokenizer import Tokenizer
  from spectr_jax.models import transformer

__version__ = '0.1.0'

__all__ = [
  # Texts in, texts out; prompts in, tokens out.
  'generate_text', 'generate', 'generate_many', 'Session', 'auto',
  'TextContinuation', 'Generation', 'Continuation', 'Request', 'SamplingParams', 'StopStrings', 'Stop', 'finish_reason',
  'ORIGIN_DRAFT', 'ORIGIN_CORRECTION', 'ORIGIN_BONUS', 'Statistics', 'NotFiniteError',
  'log_likelihood', 'LogLikelihood', 'choice_probs', 'ChoiceProbs',
  'compile_constraint', 'Constraint',
  # Models and files.
  'load_model', 'save_model', 'load_drafter', 'save_drafter', 'fit_draft', 'Tokenizer', 'TextStream',
  'cache_programs',
  'Model', 'ModelOutput', 'KVCache', 'models', 'transformer', 'table',
  # Verification, methods and trees.
  'verify', 'Verification', 'Verifier', 'Verdict', 'METHODS', 'Method', 'get_method', 'register', 'with_children',
  'with_epsilon', 'with_gumbel', 'TokenTree', 'optimal_factors', 'Proposal', 'logits_to_probs', 'theory', 'testing',
  # Drafters.
  'Drafter', 'DraftContext', 'model_drafter', 'lookup_drafter', 'lookup_beside', 'lookup_corpus', 'LookupCorpus',
  'growing', 'Likeliest', 'Confident', 'Estimated', 'vocabulary_drafter', 'SharedVocabulary',
  # Round by round, and on many devices.
  'Decoder', 'DecodeState', 'init_decode', 'decode_rounds', 'refill', 'finish', 'sample_keys', 'DecodeSharding',
]  # fmt: skip


# Names that are imported on first use, each with its module and its name there (None for the module itself). They need
# Flax, Orbax or tokenizers, which take longer to import than the rest of the library together. The imports under
# TYPE_CHECKING tell type checkers and editors the same.
_LAZY: dict[str, tuple[str, str | None]] = {
  'TextStream': ('spectr_jax.io.text_stream', 'TextStream'),
  'Tokenizer': ('spectr_jax.io.tokenizer', 'Tokenizer'),
  'cache_programs': ('spectr_jax.io.compilation_cache', 'cache_programs'),
  'compile_constraint': ('spectr_jax.io.constraints', 'compile_constraint'),
  'fit_draft': ('spectr_jax.io.fit_draft', 'fit_draft'),
  'load_drafter': ('spectr_jax.io.heads.load', 'load_drafter'),
  'load_model': ('spectr_jax.io.load', 'load_model'),
  'save_drafter': ('spectr_jax.io.heads.save', 'save_drafter'),
  'save_model': ('spectr_jax.io.hub.save', 'save_model'),
  'testing': ('spectr_jax.testing', None),
  'theory': ('spectr_jax.theory', None),
  'transformer': ('spectr_jax.models.transformer', None),
}

if not TYPE_CHECKING:  # seen by a type checker, this function would make every misspelt name valid

  def __getattr__(name: str):
    if name not in _LAZY:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, attribute = _LAZY[name]
    value = importlib.import_module(module)
    value = value if attribute is None else getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
  return sorted({*globals(), *_LAZY})
