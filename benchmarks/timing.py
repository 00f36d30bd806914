"""What benchmarks of speed share: calls in turns, rounds of the loop, a memory's rate, times in words, llama.cpp."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spectr_jax
from spectr_jax import Decoder, TokenTree
from spectr_jax.auto.timing import time_in_turns
from spectr_jax.engine import DecodeState
from spectr_jax.methods import Method

PROMPT_LENGTH, NEW_TOKENS = 64, 128
COPIED, NUM_COPIES = 2**28, 16  # numbers of a copy, and copies in one program
Call = Callable[[], int]  # runs a task and returns its number of steps
Spread = dict[str, float]


def spread(seconds: Sequence[float] | np.ndarray, unit: float = 1e-3) -> Spread:
  """Median, lowest and highest of times in seconds, in milliseconds or another unit."""
  times = np.asarray(seconds) / unit
  return {'median': float(np.median(times)), 'low': float(times.min()), 'high': float(times.max())}


def line(values: Iterable[object], digits: int = 3) -> str:
  """A line of a table: columns of 12 characters, floating point numbers with so many digits."""
  return ' '.join(f'{value:>12.{digits}f}' if isinstance(value, float) else f'{value:>12}' for value in values)


def in_words(times: Spread) -> str:
  return f'{times["median"]:.2f} ms ({times["low"]:.2f} to {times["high"]:.2f})'


def time_steps(calls: dict[str, Call], num_runs: int) -> dict[str, Spread]:
  """The `spread` per step of each call, by name. The calls take turns after one untimed call each."""
  steps: dict[str, list[int]] = {name: [] for name in calls}
  counted = {name: lambda name=name, call=call: steps[name].append(call()) for name, call in calls.items()}
  times = time_in_turns(counted, num_runs)
  return {name: spread(times[name] / steps[name][1:]) for name in calls}


def prompts(batch_size: int, vocab_size: int = 32000) -> np.ndarray:
  """Random prompts, int32 `[batch_size, PROMPT_LENGTH]`, of ids below `vocab_size`."""
  return np.random.default_rng(0).integers(0, vocab_size, (batch_size, PROMPT_LENGTH)).astype(np.int32)


def own_call(models, rows: np.ndarray, method: str, tree: TokenTree | None) -> Call:
  """A call of `generate` by a method and perhaps a tree, which continues prompts, int32 `[B, P]`, by `NEW_TOKENS`
  tokens with a target and a draft, and returns its number of rounds.
  """
  lengths, more = np.full(len(rows), rows.shape[1]), {'method': method, 'tree': tree, 'max_new_tokens': NEW_TOKENS}

  def call():
    return int(spectr_jax.generate(jax.random.key(0), *models, rows, lengths, **more).num_target_calls.max())

  return call


def make_decoder(target, draft, method: str | Method, tree: TokenTree | None) -> Decoder:
  """A decoder of `NEW_TOKENS` tokens behind prompts of `PROMPT_LENGTH`; the draft and the tree may be None."""
  return Decoder.make(
    target, draft, method=method, tree=tree, max_new_tokens=NEW_TOKENS, cache_size=PROMPT_LENGTH + NEW_TOKENS
  )


def begin(decoder: Decoder, rows: np.ndarray, **options) -> tuple[Decoder, DecodeState]:
  """The decoder, and its state behind prompts, int32 `[B, P]`, with options of `init_decode`."""
  lengths = np.full(len(rows), rows.shape[1])
  return decoder, spectr_jax.engine.init_decode(decoder, jax.random.key(0), rows, lengths, **options)


def seconds_per_round(decoder: Decoder, state: DecodeState, num_rounds: int) -> float:
  """Seconds per round of one run of the loop, at most `num_rounds`, from a state, which is donated."""
  jax.block_until_ready(state)
  start = time.perf_counter()
  state = jax.block_until_ready(spectr_jax.engine.decode_rounds(decoder, state, num_rounds))
  return (time.perf_counter() - start) / int(state.result.num_target_calls.max())


def rounds_in_turns(begun: dict, num_runs: int, num_rounds: int) -> dict:
  """Seconds per round of each run, by name, of functions that make what `begin` returns. One untimed run of each comes
  first; then they take turns.
  """
  times = {name: [] for name in begun}
  for _ in range(num_runs + 1):
    for name, make in begun.items():
      times[name].append(seconds_per_round(*make(), num_rounds))
  return {name: seconds[1:] for name, seconds in times.items()}


def llama_cpp(path: str, room: int) -> Callable[..., dict[str, Any]]:
  """A function that lets llama.cpp answer a request, its fields keyword arguments, one at a time in caches of `room`
  tokens; it needs `pip install xllamacpp`.

  It samples from the whole distribution, as the others do, and reads each prompt anew. It has a thread for each core,
  which wait for each other in a loop: beside other work it is many times slower.
  """
  import xllamacpp

  params = xllamacpp.CommonParams()
  params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, room, 1, 0
  params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
  params.verbosity = -1
  server = xllamacpp.Server(params)
  always = {'cache_prompt': False, 'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}

  def answer(**request) -> dict[str, Any]:
    reply = server.handle_completions(always | request)
    reply = json.loads(reply) if isinstance(reply, str) else reply
    if 'usage' not in reply:
      raise RuntimeError(f'llama.cpp: {reply}')
    return reply

  return answer


def in_own_process(function, *arguments):
  """The result of a module's function, computed in a new process."""
  with multiprocessing.get_context('spawn').Pool(1) as pool:
    return pool.apply(function, arguments)


def _fastest(call: Callable[[], object], num_runs: int) -> float:
  """Seconds of the fastest of several calls."""
  return time_in_turns({'': call}, num_runs)[''].min()


def read_rate() -> float:
  """The device's memory rate in bytes per second; the time to read the target's weights is the floor of a step.

  On a CPU it is that of the best of several passes over 1 GiB by all cores; elsewhere of a program of copies, of which
  each reads and writes its bytes.
  """
  if jax.default_backend() != 'cpu':
    array = jnp.ones(COPIED, jnp.float32)
    copied = jax.jit(lambda x: jax.lax.fori_loop(0, NUM_COPIES, lambda _, x: x + 1, x))
    return NUM_COPIES * 2 * array.nbytes / _fastest(lambda: copied(array), 5)
  num_cpus = os.cpu_count() or 1
  parts = np.split(np.ones(2**28 // num_cpus * num_cpus, np.float32), num_cpus)
  with concurrent.futures.ThreadPoolExecutor(num_cpus) as pool:
    return sum(part.nbytes for part in parts) / _fastest(lambda: list(pool.map(np.max, parts)), 10)
