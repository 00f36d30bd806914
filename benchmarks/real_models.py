"""Speed and memory of a public model beside Hugging Face's transformers on the same file.

Command   pip install torch transformers gguf
          python -m benchmarks.real_models --target=MODEL.gguf --output=real_models.json
Model     a `.gguf` file, dequantized by both
Prompts   `--text`, repeated as needed
Peer      `generate` with its dynamic cache, and with a static cache and torch.compile, on
          --peer_device. `--nopeer` leaves it out

Three parts, of which `--part` chooses some. `prompt`: time and peak memory of the prefill of one long prompt, in a
process of its own. `steps`: autoregressive decoding, as in `benchmarks.speed`. `trees`: the target's call on a chain of
tokens relative to its call on one, with a cache of 512.
"""

from __future__ import annotations

import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import spectr_jax
from benchmarks import timing
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.workload import describe_machine
from spectr_jax import TokenTree
from spectr_jax.auto.timing import forward_calls, time_in_turns
from spectr_jax.models.causal_lm import config_of

PARTS = ('prompt', 'steps', 'trees')
DTYPES = ('float32', 'bfloat16')
TREE_SIZES = (1, 2, 5, 9, 17, 33, 65)
TREE_CACHE = 512


def load(path: str, dtype: str):
  """The model in the form that decodes fastest, and its tokenizer.

  Args:
    path: The `.gguf` file.
    dtype: The type to compute in.
  """
  model, tokenizer = spectr_jax.load_model(path, dtype=dtype)
  return model.for_decoding(), tokenizer


def prompts(tokenizer, text: str, batch_size: int, length: int) -> np.ndarray:
  """Tokens of a text, int32 `[batch_size, length]`, repeated as needed.

  Args:
    tokenizer: The model's tokenizer.
    text: The text.
    batch_size: Rows.
    length: Tokens of a row.
  """
  return np.resize(np.array(tokenizer.encode(text), np.int32), (batch_size, length))


