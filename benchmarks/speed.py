"""Speed compared with Hugging Face's transformers: autoregressive decoding, rounds with a draft, and a round's parts.

Command   pip install torch transformers
          python -m benchmarks.speed --output=speed.json
          python -m benchmarks.speed --target_config=configs/hub/llama_3_8b --head --output=sizes.json
Models    target A and draft B of benchmarks/README.md, random weights; with `--target_config` random ones of a public
          model's sizes (`benchmarks.speed_of_sizes`)
Peer      `generate` with its dynamic cache, and with a static cache and torch.compile; with a draft `assistant_model`
          and a constant number of guesses. `--nopeer` leaves it out

All implementations of the same task take turns in one process. Medians and ranges are printed. Calls include the
prompt's prefill. With a draft the unit is a round, that is one call of the target, since models with random weights
agree only by chance. Both systems use the draft in its faster type. The floor of a step is the time to read the
target's weights once, at the rate at which the device finds the maximum of 2^28 numbers; a CPU uses all cores.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import spectr_jax
from benchmarks.memory_rates import read_rate
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from spectr_jax import Decoder, TokenTree
from spectr_jax.engine.state import DecodeState
from spectr_jax.methods import Method
from spectr_jax.models.transformer import TransformerConfig, for_decoding, init_params, transformer_model

SHAPES = {
  'A': TransformerConfig(32000, 768, num_layers=10, num_heads=12, mlp_dim=3072, max_length=512),
  'B': TransformerConfig(32000, 144, num_layers=6, num_heads=4, mlp_dim=576, max_length=512),
}
PROMPT_LENGTH, NEW_TOKENS = 64, 128
DRAFT_LENGTHS = 4, 8  # of rounds with one draft
METHODS = 'spectr', 'race_block', 'race_traversal'  # whose parts are timed
Call = Callable[[], int]  # runs a task and returns its number of steps


def make_model(shape: str, dtype: str):
  """A model of one of the shapes with random weights.

  Args:
    shape: A name in `SHAPES`.
    dtype: Type of weights and activations.
  """
  config = dataclasses.replace(SHAPES[shape], dtype=dtype)
  return for_decoding(transformer_model(init_params(jax.random.key(0), config), config))


def time_steps(calls: dict[str, Call], num_runs: int) -> dict[str, dict]:
  """Milliseconds per step of each call: median, lowest and highest. The calls take turns after one untimed call each.

  Args:
    calls: Calls by name.
    num_runs: Number of timed runs of each.
  """
  found = {name: [] for name in calls}
  for call in calls.values():
    call()
  for _ in range(num_runs):
    for name, call in calls.items():
      start = time.perf_counter()
      num_steps = call()
      found[name].append(1e3 * (time.perf_counter() - start) / num_steps)
  return {
    name: {'median': float(np.median(times)), 'low': min(times), 'high': max(times)} for name, times in found.items()
  }


def prompts(batch_size: int, vocab_size: int = 32000) -> np.ndarray:
  """Random prompts, int32 `[batch_size, PROMPT_LENGTH]`.

  Args:
    batch_size: Rows.
    vocab_size: V.
  """
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


def autoregressive_calls(dtype: str, batch_size: int, has_peer: bool) -> dict[str, Call]:
  """Calls that decode autoregressively, by name.

  Args:
    dtype: Type of the target.
    batch_size: Rows.
    has_peer: Whether to include Hugging Face's transformers.
  """
  calls = {'spectr_jax': own_call((make_model('A', dtype), None), prompts(batch_size), 'autoregressive', None)}
  if has_peer:
    from benchmarks import peer

    config, rows = SHAPES['A'], prompts(batch_size)
    ways = {
      'transformers': peer.sampler(peer.make_model(config, dtype), rows, NEW_TOKENS),
      'transformers, static and compiled': peer.compiled_sampler(peer.make_model(config, dtype), rows, NEW_TOKENS),
    }
    calls |= {name: functools.partial(lambda way: way() or NEW_TOKENS, way) for name, way in ways.items()}
  return calls


def round_calls(dtype: str, draft_length: int, has_peer: bool) -> dict[str, Call]:
  """Calls that decode with a single draft, by name. Each returns its number of target calls.

  Args:
    dtype: Type of the target.
    draft_length: Tokens per draft.
    has_peer: Whether to include Hugging Face's transformers.
  """
  target, tree, calls = make_model('A', dtype), TokenTree.chains(1, draft_length), {}
  draft_dtypes = ['float32'] if dtype == 'float32' else ['float32', 'bfloat16']
  for draft_dtype in draft_dtypes:
    own = own_call((target, make_model('B', draft_dtype)), prompts(1), 'speculative', tree)
    calls[f'spectr_jax, draft {draft_dtype}'] = own
    if has_peer:
      from benchmarks import peer

      model, draft = peer.make_model(SHAPES['A'], dtype), peer.make_model(SHAPES['B'], draft_dtype)
      counter = peer.count_calls(model)
      sample = peer.assisted_sampler(model, draft, prompts(1), NEW_TOKENS, draft_length)

      def call(counter=counter, sample=sample):
        before = counter[0]
        sample()
        return counter[0] - before

      calls[f'transformers, draft {draft_dtype}'] = call
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
  """The state behind the prompts.

  Args:
    decoder: The decoder.
    rows: Prompts, int32 `[B, P]`.
  """
  return spectr_jax.init_decode(decoder, jax.random.key(0), rows, np.full(len(rows), rows.shape[1]))


def round_seconds(decoder: Decoder, rows: np.ndarray, num_runs: int, num_rounds: int | None = None) -> list[float]:
  """Seconds per round of each run, without the prompts' prefill. One untimed run comes first.

  Args:
    decoder: The decoder.
    rows: Prompts, int32 `[B, P]`.
    num_runs: Number of timed runs.
    num_rounds: The most rounds of a run; None for all.
  """

  def run():
    state = jax.block_until_ready(begin(decoder, rows))
    start = time.perf_counter()
    state = jax.block_until_ready(spectr_jax.decode_rounds(decoder, state, num_rounds))
    return (time.perf_counter() - start) / int(state.result.num_target_calls.max())

  run()
  return [run() for _ in range(num_runs)]


def parts(dtype: str, method: str, num_drafts: int, draft_length: int, num_runs: int) -> dict[str, float]:
  """Milliseconds of a round and of its parts, each of which is a separate program.

  Args:
    dtype: Type of the target.
    method: Name of the method.
    num_drafts: K.
    draft_length: L.
    num_runs: Number of timed runs.
  """
  decoder = make_decoder(
    make_model('A', dtype), make_model('B', 'float32'), method, TokenTree.chains(num_drafts, draft_length)
  )
  rows = prompts(1)
  found = latency.time_parts(decoder, begin(decoder, rows), num_runs)
  found['round'] = float(np.median(round_seconds(decoder, rows, num_runs)))
  return {name: 1e3 * seconds for name, seconds in found.items()}


def best(times: dict[str, dict], system: str) -> dict:
  """The times of a system's fastest implementation.

  Args:
    times: Times by name, from `time_steps`.
    system: The prefix of the system's names.
  """
  return min((found for name, found in times.items() if name.startswith(system)), key=lambda found: found['median'])


def describe_times(title: str, times: dict[str, dict], tokens_per_step: int | None) -> list[str]:
  """The times as lines of text.

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
    ratio = best(times, 'transformers')['median'] / best(times, 'spectr_jax')['median']
    lines.append(f'  {ratio:.2f} times as fast as the fastest of the peer')
  return lines


