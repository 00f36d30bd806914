"""Drafters on a public model, beside Hugging Face's transformers with prompt lookup, batch by batch.

Command   python -m benchmarks.drafters --target=MODEL.gguf --drafters=lookup,pretrained/smollm2_head \
            --prompts=spec_bench:question.jsonl --chat --method=speculative,race_traversal --output=drafters.json
          Every flag of `decode.main` counts, but --draft: --drafters names several
Model     a `.gguf` file, dequantized by both
Prompts   --num_prompts of the file, equally many of each task, --batch_size at a time; our caches hold the longest
Peer      `generate` with its dynamic cache, plain and, for one prompt at a time, with `prompt_lookup_num_tokens`, on
          --peer_device. --nopeer leaves it out; --llama_cpp runs llama.cpp as well, one prompt at a time

All settings and the peer take turns on each batch, after one run on the first that is not counted. Seconds include the
prefill. A continuation may end early, and two ways may end at different places; tokens per second are new tokens over
seconds, and calls are counted row by row.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from benchmarks import command, timing
from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.model_options import DEFAULT_METHODS, split_draft
from decode.experiment.options import DecodeOptions, fitting
from decode.experiment.prompts import take_evenly
from decode.experiment.settings import Setting, settings_of
from decode.experiment.workload import Workload
from spectr_jax.methods import why_not
from spectr_jax.sharding import fetch

# Decodes the prompts of a batch, int `[B]`, and returns their new tokens and the target's calls for all of them.
Way = Callable[[np.ndarray], tuple[int, int]]
_PEER = 'transformers'


def _decode(workload: Workload, setting: Setting, batch: np.ndarray) -> tuple[int, int]:
  result = fetch(workload.generate(setting, workload.keys(workload.seeds[0]), batch))
  return int(result.lengths.sum()), int(result.num_target_calls.sum())


def fitting_settings(options: DecodeOptions) -> list[Setting]:
  """The settings of the options that take the draft's guesses."""
  every = (each for method in options.methods.make() for each in settings_of(method, options.methods))
  return [each for each in every if not why_not(each.method, each.tree, each.guesses(options.models.guesses))]


def own_ways(workloads: Mapping[str, Workload]) -> dict[str, Way]:
  """By name every setting with every drafter whose guesses its method takes; autoregressive decoding once, first."""
  ways: dict[str, Way] = {}
  for drafter, workload in workloads.items():
    for setting in fitting_settings(workload.options):
      name = f'{drafter}: {setting}' if setting.tree.num_nodes else str(setting)
      ways.setdefault(name, functools.partial(_decode, workload, setting))
  return ways


def peer_ways(workload: Workload, lookup_lengths: Sequence[int], device: str) -> dict[str, Way]:
  """The peer's decoding on a device, plain and, for single rows, with prompt lookup of so many tokens."""
  from benchmarks import peer

  models = workload.options.models
  # Its weights are of the type that ours compute in.
  model = peer.load_gguf(models.target, models.dtype or 'float32', device)
  limits = workload.max_new_tokens, workload.eos_ids, workload.sampling.temperature
  counter = peer.count_calls(model)

  def decode(request, batch):
    before, rows = counter[0], [workload.tokens[number, : workload.lengths[number]] for number in batch]
    made = peer.answer(model, rows, *limits, **request)
    num_tokens = sum(map(len, made))
    # A row takes part in a call for each of its tokens, or, where it is alone, in all calls.
    return num_tokens, counter[0] - before if len(rows) == 1 else num_tokens

  requests = {_PEER: {}}
  if workload.batch_size == 1:
    requests |= {f'{_PEER}, prompt lookup {length}': {'prompt_lookup_num_tokens': length} for length in lookup_lengths}
  return {name: functools.partial(decode, request) for name, request in requests.items()}


def llama_cpp_ways(workload: Workload) -> dict[str, Way]:
  """llama.cpp's decoding without a draft, one row at a time.

  It multiplies by the file's own few bits per weight, where the others compute in bfloat16 or float32. The file says
  which tokens end a text.
  """
  ask = timing.llama_cpp(workload.options.models.target, workload.cache_size)
  request = {'max_tokens': workload.max_new_tokens, 'temperature': workload.sampling.temperature}

  def decode(batch):
    rows = [workload.tokens[number, : workload.lengths[number]].tolist() for number in batch]
    tokens = sum(ask(prompt=row, **request)['usage']['completion_tokens'] for row in rows)
    return tokens, tokens

  return {'llama.cpp': decode}