def measure_prompt(path: str, dtype: str, text: str, length: int) -> dict[str, float]:
  """Seconds of the prefill of one prompt, without compilation, and the peak memory of the process.

  Args:
    path: The `.gguf` file.
    dtype: The type to compute in.
    text: The text of the prompt.
    length: Tokens of the prompt.

  Returns:
    `seconds`, and `bytes` of the process at its peak, loading and compilation included.
  """
  model, tokenizer = load(path, dtype)
  tokens = prompts(tokenizer, text, 1, length)

  @jax.jit
  def prefill(model, tokens):
    return model.prefill(tokens, jnp.array([length]), model.init_cache_fn(1, length))

  compiled = prefill.lower(model, tokens).compile()
  start = time.perf_counter()
  jax.block_until_ready(compiled(model, tokens))
  seconds = time.perf_counter() - start
  unit = 1 if sys.platform == 'darwin' else 1024
  return {'seconds': seconds, 'bytes': unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def _make_peer(path: str, dtype: str, device: str):
  from benchmarks import peer

  return peer.load_gguf(path, dtype, device)


def measure_trees(path: str, dtype: str, num_runs: int) -> dict[int, dict[str, float]]:
  """Milliseconds of the model's call by its number of tokens: median and lowest.

  Args:
    path: The `.gguf` file.
    dtype: The type to compute in.
    num_runs: Timed runs of each.
  """
  model, _ = load(path, dtype)
  shapes = {size: (TokenTree.chains(1, size - 1) if size > 1 else TokenTree(), 1) for size in TREE_SIZES}
  times = time_in_turns(forward_calls(model, shapes, cache_size=TREE_CACHE), num_runs)
  return {
    size: {'median': 1e3 * float(np.median(found)), 'low': 1e3 * float(found.min())} for size, found in times.items()
  }


def measure(
  path: str,
  *,
  text: str,
  parts: Sequence[str] = PARTS,
  dtypes: Sequence[str] = DTYPES,
  batch_sizes: Sequence[int] = (1, 8),
  max_new_tokens: int = timing.NEW_TOKENS,
  prompt_length: int = 8192,
  num_runs: int = 5,
  peer_device: str | None = 'cpu',
) -> dict:
  """Measures everything and prints results as they arrive.

  Args:
    path: The `.gguf` file.
    text: The text of the prompts.
    parts: Names in `PARTS`.
    dtypes: Types to compute in.
    batch_sizes: Rows in autoregressive decoding.
    max_new_tokens: New tokens of each row there.
    prompt_length: Tokens of the long prompt.
    num_runs: Timed runs of each step and call.
    peer_device: Where Hugging Face's transformers run, `cuda` or `cpu`; None to leave them out.

  Returns:
    JSON values.
  """
  results = {}
  # First, because a new process counts as its own the peak of the one that starts it.
  for dtype in dtypes if 'prompt' in parts else ():
    found = results[f'prompt {dtype}'] = timing.in_own_process(measure_prompt, path, dtype, text, prompt_length)
    print(
      f'{dtype}, prompt of {prompt_length} tokens: prefill {found["seconds"]:.1f} s,'
      f' {prompt_length / found["seconds"]:.0f} tokens/s; at most {found["bytes"] / 2**30:.2f} GiB',
      flush=True,
    )
  if 'steps' in parts:
    rate = results['read_bytes_per_second'] = timing.read_rate()
    print(f'read rate {rate / 1e9:.1f} GB/s')
    for dtype in dtypes:
      model, tokenizer = load(path, dtype)
      num_bytes = config_of(model).num_params * jnp.dtype(dtype).itemsize
      make_peer = functools.partial(_make_peer, path, dtype, peer_device) if peer_device else None
      for batch_size in batch_sizes:
        rows = prompts(tokenizer, text, batch_size, timing.PROMPT_LENGTH)
        calls = timing.step_calls(model, make_peer, rows, max_new_tokens)
        times = timing.measure_steps(dtype, calls, num_runs, batch_size, num_bytes, rate)
        results[f'steps {dtype} batch {batch_size}'] = times
  for dtype in dtypes if 'trees' in parts else ():
    found = results[f'trees {dtype}'] = measure_trees(path, dtype, num_runs)
    one = found[TREE_SIZES[0]]['low']
    print(f'\n{dtype}, cache of {TREE_CACHE}: the fastest call, and its time relative to one token')
    for size, times in found.items():
      print(f'  {size:3d} tokens {times["low"]:7.2f} ms {times["low"] / one:6.2f}', flush=True)
  return results


if __name__ == '__main__':
  _TARGET = flags.DEFINE_string('target', None, 'The model: a .gguf file.', required=True)
  _TEXT = flags.DEFINE_string('text', 'README.md', 'Text file that prompts are cut from.')
  _PART = flags.DEFINE_multi_enum('part', list(PARTS), PARTS, 'Parts to run; may be repeated.')
  _DTYPE = flags.DEFINE_multi_enum('dtype', list(DTYPES), DTYPES, 'Types to compute in; may be repeated.')
  _BATCH_SIZE = flags.DEFINE_list('batch_size', ['1', '8'], 'Rows in autoregressive decoding.')
  _MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', timing.NEW_TOKENS, 'New tokens of each row.', lower_bound=1)
  _PROMPT_LENGTH = flags.DEFINE_integer('prompt_length', 8192, 'Tokens of the long prompt.', lower_bound=1)
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 5, 'Runs of each, in turns.', lower_bound=1)
  _PEER = flags.DEFINE_bool('peer', True, "Whether to run Hugging Face's transformers as well.")
  _PEER_DEVICE = flags.DEFINE_enum('peer_device', 'cpu', ['cuda', 'cpu'], 'Where transformers run.')
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')

  def main(argv):
    del argv
    inputs = {'target': [_TARGET.value], 'text': [_TEXT.value]}
    with OutputFiles(output=_OUTPUT.value).apart_from(inputs) as files:
      found = measure(
        _TARGET.value,
        text=pathlib.Path(_TEXT.value).read_text(encoding='utf-8'),
        parts=_PART.value,
        dtypes=_DTYPE.value,
        batch_sizes=command_line.parse_numbers('batch_size', _BATCH_SIZE.value),
        max_new_tokens=_MAX_NEW_TOKENS.value,
        prompt_length=_PROMPT_LENGTH.value,
        num_runs=_NUM_RUNS.value,
        peer_device=_PEER_DEVICE.value if _PEER.value else None,
      )
      files.write(output=json.dumps({'run': describe_machine()} | found, indent=2) + '\n')

  command_line.run(main)
