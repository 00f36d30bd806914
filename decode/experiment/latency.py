"""Times of compiling and of the parts of a round, beside those of `spectr_jax.auto.timing`."""

from __future__ import annotations

import functools
import time

import jax
import jax.monitoring
import numpy as np
from etils import epath

from spectr_jax import Decoder
from spectr_jax.auto.timing import draft, time_in_turns
from spectr_jax.engine import DecodeState, decode_rounds
from spectr_jax.engine.loop import judge, noise_keys, score
from spectr_jax.engine.sharding import tracing_with
from spectr_jax.io.new_files import check_writable
from spectr_jax.proposal import Proposal


class CompilingClock:
  """A context manager that measures how long programs are traced and compiled in it, or read from a cache."""

  def __enter__(self) -> CompilingClock:
    self._spans: list[tuple[float, float]] = []  # start and seconds, none within another
    jax.monitoring.register_event_duration_secs_listener(self._note)
    return self

  def __exit__(self, *error) -> None:
    jax.monitoring.unregister_event_duration_listener(self._note)

  def _note(self, name: str, seconds: float, **_) -> None:
    if not name.startswith('/jax/core/compile/'):
      return
    start = time.perf_counter() - seconds
    while self._spans and self._spans[-1][0] >= start:  # what the trace of one program traced and compiled
      self._spans.pop()
    self._spans.append((start, seconds))

  @property
  def seconds(self) -> float:
    return sum(seconds for _, seconds in self._spans)


def profile(decoder: Decoder, state: DecodeState, directory: epath.PathLike, num_rounds: int = 8) -> None:
  """Records rounds with JAX's profiler, for TensorBoard or Perfetto. It donates the state of a program that has run."""
  try:
    epath.Path(directory).mkdir(parents=True, exist_ok=True)
    check_writable(epath.Path(directory) / 'profile')
  except OSError as error:
    raise ValueError(f'profile_dir: cannot write {directory}: {error.strerror or error}') from error
  except ValueError as error:
    raise ValueError(f'profile_dir: {error}') from error
  with jax.profiler.trace(str(directory)):
    jax.block_until_ready(decode_rounds(decoder, state, num_rounds))


@jax.jit
def _score(decoder: Decoder, state: DecodeState, proposal: Proposal):
  with tracing_with(decoder.sharding):
    return score(decoder, state, proposal).logits


@jax.jit
def _judge(decoder: Decoder, state: DecodeState, proposal: Proposal, logits):
  with tracing_with(decoder.sharding):
    return judge(decoder, state, noise_keys(decoder, state)[1], proposal, logits)[1]


def time_parts(decoder: Decoder, state: DecodeState, num_runs: int = 15) -> dict[str, float]:
  """Median seconds of the parts of a round: `draft`, `target` and `verification`.

  Verification includes the computation of the target's distributions from its logits. Each part is timed as a separate
  program, so their sum is not exactly their time within the loop. The state before the round is not donated.
  """
  proposal = draft(decoder, state)
  logits = _score(decoder, state, proposal)
  calls = {
    'draft': functools.partial(draft, decoder, state),
    'target': functools.partial(_score, decoder, state, proposal),
    'verification': functools.partial(_judge, decoder, state, proposal, logits),
  }
  return {part: float(np.median(seconds)) for part, seconds in time_in_turns(calls, num_runs).items()}