def measure(ways: Mapping[str, Way], batches: Sequence[np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
  """`tokens`, `calls` and `seconds` of every way, an entry for each batch, int `[B]`. The ways take turns."""
  measured = {name: {'tokens': [], 'calls': [], 'seconds': []} for name in ways}
  for way in ways.values():  # compiles
    way(batches[0])
  for number, batch in enumerate(batches):
    for name, way in ways.items():
      start = time.perf_counter()
      tokens, calls = way(batch)
      for column, value in {'tokens': tokens, 'calls': calls, 'seconds': time.perf_counter() - start}.items():
        measured[name][column].append(value)
    speeds = ', '.join(f'{sum(each["tokens"]) / sum(each["seconds"]):.1f}' for each in measured.values())
    print(f'batch {number + 1} of {len(batches)}, tokens/s so far: {speeds}', flush=True)
  return {name: {column: np.array(values) for column, values in each.items()} for name, each in measured.items()}


def describe(measured: Mapping[str, Mapping[str, np.ndarray]]) -> list[str]:
  """A line for each way of `measure`: tokens per call, tokens per second, and both relative to the first way."""
  first = next(iter(measured.values()))
  width = max(map(len, measured))
  lines = [f'{"":{width}}  tokens per call   tokens/s  relative to the first, 95% interval over batches']
  for name, each in measured.items():
    pairs = [(numbers['tokens'], numbers['seconds']) for numbers in (each, first)]
    kept, factor = metrics.ratio_text(each['tokens'], each['calls']), metrics.comparison_text(*pairs, digits=2)
    lines.append(f'{name:{width}}  {kept:>12}  {metrics.ratio(*pairs[0]):11.1f}  {factor}')
  return lines


def options_of(values: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, DecodeOptions]:
  """Options by drafter, from fields of `DecodeOptions`; each has the methods, trees and options that are for it.

  Raises:
    ValueError: As for `DecodeOptions`.
  """
  options = {}
  for name in drafters:
    methods, trees = fitting(name, values.get('method', DEFAULT_METHODS), values.get('tree', ('chains',)))
    own = dict(values) | {'draft': name, 'method': methods, 'tree': trees}
    if not split_draft(name)[0]:
      own = {field: value for field, value in own.items() if not field.startswith('lookup_')}
    options[name] = DecodeOptions.of(**own)
  return options


def load(values: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Workload]:
  """A workload by drafter, on the same prompts, see `options_of`."""
  pick = functools.partial(take_evenly, group=lambda prompt: prompt.task or '')
  return {name: Workload.load(options, pick=pick) for name, options in options_of(values, drafters).items()}


if __name__ == '__main__':
  from decode.experiment.option_flags import read_values

  _DRAFTERS = flags.DEFINE_list('drafters', ['lookup'], 'Drafters, each as for --draft of decode.main.')
  _PEER_FLAG = flags.DEFINE_bool('peer', True, "Whether to run Hugging Face's transformers as well.")
  _PEER_LOOKUP = command.define_numbers('peer_lookup', '3,10', 'Tokens that the prompt lookup of the peer guesses.')
  _LLAMA_CPP = flags.DEFINE_bool('llama_cpp', False, 'Whether to run llama.cpp as well.')
  _PEER_DEVICE = flags.DEFINE_enum('peer_device', 'cpu', ['cuda', 'cpu'], 'Where transformers run.')
  _OUTPUT = command.define_output()

  def main():
    with OutputFiles(output=_OUTPUT.value) as files:
      workloads = load(read_values(), _DRAFTERS.value)
      ways, one = own_ways(workloads), next(iter(workloads.values()))
      if _PEER_FLAG.value:
        ways |= peer_ways(one, _PEER_LOOKUP(), _PEER_DEVICE.value)
      if _LLAMA_CPP.value:
        ways |= llama_cpp_ways(one)
      measured = measure(ways, one.batches)
      plain = {name: {column: values.tolist() for column, values in each.items()} for name, each in measured.items()}
      content = {'run': one.info, 'drafters': _DRAFTERS.value, 'prompts': [prompt.id for prompt in one.prompts]}
      text = json.dumps(content | {'ways': plain}, indent=2) + '\n'
      files.write_after(lambda: print('\n'.join(describe(measured))), output=text)

  command_line.run(main)
