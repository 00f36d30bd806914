"""What benchmarks of speed share: calls that take turns, rounds of the loop, a device's memory rates, and words."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import spectr_jax
from spectr_jax import Decoder, TokenTree
from spectr_jax.auto.timing import time_in_turns
from spectr_jax.engine.state import DecodeState
from spectr_jax.methods import Method

PROMPT_LENGTH, NEW_TOKENS = 64, 128
COPIED, NUM_COPIES = 2**28, 16  # numbers of a copy, and copies in one program
Call = Callable[[], int]  # runs a task and returns its number of steps


def spread(seconds: Sequence[float] | np.ndarray, unit: float = 1e-3) -> dict[str, float]:
  """Median, lowest and highest of times, in milliseconds or another unit, given in seconds."""
  times = np.asarray(seconds) / unit
  return {'median': float(np.median(times)), 'low': float(times.min()), 'high': float(times.max())}


def time_steps(calls: dict[str, Call], num_runs: int) -> dict[str, dict]:
  """The `spread` per step of each call. The calls take turns after one untimed call each.

  Args:
    calls: Calls by name.
    num_runs: Number of timed runs of each.
  """
  steps: dict[str, list[int]] = {name: [] for name in calls}
  counted = {name: lambda name=name, call=call: steps[name].append(call()) for name, call in calls.items()}
  times = time_in_turns(counted, num_runs)
  return {name: spread(times[name] / steps[name][1:]) for name in calls}


def prompts(batch_size: int, vocab_size: int = 32000) -> np.ndarray:
  """Random prompts, int32 `[batch_size, PROMPT_LENGTH]`, of ids below `vocab_size`."""
  return np.random.default_rng(0).integers(0, vocab_size, (batch_size, PROMPT_LENGTH)).astype(np.int32)


def own_call(models, rows: np.ndarray, method: str, tree: TokenTree | None, max_new_tokens: int | None = None) -> Call:
  """A call of this library's `generate`, which returns its number of rounds.

  Args:
    models: Target and draft.
    rows: Prompts, int32 `[B, P]`.
    method: Name of the method.
    tree: The tree of guesses, or None.
    max_new_tokens: New tokens of each row, or None for `NEW_TOKENS`.
  """

  def call():
    result = spectr_jax.generate(
      jax.random.key(0),
      *models,
      rows,
      np.full(len(rows), rows.shape[1]),
      method=method,
      tree=tree,
      max_new_tokens=max_new_tokens or NEW_TOKENS,
    )
    return int(result.num_target_calls.max())

  return call


def step_calls(target, make_peer: Callable | None, rows: np.ndarray, max_new_tokens: int) -> dict[str, Call]:
  """Calls that decode autoregressively, by name.

  Args:
    target: The model.
    make_peer: Makes the same model in Hugging Face's transformers, or None to leave them out.
    rows: Prompts, int32 `[B, P]`.
    max_new_tokens: New tokens of each row.
  """
  calls = {'spectr_jax': own_call((target, None), rows, 'autoregressive', None, max_new_tokens)}
  if make_peer is not None:
    from benchmarks import peer

    ways = {
      'transformers': peer.sampler(make_peer(), rows, max_new_tokens),
      'transformers, static and compiled': peer.compiled_sampler(make_peer(), rows, max_new_tokens),
    }
    calls |= {name: functools.partial(lambda way: way() or max_new_tokens, way) for name, way in ways.items()}
  return calls


def make_decoder(target, draft, method: str | Method, tree: TokenTree | None) -> Decoder:
  """A decoder of `NEW_TOKENS` tokens behind prompts of `PROMPT_LENGTH`.

  Args:
    target: The target.
    draft: A model or drafter, or None.
    method: A method or its name.
    tree: The tree of guesses, or None.
  """
  return Decoder.make(
    target, draft, method=method, tree=tree, max_new_tokens=NEW_TOKENS, cache_size=PROMPT_LENGTH + NEW_TOKENS
  )


def begin(decoder: Decoder, rows: np.ndarray) -> DecodeState:
  """The state behind prompts, int32 `[B, P]`."""
  return spectr_jax.init_decode(decoder, jax.random.key(0), rows, np.full(len(rows), rows.shape[1]))


def seconds_per_round(decoder: Decoder, state: DecodeState, num_rounds: int | None) -> float:
  """Seconds per round of one run of the loop from a state, which is donated; of at most so many rounds, or of all."""
  state = jax.block_until_ready(state)
  start = time.perf_counter()
  state = jax.block_until_ready(spectr_jax.decode_rounds(decoder, state, num_rounds))
  return (time.perf_counter() - start) / int(state.result.num_target_calls.max())


def round_seconds(decoder: Decoder, rows: np.ndarray, num_runs: int, num_rounds: int | None = None) -> list[float]:
  """Seconds per round of each run, without the prompts' prefill. One untimed run comes first.

  Args:
    decoder: The decoder.
    rows: Prompts, int32 `[B, P]`.
    num_runs: Number of timed runs.
    num_rounds: The most rounds of a run; None for all.
  """

  runs = [seconds_per_round(decoder, begin(decoder, rows), num_rounds) for _ in range(num_runs + 1)]
  return runs[1:]


def in_own_process(function, *arguments):
  """The result of a module's function, computed in a new process."""
  with multiprocessing.get_context('spawn').Pool(1) as pool:
    return pool.apply(function, arguments)


