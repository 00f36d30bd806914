"""Lossless multi-draft speculative decoding in JAX."""

import importlib
from typing import TYPE_CHECKING

from spectr_jax import auto
from spectr_jax import draft as draft
from spectr_jax import engine as engine
from spectr_jax import methods as methods
from spectr_jax import model as model
from spectr_jax import models as models
from spectr_jax import proposal as proposal
from spectr_jax import verifiers as verifiers
from spectr_jax.constraint import Constraint
from spectr_jax.draft import Drafter, lookup_beside, lookup_drafter
from spectr_jax.engine import (
  ChoiceProbs,
  Continuation,
  Decoder,
  DecodeSharding,
  Generation,
  LogLikelihood,
  NotFiniteError,
  Request,
  Session,
  Statistics,
  Stop,
  StopStrings,
  choice_probs,
  finish_reason,
  generate,
  generate_many,
  log_likelihood,
)
from spectr_jax.methods import METHODS
from spectr_jax.model import Model, ModelOutput
from spectr_jax.sampling import SamplingParams, logits_to_probs
from spectr_jax.text import TextContinuation, generate_text
from spectr_jax.tree import TokenTree
from spectr_jax.tree_search import optimal_factors
from spectr_jax.verify import Verification, verify

if TYPE_CHECKING:
  from spectr_jax import testing, theory
  from spectr_jax.io.compilation_cache import cache_programs
  from spectr_jax.io.constraints import compile_constraint
  from spectr_jax.io.fit_draft import fit_draft
  from spectr_jax.io.heads.head_files import load_drafter
  from spectr_jax.io.heads.save import save_drafter
  from spectr_jax.io.hub.save import save_model
  from spectr_jax.io.model_files import load_model
  from spectr_jax.io.text_stream import TextStream
  from spectr_jax.io.tokenizer import Tokenizer

__version__ = '0.1.0'

# Rarer names are in `draft`, `engine`, `methods`, `model`, `models`, `proposal` and `verifiers`, as docs/api.md says.
# What no page of the API names is internal and may change.
__all__ = [
  # Texts in, texts out; prompts in, tokens out.
  'generate_text', 'generate', 'generate_many', 'Session', 'auto',
  'TextContinuation', 'Generation', 'Continuation', 'Request', 'SamplingParams', 'StopStrings', 'Stop', 'finish_reason',
  'Statistics', 'NotFiniteError', 'log_likelihood', 'LogLikelihood', 'choice_probs', 'ChoiceProbs',
  'compile_constraint', 'Constraint', 'Decoder', 'DecodeSharding',
  # Models, drafters and files.
  'load_model', 'save_model', 'load_drafter', 'save_drafter', 'fit_draft', 'Tokenizer', 'TextStream', 'cache_programs',
  'Model', 'ModelOutput', 'Drafter', 'lookup_drafter', 'lookup_beside',
  # Verification, methods and trees.
  'verify', 'Verification', 'METHODS', 'TokenTree', 'optimal_factors', 'logits_to_probs', 'theory', 'testing',
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
  'load_drafter': ('spectr_jax.io.heads.head_files', 'load_drafter'),
  'load_model': ('spectr_jax.io.model_files', 'load_model'),
  'save_drafter': ('spectr_jax.io.heads.save', 'save_drafter'),
  'save_model': ('spectr_jax.io.hub.save', 'save_model'),
  'testing': ('spectr_jax.testing', None),
  'theory': ('spectr_jax.theory', None),
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
