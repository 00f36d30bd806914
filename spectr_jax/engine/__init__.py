"""The engine: batches decoded round by round on the device, their rows, results and traces."""

from spectr_jax.engine.budget import Budget
from spectr_jax.engine.choices import ChoiceProbs, choice_probs
from spectr_jax.engine.decoder import Decoder, choose_cache_size
from spectr_jax.engine.generate import Continuation, generate, generate_many
from spectr_jax.engine.likelihood import LogLikelihood, log_likelihood
from spectr_jax.engine.loop import decode_rounds
from spectr_jax.engine.reading import init_decode, refill
from spectr_jax.engine.request import Piece, Request
from spectr_jax.engine.result import ORIGIN_BONUS, ORIGIN_CORRECTION, ORIGIN_DRAFT, Generation, NotFiniteError
from spectr_jax.engine.rows import Rows
from spectr_jax.engine.session import Session
from spectr_jax.engine.sharding import DecodeSharding
from spectr_jax.engine.state import DecodeState, finish, sample_keys
from spectr_jax.engine.statistics import Statistics
from spectr_jax.engine.stop import Stop, StopStrings, finish_reason
from spectr_jax.engine.trace import Judge, Judgement, Trace, TracedRound, make_judge, trace_decode

__all__ = [
  'ORIGIN_BONUS', 'ORIGIN_CORRECTION', 'ORIGIN_DRAFT', 'Budget', 'ChoiceProbs', 'Continuation', 'DecodeSharding',
  'DecodeState', 'Decoder', 'Generation', 'Judge', 'Judgement', 'LogLikelihood', 'NotFiniteError', 'Piece', 'Request',
  'Rows', 'Session', 'Statistics', 'Stop', 'StopStrings', 'Trace', 'TracedRound', 'choice_probs', 'choose_cache_size',
  'decode_rounds', 'finish', 'finish_reason', 'generate', 'generate_many', 'init_decode', 'log_likelihood',
  'make_judge', 'refill', 'sample_keys', 'trace_decode',
]  # fmt: skip
