"""llama.cpp on a GGUF file as it is, for `benchmarks.drafters`; it needs `pip install xllamacpp`.

It multiplies by the file's own few bits per weight, where the others compute in bfloat16 or float32. It has a thread
for each core, which wait for each other in a loop: beside other work it is many times slower.
"""

from __future__ import annotations

import json
import os

import numpy as np
import xllamacpp


def load(path: str, longest: int) -> xllamacpp.Server:
  """The model of a file, for one text at a time.

  Args:
    path: The `.gguf` file.
    longest: The most tokens of a prompt and its continuation.
  """
  params = xllamacpp.CommonParams()
  params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, longest, 1, 0
  params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
  params.verbosity = -1
  return xllamacpp.Server(params)


def answer(server: xllamacpp.Server, prompt: np.ndarray, max_new_tokens: int, temperature: float) -> int:
  """Continues a prompt and returns the number of new tokens. The file says which tokens end a text.

  Args:
    server: From `load`.
    prompt: int `[P]`, read anew each time.
    max_new_tokens: The most new tokens.
    temperature: Sampling temperature; 0 decodes greedily.
  """
  request = {'prompt': prompt.tolist(), 'max_tokens': max_new_tokens, 'temperature': temperature, 'cache_prompt': False}
  # The whole distribution, as the others sample from.
  request |= {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}
  found = server.handle_completions(request)
  found = json.loads(found) if isinstance(found, str) else found
  if 'usage' not in found:
    raise RuntimeError(f'llama.cpp: {found}')
  return found['usage']['completion_tokens']