def describe_floor(times: dict[str, dict], num_bytes: int, rate: float) -> str:
  """A line about the floor of a step.

  Args:
    times: Times by name, from `time_steps`.
    num_bytes: Bytes of the weights.
    rate: The read rate in bytes per second.
  """
  floor = 1e3 * num_bytes / rate
  return f'  floor {floor:.2f} ms, {floor / best(times, "spectr_jax")["median"]:.0%} of our step'


def measure(dtypes: Sequence[str], batch_sizes: Sequence[int], num_runs: int, has_peer: bool) -> dict:
  """Measures everything and prints results as they arrive.

  Args:
    dtypes: Types of the target.
    batch_sizes: Rows in autoregressive decoding.
    num_runs: Number of timed runs of each call.
    has_peer: Whether to run Hugging Face's transformers as well.

  Returns:
    JSON values.
  """
  rate, results = read_rate(), {}
  print(f'read rate {rate / 1e9:.1f} GB/s')
  for dtype in dtypes:
    num_bytes = SHAPES['A'].num_params * jnp.dtype(dtype).itemsize
    for batch_size in batch_sizes:
      times = time_steps(autoregressive_calls(dtype, batch_size, has_peer), num_runs)
      results[f'autoregressive {dtype} batch {batch_size}'] = times
      title = f'\nA, {dtype}, batch {batch_size}: autoregressive, per step'
      lines = [*describe_times(title, times, batch_size), describe_floor(times, num_bytes, rate)]
      print('\n'.join(lines), flush=True)
    for draft_length in DRAFT_LENGTHS:
      times = time_steps(round_calls(dtype, draft_length, has_peer), num_runs)
      results[f'rounds {dtype} L={draft_length}'] = times
      title = f'\nA and B, target {dtype}, K=1, L={draft_length}: per round'
      print('\n'.join(describe_times(title, times, None)), flush=True)
    for method in METHODS:
      found = parts(dtype, method, 4, 4, num_runs)
      results[f'parts {dtype} {method} K=4 L=4'] = found
      share = found['verification'] / found['round']
      print(
        f'\nA and B, target {dtype}, {method}, K=4, L=4, ms: {found}\n  verification {share:.1%} of a round', flush=True
      )
  return {'read_bytes_per_second': rate, 'milliseconds': results}


