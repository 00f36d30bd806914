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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import timing
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import latency
from decode.experiment.workload import describe_machine
from spectr_jax import TokenTree
from spectr_jax.models.transformer import TransformerConfig, init_params, transformer_model

SHAPES = {
  'A': TransformerConfig(32000, 768, num_layers=10, num_heads=12, mlp_dim=3072, max_length=512),
  'B': TransformerConfig(32000, 144, num_layers=6, num_heads=4, mlp_dim=576, max_length=512),
}
DRAFT_LENGTHS = 4, 8  # of rounds with one draft
METHODS = 'spectr', 'race_block', 'race_traversal'  # whose parts are timed


def make_model(shape: str, dtype: str):
  """A model of one of the shapes with random weights.

  Args:
    shape: A name in `SHAPES`.
    dtype: Type of weights and activations.
  """
  config = dataclasses.replace(SHAPES[shape], dtype=dtype)
  return transformer_model(init_params(jax.random.key(0), config), config).for_decoding()


def _make_peer(dtype: str):
  from benchmarks import peer

  return peer.make_model(SHAPES['A'], dtype)


def round_calls(dtype: str, draft_length: int, has_peer: bool) -> dict[str, timing.Call]:
  """Calls that decode with a single draft, by name. Each returns its number of target calls.

  Args:
    dtype: Type of the target.
    draft_length: Tokens per draft.
    has_peer: Whether to include Hugging Face's transformers.
  """
  target, tree, calls = make_model('A', dtype), TokenTree.chains(1, draft_length), {}
  draft_dtypes = ['float32'] if dtype == 'float32' else ['float32', 'bfloat16']
  for draft_dtype in draft_dtypes:
    models = target, make_model('B', draft_dtype)
    calls[f'spectr_jax, draft {draft_dtype}'] = timing.own_call(models, timing.prompts(1), 'speculative', tree)
    if has_peer:
      from benchmarks import peer

      model, draft = peer.make_model(SHAPES['A'], dtype), peer.make_model(SHAPES['B'], draft_dtype)
      sample = peer.assisted_sampler(model, draft, timing.prompts(1), timing.NEW_TOKENS, draft_length)
      calls[f'transformers, draft {draft_dtype}'] = peer.counted(model, sample)
  return calls


def parts(dtype: str, method: str, num_drafts: int, draft_length: int, num_runs: int) -> dict[str, float]:
  """Milliseconds of a round and of its parts, each of which is a separate program.

  Args:
    dtype: Type of the target.
    method: Name of the method.
    num_drafts: K.
    draft_length: L.
    num_runs: Number of timed runs.
  """
  tree = TokenTree.chains(num_drafts, draft_length)
  decoder = timing.make_decoder(make_model('A', dtype), make_model('B', 'float32'), method, tree)
  rows = timing.prompts(1)
  found = latency.time_parts(decoder, timing.begin(decoder, rows), num_runs)
  found['round'] = float(np.median(timing.round_seconds(decoder, rows, num_runs)))
  return {name: 1e3 * seconds for name, seconds in found.items()}


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
  rate, results = timing.read_rate(), {}
  print(f'read rate {rate / 1e9:.1f} GB/s')
  for dtype in dtypes:
    num_bytes = SHAPES['A'].num_params * jnp.dtype(dtype).itemsize
    for batch_size in batch_sizes:
      make_peer = functools.partial(_make_peer, dtype) if has_peer else None
      calls = timing.step_calls(make_model('A', dtype), make_peer, timing.prompts(batch_size), timing.NEW_TOKENS)
      times = timing.measure_steps(f'A, {dtype}', calls, num_runs, batch_size, num_bytes, rate)
      results[f'autoregressive {dtype} batch {batch_size}'] = times
    for draft_length in DRAFT_LENGTHS:
      times = timing.time_steps(round_calls(dtype, draft_length, has_peer), num_runs)
      results[f'rounds {dtype} L={draft_length}'] = times
      timing.print_times(f'\nA and B, target {dtype}, K=1, L={draft_length}: per round', times)
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
  _HEAD = flags.DEFINE_bool('head', False, "Whether heads of EAGLE-3's and DSpark's sizes draft as well, likewise.")
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
        target=_TARGET.value,
        draft=_DRAFT.value,
        has_head=_HEAD.value,
        dtype=_DTYPE.value[0],
        batch_sizes=tuple(batch_sizes),
        shapes=speed_of_sizes.parse_shapes(_SHAPES.value),
        num_runs=_NUM_RUNS.value,
        peer_device=_PEER_DEVICE.value if _PEER.value else None,
      )
      speed_of_sizes.run(sizes, _OUTPUT.value)
      return
    with OutputFiles(output=_OUTPUT.value) as files:
      found = measure(_DTYPE.value, batch_sizes, _NUM_RUNS.value, _PEER.value)
      found = {'run': describe_machine()} | found
      files.write(output=json.dumps(found, indent=2) + '\n')

  command_line.run(main)