# The floor of a step is the time to read the target's weights.


def _fastest(call: Callable[[], object], num_runs: int) -> float:
  """Seconds of the fastest of several calls, whose arrays are waited for."""
  return time_in_turns({'': call}, num_runs)[''].min()


def read_rate() -> float:
  """The device's read rate in bytes per second, the best of several passes over 1 GiB."""
  if jax.default_backend() != 'cpu':
    array, largest = jnp.ones(2**28, jnp.float32), jax.jit(jnp.max)
    return array.nbytes / _fastest(lambda: largest(array), 10)
  num_cpus = os.cpu_count() or 1
  parts = np.split(np.ones(2**28 // num_cpus * num_cpus, np.float32), num_cpus)
  with concurrent.futures.ThreadPoolExecutor(num_cpus) as pool:
    return sum(part.nbytes for part in parts) / _fastest(lambda: list(pool.map(np.max, parts)), 10)


def copy_rate() -> float:
  """Bytes per second that copies of 1 GiB read and write, one after another in one program; the best of five runs."""
  array = jnp.ones(COPIED, jnp.float32)
  copied = jax.jit(lambda x: jax.lax.fori_loop(0, NUM_COPIES, lambda _, x: x + 1, x))
  return NUM_COPIES * 2 * array.nbytes / _fastest(lambda: copied(array), 5)


# In words.


def _best(times: dict[str, dict], system: str) -> float:
  """The median of a system's fastest implementation, in milliseconds."""
  return min(found['median'] for name, found in times.items() if name.startswith(system))


def in_words(found: dict[str, float]) -> str:
  """A `spread` as text."""
  return f'{found["median"]:.2f} ms ({found["low"]:.2f} to {found["high"]:.2f})'


def print_times(title: str, times: dict[str, dict], tokens_per_step: int | None = None) -> None:
  """Prints times, and how much faster this library is than the peer if that ran.

  Args:
    title: The first line.
    times: Times by name, from `time_steps`.
    tokens_per_step: New tokens of a step over all rows; None to omit tokens per second.
  """
  lines = [title]
  for name, found in times.items():
    speed = f', {1e3 * tokens_per_step / found["median"]:.1f} tokens/s' if tokens_per_step else ''
    lines.append(f'  {name:<34} {found["median"]:7.2f} ms ({found["low"]:.2f} to {found["high"]:.2f}){speed}')
  if any(name.startswith('transformers') for name in times):
    ratio = _best(times, 'transformers') / _best(times, 'spectr_jax')
    lines.append(f'  {ratio:.2f} times as fast as the fastest of the peer')
  print('\n'.join(lines), flush=True)


def measure_steps(title: str, calls: dict[str, Call], num_runs: int, num_rows: int, num_bytes: int, rate: float):
  """Times of autoregressive decoding by name, from `time_steps`; they are printed, with the floor of a step.

  Args:
    title: Models and types, for the first line.
    calls: From `step_calls`.
    num_runs: Number of timed runs of each.
    num_rows: Rows.
    num_bytes: Bytes of the weights.
    rate: The read rate in bytes per second.
  """
  times = time_steps(calls, num_runs)
  print_times(f'\n{title}, batch {num_rows}: autoregressive, per step', times, num_rows)
  floor = 1e3 * num_bytes / rate
  print(f'  floor {floor:.2f} ms, {floor / _best(times, "spectr_jax"):.0%} of our step', flush=True)
  return times
