"""A model's call on a few tokens on a CPU, with the products in C++ and with those of XLA, in turns in one process.

Command   python -m benchmarks.native_products --model=SmolLM2-135M-Instruct.Q4_1.gguf --dtype=bfloat16 \
            --output=native.json
Model     whatever `decode.main --target` takes
Calls     one row, a chain of N tokens, a cache of 256

A ratio is that of the medians of a form on N tokens and on one.
"""

from __future__ import annotations

import json

import numpy as np
from absl import flags

import spectr_jax
from common import command_line
from common.output_files import OutputFiles
from decode.experiment.workload import describe_machine
from spectr_jax import TokenTree
from spectr_jax.auto.timing import forward_calls, time_in_turns
from spectr_jax.kernels import native

SIZES = 1, 2, 3, 5, 9, 17, 33, 128
_CACHE = 256


def measure(path: str, dtype: str | None, weights: str | None, num_runs: int) -> dict[str, dict[int, dict[str, float]]]:
  """Milliseconds of the calls by form and number of tokens: median, lowest and highest.

  Args:
    path: The model.
    dtype: The type to compute in, or None for the model's own.
    weights: `int8`, or None for those of the file.
    num_runs: Timed runs of each.

  Raises:
    ValueError: There are no products in C++; the message says why.
  """
  form = native.form()
  if form is None:
    raise ValueError(f'there are no products in C++ to compare with: {native.why_not()}')
  model, _ = spectr_jax.load_model(path, dtype=dtype, weights=weights)
  with native.disabled():
    models = {'XLA': model.for_decoding()}
  models[form] = model.for_decoding()
  shapes = {size: (TokenTree.chains(1, size - 1) if size > 1 else TokenTree(), 1) for size in SIZES}
  calls = {
    (name, size): call
    for name, each in models.items()
    for size, call in forward_calls(each, shapes, cache_size=_CACHE).items()
  }
  times = time_in_turns(calls, num_runs)
  return {
    name: {
      size: dict(zip(('median', 'low', 'high'), (float(1e3 * f(times[name, size])) for f in (np.median, min, max))))
      for size in SIZES
    }
    for name in models
  }


if __name__ == '__main__':
  _MODEL = flags.DEFINE_string('model', None, 'The model.', required=True)
  _DTYPE = flags.DEFINE_enum('dtype', None, ['float32', 'bfloat16'], 'The type to compute in.')
  _WEIGHTS = flags.DEFINE_enum('weights', None, ['int8'], 'How weights are held.')
  _NUM_RUNS = flags.DEFINE_integer('num_runs', 15, 'Timed runs of each.', lower_bound=1)
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file.')

  def main(_):
    with OutputFiles(output=_OUTPUT.value).apart_from({'model': [_MODEL.value]}) as files:
      results = measure(_MODEL.value, _DTYPE.value, _WEIGHTS.value, _NUM_RUNS.value)
      for name, found in results.items():
        for size, times in found.items():
          spread = f'{times["median"]:.1f} ms ({times["low"]:.1f} to {times["high"]:.1f})'
          print(f'{name}, {size} tokens: {spread}, {times["median"] / found[1]["median"]:.2f} times one')
      files.write(output=json.dumps(describe_machine() | {'milliseconds': results}, indent=2) + '\n')

  command_line.run(main)
