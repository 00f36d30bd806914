"""The engine: batches decoded round by round on the device, their rows, results and traces."""

from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.generate import generate
from spectr_jax.engine.likelihood import LogLikelihood, log_likelihood
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.refill import Continuation, Pool, Request, generate_many, refill
from spectr_jax.engine.result import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT, Generation, NotFiniteError
from spectr_jax.engine.session import Session, reprompt
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState, finish, init_decode, sample_keys
from spectr_jax.engine.statistics import Statistics
from spectr_jax.engine.stop import Stop, StopStrings, finish_reason
from spectr_jax.engine.trace import Judge, Judgement, Trace, TracedRound, make_judge, trace_decode

__all__ = [
  'ORIGIN_BONUS', 'ORIGIN_CORRECTION', 'ORIGIN_DRAFT', 'Continuation', 'DecodeSharding', 'DecodeState', 'Decoder',
  'Generation', 'Judge', 'Judgement', 'LogLikelihood', 'NotFiniteError', 'Pool', 'Request', 'Session', 'Statistics',
  'Stop', 'StopStrings', 'Trace', 'TracedRound', 'choose_cache_size', 'decode_rounds', 'finish', 'finish_reason',
  'generate', 'generate_many', 'init_decode', 'log_likelihood', 'make_judge', 'refill', 'reprompt', 'sample_keys',
  'trace_decode',
]  # fmt: skip
