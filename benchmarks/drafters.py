"""Drafters on a public model, beside Hugging Face's transformers with prompt lookup, prompt by prompt.

Command   python -m benchmarks.drafters --target=MODEL.gguf --drafters=lookup,pretrained/smollm2_head \
            --prompts=spec_bench:question.jsonl --chat --method=speculative,race_traversal --output=drafters.json
          Every flag of `decode.main` counts, but --draft: --drafters names several
Model     a `.gguf` file, dequantised by both
Prompts   --num_prompts of the file, equally many of each task, one at a time; our caches hold the longest of them
Peer      `generate` with its dynamic cache, plain and with `prompt_lookup_num_tokens`. --nopeer leaves it out

All settings and the peer take turns on each prompt, after one run on the first that is not counted. Seconds include the
prefill. A continuation may end early, and two ways may end at different places; tokens per second are new tokens over
seconds.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from common import command_line
from common.output_files import OutputFiles
from decode.experiment import metrics
from decode.experiment.options import DecodeOptions, fitting, split_draft
from decode.experiment.prompts import take_evenly
from decode.experiment.settings import Setting, settings_of
from decode.experiment.workload import Workload
from spectr_jax.sharding import fetch

# Decodes prompt number i of the run and returns the new tokens and the target's calls.
Way = Callable[[int], tuple[int, int]]
_PEER = 'transformers'


def _decode(workload: Workload, setting: Setting, number: int) -> tuple[int, int]:
  found = fetch(workload.generate(setting, workload.keys(workload.options.seed), np.array([number])))
  return int(found.lengths[0]), int(found.num_target_calls[0])


def own_ways(workloads: Mapping[str, Workload]) -> dict[str, Way]:
  """Every setting with every drafter whose guesses its method takes, and autoregressive decoding once, first.

  Args:
    workloads: A workload by drafter.
  """
  ways: dict[str, Way] = {}
  for drafter, workload in workloads.items():
    options = workload.options
    for method in options.methods:
      for setting in settings_of(method, options, skip_unfit=True):
        name = f'{drafter}: {setting}' if setting.tree.num_nodes else str(setting)
        ways.setdefault(name, functools.partial(_decode, workload, setting))
  return ways


def peer_ways(workload: Workload, lookup_lengths: Sequence[int]) -> dict[str, Way]:
  """The peer's decoding, plain and with prompt lookup.

  Args:
    workload: The prompts, and the options of sampling.
    lookup_lengths: Tokens that its prompt lookup guesses.
  """
  from benchmarks import peer

  options = workload.options
  # Its weights are of the type that ours compute in.
  model = peer.load_gguf(options.target, options.dtype or 'float32')
  counter = peer.count_calls(model)

  def decode(request, number):
    before, prompt = counter[0], workload.tokens[number, : workload.lengths[number]]
    num_tokens = peer.answer(
      model, prompt, options.max_new_tokens, workload.tokenizer.eos_ids, options.temperature, **request
    )
    return num_tokens, counter[0] - before

  requests = {_PEER: {}} | {
    f'{_PEER}, prompt lookup {length}': {'prompt_lookup_num_tokens': length} for length in lookup_lengths
  }
  return {name: functools.partial(decode, request) for name, request in requests.items()}


def measure(ways: Mapping[str, Way], num_prompts: int) -> dict[str, dict[str, np.ndarray]]:
  """`tokens`, `calls` and `seconds`, `[P]` each, of every way.

  Args:
    ways: The ways, which take turns.
    num_prompts: P.
  """
  found = {name: {'tokens': [], 'calls': [], 'seconds': []} for name in ways}
  for way in ways.values():  # compiles
    way(0)
  for number in range(num_prompts):
    for name, way in ways.items():
      start = time.perf_counter()
      tokens, calls = way(number)
      for column, value in {'tokens': tokens, 'calls': calls, 'seconds': time.perf_counter() - start}.items():
        found[name][column].append(value)
    print(f'prompt {number + 1} of {num_prompts}', flush=True)
  return {name: {column: np.array(values) for column, values in each.items()} for name, each in found.items()}


def describe(found: Mapping[str, Mapping[str, np.ndarray]]) -> list[str]:
  """A line for each way: tokens per call, tokens per second, and both relative to the first way.

  Args:
    found: From `measure`, of at least two prompts.
  """
  first = next(iter(found.values()))
  width = max(map(len, found))
  lines = [f'{"":{width}}  tokens per call   tokens/s  relative to the first, 95% interval over prompts']
  for name, each in found.items():
    low, high = metrics.ratio_interval(each['tokens'], each['calls'])
    pairs = [(numbers['tokens'], numbers['seconds']) for numbers in (each, first)]
    factor, least, most = metrics.compare(*pairs)
    kept = metrics.ratio(each['tokens'], each['calls'])
    lines.append(
      f'{name:{width}}  {kept:5.2f} ± {(high - low) / 2:4.2f}  {metrics.ratio(*pairs[0]):11.1f}'
      f'  {factor:.2f} ({least:.2f} to {most:.2f})'
    )
  return lines


def load(values: Mapping[str, Any], drafters: Sequence[str]) -> dict[str, Workload]:
  """A workload by drafter, on the same prompts.

  Args:
    values: Fields of `DecodeOptions`; each drafter has those of the methods, trees and options that are for it.
    drafters: Drafters as for `decode.main --draft`.
  """
  pick = functools.partial(take_evenly, group=lambda prompt: prompt.task or '')
  workloads = {}
  for name in drafters:
    methods, trees = fitting(name, values['method'], values['tree'])
    own = dict(values) | {'draft': name, 'method': methods, 'tree': trees, 'batch_size': 1}
    if not split_draft(name)[0]:
      own = {field: value for field, value in own.items() if not field.startswith('lookup_')}
    workloads[name] = Workload.load(DecodeOptions(**own), pick=pick)
  return workloads


if __name__ == '__main__':
  from decode.experiment.option_flags import read_values

  _DRAFTERS = flags.DEFINE_list('drafters', ['lookup'], 'Drafters, each as for --draft of decode.main.')
  _PEER_FLAG = flags.DEFINE_bool('peer', True, "Whether to run Hugging Face's transformers as well.")
  _PEER_LOOKUP = flags.DEFINE_list('peer_lookup', ['3', '10'], 'Tokens that the prompt lookup of the peer guesses.')
  _OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the results.')

  def main(argv):
    del argv
    with OutputFiles(output=_OUTPUT.value) as files:
      workloads = load(read_values(), _DRAFTERS.value)
      ways, one = own_ways(workloads), next(iter(workloads.values()))
      if _PEER_FLAG.value:
        ways |= peer_ways(one, command_line.parse_numbers('peer_lookup', _PEER_LOOKUP.value))
      found = measure(ways, len(one.prompts))
      plain = {name: {column: values.tolist() for column, values in each.items()} for name, each in found.items()}
      content = {'run': one.info, 'drafters': _DRAFTERS.value, 'prompts': [prompt.id for prompt in one.prompts]}
      text = json.dumps(content | {'ways': plain}, indent=2) + '\n'
      files.write_after(lambda: print('\n'.join(describe(found))), output=text)

  command_line.run(main)