if __name__ == '__main__':
  _DTYPE = flags.DEFINE_list('dtype', ['bfloat16', 'float32'], 'Types of the target.')
  _BATCH_SIZE = flags.DEFINE_list('batch_size', ['1', '8'], 'Rows in autoregressive decoding.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 5, 'Runs of each, in turns.', lower_bound=1)
  _PEER = flags.DEFINE_bool('peer', True, "Whether to run Hugging Face's transformers as well.")
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')
  _TARGET = flags.DEFINE_string(
    'target_config',
    None,
    'Folder with config.json: sizes of the target in place of A and B. The first of --dtype counts; rounds have as many'
    ' rows as steps, and --output, which is needed, may hold results of an earlier run that was ended.',
  )
  _DRAFT = flags.DEFINE_string(
    'draft_config', 'configs/hub/draft_160m_of_llama_3', 'Folder with config.json: sizes of the draft, likewise.'
  )
  _HEAD = flags.DEFINE_bool('head', False, "Whether a head of EAGLE-3's sizes drafts as well, likewise.")
  _SHAPES = flags.DEFINE_list('shapes', ['1x4', '4x8', '4x16'], 'Rounds of K drafts of L tokens, KxL, likewise.')
  _PEER_DEVICE = flags.DEFINE_enum('peer_device', 'cuda', ['cuda', 'cpu'], 'Where transformers run, likewise.')

  def main(argv):
    del argv
    batch_sizes = command_line.parse_numbers('batch_size', _BATCH_SIZE.value)
    if _TARGET.value is not None:
      from benchmarks import speed_of_sizes

      if _OUTPUT.value is None:
        raise ValueError('--target_config needs --output')
      sizes = speed_of_sizes.Sizes(
        _TARGET.value, _DRAFT.value, _HEAD.value, _DTYPE.value[0], tuple(batch_sizes),
        speed_of_sizes.parse_shapes(_SHAPES.value), _NUM_RUNS.value,
        _PEER_DEVICE.value if _PEER.value else None,
      )  # fmt: skip
      speed_of_sizes.run(sizes, _OUTPUT.value)
      return
    with OutputFiles(output=_OUTPUT.value) as files:
      found = measure(_DTYPE.value, batch_sizes, _NUM_RUNS.value, _PEER.value)
      found = {'run': describe_machine()} | found
      files.write(output=json.dumps(found, indent=2) + '\n')

  command_line.run(main)
