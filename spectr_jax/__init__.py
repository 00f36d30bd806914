"""Lossless multi-draft speculative decoding in JAX."""

from spectr_jax import models
from spectr_jax.draft import DraftContext, Drafter, model_drafter
from spectr_jax.engine.decoder import Decoder
from spectr_jax.engine.loop import decode_rounds, generate
from spectr_jax.engine.refill import Continuation, Request, generate_many, refill
from spectr_jax.engine.result import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT, Generation, NotFiniteError
from spectr_jax.engine.state import DecodeState, init_decode
from spectr_jax.engine.statistics import Statistics
from spectr_jax.io.model_files import load_model, save_model
from spectr_jax.io.tokenizer import Tokenizer
from spectr_jax.methods import METHODS, Method, get_method, register, with_children, with_epsilon, with_gumbel
from spectr_jax.model import KVCache, Model, ModelOutput
from spectr_jax.models import table, transformer
from spectr_jax.proposal import Proposal
from spectr_jax.sampling import SamplingParams
from spectr_jax.tree import TokenTree, optimal_factors
from spectr_jax.verify import Verdict, Verifier

__version__ = '0.1.0'

__all__ = [
  'METHODS',
  'ORIGIN_BONUS',
  'ORIGIN_CORRECTION',
  'ORIGIN_DRAFT',
  'DecodeState',
  'Continuation',
  'Decoder',
  'DraftContext',
  'Drafter',
  'Generation',
  'KVCache',
  'Method',
  'Model',
  'ModelOutput',
  'NotFiniteError',
  'Proposal',
  'Request',
  'SamplingParams',
  'Statistics',
  'TokenTree',
  'Tokenizer',
  'Verdict',
  'Verifier',
  'decode_rounds',
  'generate',
  'generate_many',
  'get_method',
  'init_decode',
  'load_model',
  'model_drafter',
  'models',
  'optimal_factors',
  'refill',
  'register',
  'save_model',
  'table',
  'transformer',
  'with_children',
  'with_epsilon',
  'with_gumbel',
]
